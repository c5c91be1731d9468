"""`python -m benchmarks.campaign`: kill a training, and flip bits in what it left, a thousand times each;
nothing may be lost.

The places are a run's folder alone, with a backup in a folder, and with one in a bucket (an S3 server on
loopback). After each kill the newest whole checkpoint of every place is at least as new as before; a run that
has come to its end equals one that was never killed. After each flipped bit the resumed run equals that one
too, or says what is damaged, or is refused, and no place that was whole has lost anything. Exit code 1, with
the lines to repeat it, where that does not hold."""

import argparse
import collections
import contextlib
import dataclasses
import io
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

import boto3
import numpy as np
import s3fs  # noqa: F401  here, as torch._dynamo, so that no child has to import it
import torch
import torch._dynamo

from tests.conftest import exact
from tests.runs.store import alike, kill_before, s3_server
from tpukit import Run, Task, TpukitError, train
from tpukit.devices.runtime import Runtime
from tpukit.host.errors import Damaged
from tpukit.host.tables import Table
from tpukit.runs import checkpoints, run, tensorboard, weights
from tpukit.training import loop, saver

PLACES = ("run", "folder", "bucket")
BUCKET = "campaign"
STOP_AT = 22  # steps of 40: in the third epoch of four
MAX_KILLS = 12  # of one run
LOSE_SHARE = 0.1  # of the kills after which the run's folder is lost, where there is a backup


class Points:
    """Two clouds of points in eight dimensions."""

    num_uniforms = 0

    def __init__(self, seed, size):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 2, size)
        self.points = (rng.normal(size=(size, 8)) + 0.4 * self.labels[:, None]).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, numbers=None):
        return dict(point=self.points[indices], label=self.labels[indices])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiny(Task):
    """A linear classifier, of which a training takes a fraction of a second."""

    name = "tiny"
    score = "accuracy"

    def datasets(self):
        return Points(0, 80), Points(1, 40)

    def model(self):
        return torch.nn.Linear(8, 2)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model, batch, epoch):
        return torch.nn.functional.cross_entropy(model(batch["point"]), batch["label"])

    def predict(self, model, batch, epoch=None):
        return model(batch["point"]).argmax(1)

    def evaluate(self, predictions):
        hits = [int(((found == batch["label"]) & batch["valid"]).sum()) for found, batch in predictions]
        return dict(accuracy=sum(hits) / 40)


TASK = Tiny(
    batch_size=8, epochs=4, log_every=3, num_workers=0, save_every_s=0.0, ema_decay=0.9, schedule="cosine"
)


# A training in a process of its own


def resume(folder, backup, stop_at=None, kill_at=None):
    """Train in a run's folder to the end, or to a step, or to the n-th change of a file, before which the
    process is killed."""
    if kill_at:
        kill_before(kill_at)
    if stop_at:
        whole = loop.Trainer.take_step

        def take_step(self, batch, epoch):
            whole(self, batch, epoch)
            self.stop.signal = signal.SIGINT if self.state.step == stop_at else None

        loop.Trainer.take_step = take_step
    with contextlib.suppress(KeyboardInterrupt):
        train(TASK, Run.open(folder, TASK, backup=backup), runtime=Runtime("cpu"), progress=False)


def forked(log, function, *arguments, kill_after_s=None, **options):
    """Call a function in a forked process. Returns (exit code: 1 for a TpukitError, 2 for any other, -9 if
    killed; output)."""
    if (pid := os.fork()) == 0:
        code = 2
        try:
            with open(log, "w", buffering=1) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout = sys.stderr = file
                try:
                    function(*arguments, **options)
                    code = 0
                except TpukitError as error:
                    print(error)
                    code = 1
                except BaseException:
                    traceback.print_exc()
        finally:
            os._exit(code)
    ends_at = time.monotonic() + (120 if kill_after_s is None else kill_after_s)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), log.read_text(errors="replace") if log.exists() else ""
        if time.monotonic() > ends_at:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            return (code, "") if kill_after_s is not None else (2, "the training hangs")
        time.sleep(0.002)


# What is in a place


class Campaign:
    """The straight run, the bucket, and what was found."""

    def __init__(self, work, client, seed):
        self.work, self.client, self.rng = work, client, random.Random(seed)
        self.tally, self.lost = collections.Counter(), []
        self.log = work / "out.txt"
        code, out = forked(self.log, resume, work / "straight", None)
        assert code == 0, out
        self.wanted = results(work / "straight")

    def fetch(self, place, folder):
        """The run that lies at a place, as a folder for reading."""
        if not str(place).startswith("s3:"):
            return Path(place)
        shutil.rmtree(folder, ignore_errors=True)
        prefix = str(place).removeprefix(f"s3://{BUCKET}/") + "/"
        for one in self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", []):
            path = folder / one["Key"].removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read())
        return folder

    def store(self, folder, place):
        """Make a place hold what a folder holds."""
        if not str(place).startswith("s3:"):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(folder, place)
            return
        prefix = str(place).removeprefix(f"s3://{BUCKET}/") + "/"
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        for one in found:
            self.client.delete_object(Bucket=BUCKET, Key=one["Key"])
        for path in folder.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                self.client.put_object(
                    Bucket=BUCKET, Key=prefix + str(path.relative_to(folder)), Body=path.read_bytes()
                )

    def backup(self, kind, name):
        return dict(run=None, folder=self.work / f"{name}-copy", bucket=f"s3://{BUCKET}/{name}")[kind]

    def report(self, what, repeat, out=""):
        self.lost.append((what, repeat))
        print(f"LOST {what}: {repeat}\n{out[-2000:]}", flush=True)

    # Kills

    def kill(self, kind, count):
        """Kill trainings `count` times. kind: of PLACES."""
        seconds, number = 1.0, 0
        while self.tally["kills", kind] < count:
            number += 1
            name = f"{kind}-{number}"
            folder, backup = self.work / name, self.backup(kind, name)
            started = time.monotonic()
            newest, kills = {}, 0
            while True:
                how = {}
                if kills < MAX_KILLS and self.tally["kills", kind] < count:
                    at_a_change = self.rng.random() < 0.5
                    how = dict(kill_at=self.rng.randrange(1, 150)) if at_a_change else {}
                    how |= {} if at_a_change else dict(kill_after_s=self.rng.uniform(0, seconds))
                code, out = forked(self.log, resume, folder, backup, **how)
                if code == 0:
                    break
                if code != -signal.SIGKILL:
                    self.report(f"exit code {code} after {kills} kills", name, out)
                    break
                kills += 1
                self.tally["kills", kind] += 1
                self._check_kept(folder, backup, newest, name)
                if newest.get("backup", 0) and self.rng.random() < LOSE_SHARE:
                    shutil.rmtree(folder, ignore_errors=True)
                    newest.pop("run", None)
                    self.tally["lost folders", kind] += 1
            if kills == 0 and code == 0:
                seconds = max(0.05, time.monotonic() - started)
            if code == 0:
                for place in filter(None, (folder, backup)):
                    if different := unequal(self.fetch(place, self.work / "fetched"), self.wanted):
                        self.report(f"{', '.join(different)} differ after {kills} kills", f"{place}", out)
                self.tally["equal runs", kind] += 1
            for place in filter(None, (folder, backup)):
                (
                    self.store(self.work / "nothing", place)
                    if str(place).startswith("s3:")
                    else shutil.rmtree(place, True)
                )

    def _check_kept(self, folder, backup, newest, name):
        for what, place in (("run", folder), ("backup", backup)):
            if place is None:
                continue
            step = newest_whole(self.fetch(place, self.work / "fetched"))
            if step < newest.get(what, 0):
                self.report(
                    f"the newest whole checkpoint of the {what} was of step {newest[what]}, is of {step}",
                    name,
                )
            newest[what] = step

    # Flipped bits

    def prepare_flips(self):
        code, out = forked(self.log, resume, self.work / "base", self.work / "base-copy", stop_at=STOP_AT)
        assert code == 0 and newest_whole(self.work / "base") == STOP_AT, out
        self.files = {
            kind: sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
            for kind, folder in (("run", self.work / "base"), ("copy", self.work / "base-copy"))
        }

    def flip(self, number):
        """Flip one bit at one place, resume, and look what became of every place."""
        where = PLACES[number % 3]
        kind = PLACES[number // 3 % 3] if where == "run" else where
        has_run = where == "run" or number // 3 % 2 == 0
        folder, backup = self.work / "flipped", self.backup(kind, "flipped")
        self.store(self.work / "base", folder) if has_run else shutil.rmtree(folder, ignore_errors=True)
        if backup:
            self.store(self.work / "base-copy", backup)
        name = self.rng.choice(self.files["run" if where == "run" else "copy"])
        source = (self.work / ("base" if where == "run" else "base-copy") / name).read_bytes()
        bit = self.rng.randrange(8 * len(source))
        data = bytearray(source)
        data[bit // 8] ^= 1 << bit % 8
        if where == "bucket":
            self.client.put_object(Bucket=BUCKET, Key=f"flipped/{name}", Body=bytes(data))
        else:
            ((folder if where == "run" else backup) / name).write_bytes(data)
        repeat = (
            f"bit {bit} of {name} in the {where}, backup {kind}, {'with' if has_run else 'without'} the run's"
            " folder"
        )
        code, out = forked(self.log, resume, folder, backup)
        outcome = self._judge(code, out, repeat, folder, backup)
        self.tally[outcome, where] += 1
        whole = {"run": folder, "copy": backup}
        whole.pop("run" if where == "run" else "copy")
        for place in filter(None, whole.values()):
            if place == folder and not has_run:
                continue
            left = self.fetch(place, self.work / "fetched")
            if newest_whole(left) < STOP_AT or not has_whole_best(left) or not has_whole_records(left):
                self.report("damage has spread", repeat, out)

    def _judge(self, code, out, repeat, folder, backup):
        if code == 1:
            return "refused"
        if code != 0:
            self.report(f"exit code {code}", repeat, out)
            return "failed"
        named = any(word in out for word in ("damaged", "is missing", "are lost", "left out"))
        if "resuming at step" not in out:
            self.report("the training started again", repeat, out)
            return "restarted"
        different = set()
        for place in filter(None, (folder, backup)):
            different |= unequal(self.fetch(place, self.work / "fetched"), self.wanted)
        if different and not named:
            self.report(f"{', '.join(different)} differ, and nothing was said", repeat, out)
            return "silently different"
        if different - {"records"} or (different and "records.jsonl" not in out):
            self.report(f"{', '.join(different)} differ", repeat, out)
        if different:
            self.tally[f"named: {', '.join(sorted(different))}", "all"] += 1
        return ("named" if different else "healed") if named else "without effect"


def results(folder):
    """dict of what a run left: records, best weights, and the last state."""
    found = Run(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records = exact(found)
    entry = found.checkpoints()[0]
    state = checkpoints.load(folder / "checkpoints" / entry["file"])["state"]
    return dict(records=records, best=weights.read(folder / "best.safetensors"), state=state)


def unequal(folder, wanted):
    """Names of the results of a run that are not those of the straight run, or cannot be read."""
    found = set()
    for name in wanted:
        try:
            is_equal = alike(results_of(folder, name), wanted[name])
        except Exception:  # whatever reading damaged files raises
            is_equal = False
        if not is_equal:
            found.add(name)
    return found


def results_of(folder, name):
    if name == "best":
        return weights.read(folder / "best.safetensors")
    found = Run(folder)
    if name == "records":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return exact(found)
    return checkpoints.load(folder / "checkpoints" / found.checkpoints()[0]["file"])["state"]


def newest_whole(folder):
    """The step of the newest whole checkpoint of a run; 0 without."""
    for entry in Run(folder).checkpoints():
        with contextlib.suppress(Damaged):
            checkpoints.check(folder / "checkpoints" / entry["file"], entry)
            return entry["step"]
    return 0


def has_whole_best(folder):
    try:
        weights.read(folder / "best.safetensors")
        return True
    except TpukitError:
        return False


def has_whole_records(folder):
    path = folder / "records.jsonl"
    return path.exists() and all(map(run._parse_record, path.read_bytes().splitlines()))


def campaign(kills, flips, seed=0, places=PLACES):
    """Returns the `Campaign` after so many kills and flips, spread over the places."""
    torch.set_num_threads(1)
    saver.MAX_SHARE = float("inf")  # a checkpoint as often as one can be written
    warnings.simplefilter("ignore")
    # a kill loses nothing of what was written, there or on a disk
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=memory) as work, s3_server() as port:
        address = f"http://127.0.0.1:{port}"
        os.environ.update(
            TPUKIT_CACHE=f"{work}/cache", AWS_ENDPOINT_URL=address, AWS_DEFAULT_REGION="us-east-1"
        )
        os.environ.update(AWS_ACCESS_KEY_ID="campaign", AWS_SECRET_ACCESS_KEY="campaign")
        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket=BUCKET)
        (Path(work) / "nothing").mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            tensorboard.EventFile(Path(work) / "events")  # imported once
        found = Campaign(Path(work), client, seed)
        for number, kind in enumerate(places):
            found.kill(kind, kills // len(places) + (number < kills % len(places)))
            print(f"kills, {kind}: {dict(found.tally)}", flush=True)
        found.prepare_flips()
        for number in range(flips):
            found.flip(number)
            if number % 100 == 99:
                print(f"flips: {number + 1}: {dict(found.tally)}", flush=True)
        return found


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = campaign(options.kills, options.flips, options.seed)
    names = sorted({name for name, _ in found.tally})
    rows = [(name, *(found.tally[name, place] for place in (*PLACES, "all"))) for name in names]
    print(Table("What was found", ("what", *PLACES, "all"), rows))
    print(f"lost: {len(found.lost)}")
    return 1 if found.lost else 0


if __name__ == "__main__":
    sys.exit(main())
