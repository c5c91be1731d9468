"""Collectives of trees over the processes of a training."""

import pickle

import pytest
import torch

from tests.tpukit.devices.conftest import told_by_ranks
from tpukit.devices import distributed
from tpukit.devices.distributed import World

RANK = """
mine = dict(weight=torch.full((rank + 1,), float(rank)), notes=[rank, f"rank {rank}"])
tell(world.all_gather(dict(row=[rank, 0.5], is_first=rank == 0)))
gathered = world.gather(mine)
tell([tree["weight"].tolist() for tree in gathered])
tell(world.broadcast(mine)["notes"], world.broadcast(mine)["weight"].tolist())
tell(world.all_reduce(torch.tensor([1.0, rank])).tolist())

runtime = Runtime("cpu", "fp16", world)
channels_last = torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
made = [channels_last, torch.ones(2), torch.ones(2), torch.ones(())]
everywhere, on_one, nowhere, frozen = parameters = [torch.nn.Parameter(value) for value in made]
frozen.requires_grad_(False)
# The fused kernel skips where the flag is exactly 1.
optimizer = torch.optim.SGD(parameters, 1.0, weight_decay=0.5, fused=True)
numbers = torch.arange(24.0).view(2, 3, 2, 2)
for number in range(3):
    optimizer.zero_grad()
    loss = (everywhere * numbers).sum() * (rank + 1)
    if rank == 1 and number == 0:
        loss = loss + on_one.sum() * 3
    if rank == 2 and number == 2:
        loss = loss * 1e38
    runtime.scaler.scale(loss).backward()
    runtime.scaler.unscale_(optimizer)
    runtime.all_reduce_gradients(optimizer)
    missing = [p.grad is None for p in parameters]
    runtime.optimizer_step(optimizer)
    tell(missing, everywhere[1, 2, 1].tolist(), on_one[0].item(), nowhere[0].item())
tell(runtime.scaler.get_scale())
"""


class Code:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code of another rank')",)


def test_what_another_rank_sends_runs_no_code():
    with pytest.raises(pickle.UnpicklingError):
        distributed._unpack(distributed._pack([Code()]))


@pytest.fixture(scope="module")
def told(tmp_path_factory, warm_calls):
    """What each of three ranks tells, line by line."""
    told = told_by_ranks(RANK, 3, tmp_path_factory.mktemp("ranks"))
    assert [len(lines) for lines in told] == [8] * 3, told
    return told


def test_every_rank_gets_what_a_collective_promises(told):
    for number, lines in enumerate(told):
        assert lines[0] == str([dict(row=[rank, 0.5], is_first=float(not rank)) for rank in (0.0, 1.0, 2.0)])
        assert lines[1] == (str([[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]) if number == 0 else "[]")
        assert lines[2:4] == ["[0, 'rank 0'] [0.0]", "[3.0, 3.0]"]


def test_gradients_become_their_mean_and_an_overflow_of_one_rank_skips_the_step_of_all(told):
    """Parameters: with a gradient on all ranks, on one rank in the first step, on none, frozen. Weight decay
    of 0.5 tells a gradient of zero from none."""
    first = [[False, False, True, True], [1 - 0.5 - 2 * 22.0, 1 - 0.5 - 2 * 23.0], 1 - 0.5 - 1.0, 1.0]
    moved = [x / 2 - 2 * n for x, n in zip(first[1], (22.0, 23.0))]
    second = [[False, True, True, True], moved, *first[2:]]
    third = second  # that overflowed
    wanted = [*(" ".join(map(str, row)) for row in (first, second, third)), str(2.0**15)]
    assert [lines[4:] for lines in told] == [wanted] * 3


def test_a_world_of_one_needs_no_process_group():
    world, tree = World(), dict(a=torch.ones(2))
    assert world.all_gather([1.0]) == [[1.0]] and world.gather(tree) == [tree]
    assert world.broadcast(tree) is tree and world.all_reduce(tree["a"]).tolist() == [1.0, 1.0]
