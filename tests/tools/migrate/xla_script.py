import numpy as np
import torch
import torch.distributed as dist
import torch_xla as tx
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch_xla import runtime
from torch_xla.amp import autocast, syncfree
from torch_xla.core.xla_model import mark_step, xla_device
from torch_xla.distributed.spmd import Mesh


def train(index, loader, optimizer):
    device = xm.xla_device()
    share = dict(num_replicas=xr.world_size(), rank=xr.global_ordinal())
    loader = DataLoader(loader, sampler=DistributedSampler(loader, **share), batch_size=8)
    model = torch.nn.Linear(8, 2).to(device)
    for step, (x, y) in enumerate(pl.MpDeviceLoader(loader, device)):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.add_step_closure(print, args=(loss.item(),))
    total = xm.mesh_reduce("loss", loss.item(), sum)
    xm.master_print(f"{total / xr.world_size()}")
    if xm.is_master_ordinal():
        print(met.metrics_report())
    xm.save(model.state_dict(), "model.pt")
    xm.rendezvous("done")


def amp(index):
    dist.init_process_group("xla", init_method="xla://")
    tx.backends.set_mat_mul_precision("highest")
    device = tx.device()
    model = DDP(torch.nn.Linear(8, 2).to(device=xla_device()))
    optimizer = syncfree.Adam(model.parameters(), lr=1e-3)
    xm.set_rng_state(3)
    x = torch.randn(4, 8, device="xla") + torch.zeros(8, device=torch.device("xla"))
    with autocast(device):
        loss = model(x).sum()
    with torch.amp.autocast("xla", torch.bfloat16):
        loss = loss + 0 * model(x).sum()
    loss.backward()
    optimizer.step()
    mark_step()
    tx.sync()
    with tx.step():
        pass
    if x.device.type == "xla":
        print(xm.get_memory_info(device))
    tx.manual_seed(1)


def spmd():
    xr.use_spmd()
    xr.initialize_cache("/tmp/cache", readonly=False)
    mesh = Mesh(np.arange(xr.global_runtime_device_count()), (4, 1), ("data", "model"))
    model = torch.nn.Linear(8, 16).to("xla")
    xs.mark_sharding(model.weight, mesh, ("model", None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="xla:0"))

    @tx.compile
    def step(x):
        with torch.autocast(device_type="xla", dtype=torch.bfloat16):
            return model(x).sum()

    step(torch.randn(32, 8).to("xla")).backward()
    optimizer.step()
    print(runtime.device_type())
    tx.sync(wait=True)


if __name__ == "__main__":
    xmp.spawn(train, args=([], None), nprocs=None, start_method="fork")
    tx.launch(amp, args=(), debug_single_process=False)
