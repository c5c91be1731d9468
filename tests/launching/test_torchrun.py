"""`launch` under torchrun."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, best_weights, wait_for
from tests.launching.conftest import CPU, are_gone, difference, losses, output_of
from tests.launching.launched import children
from tpukit import Run

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


PROGRAM = """
import os, sys, weakref
from pathlib import Path
import torch.distributed as dist
from tests.launching.launched import RECIPE, Watched
from tpukit import Run, launch, train
groups = []
def function(task, run, runtime):
    groups.append(weakref.ref(dist.group.WORLD))
    return train(task, run, runtime=runtime)
data, folder = map(Path, sys.argv[1:])
task = Watched(dataset_dir=data, log_every=1, **RECIPE)
launch(function, task, Run.open(folder / "run", task))
(folder / f"left{os.environ['RANK']}").write_text(str(groups[0]()))  # printed at once, lines would mix
task = Watched(dataset_dir=data, accident="raise")
launch(train, task, Run.open(folder / "broken", task))
"""


def test_two_ranks_give_the_losses_and_weights_of_one_and_torchrun_names_the_one_that_fails(
    odd, alone, tmp_path
):
    (tmp_path / "program.py").write_text(PROGRAM)
    environ, pipes = {**CPU, "PYTHONPATH": str(ROOT)}, dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command = [*TORCHRUN, str(tmp_path / "program.py"), str(odd), str(tmp_path)]
    ran = subprocess.Popen(command, env=environ, text=True, **pipes)
    out, err = output_of(ran, timeout_s=300)
    assert difference(losses(Run(tmp_path / "run")), losses(alone[0])) < 1e-4, err[-3000:]
    ours, theirs = best_weights(Run(tmp_path / "run")), best_weights(alone[0])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert (tmp_path / "run/log.txt").read_text().count("all 2 cores started") == 1
    # A thread of the group would abort the process when Python ends.
    assert [(tmp_path / f"left{rank}").read_text() for rank in range(2)] == ["None", "None"]
    assert ran.returncode == 1 and "core 1 (rank 1) in step 30 failed: sample 7 is broken" in err
    first = err.split("Root Cause")[1]
    assert "rank      : 1" in first and "ValueError: sample 7 is broken" in first


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_command_trains_under_torchrun_and_its_ranks_end_with_the_agent_however_that_ends(odd, tmp_path):
    run = tmp_path / "run"
    # `--` keeps torchrun from reading tpukit's options as its own.
    options = "--batch-size 8 --channels 4 --epochs 100000"
    words = f"-m -- tpukit train mnist --dataset-dir {odd} --run {run} {options}"
    silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    agent = subprocess.Popen([*TORCHRUN, *words.split()], cwd=ROOT, env=CPU, **silent)
    ranks = []
    try:
        wait_for((run / "progress.json").exists, agent)
        ranks = children(agent.pid)
        assert len(ranks) == 2 and not are_gone(ranks, timeout_s=0)
        agent.kill()
        agent.wait(timeout=60)
        assert are_gone(ranks, timeout_s=60)
    finally:
        agent.kill()
        agent.wait(timeout=60)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
