import torch
import torch.distributed as dist
import torch_xla as tx
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch_xla import runtime
from torch_xla.amp import autocast, syncfree
from torch_xla.core.xla_model import mark_step, xla_device


def train(index, loader, optimizer):
    dist.init_process_group("xla", init_method="xla://")
    tx.backends.set_mat_mul_precision("highest")
    device = xm.xla_device()
    model = torch.nn.Linear(8, 2).to(device=xla_device())
    learning_rate = torch.tensor(1e-3, device="xla:0")
    optimizer = syncfree.Adam(model.parameters(), lr=learning_rate)
    for x in pl.MpDeviceLoader(loader, device):
        x = x.to("xla") + torch.zeros(8, device=torch.device("xla"))
        with autocast(device):
            loss = model(x).sum()
        with torch.amp.autocast("xla", torch.bfloat16):
            loss = loss + model(x).sum()
        loss.backward()
        xm.optimizer_step(optimizer)
        mark_step()
        tx.sync()
    total = xm.mesh_reduce("loss", loss.item(), sum)
    is_on_xla = x.device.type == "xla"
    if xm.is_master_ordinal() and is_on_xla:
        print(met.metrics_report(), total / xr.world_size(), runtime.device_type())
    xm.save(model.state_dict(), "model.pt")
    xs.mark_sharding(model.weight, xs.Mesh([0], (1, 1), ("data", "model")), ("model", None))
    print("xla" + str(xm.xla_device(3)))


if __name__ == "__main__":
    xmp.spawn(train, args=([], None), nprocs=None, start_method="fork")
    tx.launch(train, args=(), debug_single_process=False)
