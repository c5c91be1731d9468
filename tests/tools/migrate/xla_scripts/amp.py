import torch
import torch.distributed as dist
import torch_xla as tx
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_xla.amp import autocast, syncfree
from torch_xla.core.xla_model import mark_step, xla_device


def main(index):
    dist.init_process_group("xla", init_method="xla://")
    tx.backends.set_mat_mul_precision("highest")
    device = tx.device()
    other = xla_device()
    model = DDP(torch.nn.Linear(8, 2).to(device=other))
    optimizer = syncfree.Adam(model.parameters(), lr=1e-3)
    xm.set_rng_state(3)
    for index in range(5):
        x, y = torch.randn(4, 8, device="xla"), torch.zeros(4, dtype=torch.long, device=torch.device("xla"))
        with autocast(device):
            loss = torch.nn.functional.cross_entropy(model(x), y)
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
    torch.save({k: v.cpu() for k, v in model.state_dict().items()}, "m.pt")


if __name__ == "__main__":
    tx.launch(main, args=(), debug_single_process=False)
