"""A step as StableHLO, without the device that will run it."""

import subprocess
import sys

from tests.conftest import ROOT

EXPORT = """
import torch
from tpukit.devices.xla_export import ExportRuntime

runtime = ExportRuntime("fp32", cores=4, memory_size=123)
model = runtime.place(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step(x):
    loss = model(x).square().sum()
    runtime.backward(loss, optimizer)
    runtime.all_reduce_gradients(optimizer)
    runtime.optimizer_step(optimizer)
    return loss.detach()

x = runtime.put({"x": torch.ones(4, 3)})["x"]
loss = runtime.compile(step, changes=(model, optimizer))(x)
nonzero = runtime.compile(lambda x: x.nonzero())
try:
    nonzero(x)
except ValueError as error:
    print(error)
print(runtime.memory_size(), loss.item(), len(runtime.graphs), b"all_reduce" in runtime.graphs[0], runtime.graphs[0][:4])
"""


def test_a_step_of_several_cores_is_exported_and_not_run_and_a_fallback_is_refused(xla):
    ran = subprocess.run([sys.executable, "-c", EXPORT], cwd=ROOT, capture_output=True, text=True)
    refused, printed = ran.stdout.splitlines()[-2:]
    assert "aten::nonzero" in refused, ran.stderr
    assert printed == "123 0.0 1 True b'ML\\xefR'", ran.stderr  # the first bytes of a portable artifact
