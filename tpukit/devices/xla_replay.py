"""Graph capture and replay: a training step on an XLA device that is traced once and then run by its hash.

torch_xla traces every step again, only to find that it has compiled the graph already. For a network of a
thousand operations that can take the host longer than the device needs for the step. Here the traced graph is
kept with the list of its inputs, and later steps hand it the current tensors. (The calls are those of
torch_xla's own bridge to torch.compile, which takes no optimizer.) With several cores every process does so,
and the all-reduce is part of the graph; under SPMD it is the one graph of all cores.

    first call of a signature    capture: trace the step, twice for the very first one, to check that both
    traces agree later calls                  replay: run the compiled graph, move its outputs into the model,
    optimizer and gradients after some replays           check: capture again, to see that the step is still
    that graph; the first time after
                                 CHECK_AFTER replays, then after twice as many as before, up to MAX_UNCHECKED
"""

import collections
import dataclasses
from typing import NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import _XLAC
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from tpukit.devices.optimizers import state_tensors
from tpukit.devices.recompiles import UnexpectedRecompilation, call_key, new_operation

CHECK_AFTER = 64  # replays of a new graph
# replays. A check drains the device and traces the step, which takes as long as some 20 fast replays
MAX_UNCHECKED = 4096
MAX_KEPT = 4  # captured graphs: a step and its variants, for the epochs that differ in an argument
MAX_COMPARED = 4096  # elements of a constant that is compared by its values


class GraphReplay:
    """`function` as a captured graph that is replayed, where that gives the same result.

    function: takes tensors (in any nest) and numbers, returns one tensor, and may change the parameters and
    buffers of `model` and the state of `optimizer`. max_graphs: how many different graphs may be compiled. A
    new number among the arguments, a new shape or sharding, or a new setting of the optimizer is captured
    again. A graph that differs without any of these, or one more than max_graphs, raises
    UnexpectedRecompilation.

    may_replay: False once a capture has found that every step has to be traced: on some rank two captures
    have different constants (Adam's bias corrections on the host), or it draws random numbers on the device,
    or under SPMD it shards the state in another way than it found it. new_operation: the first operation of
    the last graph that the graph before does not have, see `recompiles.new_operation`."""

    may_replay = True
    new_operation = None

    def __init__(self, function, name, max_graphs, model, optimizer, runtime):
        self.function, self.name, self.max_graphs = function, name, max_graphs
        self.model, self.optimizer, self.runtime = model, optimizer, runtime
        self.calls = 0
        self.was_tried = False  # whether `may_replay` is known
        self.captured = {}  # key -> CapturedGraph
        self.trace_of = {}  # hash of a compiled graph -> its trace as text, the last one compiled last
        self.state_before = []  # while a step is traced: (tensor that the step may write, its data before)
        self.recently_written = collections.deque(maxlen=2)  # the state that the last two replays wrote

    def __call__(self, *arguments):
        key, tensors = call_key(arguments, self.model, self.optimizer)
        key += repr(self._shardings(tensors))
        self.calls += 1
        graph = self.captured.get(key)
        if graph is None or graph.replays == graph.check_after:
            # full_graph: a hidden `.item()` raises instead of cutting the step.
            return torch_xla.compile(self._trace_or_discard, full_graph=True, name=self.name)(
                arguments, key, tensors
            )
        if graph.host_state:
            torch._foreach_add_(graph.host_state, graph.host_increments)
        return self._replay(graph, tensors)

    def _shardings(self, tensors):
        """How SPMD spreads each tensor over the devices, as text; nothing without SPMD."""
        if self.runtime.mesh is None:
            return []
        return [sharding or "{replicated}" for sharding in _XLAC._get_xla_sharding_specs(tensors)]

    def _trace_or_discard(self, *arguments):
        try:
            return self._trace(*arguments)
        except BaseException:
            # torch_xla.compile compiles and runs what is pending when it ends, also after an error
            self._discard()
            raise

    def _trace(self, arguments, key, tensors):
        """Capture the step, check it against what was captured before, and run it."""
        if not self.was_tried:
            graph = self._capture_twice(arguments, tensors)
        elif known := self.captured.pop(key, None):
            graph = self._check(known, arguments, tensors)
        else:
            graph = self._capture(arguments, tensors)
        if not self.may_replay:
            return self.function(*arguments)  # the end of torch_xla.compile runs it
        return self._compile(graph, key, tensors)

    def _check(self, known, arguments, tensors):
        """Capture a known graph again; UnexpectedRecompilation where the step has become another one."""
        graph = self._capture(arguments, tensors, with_lines=False)  # which take time
        if known.hash == graph.hash and known.is_equivalent(graph):
            graph.check_after = min(2 * known.check_after, MAX_UNCHECKED)
            return graph
        self._discard()
        for value, before in zip(graph.host_state, graph.host_before):
            value.copy_(before)
        raise self._unexpected(self.trace_of[known.hash], self._capture(arguments, tensors).trace())

    def _capture_twice(self, arguments, tensors):
        """Find out whether the step can be replayed (`may_replay`), and capture it if so."""
        seed = xm.get_rng_state()
        first = self._capture(arguments, tensors)
        first_text, host_before = first.trace(), first.host_before
        self._discard()
        # The second capture finds the optimizer's numbers on the host one step further: what depends on them
        # differs.
        second = self._capture(arguments, tensors)
        if second.hash != first.hash and not first.draws_random_numbers:
            raise self._unexpected(first_text, second.trace())
        # A traced step and a replayed one are different graphs, and an all-reduce needs the same graph on all
        # ranks.
        answers = self.runtime.world.all_gather([first.is_equivalent(second)])
        self.was_tried, self.may_replay = True, all(is_equivalent for [is_equivalent] in answers)
        self._discard()
        for value, before in zip(first.host_state, host_before):
            value.copy_(before)
        if first.draws_random_numbers:
            xm.set_rng_state(seed)
        return self._capture(arguments, tensors) if self.may_replay else None

    def _unexpected(self, expected_text, text):
        self.new_operation = new_operation(expected_text, text)
        return UnexpectedRecompilation(self.name, self.calls, self.max_graphs, self.new_operation)

    def _capture(self, arguments, tensors, with_lines=True):
        """Trace the function, which leaves its results uncomputed: a `CapturedGraph`. with_lines: its `trace`
        names the line of each operation; the graph is the same."""
        state, host_state = self._state()
        xm.wait_device_ops()  # what is still being computed has no handle
        sources = [("argument", i) for i in range(len(tensors))] + [("state", i) for i in range(len(state))]
        source_of = dict(zip(_XLAC._get_tensors_handle([*tensors, *state]), sources))
        # Keeps their data, whose handles new data could otherwise take over while the function is traced.
        _, held = _XLAC._get_tensors_xla_device_data_node([*tensors, *state])
        data_of = dict(zip(_XLAC._get_tensors_handle(held), held))
        self.state_before = [
            (v, data_of[handle]) for v, handle in zip(state, _XLAC._get_tensors_handle(state))
        ]
        host_before = [value.clone() for value in host_state]
        debugs = _XLAC._get_ir_debug()
        _XLAC._set_ir_debug(with_lines)
        try:
            result = self.function(*arguments)
        finally:
            _XLAC._set_ir_debug(debugs)
        changed = _XLAC._check_tensor_need_materialization(state)
        written = [i for i, is_changed in enumerate(changed) if is_changed]
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        outputs = [*(state[i] for i in written), *(p.grad for p in parameters), result]
        ids, values = _XLAC._get_tensors_xla_device_data_node(outputs)
        handles = _XLAC._get_tensors_handle(values)  # of the data: the ids of tensors change under SPMD
        inputs = [
            Input(*source_of.get(handle, ("constant", None)), value) for handle, value in zip(handles, values)
        ]
        for kind, index, value in inputs:  # what the step writes may take the memory of its old value
            if kind == "state" and index in written:
                _XLAC._set_buffer_donation(value, True)
        with alias_with_buffer_donor_config():
            graph_hash = _XLAC._get_graph_hash(outputs)
        return CapturedGraph(
            hash=graph_hash,
            state=state,
            host_state=host_state,
            host_before=host_before,
            host_increments=[after - before for after, before in zip(host_state, host_before)],
            written=written,
            parameters=parameters,
            outputs=outputs,
            inputs=inputs,
            draws_random_numbers=_XLAC._get_seed_info_id() in ids,
            check_after=CHECK_AFTER,
        )

    def _state(self):
        """(tensors on the device that the function may write, the optimizer's numbers on the host)."""
        of_optimizer = state_tensors(self.optimizer)
        on_device = [v for v in of_optimizer if v.device.type == "xla"]
        on_host = [v for v in of_optimizer if v.device.type == "cpu"]
        return [*self.model.parameters(), *self.model.buffers(), *on_device], on_host

    def _discard(self):
        """Undo the traced step, if there is one, except for the optimizer's numbers on the host."""
        for tensor, data in self.state_before:
            tensor.data = data
        if self.state_before:
            self.state_before = []
            self.model.zero_grad(set_to_none=True)
            _XLAC._clear_pending_irs(str(self.runtime.device))

    def _compile(self, graph, key, tensors):
        """Compile a captured graph where it is new, and run it."""
        _XLAC._set_allow_execution(True)
        if graph.hash not in self.trace_of:
            text = graph.trace()
            last_text = next(reversed(self.trace_of.values()), None)
            self.new_operation = new_operation(last_text, text) if last_text else None
            if len(self.trace_of) == self.max_graphs:
                raise UnexpectedRecompilation(self.name, self.calls, self.max_graphs, self.new_operation)
            with alias_with_buffer_donor_config():
                _XLAC._xla_warm_up_cache(graph.outputs, [])
            self.trace_of[graph.hash] = text
        self._discard()
        graph.release_values()
        while len(self.captured) >= MAX_KEPT:
            del self.captured[next(iter(self.captured))]
        self.captured[key] = graph
        shardings = self._shardings(graph.state)
        result = self._replay(graph, tensors)
        self.may_replay = (
            self._shardings(graph.state) == shardings
        )  # because the next replay reads what this one wrote
        return result

    def _replay(self, graph, tensors):
        graph.replays += 1
        current = dict(state=graph.state, argument=tensors)
        inputs = [
            value if kind == "constant" else current[kind][index] for kind, index, value in graph.inputs
        ]
        *outputs, result = _XLAC._run_cached_graph(graph.hash, inputs)
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
    """An input of a graph: at each replay the index-th of the "state" or "argument" tensors, or a
    "constant"."""

    kind: str
    index: int | None
    value: torch.Tensor | None  # as traced


@dataclasses.dataclass(kw_only=True)
class CapturedGraph:
    """A traced step: where its inputs come from, and where its outputs go."""

    hash: str  # torch_xla's name of the graph
    state: list  # tensors on the device that the step may write
    host_state: list  # the optimizer's numbers on the host
    host_before: list | None  # what they were before the step
    host_increments: list  # by how much each step increases them
    written: list  # indices of those of `state` that the step writes; its first outputs
    parameters: list  # those that get a gradient; its next outputs
    outputs: list | None  # the traced tensors, the function's result last
    inputs: list  # of `Input`, in the graph's order
    draws_random_numbers: bool
    check_after: int  # how many replays
    replays: int = 0

    def is_equivalent(self, other):
        """Whether the two differ in nothing but the values of state and arguments, so that one can replace
        the other."""
        if self.draws_random_numbers or self.written != other.written:
            return False
        if [(x.kind, x.index) for x in self.inputs] != [(x.kind, x.index) for x in other.inputs]:
            return False
        if not set(self.written) <= {x.index for x in self.inputs if x.kind == "state"}:
            return False
        if not all(torch.equal(a, b) for a, b in zip(self.host_increments, other.host_increments)):
            return False
        return all(
            _same_constant(a.value, b.value)
            for a, b in zip(self.inputs, other.inputs)
            if a.kind == "constant"
        )

    def trace(self):
        """The graph as text, see `recompiles.new_operation`."""
        return _XLAC._get_xla_tensors_text(self.outputs)

    def release_values(self):
        """Release everything that belongs to a single step."""
        self.outputs = self.host_before = None
        self.inputs = [x if x.kind == "constant" else x._replace(value=None) for x in self.inputs]


def _same_constant(a, b):
    """Whether two constants are the same data on the device, or small and equal."""
    mine, other = _XLAC._get_tensors_handle([a, b])
    if mine == other:
        return True
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.numel() <= MAX_COMPARED
        and torch.equal(a.cpu(), b.cpu())
    )
