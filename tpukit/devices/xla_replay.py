"""Graph capture and replay: a training step on an XLA device that is traced once and then run by its hash.

torch_xla traces every step again, only to find that it has compiled the graph already. For a network of a
thousand operations that can take the host longer than the device needs for the step. Here the traced graph is
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

import collections
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tpukit.devices import xla_private
from tpukit.devices.optimizers import HostNumbers, state_tensors
from tpukit.devices.recompiles import UnexpectedRecompilation, new_operation

if TYPE_CHECKING:
    from tpukit.devices.xla import XLARuntime

CHECK_AFTER = 64  # replays of a new graph
# replays. A check drains the device and traces the step, which takes as long as some 20 fast replays
MAX_UNCHECKED = 4096

MAX_COMPARED = 4096  # elements of a constant that is compared by its values


class GraphReplay:
    """`function` as a captured graph that is replayed, where that gives the same result.

    function: takes tensors (in any pytree) and numbers, returns one tensor, and may change the parameters and
    buffers of `model` and the state of `optimizer`. A new number among the arguments, a new shape or
    sharding, or a new setting of the optimizer is captured again. A graph that then differs raises
    UnexpectedRecompilation.

    may_replay: False once a capture has found that every step has to be traced: on some rank two captures
    have different constants (Adam's bias corrections on the host), or it draws random numbers on the device,
    or under SPMD it shards the state in another way than it found it."""

    may_replay = True

    def __init__(
        self,
        function: Callable[..., Tensor],
        name: str,
        model: nn.Module,
        optimizer: Optimizer,
        runtime: "XLARuntime",
    ):
        self.function, self.name = function, name
        self.model, self.optimizer, self.runtime = model, optimizer, runtime
        self.calls = 0
        self.graph: CapturedGraph | None = None
        self.key = self.trace = ""  # of the graph: the signature of the call, and its text
        # While a step is traced: (tensor that the step may write, its data before).
        self.state_before: list[tuple[Tensor, Tensor]] = []
        # The state that the last two replays wrote.
        self.recently_written: collections.deque = collections.deque(maxlen=2)

    def __call__(self, arguments: tuple, signature: dict[str, Any]) -> Tensor:
        """signature: of the arguments, see `recompiles`."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = repr((signature, self._shardings(tensors)))
        self.calls += 1
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

    def _trace_or_discard(self, *arguments):
        try:
            return self._trace(*arguments)
        except BaseException:
            # torch_xla.compile compiles and runs what is pending when it ends, also after an error
            self._discard()
            raise

    def _trace(self, arguments, key, tensors):
        """Capture the step, check it against what was captured before, and run it."""
        if self.graph is None:
            graph = self._capture_twice(arguments, tensors)
        else:
            graph = self._check(self.graph, arguments, tensors, is_new_signature=key != self.key)
        if not self.may_replay:
            return self.function(*arguments)  # the end of torch_xla.compile runs it
        return self._run(graph, key, tensors)

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
        """Find out whether the step can be replayed (`may_replay`), and capture it if so."""
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
        self._discard()
        first.host.restore()
        if first.draws_random_numbers:
            xm.set_rng_state(seed)
        return self._capture(arguments, tensors) if self.may_replay else None

    def _unexpected(self, expected_trace, graph):
        operation = new_operation(expected_trace, xla_private.trace_text(graph.outputs))
        return UnexpectedRecompilation(self.name, self.calls, 1, operation)

    def _capture(self, arguments, tensors, with_lines=True):
        """Trace the function, which leaves its results uncomputed: a `CapturedGraph`. with_lines: its text
        names the line of each operation; the graph is the same."""
        of_optimizer = [value for value in state_tensors(self.optimizer) if value.device.type == "xla"]
        state = [*self.model.parameters(), *self.model.buffers(), *of_optimizer]
        xm.wait_device_ops()  # what is still being computed has no handle
        sources = [("argument", i) for i in range(len(tensors))] + [("state", i) for i in range(len(state))]
        source_of = dict(zip(xla_private.handles([*tensors, *state]), sources))
        # Keeps their data, whose handles new data could otherwise take over while the function is traced.
        _, held = xla_private.graph_inputs([*tensors, *state])
        data_of = dict(zip(xla_private.handles(held), held))
        self.state_before = [(v, data_of[handle]) for v, handle in zip(state, xla_private.handles(state))]
        host = HostNumbers(self.optimizer)
        with xla_private.lines_named(with_lines):
            result = self.function(*arguments)
        host.measure()
        written = [i for i, is_changed in enumerate(xla_private.are_pending(state)) if is_changed]
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        outputs = [*(state[i] for i in written), *(p.grad for p in parameters), result]
        ids, values = xla_private.graph_inputs(outputs)
        handles = xla_private.handles(values)  # of the data: the ids of tensors change under SPMD
        inputs = [
            Input(*source_of.get(handle, ("constant", None)), value) for handle, value in zip(handles, values)
        ]
        for kind, index, value in inputs:  # what the step writes may take the memory of its old value
            if kind == "state" and index in written:
                xla_private.donate(value)
        return CapturedGraph(
            hash=xla_private.graph_hash(outputs),
            state=state,
            host=host,
            written=written,
            parameters=parameters,
            outputs=outputs,
            inputs=inputs,
            draws_random_numbers=xla_private.random_seed_id() in ids,
            check_after=CHECK_AFTER,
        )

    def _discard(self):
        """Undo the traced step, if there is one, except for the optimizer's numbers on the host."""
        for tensor, data in self.state_before:
            tensor.data = data
        if self.state_before:
            self.state_before = []
            self.model.zero_grad(set_to_none=True)
            xla_private.discard_pending(self.runtime.device)

    def _run(self, graph, key, tensors):
        """Run a captured graph, compiled if it is the first one, and keep it."""
        xla_private.allow_execution()
        if self.graph is None:
            self.trace = xla_private.trace_text(graph.outputs)
            xla_private.compile_graph(graph.outputs)
        self._discard()
        graph.release_values()
        self.graph, self.key = graph, key
        shardings = self._shardings(graph.state)
        result = self._replay(graph, tensors)
        # The next replay reads what this one wrote.
        self.may_replay = self._shardings(graph.state) == shardings
        return result

    def _replay(self, graph, tensors):
        graph.replays += 1
        current = dict(state=graph.state, argument=tensors)
        inputs = [
            value if kind == "constant" else current[kind][index] for kind, index, value in graph.inputs
        ]
        *outputs, result = xla_private.run_graph(graph.hash, inputs)
        written, gradients = outputs[: len(graph.written)], outputs[len(graph.written) :]
        # Keeps the state that this graph reads until the next replay: the host would wait here for the graph
        # to release it.
        self.recently_written.append(written)
        for index, value in zip(graph.written, written):
            graph.state[index].data = value
        for p, gradient in zip(graph.parameters, gradients):
            p.grad = gradient
        return result


class Input(NamedTuple):
    """An input of a graph: at each replay one of the "state" or "argument" tensors, by number, or a
    "constant"."""

    kind: str
    number: int | None
    value: Any  # as traced


@dataclasses.dataclass(kw_only=True)
class CapturedGraph:
    """A traced step: where its inputs come from, and where its outputs go."""

    hash: str  # torch_xla's name of the graph
    state: list[Tensor]  # on the device, which the step may write
    host: HostNumbers  # which a replay does not change
    written: list[int]  # indices of those of `state` that the step writes; its first outputs
    parameters: list[nn.Parameter]  # those that get a gradient; its next outputs
    outputs: list[Tensor]  # as traced, the function's result last
    inputs: list[Input]  # in the graph's order
    draws_random_numbers: bool
    check_after: int  # how many replays
    replays: int = 0

    def is_equivalent(self, other: "CapturedGraph") -> bool:
        """Whether the two differ in nothing but the values of state and arguments, so that one can replace
        the other."""
        if self.draws_random_numbers or self.host.were_replaced() or self.written != other.written:
            return False
        if [(x.kind, x.number) for x in self.inputs] != [(x.kind, x.number) for x in other.inputs]:
            return False
        if not set(self.written) <= {x.number for x in self.inputs if x.kind == "state"}:
            return False
        if not all(map(torch.equal, self.host.increments, other.host.increments)):
            return False
        constants = [(a.value, b.value) for a, b in zip(self.inputs, other.inputs) if a.kind == "constant"]
        return all(_same_constant(a, b) for a, b in constants)

    def release_values(self) -> None:
        """Release everything that belongs to a single step."""
        self.outputs = []
        self.inputs = [x if x.kind == "constant" else x._replace(value=None) for x in self.inputs]


def _same_constant(a: Tensor, b: Tensor) -> bool:
    """Whether two constants are the same data on the device, or small and equal."""
    mine, other = xla_private.handles([a, b])
    if mine == other:
        return True
    if a.shape != b.shape or a.dtype != b.dtype or a.numel() > MAX_COMPARED:
        return False
    return torch.equal(a.cpu(), b.cpu())
