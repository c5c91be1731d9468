import os

import torch
import torch.nn as nn
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(index, flags):
    torch.manual_seed(flags["seed"])
    device = xm.xla_device()
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    sampler = DistributedSampler(data, num_replicas=xr.world_size(), rank=xr.global_ordinal(), shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    device_loader = pl.MpDeviceLoader(loader, device)
    model = nn.Linear(8, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(flags["epochs"]):
        for step, (x, y) in enumerate(device_loader):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            xm.optimizer_step(optimizer)
            if step % 10 == 0:
                xm.add_step_closure(print, args=(loss.item(),))
        total = xm.mesh_reduce("loss", loss.item(), sum)
        xm.master_print(f"epoch {epoch}: {total / xr.world_size()}")
    if xm.is_master_ordinal():
        print(met.metrics_report())
    xm.save(model.state_dict(), "model.pt")
    xm.rendezvous("done")


if __name__ == "__main__":
    os.environ["PJRT_DEVICE"] = "TPU"
    xmp.spawn(train, args=({"seed": 1, "epochs": 2},), nprocs=None, start_method="fork")
