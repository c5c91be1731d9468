"""What the tests run on emulated chips: python programs.py NAME ARGUMENTS. Prints lines of JSON."""

import json
import os
import sys
import time
from pathlib import Path


def say(**facts):
    os.write(1, f"{json.dumps(facts)}\n".encode())  # at once, so that ranks do not mix


# tpukit

CHOICES = [(None, 1), (0.1, 1), (None, 2), (0.1, 2)]  # clip, micro-batches


def own_loop():
    """A loop of one's own, four ways: the loss and the norm of each step, and the weights at the end."""
    import torch
    from torch import nn

    import tpukit

    core = tpukit.core()
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
    x, y = (a[core.rank :: core.size].to(core.device) for a in (inputs, 3 * inputs.sum(1, keepdim=True)))
    made = {}
    for clip, micro in CHOICES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(core.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for _ in range(4):
            for k in range(micro):
                loss = (model(x[k::micro]) - y[k::micro]).square().mean() / micro
                loss.backward()
            core.average_gradients(optimizer)
            if clip:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
            core.end_step()
        weights = [value for p in model.parameters() for value in p.detach().cpu().flatten().tolist()]
        made[f"clip {clip}, {micro} micro-batches"] = [norm.item() for norm in norms] + weights
    return made | dict(gradients=gradients_of_some(core))


def gradients_of_some(core):
    """The mean gradients of a parameter of each core's loss, and of one of rank 0's alone."""
    import torch

    both, alone = (torch.nn.Parameter(torch.ones(2, device=core.device)) for _ in range(2))
    loss = both.sum() + alone.sum() if core.rank == 0 else both.sum()
    loss.backward()
    core.average_gradients(torch.optim.SGD([both, alone], lr=0.1))
    means = [parameter.grad.cpu().tolist() for parameter in (both, alone)]
    core.end_step()
    return means


def train(folder, data):
    import tpukit

    say(own=tpukit.launch(own_loop))
    train_task("mnist", folder, data, "{}")


def train_task(kind, folder, data, changes):
    """Train a small task on all chips."""
    import tpukit

    task = small_task(kind, data, **json.loads(changes))
    tpukit.launch(tpukit.train, task, tpukit.Run.open(Path(folder), task))


SETTINGS = dict(
    epochs=2,
    batch_size=16,
    micro_batches=2,
    clip_norm=0.1,
    schedule="cosine",
    ema_decay=0.9,
    channels=4,
    log_every=1,
    precision="fp32",
    save_every_s=0.0,
)
# The same, for a command line
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]


def small_task(kind, data, **changes):
    """A task that takes 20 steps or more, of the same parts as the real one."""
    import tpukit

    settings = {name: value for name, value in SETTINGS.items() if name != "channels"}
    folder = Path(data)
    if kind == "mnist":
        made, own = tpukit.MNIST, dict(channels=4)
    elif kind == "mshnet":
        from tests.tasks.mshnet.small import Narrow as made

        own = dict(epochs=20, eval_every=10, warm_epoch=4, base_size=32, crop_size=32, batch_norm="frozen")
        own |= dict(lr=2e-3, clip_norm=0.01)  # at higher rates rounding errors grow
    elif kind == "cdeit":
        from tests.tasks.cdeit.small import Tiny as made

        own = dict(epochs=20, eval_every=10, lr=1e-3, clip_norm=0.05)
    elif kind == "images":
        made, own = tpukit.ImageClassifier, dict(model_name="test_resnet", pretrained="no", image_size=32)
        own |= dict(epochs=7, batch_norm="frozen")
    else:
        from tests.tasks.text.small import Single as made

        own = dict(model_name=str(folder / "model"), sequence_length=64, epochs=2)
        own |= dict(lora_rank=2, lr=1e-2, samples=2, new_tokens=6)
        folder /= "chats.jsonl"
    return made(dataset_dir=folder, **settings | own | changes)


def public_loops(path):
    """Train by five loops in the shape of public ones, on both chips and on one."""
    import torch

    import tpukit
    from tests.tpukit.launching.public_loops import all_loops

    two = tpukit.launch(all_loops)
    torch.save(dict(two=two, one=tpukit.launch(all_loops, cores=1)), path)


def accident(kind):
    """Launch a function on all chips that ends badly. Prints the processes that are left."""
    import torch_xla

    import tpukit

    if kind == "opened":
        torch_xla.device()

    def accident():
        core = tpukit.core()
        for step in range(1000):
            if core.rank == 1 and step == 5:
                if kind == "raises":
                    raise ValueError("sample 7 is broken")
                if kind == "dies":
                    os.kill(os.getpid(), 9)
                time.sleep(600)
            torch_xla.core.xla_model.all_reduce("sum", [torch.ones(3, device=core.device)])
            core.end_step()

    import torch

    try:
        tpukit.launch(accident, hang_timeout_s=5)
    finally:
        left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        # torch 2.8 keeps a process that compiles, as soon as it is imported
        ours = [pid for pid in left if "compile_worker" not in Path(f"/proc/{pid}/cmdline").read_text()]
        print("left:", ours, flush=True)


def beside_a_holder(*command):
    """Run a command while this process holds all chips."""
    import subprocess

    import torch_xla

    torch_xla.device()
    sys.exit(subprocess.run([sys.executable, *command]).returncode)


def after_opening(folder, data):
    """Train in a process that has opened its chip before, as a notebook does."""
    import torch
    import torch_xla

    assert torch.ones(3, device=torch_xla.device()).sum().item() == 3
    train_task("mnist", folder, data, "{}")


def without_libtpu(*command):
    """Go on as a command that finds chips, but no libtpu."""
    del os.environ["TPU_LIBRARY_PATH"], os.environ["PJRT_DEVICE"]
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])  # without the emulator's
    os.execv(sys.executable, [sys.executable, *command])


# torch_xla


def spawn(function, *arguments):
    import torch_xla.distributed.xla_multiprocessing as xmp

    xmp.spawn(function, args=arguments)


def collectives_of(index):
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    device, rank, size = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    x = torch.arange(size * 6, dtype=torch.float32).reshape(size, 6) + 100 * rank
    on, made = x.to(device), {}
    for name in ("SUM", "MUL", "MIN", "MAX"):
        for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            row = (x[0, :3] % 7 + 1).to(kind).to(device)
            made[f"{name} {kind}"] = xm.all_reduce(getattr(xm, f"REDUCE_{name}"), row).cpu().tolist()
    bits = torch.tensor([rank > 0, True, False]).to(device)
    made["AND"], made["OR"] = (xm.all_reduce(op, bits).cpu().tolist() for op in (xm.REDUCE_AND, xm.REDUCE_OR))
    made["gather 0"], made["gather 1"] = (xm.all_gather(on[:2], dim=dim).cpu().tolist() for dim in (0, 1))
    for pin in (True, False):
        scattered = xm.reduce_scatter(xm.REDUCE_SUM, on, 1.0, 0, size, pin_layout=pin)
        across = xm.reduce_scatter(xm.REDUCE_SUM, on.t().contiguous(), 1.0, 1, size, pin_layout=pin)
        made[f"scatter 0 {pin}"], made[f"scatter 1 {pin}"] = scattered.cpu().tolist(), across.cpu().tolist()
        made[f"to all {pin}"] = xm.all_to_all(on, 0, 1, size, pin_layout=pin).cpu().tolist()
    made["permute"] = xm.collective_permute(on, [[k, (k + 1) % size] for k in range(size)]).cpu().tolist()
    made["permute one"] = xm.collective_permute(on, [[0, 1]]).cpu().tolist()
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    made["groups"] = xm.all_reduce(xm.REDUCE_SUM, on, groups=halves).cpu().tolist()
    made["groups gather"] = xm.all_gather(on[0], groups=halves).cpu().tolist()
    say(rank=rank, made=made)


def helpers_of(index):
    """What examples of torch_xla use beside collectives; each rank has a program of its own."""
    import torch
    import torch.distributed
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as loaders
    import torch_xla.distributed.xla_backend  # noqa: F401  registers xla
    import torch_xla.runtime as xr

    torch.distributed.init_process_group("xla", init_method="xla://")
    device, rank, closed = torch_xla.device(), xr.global_ordinal(), []
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 1).to(device)
    xm.broadcast_master_param(model)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    for x in loaders.MpDeviceLoader([torch.full((1, 4), k + rank + 1.0) for k in range(3)], device):
        optimizer.zero_grad()
        loss = parallel(x).square().sum()
        loss.backward()
        optimizer.step()
        xm.add_step_closure(lambda value: closed.append(value.item()), args=(x.sum(),))
    torch_xla.sync()
    xm.rendezvous("all are here")
    say(
        rank=rank, weights=model.weight.cpu().tolist(), closed=closed, mesh=xm.mesh_reduce("m", rank + 1, sum)
    )


def part_of(index, how):
    """Rank 1 never comes to the collective, or brings another size."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    rank, device = xr.global_ordinal(), torch_xla.device()
    if rank == 1 and how == "never":
        time.sleep(20)
        return
    xm.all_reduce(xm.REDUCE_SUM, torch.ones(5 if rank == 1 else 3).to(device)).cpu()


def spmd():
    import numpy
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    count = xr.global_runtime_device_count()
    device = torch_xla.device()
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 1).to(device), torch.randn(8, 4).to(device)
    xs.mark_sharding(x, xs.Mesh(numpy.arange(count), (count,), ("data",)), ("data", None))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    say(count=count, losses=losses)


def memory():
    """Hold ever more, until it does not fit; and ask for a program that never fits."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device, held, used = torch_xla.device(), [], []
    try:
        for k in range(9):
            held.append(torch.zeros(1 << 20, device=device) + k + 0.5)
            torch_xla.sync(wait=True)
            used.append(xm.get_memory_info(device)["bytes_used"])
    except RuntimeError as error:
        say(used=used, error=str(error))
    del held[1:]
    say(after=xm.get_memory_info(device))
    errors = []
    for _ in range(2):  # torch_xla says the error of an allocation once more, in the next call
        try:
            (held[0][:, None] * held[0]).cpu()
        except RuntimeError as error:
            errors.append(str(error))
    say(error=errors[1])
    os._exit(0)  # without what is still to compute


def alone():
    """One process, which opens all chips."""
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    sums = [(torch.ones(3).to(torch_xla.device(k)) * k).sum().item() for k in range(2)]
    say(devices=xr.addressable_device_count(), sums=sums)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if f"{name}_of" in globals():
        spawn(globals()[f"{name}_of"], *arguments)
    else:
        globals()[name](*arguments)
