"""The calls of torch_xla 2.8 and 2.9 that have no public name, each once. Most are those of torch_xla's own
bridge to torch.compile.

A handle is the number of the data that a tensor has on the device; what is still to be computed has none."""

from collections.abc import Callable

from torch import Tensor
from torch_xla import _XLAC
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

# "highest": a TPU multiplies fp32 factors as they are. (`torch_xla.backends` says so with a warning.)
set_matmul_precision: Callable[[str], None] = _XLAC._xla_set_mat_mul_precision
# Whether this process has opened the XLA device, so that processes forked from it cannot.
is_open: Callable[[], bool] = _XLAC._xla_runtime_is_initialized

# Data on the device

# Copies on the CPU, by one transfer.
to_cpu: Callable[[list[Tensor]], list[Tensor]] = _XLAC._xla_get_cpu_tensors
handles: Callable[[list[Tensor]], list[int]] = _XLAC._get_tensors_handle
# (ids, tensors) of all data that must be on the device to compute the outputs, in the graph's order.
graph_inputs: Callable[[list[Tensor]], tuple[list[int], list[Tensor]]] = (
    _XLAC._get_tensors_xla_device_data_node
)
# The id in `graph_inputs` of the seed of random numbers that are drawn on the device.
random_seed_id: Callable[[], int] = _XLAC._get_seed_info_id

# Let the next graph that reads a tensor's data write over it.
set_donated: Callable[[Tensor, bool], None] = _XLAC._set_buffer_donation
# Forget what is still to be computed on a device, "xla:0".
discard_pending: Callable[[str], None] = _XLAC._clear_pending_irs

# Graphs that were traced

# Whether each tensor's value is still to be computed.
are_pending: Callable[[list[Tensor]], list[bool]] = _XLAC._check_tensor_need_materialization
# Whether graphs that are traced from here on keep the line of each operation.
name_lines: Callable[[bool], None] = _XLAC._set_ir_debug
# StableHLO of the outputs' graph for a device. The others: [], and whether it is to be a portable artifact.
stablehlo: Callable[[list[Tensor], str, list, bool], bytes] = _XLAC._get_stablehlo
# Whether anything may run: not within `torch_xla.compile(full_graph=True)`, which ends that itself.
allow_execution: Callable[[bool], None] = _XLAC._set_allow_execution
allows_execution: Callable[[], bool] = _XLAC._get_allow_execution
# A TPU kernel as one operation of the graph, of operands and the payload of the kernel's own compiler; then
# the shapes and dtypes of its results.
tpu_custom_call: Callable[[list[Tensor], str, list, list], list[Tensor]] = _XLAC._xla_tpu_custom_call
# Run a compiled graph, named by its `graph_hash`, on these inputs.
run_graph: Callable[[str, list[Tensor]], list[Tensor]] = _XLAC._run_cached_graph


def graph_hash(outputs: list[Tensor]) -> str:
    """torch_xla's name of the graph that computes the outputs, by which it can be run again."""
    with alias_with_buffer_donor_config():
        return _XLAC._get_graph_hash(outputs)


def compile_graph(outputs: list[Tensor]) -> None:
    """Compile the graph that computes the outputs, which keeps it under its `graph_hash`."""
    with alias_with_buffer_donor_config():
        _XLAC._xla_warm_up_cache(outputs, [])
