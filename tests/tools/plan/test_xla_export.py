"""A step as StableHLO, without the device that will run it."""

import pytest

pytest.importorskip("torch_xla")
from tpukit.tools.child import run_python

STEP = """
import torch
from tpukit.tools.plan.xla_export import ExportRuntime

runtime = ExportRuntime("fp32", cores=4, memory_size=123)
model = runtime.to_device(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step(x):
    loss = model(x).square().sum()
    runtime.backward(loss, optimizer)
    runtime.all_reduce_gradients(optimizer)
    runtime.optimizer_step(optimizer)
    return loss.detach()

x = runtime.put({"x": torch.ones(4, 3)})["x"]
loss = runtime.compile(step, mutates=(model, optimizer))(x)
try:
    runtime.compile(lambda x: x.nonzero())(x)
except ValueError as error:
    assert "aten::nonzero" in str(error), error
(graph,) = runtime.graphs
assert (runtime.memory_size(), loss.item(), graph["name"]) == (123, 0.0, "step")
assert graph["stablehlo"].startswith(b"ML\\xefR"), "no portable artifact"
assert b"all_reduce" in graph["stablehlo"]
"""
SPMD = """
import numpy as np
from tpukit.tools.plan.xla_export import ExportRuntime

runtime = ExportRuntime("fp32", cores=4, spmd=True)
x = runtime.put_batch({"x": np.ones((8, 3), np.float32)})["x"]
runtime.compile(lambda x: x.sum(), name="sum")(x)
(graph,) = runtime.graphs
assert b"devices=[4,1]0,1,2,3" in graph["stablehlo"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [STEP, SPMD], ids=["a step of several cores", "a graph over several cores"]
)
def test_what_is_exported_has_its_collectives_or_shardings_is_not_run_and_has_no_fallback(program):
    ran = run_python("-c", program)
    assert ran.returncode == 0, ran.stderr
