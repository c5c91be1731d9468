"""A step as StableHLO, without the device that will run it."""

import subprocess
import sys

from tests.conftest import ROOT

EXPORT = """
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
nonzero = runtime.compile(lambda x: x.nonzero())
try:
    nonzero(x)
except ValueError as error:
    print(error)
(graph,) = runtime.graphs
code = graph["stablehlo"]
print(runtime.memory_size(), loss.item(), graph["name"], b"all_reduce" in code, code[:4])
"""


def test_a_step_of_several_cores_is_exported_and_not_run_and_a_fallback_is_refused(xla):
    ran = subprocess.run([sys.executable, "-c", EXPORT], cwd=ROOT, capture_output=True, text=True)
    refused, printed = ran.stdout.splitlines()[-2:]
    assert "aten::nonzero" in refused, ran.stderr
    assert printed == "123 0.0 step True b'ML\\xefR'", ran.stderr  # the first bytes of a portable artifact


EXPORT_SPMD = """
import numpy as np
from tpukit.tools.plan.xla_export import ExportRuntime

runtime = ExportRuntime("fp32", cores=4, spmd=True)
x = runtime.put_batch({"x": np.ones((8, 3), np.float32)})["x"]
runtime.compile(lambda x: x.sum(), name="sum")(x)
(graph,) = runtime.graphs
print(b"devices=[4,1]0,1,2,3" in graph["stablehlo"])
"""


def test_a_graph_over_several_cores_has_the_sharding_of_its_batch(xla):
    ran = subprocess.run([sys.executable, "-c", EXPORT_SPMD], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1:] == ["True"], ran.stderr
