"""`python -m benchmarks.campaign`: kill a training run, and flip bits in its weights files, a thousand times;
and let reads and writes of its files fail, five hundred times each.

A run has a folder, and a backup in another one. After each kill the newest whole checkpoint of both is at
least as new as before, and a run that has come to its end equals one that was never killed. A weights file
with a flipped bit is never read as whole: the training that goes on names it, and ends with the same records
and state. A call of the disk that fails, once or from then on, ends what was being done with a sentence at
most: nothing whole is gone, and the training that goes on ends the same. Exit code 1, with what differs, if
that does not hold."""

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

import numpy as np
import torch
import torch._dynamo  # here, so that no child has to import it

from tests.conftest import exact
from tests.tpukit.runs.faults import READ_ERRORS, READS, WRITE_ERRORS, WRITES, failing_disk
from tests.tpukit.runs.store import alike, kill_before
from tpukit import MNIST, Run, TpukitError, export, predict, show, show_report, train
from tpukit.data.datasets import make_synthetic
from tpukit.devices.runtime import Runtime
from tpukit.runs import manifest, weights
from tpukit.runs import run as run_module

SETTINGS = dict(batch_size=8, channels=2, log_every=3, num_workers=0, save_every_s=0.0, ema_decay=0.9)
FLIPPED_AT = 20  # steps of 40: at the end of the second epoch of four
MAX_KILLS = 12  # of one run
MAX_CHANGES = 60  # of files, before a kill
LOSE_SHARE = 0.1  # of the kills after which the run's folder is lost
LIMIT_S = 120.0  # a training that takes longer hangs


def train_in(task, folder, backup):
    """Train to the end, with another folder as the backup."""
    train(task, Run.open(folder, task, backup=backup), runtime=Runtime("cpu"), progress=False)


def report(folder):
    show(folder)
    show_report(folder)


def predicted(folder):
    assert len(predict(folder, [np.zeros((28, 28), np.uint8)], device="cpu", progress=False)) == 1


def exported(folder):
    assert export(folder).is_equal()


def act(log, function, *arguments, kill_at=None, faults=None):
    """Call a function in this process, which ends with exit code 0, with 3 after a sentence for the user, and
    with 1 after any other error. kill_at: the n-th change of a file, before which the process is killed.
    faults: arguments of `failing_disk`; how many calls it counted is written to the log."""
    if kill_at:
        kill_before(kill_at)
    code = 0
    with open(log, "w", buffering=1) as file, contextlib.redirect_stdout(file):
        with failing_disk(**faults) if faults else contextlib.nullcontext() as disk:
            try:
                function(*arguments)
            except TpukitError as error:
                code = 3
                file.write(f"TpukitError: {error}\n")
            except BaseException:
                code = 1
                traceback.print_exc(file=file)
        if disk:
            file.write(f"failed: {disk.failed[:3]}\nCALLS {len(disk.calls)}")
    sys.exit(code)


def forked(log, *arguments, kill_after_s=None, **options):
    """Call `act` in a forked process, which is killed after this time. Returns (exit code, output)."""
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=act, args=(log, *arguments), kwargs=options)
    child.start()
    child.join(LIMIT_S if kill_after_s is None else kill_after_s)
    hangs = kill_after_s is None and child.is_alive()
    child.kill()
    child.join()
    out = log.read_text() if log.exists() else ""
    return (1, f"{out}\nit hangs") if hangs else (child.exitcode, out)


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
        self.training = train_in, self.task, self.folder, self.backup
        half = dataclasses.replace(self.task, epochs=2)
        for name, task in dict(straight=self.task, half=half).items():
            code, out = forked(self.log, train_in, task, work / name, work / f"{name}-copy")
            assert code == 0, out
        assert newest_whole(work / "half") == newest_whole(work / "half-copy") == FLIPPED_AT
        self.wanted, self.halfway = results(work / "straight"), results(work / "half")

    def lose(self, what, out=""):
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
            code, out = forked(self.log, *self.training, **how)
            if code != -signal.SIGKILL:
                break
            self.kills += 1
            for place, before in newest.items():
                newest[place] = newest_whole(place)
                if newest[place] < before:
                    self.lose(f"{what}: the {place.name} had step {before}, has {newest[place]}", out)
            if newest[self.backup] and self.rng.random() < LOSE_SHARE:
                shutil.rmtree(self.folder, ignore_errors=True)
                newest[self.folder] = 0
        if code != 0:
            self.lose(f"{what}: exit code {code}", out)
        for place in newest:
            if different := unequal(place, self.wanted):
                self.lose(f"{what}: {different} of the {place.name}", out)

    def copy_half(self):
        """Put a run of two epochs, and its backup, in place of the last ones."""
        for place, name in ((self.folder, "half"), (self.backup, "half-copy")):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self.work / name, place)

    def flip(self, number):
        """Flip one bit in a weights file of the run or of its backup, and train on."""
        self.copy_half()
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
                self.lose(f"{what}: read as whole")
        if place == self.backup:
            shutil.rmtree(self.folder)  # so that the backup is needed
        code, out = forked(self.log, *self.training)
        if code != 0 or "resuming at step" not in out or path.name not in out or "damaged" not in out:
            self.lose(f"{what}: exit code {code}, not resumed, or not named", out)
        is_back = place == self.folder and "takes its place" in out  # its copy in the backup
        if not is_best and not is_back and f"resuming at step {FLIPPED_AT}" in out:
            self.lose(f"{what}: read as whole", out)
        for folder in (self.folder, self.backup):
            different = unequal(folder, self.wanted)
            if is_best and not is_back:  # those of a later evaluation took their place
                different -= set(self.wanted)
            if different:
                self.lose(f"{what}: {different} of the {folder.name}", out)

    # Faults of the disk

    def count_calls(self, kinds):
        """Return how many calls of some kinds each act has."""
        counts = {}
        for name in ACTS if kinds is READS else ["train"]:
            code, out = self.fail(name, dict(kinds=kinds))
            assert code == 0, out
            counts[name] = int(out.rpartition("CALLS ")[2])
        return counts

    def fail(self, name, how):
        """Do an act on a disk that fails in this way, on a run of two epochs with a backup."""
        self.copy_half()
        if name == "train from the backup":
            shutil.rmtree(self.folder)
        does = self.training if name.startswith("train") else (ACTS[name], self.folder)
        return forked(self.log, *does, faults=dict(folders=[self.folder, self.backup], **how))

    def fail_often(self, times, kinds, errors):
        """Let an act, chosen at random, fail this many times."""
        counts = self.count_calls(kinds)
        names = self.rng.choices(list(counts), SHARES[: len(counts)], k=times)
        for number, name in enumerate(names):
            self.fail_once(number, name, kinds, errors, counts[name])

    def fail_once(self, number, name, kinds, errors, count):
        """Let a call of an act fail, or all from one on. Nothing whole is gone then, and training goes on to
        the same end."""
        error = self.rng.choice(errors)
        how = dict(kinds=kinds, at=self.rng.randint(1, count), error=error, once=self.rng.random() < 0.5)
        code, out = self.fail(name, how)
        what = f"fault {number} ({name}, {how})"
        if code not in (0, 3):
            self.lose(f"{what}: exit code {code}", out)
        for place in (self.folder, self.backup):
            if name == "train from the backup" and place == self.folder and code != 0:
                continue  # it may not have been restored
            if newest_whole(place) < newest_whole(self.work / "half"):
                self.lose(f"{what}: the newest checkpoint of the {place.name} is gone", out)
            best = weights.read(place / manifest.BEST)
            if not any(alike(best, each["best"]) for each in (self.halfway, self.wanted)):
                self.lose(f"{what}: the best weights of the {place.name} are gone", out)
        code, again = forked(self.log, *self.training)
        if code != 0:
            self.lose(f"{what}: afterwards exit code {code}", out + again)
        for place in (self.folder, self.backup):
            if different := unequal(place, self.wanted):
                self.lose(f"{what}: {different} of the {place.name}", out + again)


ACTS = {  # name -> function of the run's folder
    "train": train_in,
    "train from the backup": train_in,
    "report": report,
    "predict": predicted,
    "export": exported,
}
SHARES = (8, 6, 3, 3, 1)  # of the faults, in the order of ACTS; an export takes seconds


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--read-faults", type=int, default=500)
    parser.add_argument("--write-faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run_module.RETRY_AFTER_S = (0.0, 0.0)
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
        faults = dict(read=(READS, READ_ERRORS), write=(WRITES, WRITE_ERRORS))
        for (kinds, errors), faults_of_kind in zip(
            faults.values(), (options.read_faults, options.write_faults)
        ):
            if faults_of_kind:
                found.fail_often(faults_of_kind, kinds, errors)
    print(
        f"kills: {found.kills}, of {number} runs; flips: {options.flips}; faults of reading:"
        f" {options.read_faults}, of writing: {options.write_faults}; lost: {found.lost}"
    )
    return 1 if found.lost else 0


if __name__ == "__main__":
    sys.exit(main())
