"""A function on an XLA device as one compiled graph; and the graph of a training step, captured and replayed.

torch_xla traces a function at every call, only to find that it has compiled the graph already. For a step of
a thousand operations that can take the host longer than the device needs for it. Here the traced graph is
kept with the list of its inputs, and later steps hand it the current tensors. (The calls are those of
torch_xla's own bridge to torch.compile, which takes no optimizer.) With several cores every process does so,
and the all-reduce is part of the graph; under SPMD it is the one graph of all cores.

    first call                  capture: trace the step, twice, to check that both traces agree
    later calls                 replay: run the compiled graph, move its outputs into the model, the
                                optimizer and the gradients
    another signature, or       check: capture again, to see that the step is still that graph; the first
    after some replays          time after CHECK_AFTER replays, then after twice as many as before, up to
                                MAX_UNCHECKED
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tpukit.devices import recompiles, xla_private
from tpukit.devices.optimizers import HostNumbers, state_tensors
from tpukit.devices.recompiles import UnexpectedRecompilation
from tpukit.devices.runtime import Runtime

GUARDED_CALLS = 3
CHECK_AFTER = 64  # replays of a new graph
# replays. A check drains the device and traces the step, which takes as long as some 20 fast replays
MAX_UNCHECKED = 4096
MAX_COMPARED = 4096  # elements of a constant that is compared by its values


class CompiledFunction:
    """`function` as one compiled graph per call, with at most `max_graphs` different graphs.

    A call that needs one graph more raises UnexpectedRecompilation with its causes. What was compiled, and
    why, is added to the runtime's compile events. mutates: see `Runtime.compile`."""

    calls = 0
    graphs = 0  # compiled so far, without those that were captured

    def __init__(
        self,
        function: Callable,
        name: str,
        max_graphs: int,
        runtime: Runtime,
        mutates: tuple[nn.Module, Optimizer] | None,
    ):
        self.function, self.name, self.max_graphs, self.runtime = function, name, max_graphs, runtime
        self.mutates = mutates
        self.parameter_names = tuple(inspect.signature(function).parameters)
        # The keywords of a partial: another number makes another partial, of the same name.
        keywords = getattr(inspect.unwrap(function), "keywords", {})
        self.bound = {name: value for name, value in keywords.items() if not isinstance(value, Tensor)}
        if not self.bound:
            runtime.last_signatures.pop(name, None)  # of another function with this name

    def __call__(self, *arguments) -> Any:
        signature = recompiles.signature(self.parameter_names, arguments, self.mutates) | self.bound
        before, refusal = self.runtime.compilations(), None
        self.calls += 1
        try:
            return self._call(arguments, signature)
        except UnexpectedRecompilation as error:
            refusal = error
            raise
        finally:
            self._record(signature, before, refusal)

    def _record(self, signature: dict[str, Any], before, refusal):
        """Keep what this call was made with, and an event where it compiled, or was refused."""
        last = self.runtime.last_signatures.get(self.name, signature)
        self.runtime.last_signatures[self.name] = signature
        graphs, seconds = (after - earlier for earlier, after in zip(before, self.runtime.compilations()))
        if not graphs and refusal is None:
            return
        causes = recompiles.differences(last, signature)
        if refusal is not None:
            refusal.causes = tuple(causes)
            if operation := refusal.args[3]:
                causes.append(f"first new operation: {operation}")
        self.runtime.record_compilation(self.name, graphs, seconds, causes, refused=refusal is not None)

    def _call(self, arguments, signature):
        before, _ = self.runtime.compilations()
        # An all-reduce on the host cuts the step into two graphs, which cannot be counted.
        is_one_graph = not self.runtime.reduces_on_the_host
        # full_graph: a hidden `.item()` raises instead of cutting the step. It also makes the host wait for
        # the device before it traces the next step, so only the first calls are guarded.
        if self.calls <= GUARDED_CALLS and is_one_graph:
            result = torch_xla.compile(self.function, full_graph=True, name=self.name)(*arguments)
        else:
            result = self.function(*arguments)
            torch_xla.sync()
        compiled = self.runtime.compilations()[0] - before
        # The first call has one graph, even if this process had compiled it before, or also compiled what was
        # pending.
        self.graphs = self.graphs + compiled if self.graphs else 1
        if self.graphs > self.max_graphs and is_one_graph:
            raise UnexpectedRecompilation(self.name, self.calls, self.max_graphs, None)
        return result


class ReplayedStep(CompiledFunction):
    """A training step as a captured graph that is replayed, where that gives the same result.

    Its function takes tensors (in any pytree) and numbers, returns one tensor, and may change the parameters
    and buffers of the model and the state of the optimizer. A new number among the arguments, a new shape or
    sharding, or a new setting of the optimizer is captured again. A graph that then differs raises
    UnexpectedRecompilation.

    may_replay: False once a capture has found that every step has to be traced: on some rank two captures
    have different constants (Adam's bias corrections on the host), or it draws random numbers on the device,
    or under SPMD it shards the state in another way than it found it."""

    mutates: tuple[nn.Module, Optimizer]
    may_replay = True
    graph: "CapturedGraph | None" = None
    key = trace = ""  # of the graph: the signature of the call, and its text
    # While a step is traced: (tensor that the step may write, its data before).
    state_before: list[tuple[Tensor, Tensor]] = []
    written: list[list[Tensor]] = []  # the state, by each of the last two replays

    def _call(self, arguments, signature):
        if not self.may_replay:
            return super()._call(arguments, signature)
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = repr((signature, self._shardings(tensors)))
        graph = self.graph
        if graph is None or key != self.key or graph.replays == graph.check_after:
            # full_graph: a hidden `.item()` raises instead of cutting the step.
            traced: Any = torch_xla.compile(self._trace_or_discard, full_graph=True, name=self.name)
            return traced(arguments, key, tensors)
        graph.host.advance()
        return self._replay(graph, tensors)

    def _shardings(self, tensors):
        """How SPMD spreads each tensor over the devices, as text; nothing without SPMD."""
        if self.runtime.mesh is None:
            return []
        return [sharding or "{replicated}" for sharding in xla_private.shardings(tensors)]

    def _trace_or_discard(self, arguments, key, tensors):
        """Capture the step, check it against what was captured before, and run it."""
        try:
            if self.graph is None:
                graph = self._capture_twice(arguments, tensors)
            else:
                graph = self._check(self.graph, arguments, tensors, is_new_signature=key != self.key)
            if graph is None:
                return self.function(*arguments)  # the end of torch_xla.compile runs it
            return self._run(graph, key, tensors)
        except BaseException:
            # torch_xla.compile compiles and runs what is pending when it ends, also after an error
            self._discard()
            raise

    def _check(self, known, arguments, tensors, *, is_new_signature):
        """Capture a known graph again; UnexpectedRecompilation where the step has become another one."""
        graph = self._capture(arguments, tensors, with_lines=False)  # which take time
        if known.hash == graph.hash and (is_new_signature or known.is_equivalent(graph)):
            graph.check_after = min(2 * known.check_after, MAX_UNCHECKED)
            return graph
        self._discard()
        graph.host.restore()
        raise self._unexpected(self.trace, self._capture(arguments, tensors))

    def _capture_twice(self, arguments, tensors):
        """Find out whether the step can be replayed (`may_replay`). Returns its graph, or None."""
        seed = xm.get_rng_state()
        first = self._capture(arguments, tensors)
        first_trace = xla_private.trace_text(first.outputs)
        self._discard()
        # The second capture finds the optimizer's numbers on the host one step further: what depends on them
        # differs.
        second = self._capture(arguments, tensors)
        if second.hash != first.hash and not first.draws_random_numbers:
            raise self._unexpected(first_trace, second)
        # A traced step and a replayed one are different graphs, and an all-reduce needs the same graph on all
        # ranks.
        answers = self.runtime.world.all_gather([first.is_equivalent(second)])
        self.may_replay = all(is_equivalent for [is_equivalent] in answers)
        if self.may_replay:
            second.host.restore()  # to one step further
            return second
        self._discard()
        first.host.restore()
        if first.draws_random_numbers:
            xm.set_rng_state(seed)
        return None

    def _unexpected(self, expected_trace, graph):
        operation = recompiles.new_operation(expected_trace, xla_private.trace_text(graph.outputs))
        return UnexpectedRecompilation(self.name, self.calls, 1, operation)

    def _capture(self, arguments, tensors, with_lines=True):
        """Trace the function, which leaves its results uncomputed: a `CapturedGraph`. with_lines: its text
        names the line of each operation; the graph is the same."""
        model, optimizer = self.mutates
        of_optimizer = [value for value in state_tensors(optimizer) if value.device.type == "xla"]
        state = [*model.parameters(), *model.buffers(), *of_optimizer]
        xm.wait_device_ops()  # what is still being computed has no handle
        sources = [("argument", i) for i in range(len(tensors))] + [("state", i) for i in range(len(state))]
        source_of = dict(zip(xla_private.handles([*tensors, *state]), sources))
        # Keeps their data, whose handles new data could otherwise take over while the function is traced.
        _, held = xla_private.graph_inputs([*tensors, *state])
        data_of = dict(zip(xla_private.handles(held), held))
        self.state_before = [(v, data_of[handle]) for v, handle in zip(state, xla_private.handles(state))]
        host = HostNumbers(optimizer)
        with xla_private.lines_named(with_lines):
            result = self.function(*arguments)
        host.measure()
        written = [i for i, is_changed in enumerate(xla_private.are_pending(state)) if is_changed]
        parameters = [p for p in model.parameters() if p.grad is not None]
        outputs = [*(state[i] for i in written), *(p.grad for p in parameters), result]
        ids, values = xla_private.graph_inputs(outputs)
        inputs, constants = [], []
        for handle, value in zip(xla_private.handles(values), values):  # the ids of tensors change under SPMD
            kind, number = source_of.get(handle, ("constant", len(constants)))
            inputs.append((kind, number))
            if kind == "constant":
                constants.append(value)
            elif kind == "state" and number in written:  # which may take the memory of its old value
                xla_private.set_donated(value, True)
        return CapturedGraph(
            hash=xla_private.graph_hash(outputs),
            state=state,
            host=host,
            written=written,
            parameters=parameters,
            outputs=outputs,
            inputs=inputs,
            constants=constants,
            draws_random_numbers=xla_private.random_seed_id() in ids,
            check_after=CHECK_AFTER,
        )

    def _discard(self):
        """Undo the traced step, if there is one, except for the optimizer's numbers on the host."""
        for tensor, data in self.state_before:
            tensor.data = data
        if self.state_before:
            self.state_before = []
            self.mutates[0].zero_grad(set_to_none=True)
            xla_private.discard_pending(str(self.runtime.device))

    def _run(self, graph, key, tensors):
        """Run a captured graph, compiled if it is the first one, and keep it."""
        xla_private.allow_execution(True)
        if self.graph is None:
            self.trace = xla_private.trace_text(graph.outputs)
            xla_private.compile_graph(graph.outputs)
        self._discard()
        graph.outputs = []  # of this step alone
        self.graph, self.key = graph, key
        shardings = self._shardings(graph.state)
        result = self._replay(graph, tensors)
        # The next replay reads what this one wrote.
        self.may_replay = self._shardings(graph.state) == shardings
        return result

    def _replay(self, graph, tensors):
        graph.replays += 1
        current = dict(argument=tensors, state=graph.state, constant=graph.constants)
        inputs = [current[kind][number] for kind, number in graph.inputs]
        *outputs, result = xla_private.run_graph(graph.hash, inputs)
        written, gradients = outputs[: len(graph.written)], outputs[len(graph.written) :]
        for index, value in zip(graph.written, written):
            graph.state[index].data = value
        for p, gradient in zip(graph.parameters, gradients):
            p.grad = gradient
        # Keeps the state that this graph reads until the next replay: the host would wait here for the graph
        # to release it.
        self.written = [*self.written[-1:], written]
        return result


@dataclasses.dataclass(kw_only=True)
class CapturedGraph:
    """A traced step: where its inputs come from, and where its outputs go."""

    hash: str  # torch_xla's name of the graph
    state: list[Tensor]  # on the device, which the step may write
    host: HostNumbers  # which a replay does not change
    written: list[int]  # indices of those of `state` that the step writes; its first outputs
    parameters: list[nn.Parameter]  # those that get a gradient; its next outputs
    outputs: list[Tensor]  # as traced, the function's result last
    inputs: list[tuple[str, int]]  # in the graph's order: which "argument", "state" or "constant" each is
    constants: list[Tensor]
    draws_random_numbers: bool
    check_after: int  # how many replays
    replays: int = 0

    def is_equivalent(self, other: "CapturedGraph") -> bool:
        """Whether the two differ in nothing but the values of state and arguments, so that one can replace
        the other."""
        if self.draws_random_numbers or self.host.were_replaced():
            return False
        if (self.written, self.inputs) != (other.written, other.inputs):
            return False
        if not set(self.written) <= {number for kind, number in self.inputs if kind == "state"}:
            return False
        if not all(map(torch.equal, self.host.increments, other.host.increments)):
            return False
        return all(map(_same_constant, self.constants, other.constants))


def _same_constant(a: Tensor, b: Tensor) -> bool:
    """Whether two constants are the same data on the device, or small and equal."""
    mine, other = xla_private.handles([a, b])
    if mine == other:
        return True
    if a.shape != b.shape or a.dtype != b.dtype or a.numel() > MAX_COMPARED:
        return False
    return torch.equal(a.cpu(), b.cpu())
