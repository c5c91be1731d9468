"""The calls of torch_xla 2.8 and 2.9 that have no public name, each once. Most are those of torch_xla's own
bridge to torch.compile.

A handle is the number of the data that a tensor has on the device; what is still to be computed has none."""

import contextlib
from typing import Any

from torch import Tensor
from torch_xla import _XLAC
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config


def is_open() -> bool:
    """Whether this process has opened the XLA device, so that processes forked from it cannot."""
    return _XLAC._xla_runtime_is_initialized()


def multiply_in_fp32() -> None:
    """Let a TPU multiply fp32 factors as they are. `torch_xla.backends` does so too, with a warning at the
    first time."""
    _XLAC._xla_set_mat_mul_precision("highest")


# Data on the device


def to_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Copies on the CPU, by one transfer."""
    return _XLAC._xla_get_cpu_tensors(tensors)


def handles(tensors: list[Tensor]) -> list[int]:
    return _XLAC._get_tensors_handle(tensors)


def graph_inputs(outputs: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """(ids, tensors) of all data that must be on the device to compute the outputs, in the graph's order."""
    return _XLAC._get_tensors_xla_device_data_node(outputs)


def random_seed_id() -> int:
    """The id in `graph_inputs` of the seed of random numbers that are drawn on the device."""
    return _XLAC._get_seed_info_id()


def donate(tensor: Tensor) -> None:
    """Let the next graph that reads the tensor's data write over it."""
    _XLAC._set_buffer_donation(tensor, True)


# SPMD


def shard(tensor: Tensor, sharding: Any) -> None:
    """Spread a tensor over the devices. sharding: of `Mesh.get_op_sharding`. (`xs.mark_sharding` tries to
    import torchax and jax at every call.)"""
    _XLAC._xla_mark_sharding(tensor, sharding)


def shardings(tensors: list[Tensor]) -> list[str]:
    """How each tensor is spread over the devices, as text; "" where nothing is said."""
    return _XLAC._get_xla_sharding_specs(tensors)


def annotate_sharding(tensor: Tensor, sharding: Any) -> None:
    """`shard` within a graph, for what is still to be computed."""
    _XLAC._xla_annotate_custom_sharding(tensor, sharding)


# Graphs that were traced


def tensor_id(tensor: Tensor) -> int:
    """A number that grows with each tensor that is made."""
    return _XLAC._xla_get_tensor_id(tensor)


def are_pending(tensors: list[Tensor]) -> list[bool]:
    """Whether each tensor's value is still to be computed."""
    return _XLAC._check_tensor_need_materialization(tensors)


def discard_pending(device: Any) -> None:
    """Forget what is still to be computed on a device."""
    _XLAC._clear_pending_irs(str(device))


def name_lines(enabled: bool = True) -> None:
    """Let graphs that are traced from here on keep the line of each operation, or not."""
    _XLAC._set_ir_debug(enabled)


@contextlib.contextmanager
def lines_named(enabled: bool):
    """Context manager: `name_lines` within it."""
    before = _XLAC._get_ir_debug()
    name_lines(enabled)
    try:
        yield
    finally:
        name_lines(before)


def trace_text(outputs: list[Tensor]) -> str:
    """The graph that computes the outputs as torch_xla prints it, see `recompiles.new_operation`."""
    return _XLAC._get_xla_tensors_text(outputs)


def hlo_text(outputs: list[Tensor]) -> str:
    return _XLAC._get_xla_tensors_hlo(outputs)


def stablehlo(outputs: list[Tensor], device: Any, *, portable: bool) -> bytes:
    """The graph as StableHLO: text, or a portable artifact."""
    return _XLAC._get_stablehlo(outputs, str(device), [], portable)


def graph_hash(outputs: list[Tensor]) -> str:
    """torch_xla's name of the graph that computes the outputs, by which it can be run again."""
    with alias_with_buffer_donor_config():
        return _XLAC._get_graph_hash(outputs)


def allow_execution() -> None:
    """End the part of `torch_xla.compile(full_graph=True)` in which nothing may run."""
    _XLAC._set_allow_execution(True)


def compile_graph(outputs: list[Tensor]) -> None:
    """Compile the graph that computes the outputs, which keeps it under its `graph_hash`."""
    with alias_with_buffer_donor_config():
        _XLAC._xla_warm_up_cache(outputs, [])


def run_graph(name: str, inputs: list[Tensor]) -> list[Tensor]:
    """Run a compiled graph, named by its `graph_hash`, on these inputs."""
    return _XLAC._run_cached_graph(name, inputs)


def tpu_custom_call(operands: list[Tensor], payload: str, shapes: list, dtypes: list) -> list[Tensor]:
    """A TPU kernel as one operation of the graph. payload: of the kernel's own compiler. shapes, dtypes: of
    the results."""
    return _XLAC._xla_tpu_custom_call(operands, payload, shapes, dtypes)
