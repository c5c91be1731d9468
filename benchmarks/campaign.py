"""`python -m benchmarks.campaign`: kill a training run, and flip bits in its weights files, a thousand times.

A run has a folder, and a backup in another one. After each kill the newest whole checkpoint of both is at
least as new as before, and a run that has come to its end equals one that was never killed. A weights file
with a flipped bit is never read as whole: the training that goes on names it, and ends with the same records
and state. Exit code 1, with what differs, if that does not hold."""

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo  # here, so that no child has to import it

from tests.conftest import exact
from tests.runs.store import alike, kill_before
from tpukit import MNIST, Run, TpukitError, train
from tpukit.devices.runtime import Runtime
from tpukit.runs import manifest, weights
from tpukit.tasks.datasets import make_synthetic

SETTINGS = dict(batch_size=8, channels=2, log_every=3, num_workers=0, save_every_s=0.0, ema_decay=0.9)
FLIPPED_AT = 20  # steps of 40: at the end of the second epoch of four
MAX_KILLS = 12  # of one run
MAX_CHANGES = 60  # of files, before a kill
LOSE_SHARE = 0.1  # of the kills after which the run's folder is lost
LIMIT_S = 120.0  # a training that takes longer hangs


def resume(log, task, folder, backup, kill_at=None):
    """Train to the end, or to the n-th change of a file, before which the process is killed."""
    if kill_at:
        kill_before(kill_at)
    with open(log, "w", buffering=1) as file, contextlib.redirect_stdout(file):
        try:
            train(task, Run.open(folder, task, backup=backup), runtime=Runtime("cpu"), progress=False)
        except BaseException:
            traceback.print_exc(file=file)
            sys.exit(1)


def forked(log, *arguments, kill_after_s=None, **options):
    """Call `resume` in a forked process, which is killed after this time. Returns (exit code, output)."""
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=resume, args=(log, *arguments), kwargs=options)
    child.start()
    child.join(LIMIT_S if kill_after_s is None else kill_after_s)
    hangs = kill_after_s is None and child.is_alive()
    child.kill()
    child.join()
    out = log.read_text() if log.exists() else ""
    return (1, f"{out}\nthe training hangs") if hangs else (child.exitcode, out)


def results(folder):
    """Return records, last state and best weights of a run. Raises TpukitError for what is damaged."""
    run = Run(folder)
    return dict(records=exact(run), state=run.restore(), best=weights.read(run.best()))


def unequal(folder, wanted):
    """Return the names of the results that differ from the straight run's, or why they cannot be read."""
    try:
        found = results(folder)
    except (OSError, TpukitError) as error:
        return {str(error)}
    return {name for name in wanted if not alike(found[name], wanted[name])}


def newest_whole(folder):
    """Return the step of the newest whole checkpoint of a run; 0 without."""
    listed = manifest.read(folder) or {}
    for name, step in manifest.steps(listed).items():
        if manifest.is_whole(folder / name, listed[name]):
            return step
    return 0


class Campaign:
    """The runs to compare with, and how often something was lost."""

    def __init__(self, work, seed):
        self.work, self.log, self.rng = work, work / "out.txt", random.Random(seed)
        self.folder, self.backup = work / "run", work / "backup"
        self.lost = self.kills = 0
        self.task = MNIST(dataset_dir=make_synthetic("mnist", work / "digits", size=96), epochs=4, **SETTINGS)
        half = dataclasses.replace(self.task, epochs=2)
        for name, task in dict(straight=self.task, half=half).items():
            code, out = forked(self.log, task, work / name, work / f"{name}-copy")
            assert code == 0, out
        assert newest_whole(work / "half") == newest_whole(work / "half-copy") == FLIPPED_AT
        self.wanted = results(work / "straight")

    def report(self, what, out=""):
        self.lost += 1
        print(f"LOST {what}\n{out[-2000:]}", flush=True)

    def kill_one_run(self, number, count, seconds):
        """Train a run to its end, killed at most `count` times within these seconds of a start."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.backup, ignore_errors=True)
        newest = {self.folder: 0, self.backup: 0}
        for kill in range(count + 1):
            how = {}
            if kill < count and self.rng.random() < 0.5:
                how = dict(kill_at=self.rng.randrange(1, MAX_CHANGES))
            elif kill < count:
                how = dict(kill_after_s=self.rng.uniform(0, seconds))
            what = f"run {number}, kill {kill} ({how})"
            code, out = forked(self.log, self.task, self.folder, self.backup, **how)
            if code != -signal.SIGKILL:
                break
            self.kills += 1
            for place, before in newest.items():
                newest[place] = newest_whole(place)
                if newest[place] < before:
                    self.report(f"{what}: the {place.name} had step {before}, has {newest[place]}", out)
            if newest[self.backup] and self.rng.random() < LOSE_SHARE:
                shutil.rmtree(self.folder, ignore_errors=True)
                newest[self.folder] = 0
        if code != 0:
            self.report(f"{what}: exit code {code}", out)
        for place in newest:
            if different := unequal(place, self.wanted):
                self.report(f"{what}: {different} of the {place.name}", out)

    def flip(self, number):
        """Flip one bit in a weights file of the run or of its backup, and train on."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.backup, ignore_errors=True)
        shutil.copytree(self.work / "half", self.folder)
        shutil.copytree(self.work / "half-copy", self.backup)
        place = (self.folder, self.backup)[number % 2]
        is_best = self.rng.random() < 0.5
        path = place / (manifest.BEST if is_best else f"checkpoints/step-{FLIPPED_AT:08d}.pt")
        data = bytearray(path.read_bytes())
        bit = self.rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        what = f"flip {number}, bit {bit} of {path.name} in the {place.name}"
        if is_best:
            with contextlib.suppress(TpukitError):
                weights.read(path)
                self.report(f"{what}: read as whole")
        if place == self.backup:
            shutil.rmtree(self.folder)  # so that the backup is needed
        code, out = forked(self.log, self.task, self.folder, self.backup)
        if code != 0 or "resuming at step" not in out or path.name not in out or "damaged" not in out:
            self.report(f"{what}: exit code {code}, not resumed, or not named", out)
        if not is_best and f"resuming at step {FLIPPED_AT}" in out:
            self.report(f"{what}: read as whole", out)
        for folder in (self.folder, self.backup):
            different = unequal(folder, self.wanted)
            if is_best:  # those of a later evaluation took their place
                different -= set(self.wanted)
            if different:
                self.report(f"{what}: {different} of the {folder.name}", out)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # A kill loses nothing of what was written, there or on a disk.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=memory) as work:
        os.environ["TPUKIT_CACHE"] = f"{work}/cache"
        started = time.monotonic()
        found = Campaign(Path(work), options.seed)
        seconds = (time.monotonic() - started) / 2  # of a training
        number = 0
        while found.kills < options.kills:
            found.kill_one_run(number, min(options.kills - found.kills, MAX_KILLS), seconds)
            number += 1
        for flip in range(options.flips):
            found.flip(flip)
    print(f"kills: {found.kills}, of {number} runs; flips: {options.flips}; lost: {found.lost}")
    return 1 if found.lost else 0


if __name__ == "__main__":
    sys.exit(main())
