"""Collectives of trees over the processes of a training."""

import subprocess
import sys

import torch

from tests.conftest import ROOT
from tpukit.devices.distributed import World

RANK = """
import sys
import torch, torch.distributed as dist
from tpukit.devices.distributed import World

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
world = World(rank, 3)
def tell(*values): print("result:", *values, file=sys.stderr)  # gloo prints to stdout
mine = dict(weight=torch.full((rank + 1,), float(rank)), notes=[rank, f"rank {rank}"])
tell([row for row in world.all_gather([rank, 0.5])])
gathered = world.gather(mine)
tell([tree["weight"].tolist() for tree in gathered])
tell(world.broadcast(mine)["notes"], world.broadcast(mine)["weight"].tolist())
tell(world.all_reduce(torch.tensor([1.0, rank])).tolist())
"""


def test_every_rank_gets_what_a_collective_promises(tmp_path):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "store"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    errors = [rank.communicate(timeout=120)[1].splitlines() for rank in ranks]
    printed = [[line.removeprefix("result: ") for line in lines if line.startswith("result: ")] for lines in errors]
    for number, lines in enumerate(printed):
        assert lines[0] == str([[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]])
        assert lines[1] == (str([[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]) if number == 0 else "[]")
        assert lines[2:] == ["[0, 'rank 0'] [0.0]", "[3.0, 3.0]"]


def test_a_world_of_one_needs_no_process_group():
    world, tree = World(), dict(a=torch.ones(2))
    assert world.all_gather([1.0]) == [[1.0]] and world.gather(tree) == [tree] and world.broadcast(tree) is tree
    assert world.all_reduce(tree["a"]).tolist() == [1.0, 1.0]
