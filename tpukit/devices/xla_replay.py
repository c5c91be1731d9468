"""A training step on an XLA device that is traced once and then run again by its name.

torch_xla traces a step anew every time, operation by operation, to find that it has the program already. For a network of a
thousand operations that can take the host longer than the device needs for the step. Here the traced program is kept with the
list of its inputs, and later steps hand the compiler's program the current tensors. (The calls are those of torch_xla's own
bridge to torch.compile, which takes no optimizer.)
"""

import torch
from torch.utils._pytree import tree_flatten

from tpukit.devices.recompiles import new_operation

CHECK_EVERY = 64  # runs of a recording, after which it is traced again to see that it still holds
KEPT = 4  # recordings: a step and its phases, for the epochs that differ in an argument
SMALL = 4096  # numbers in an input that is compared by its values


class GraphReplay:
    """`function` as one program, run without tracing where that gives the same.

    function: takes tensors (in any nest) and numbers, returns one tensor, and may change the parameters and buffers of `model`
    and the state of `optimizer`. graphs: how many different programs it is allowed. It is traced again when a number among its
    arguments, a shape, or a setting of the optimizer is new, and every 64 steps, to see that nothing else changes it: that is
    an error, as is a step that is another program. `works`: None until it was tried; False where two traces of the same step
    have other constants (Adam's corrections), or where it draws random numbers on the device: then it is traced every time, as
    torch_xla does.
    """

    works = None
    new_operation = None
    """Of the last program: the first operation that the one before has not. See `causes.new_operation`."""

    def __init__(self, function, graphs, model, optimizer, device):
        self.function, self.graphs, self.model, self.optimizer, self.device = function, graphs, model, optimizer, str(device)
        self.recordings, self.hashes, self.calls = {}, set(), 0
        self.trace, self.traces = "", {}  # of the program that was compiled last; of each, by its hash

    def __call__(self, *arguments):
        import torch_xla

        key, tensors = self._key(arguments)
        self.calls += 1
        recording = self.recordings.get(key)
        if recording is None or recording.runs == CHECK_EVERY:
            # full_graph: a hidden `.item()` raises instead of cutting the step.
            guarded = torch_xla.compile(self._traced, full_graph=True, name=self.function.__name__)
            return guarded(arguments, key, tensors)
        if recording.host:
            torch._foreach_add_(recording.host, recording.steps)
        return self._run(recording, tensors)

    def _key(self, arguments):
        """What a recording depends on besides the values of tensors; and those tensors."""
        leaves, nest = tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]
        settings = [(n, v) for group in self.optimizer.param_groups for n, v in group.items() if n != "params"]
        return repr((nest, values, settings, self.model.training)), tensors

    def _traced(self, arguments, key, tensors):
        import torch_xla.core.xla_model as xm
        from torch_xla import _XLAC

        seed = xm.get_rng_state()
        recording = self._record(arguments, tensors)
        known = self.recordings.get(key)
        if self.works is None:
            # The second trace finds the optimizer's numbers on the host a step further: what is made of them is no constant.
            text, before = _XLAC._get_xla_tensors_text(recording.outputs), recording.before
            self._undo(recording)
            again = self._record(arguments, tensors)
            if again.hash != recording.hash and not recording.draws:
                raise RuntimeError(self._another(text, _XLAC._get_xla_tensors_text(again.outputs)))
            self.works = recording.like(again)
            self._undo(again)
            for value, old in zip(recording.host, before):
                value.copy_(old)
            if recording.draws:
                xm.set_rng_state(seed)
            recording = self._record(arguments, tensors) if self.works else None
        elif known is not None and not (known.hash == recording.hash and known.like(recording)):
            raise RuntimeError(self._another(self.traces[known.hash], _XLAC._get_xla_tensors_text(recording.outputs)))
        if not self.works:
            return self.function(*arguments)  # the end of the guarded call runs it
        return self._compiled(recording, key, tensors)

    def _another(self, expected, got):
        """What to say of a step that is not what it was."""
        operation = self.new_operation = new_operation(expected, got)
        return (
            f"call {self.calls} of {self.function.__name__} is another program than before, with the same shapes and numbers "
            f"given: "
            f"maximum number of different graphs exceeded: {self.graphs}" + (f"\nNew in it: {operation}" if operation else "")
        )

    def _record(self, arguments, tensors):
        """Trace the function, which leaves its results uncomputed."""
        from torch_xla import _XLAC
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        state, host = self._state()
        names = {_XLAC._xla_get_tensor_id(t): ("tensor", i) for i, t in enumerate(tensors)}
        names |= {_XLAC._xla_get_tensor_id(t): ("state", i) for i, t in enumerate(state)}
        before = [value.clone() for value in host]
        debugs = _XLAC._get_ir_debug()
        _XLAC._set_ir_debug(True)  # the trace keeps the line of each operation; the program is the same
        try:
            result = self.function(*arguments)
        finally:
            _XLAC._set_ir_debug(debugs)
        changed = _XLAC._check_tensor_need_materialization(state)
        written = [i for i, yes in enumerate(changed) if yes]
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        outputs = [*(state[i] for i in written), *(p.grad for p in parameters), result]
        ids, values = _XLAC._get_tensors_xla_device_data_node(outputs)
        inputs = [(names.get(i), i, value) for i, value in zip(ids, values)]
        steps = [after - old for after, old in zip(host, before)]
        draws = _XLAC._get_seed_info_id() in ids
        for name, _, value in inputs:  # what the step writes anew may take the memory of what it was
            if name and name[0] == "state" and name[1] in written:
                _XLAC._set_buffer_donation(value, True)
        with alias_with_buffer_donor_config():
            program = _XLAC._get_graph_hash(outputs)
        return _Recording(program, state, host, before, steps, written, parameters, outputs, inputs, draws)

    def _state(self):
        """(tensors on the device that the function may write, the optimizer's numbers on the host)."""
        kept = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        there = [v for v in kept if v.device.type == "xla"]
        return [*self.model.parameters(), *self.model.buffers(), *there], [v for v in kept if v.device.type == "cpu"]

    def _undo(self, recording):
        """Make the traced step not have happened, but for the optimizer's numbers on the host."""
        from torch_xla import _XLAC

        for name, _, value in recording.inputs:
            if name and name[0] == "state":
                recording.state[name[1]].data = value
        for p in recording.parameters:
            p.grad = None
        recording.outputs = None
        _XLAC._clear_pending_irs(self.device)

    def _compiled(self, recording, key, tensors):
        """Compile the traced step where it is new, and run it."""
        from torch_xla import _XLAC
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        _XLAC._set_allow_execution(True)
        if recording.hash not in self.hashes:
            trace = _XLAC._get_xla_tensors_text(recording.outputs)
            self.new_operation, self.trace = new_operation(self.trace, trace) if self.trace else None, trace
            self.traces[recording.hash] = trace
            if len(self.hashes) == self.graphs:
                raise RuntimeError(
                    f"call {self.calls} of {self.function.__name__} is another program: maximum number of different graphs "
                    f"exceeded: {self.graphs}"
                )
            with alias_with_buffer_donor_config():
                _XLAC._xla_warm_up_cache(recording.outputs, [])
            self.hashes.add(recording.hash)
        self._undo(recording)
        recording.forget()
        while len(self.recordings) >= KEPT:
            del self.recordings[next(iter(self.recordings))]
        self.recordings[key] = recording
        return self._run(recording, tensors)

    def _run(self, recording, tensors):
        from torch_xla import _XLAC

        recording.runs += 1
        given = dict(state=recording.state, tensor=tensors)
        inputs = [given[name[0]][name[1]] if name else value for name, _, value in recording.inputs]
        *written, result = _XLAC._run_cached_graph(recording.hash, inputs)
        for index, value in zip(recording.written, written):
            recording.state[index].data = value
        for p, gradient in zip(recording.parameters, written[len(recording.written) :]):
            p.grad = gradient
        return result


class _Recording:
    """A traced step: where its inputs come from, and where its outputs go.

    state, host: what the step may change, on the device and on the host. before, steps: of host, what they were, and by how
    much a step moves them. written: indices of state. parameters: those that get a gradient. outputs: the traced tensors.
    inputs: (name, id, value) in the program's order, where name is ("state" or "tensor", index), or None for a constant. hash:
    torch_xla's name of the program.
    """

    runs = 0

    def __init__(self, hash, state, host, before, steps, written, parameters, outputs, inputs, draws):
        self.hash = hash
        self.state, self.host, self.before, self.steps = state, host, before, steps
        self.written, self.parameters, self.outputs, self.inputs, self.draws = written, parameters, outputs, inputs, draws

    def like(self, other):
        """Whether the two differ in nothing but the values of state and arguments, so that one can stand for the other."""
        read = {name[1] for name, _, _ in self.inputs if name and name[0] == "state"}
        return (
            not self.draws
            and set(self.written) <= read
            and [name for name, _, _ in self.inputs] == [name for name, _, _ in other.inputs]
            and self.written == other.written
            and all(torch.equal(a, b) for a, b in zip(self.steps, other.steps))
            and all(_same(a, b) for (name, _, a), (_, _, b) in zip(self.inputs, other.inputs) if name is None)
        )

    def forget(self):
        """Let go of everything that belongs to one step alone."""
        self.outputs = self.before = None
        self.inputs = [(name, i, None if name else value) for name, i, value in self.inputs]


def _same(a, b):
    """Whether two constants are the same: the same data on the device, or small and equal."""
    from torch_xla import _XLAC

    if _XLAC._unique_id_for_ir_and_data(a) == _XLAC._unique_id_for_ir_and_data(b):
        return True
    return a.shape == b.shape and a.dtype == b.dtype and a.numel() <= SMALL and torch.equal(a.cpu(), b.cpu())
