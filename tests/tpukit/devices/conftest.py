"""An emulated GPU, a training step by hand, a training of a small model by such steps, and programs that run
as several ranks."""

import pytest
import torch

from tests.tpukit.devices.emulated_gpu import EmulatedGpu
from tpukit import MNIST
from tpukit_tools.subprocess_call import run_python


@pytest.fixture
def emulated(monkeypatch):
    gpu = EmulatedGpu(monkeypatch)
    yield gpu
    gpu.hook.remove()


def take_step(runtime, loss, optimizer):
    optimizer.zero_grad(set_to_none=True)
    runtime.scaler.scale(loss).backward()
    runtime.scaler.unscale_(optimizer)
    runtime.all_reduce_gradients(optimizer)
    runtime.optimizer_step(optimizer)


def outcome(runtime, optimizer, captured, dropout=False, steps=8, ragged_at=None):
    """(sums of the loss after each step, final state and the next random numbers, how often the step was
    called in Python). Half of the steps have another loss. ragged_at: the step from which on a batch has
    fewer samples."""
    torch.manual_seed(0)
    # No bias, whose gradient would be nothing but rounding before a batch norm
    layers = [torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU()]
    layers += [torch.nn.Flatten(), torch.nn.Dropout(0.5)][: 1 + dropout]
    model = runtime.to_device(torch.nn.Sequential(*layers, torch.nn.Linear(4 * 26 * 26, 10)).train())
    made = optimizer(model.parameters())
    runtime.init_optimizer_state(made)
    runtime.seed(5)
    calls = []

    def step(batch, epoch, total):
        calls.append(epoch)
        loss = torch.nn.functional.cross_entropy(model(batch["image"].float() / 255), batch["label"])
        take_step(runtime, loss * (epoch + 1), made)
        if runtime.compiles:
            made.zero_grad(set_to_none=True)
        return total + loss.detach().reshape(1) * (epoch + 1)

    compiled = runtime.compile(step, name="step", mutates=(model, made) if captured else None)
    totals = [runtime.put(torch.zeros(1))]
    for number in range(steps):
        batch = MNIST().example(8 if ragged_at is None or number < ragged_at else 6)
        batch["image"] = batch["image"] // (number + 1)
        epoch = runtime.as_graph_input("epoch", number // (steps // 2))
        runtime.seed_device(5, number)
        totals.append(compiled(runtime.put_batch(batch), epoch, totals[-1]))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    kept = [value for state in made.state_dict()["state"].values() for value in state.values()]
    kept = [value for value in kept if torch.is_tensor(value)]
    state = [value.detach().cpu() for value in (*model.state_dict().values(), *gradients, *kept)]
    return [float(total) for total in totals[1:]], [*state, torch.rand(3)], len(calls)


RANKS = r"""
import os, sys
import torch, torch._dynamo  # once for all
import torch.distributed as dist
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime

torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and it would wait for them
program, size = sys.argv[1], int(sys.argv[2])
for rank in range(size):
    if os.fork() == 0:
        store = dist.FileStore(sys.argv[3], size)

        def tell(*values):
            words = " ".join(map(str, [f"rank {rank}:", *values]))
            os.write(2, f"{words}\n".encode())  # in one call, or ranks' lines mix; gloo prints to stdout

        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        world = World(rank, size)
        exec(program)
        store.set(f"rank {rank} is done", "")  # gloo fails in a rank that another one leaves too early
        store.wait([f"rank {other} is done" for other in range(size)])
        os._exit(0)
for rank in range(size):
    os.wait()
"""


def told_by_ranks(program, size, folder, timeout_s=300):
    """What each of several processes tells, line by line. program: Python, run by each, which knows `rank`,
    `world` and `tell`."""
    ran = run_python("-c", RANKS, program, size, folder / "store", timeout_s=timeout_s)
    lines = [line.partition(": ") for line in ran.stderr.splitlines()]
    told = [[words for who, _, words in lines if who == f"rank {rank}"] for rank in range(size)]
    assert all(told), ran.stderr
    return told
