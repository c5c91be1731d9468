import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import runtime
from torch_xla.distributed.spmd import Mesh

xr.use_spmd()
xr.initialize_cache("/tmp/cache", readonly=False)
device = torch_xla.device()
count = xr.global_runtime_device_count()
mesh = Mesh(np.arange(count), (count, 1), ("data", "model"))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).to("xla")
xs.mark_sharding(model[0].weight, mesh, ("model", None))
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="xla:0"))


@torch_xla.compile
def step(x, y):
    optimizer.zero_grad()
    with torch.autocast(device_type="xla", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


for _ in range(3):
    x = torch.randn(32, 8).to(device)
    y = torch.randint(0, 2, (32,), device=device)
    xs.mark_sharding(x, mesh, ("data", None))
    loss = step(x, y)
torch_xla.sync(wait=True)
print(loss.cpu(), runtime.device_type())
