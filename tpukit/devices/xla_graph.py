"""A function on an XLA device as one compiled graph; and a training step, captured once and replayed.

torch_xla traces a function at every call, only to find that it has compiled the graph already. For a step of
a thousand operations that can take the host longer than the device needs for it. Here the traced graph is
kept with the list of its inputs, and later steps hand it the current tensors. (The calls are those of
torch_xla's own bridge to torch.compile, which takes no optimizer.) With several cores every process does so,
and the all-reduce is part of the graph.

    first call         capture: trace the step twice, check that both traces agree, compile and run the graph
    later calls        replay: run the graph, move its outputs into the model and the optimizer
    another signature  refuse: a step is one graph
    now and then       check: capture again, to see that the step is still that graph
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tpukit.devices import recompiles, xla_counters, xla_private
from tpukit.devices.optimizers import HostNumbers, state_tensors
from tpukit.devices.recompiles import UnexpectedRecompilation
from tpukit.devices.runtime import Runtime

GUARDED_CALLS = 3
CHECK_AFTER = 64  # calls; then after twice as many as before
MAX_COMPARED = 4096  # elements of a constant that is compared by its values


def compilations() -> tuple[int, float]:
    """Return the number of graphs that this process compiled, and the seconds that took."""
    return xla_counters.timed("CompileTime")


class CompiledFunction:
    """`function` as one compiled graph per call, with at most `max_graphs` different graphs.

    A call that needs one graph more raises UnexpectedRecompilation with its causes. What was compiled, and
    why, is added to the runtime's compile events. mutates: see `Runtime.compile`."""

    calls = 0
    graphs = 0  # compiled so far, without those that were captured
    signature: dict[str, Any] | None = None  # the last call's, see `recompiles`

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

    def __call__(self, *arguments) -> Any:
        signature = recompiles.signature(self.parameter_names, arguments, self.mutates)
        last, self.signature = self.signature or signature, signature
        graphs_before, seconds_before = compilations()
        is_refused = False
        self.calls += 1
        self.runtime.device_calls += 1
        try:
            return self._call(arguments, signature)
        except UnexpectedRecompilation as error:
            is_refused = True
            error.causes = tuple(recompiles.differences(last, signature))
            raise
        finally:
            graphs, seconds = compilations()
            if graphs > graphs_before or is_refused:
                event = dict(
                    what=self.name,
                    programs=graphs - graphs_before,
                    seconds=seconds - seconds_before,
                    why=recompiles.differences(last, signature),
                    refused=is_refused,
                )
                self.runtime.compile_events.append(event)

    def _compute(self, *arguments):
        # Not earlier: each sync moves the device's random state, and the first calls of a session begin with
        # one.
        runtime = self.runtime
        if runtime.device_seed:
            numbers = (*runtime.device_seed, runtime.device_calls, runtime.world.rank)
            xm.set_rng_state(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
        return self.function(*arguments)

    def _call(self, arguments, signature):
        before, _ = compilations()
        # An all-reduce on the host cuts the step into two graphs, which cannot be counted.
        is_one_graph = not self.runtime.reduces_on_the_host
        # full_graph: a hidden `.item()` raises instead of cutting the step. It also makes the host wait for
        # the device before it traces the next step, so only the first calls are guarded.
        if self.calls <= GUARDED_CALLS and is_one_graph:
            result = torch_xla.compile(self._compute, full_graph=True, name=self.name)(*arguments)
        else:
            result = self._compute(*arguments)
            torch_xla.sync()
        compiled = compilations()[0] - before
        # The first call has one graph, even if this process had compiled it before, or also compiled what was
        # pending.
        self.graphs = self.graphs + compiled if self.graphs else 1
        if self.graphs > self.max_graphs and is_one_graph:
            raise UnexpectedRecompilation(self.name, self.calls, self.max_graphs)
        return result


class Graph(NamedTuple):
    """A traced step: where its inputs come from, and where its outputs go."""

    hash: str  # torch_xla's name of it
    state: list[Tensor]  # on the device, which the step may write
    written: list[int]  # indices of those of `state` that it writes; its outputs before the result
    inputs: list[tuple[str, int]]  # in the graph's order: which "argument", "state" or "constant" each is
    constants: list[Tensor]
    draws_random_numbers: bool
    host: HostNumbers  # a replay does not change them


class ReplayedStep(CompiledFunction):
    """A training step as a captured graph that is replayed, if that gives the same result.

    Its function takes tensors (in any pytree) and numbers, returns one tensor, and may change the parameters
    and buffers of the model and the state of the optimizer. It leaves no gradients.

    may_replay: False if a replay would be wrong on some rank, so that all trace every step: it draws
    random numbers on the device, replaces numbers of the optimizer's state on the host, or has other
    constants in each trace."""

    mutates: tuple[nn.Module, Optimizer]
    may_replay = True
    graph: Graph | None = None
    key = ""  # the signature of the call that was captured
    check_at = 0  # the number of a call
    # While a step is traced: (tensor that the step may write, its data before).
    state_before: list[tuple[Tensor, Tensor]] = []
    kept: list[list[Tensor]] = []  # the state, by each of the last two replays

    def _call(self, arguments, signature):
        if not self.may_replay:
            return super()._call(arguments, signature)
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = repr(signature)
        if self.graph is None:
            result = self._traced(self._first_call, arguments, tensors)
            self.key, self.check_at = key, self.calls + CHECK_AFTER
            return result
        if key != self.key:
            raise UnexpectedRecompilation(self.name, self.calls, 1)
        if self.calls == self.check_at:
            self._traced(self._check, arguments, tensors)
            self.check_at = 2 * self.calls
        return self._replay(self.graph, tensors)

    def _traced(self, function, arguments, tensors):
        # full_graph: a hidden `.item()` raises instead of cutting the step.
        traced: Any = torch_xla.compile(function, full_graph=True, name=self.name)
        return traced(arguments, tensors)

    def _first_call(self, arguments, tensors):
        """Capture the step and run its graph, or trace it as it is if it cannot be replayed."""
        try:
            graph, outputs = self._capture(arguments, tensors)
            is_fixed = not graph.draws_random_numbers and not graph.host.were_replaced()
            if is_fixed:
                self._discard()
                again, outputs = self._capture(arguments, tensors)
                if again.hash != graph.hash:
                    raise UnexpectedRecompilation(self.name, self.calls, 1)
                is_fixed = _is_same(graph, again)
            # A traced step and a replayed one are different graphs, and an all-reduce needs the same graph on
            # all ranks.
            answers = self.runtime.world.all_gather([is_fixed])
            self.may_replay = all(answer for [answer] in answers)
            graph.host.restore()
            if not self.may_replay:
                self._discard()
                return self._compute(*arguments)  # the end of torch_xla.compile runs it
            xla_private.allow_execution(True)
            xla_private.compile_graph(outputs)
            self._discard()
        except BaseException:
            # torch_xla.compile compiles and runs what is pending when it ends, also after an error
            self._discard()
            raise
        self.graph = graph
        return self._replay(graph, tensors)

    def _check(self, arguments, tensors):
        """Capture the step again; raise UnexpectedRecompilation if it has become another graph."""
        assert self.graph is not None
        try:
            again, _ = self._capture(arguments, tensors)
            again.host.restore()
            is_same = _is_same(self.graph, again)
        finally:
            self._discard()
        if not is_same:
            raise UnexpectedRecompilation(self.name, self.calls, 1)

    def _capture(self, arguments, tensors):
        """Trace the function, which leaves its results uncomputed. Return (its `Graph`, the results)."""
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
        result = self._compute(*arguments)
        host.measure()
        written = [i for i, is_changed in enumerate(xla_private.are_pending(state)) if is_changed]
        outputs = [*(state[i] for i in written), result]
        ids, values = xla_private.graph_inputs(outputs)
        inputs, constants = [], []
        for handle, value in zip(xla_private.handles(values), values):
            kind, number = source_of.get(handle, ("constant", len(constants)))
            inputs.append((kind, number))
            if kind == "constant":
                constants.append(value)
            elif kind == "state" and number in written:  # the new value may reuse its memory
                xla_private.set_donated(value, True)
        is_random = xla_private.random_seed_id() in ids
        name = xla_private.graph_hash(outputs)
        return Graph(name, state, written, inputs, constants, is_random, host), outputs

    def _discard(self):
        """Undo the traced step, if there is one, except for the optimizer's numbers on the host."""
        if not self.state_before:
            return
        for tensor, data in self.state_before:
            tensor.data = data
        self.state_before = []
        self.mutates[0].zero_grad(set_to_none=True)
        xla_private.discard_pending(str(self.runtime.device))

    def _replay(self, graph, tensors):
        current = dict(argument=tensors, state=graph.state, constant=graph.constants)
        inputs = [current[kind][number] for kind, number in graph.inputs]
        *written, result = xla_private.run_graph(graph.hash, inputs)
        graph.host.advance()
        for index, value in zip(graph.written, written):
            graph.state[index].data = value
        # Keeps the state that this graph reads until the next replay: the host would wait here for the graph
        # to release it.
        self.kept = [*self.kept[-1:], written]
        return result


def _is_same(a: Graph, b: Graph) -> bool:
    """Return whether two traces differ in nothing but the values of state and arguments."""
    if (a.hash, a.written, a.inputs) != (b.hash, b.written, b.inputs):
        return False
    if not set(a.written) <= {number for kind, number in a.inputs if kind == "state"}:
        return False
    if not all(map(torch.equal, a.host.increments, b.host.increments)):
        return False
    return all(map(_same_constant, a.constants, b.constants))


def _same_constant(a: Tensor, b: Tensor) -> bool:
    """Return whether two constants are the same data on the device, or small and equal."""
    mine, other = xla_private.handles([a, b])
    if mine == other:
        return True
    if a.shape != b.shape or a.dtype != b.dtype or a.numel() > MAX_COMPARED:
        return False
    return torch.equal(a.cpu(), b.cpu())
