"""A step as StableHLO, without the device that will run it."""

import pytest

pytest.importorskip("torch_xla")
from tpukit_tools.subprocess_call import run_python

STEP = """
import os, torch
from tpukit_tools.plan.xla_export import ExportRuntime

runtime = ExportRuntime("fp32", cores=4)
model = runtime.to_device(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = runtime.put(torch.ones(4, 3))
try:
    runtime.compile(lambda x: x.nonzero())(x)
except ValueError as error:
    assert "aten::nonzero" in str(error), error

def step(x):
    loss = model(x).square().sum()
    loss.backward()
    runtime.all_reduce_gradients(optimizer)
    runtime.optimizer_step(optimizer)
    return loss.detach()

runtime.compile(step, mutates=(model, optimizer))(x)
(graph,) = runtime.graphs
assert graph["stablehlo"].startswith(b"ML\\xefR"), "no portable artifact"
assert b"all_reduce" in graph["stablehlo"]
print("exported", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_what_is_exported_has_its_collectives_is_not_run_and_has_no_fallback(warm_calls):
    ran = run_python("-c", STEP, timeout_s=300)
    assert ran.stdout.endswith("exported\n"), ran.stderr
