"""Graphs of torch.fx as StableHLO by torch_tpu 0.2, on a machine without a TPU, by names that are private
there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, fx


@contextlib.contextmanager
def compiling():
    """Context manager: torch's optimizers behave as in a compiled graph, and count their steps by tensors."""
    import torch

    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def lower(graph: fx.GraphModule, inputs: list[Tensor]) -> tuple[str, bytes]:
    """(text, portable artifact) of the StableHLO of a torch.fx graph of ATen operations, traced on the CPU.

    inputs: tensors in the shapes and types of its placeholders. What the graph returns as it came is no
    result."""
    from torch_tpu._internal import execution_mode
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.export.export import EagerLikeFxInterpreter

    _move_to_tpu(graph)
    arguments = [tpu_torch_compile.placeholder(list(value.shape), value.dtype) for value in inputs]
    with execution_mode.set_eager_mode(execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH):
        # Copies, because an operation in place would replace the argument itself.
        results = EagerLikeFxInterpreter(graph).run(*[value.clone() for value in arguments])
        (output,) = graph.graph.find_nodes(op="output")
        changed = [value for value, node in zip(results, output.args[0]) if node.op != "placeholder"]
        module = tpu_torch_compile.build_mlir(result_tensors=changed, argument_tensors=arguments)
    text = tpu_torch_compile.serialize_mlir_text(module)
    return text, tpu_torch_compile.serialize_mlir_portable_artifact(module)


def _move_to_tpu(graph: fx.GraphModule) -> None:
    """Let the operations of a graph that name a device make their tensors on the TPU."""
    import torch
    from torch_tpu._internal.compile import tpu_torch_compile

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = dict(node.kwargs, device=torch.device("tpu"))
        if node.op == "get_attr":
            setattr(graph, node.target, tpu_torch_compile.make_constant_tensor(getattr(graph, node.target)))
        if node.target is torch.ops.aten._local_scalar_dense.default and not node.users:
            graph.graph.erase_node(node)  # a number that the trace knew: of Adagrad, its learning rate
    graph.recompile()
