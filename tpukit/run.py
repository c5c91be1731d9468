"""A run directory: settings, records, checkpoints, best weights. The only channel between a training and its reader.

config.json              workload, settings, and what a resumed run must agree with
records.jsonl            one JSON object a line: kind, step, time, values
log.txt                  what was said, as plain lines
checkpoints/             step-N.pt (the newest two) and checkpoints.json, newest first, with SHA-256
best.safetensors         the weights of the best evaluation
pictures/, predictions/  what `show` drew, and what a test keeps of its predictions
trace/, step.hlo         what `tpukit report --trace` and `--hlo` saw
progress.json            where the training is now, for a progress bar
tensorboard/             the records' numbers for TensorBoard, where it is installed
cores/                   what each core of the last launch said: rank-NN.log, and its error or stacks where it failed
"""

import contextlib
import dataclasses
import json
import math
import time
from pathlib import Path

from tpukit import environment, files
from tpukit.errors import TpukitError, first_line
from tpukit.events import Events
from tpukit.tables import GIB

KEEP = 2  # checkpoints: the newest, and the one before in case it is damaged
WORTH_A_WORD_S = 0.5  # a program of a few operations (fresh sums) compiles in milliseconds


def setting(default, *, free=False):
    """A dataclass field of a workload. free=True: a resumed run may change it, because it does not change the result."""
    return dataclasses.field(default=default, metadata={"free": free})


def settings(task):
    """The fields of a workload as a dict that JSON keeps unchanged."""
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return json.loads(json.dumps(values, default=str))


class Run:
    """One training run in one folder. Use `Run.open`."""

    prints = True
    """Whether `say` prints; a launched core does not, its notebook reads log.txt."""
    _writes = True
    _events = None

    def __init__(self, path, backup=None):
        self.path = Path(path)
        self.backup = Path(backup) if backup else None
        self._backup_works = True
        self._progress_at = 0.0

    def muted(self):
        """The same run for a rank that is not 0: it reads, and what it says or writes is dropped."""
        other = Run(self.path)
        other._writes = other.prints = False
        return other

    def __repr__(self):
        return f"Run({str(self.path)!r})"

    @classmethod
    def open(cls, path, task, *, backup=None, earlier=None):
        """Start a run in the folder `path`, or go on with the one that is there.

        backup: a folder (on Drive, say) that gets a copy at every checkpoint; when `path` is gone and the backup is
        there, the run comes back from it. earlier: such a folder that is only read (`find_run` finds one on Kaggle).
        Raises TpukitError if the folder holds a run of another workload or of other settings, naming them; settings that do
        not change the result (epochs, folders, workers) may differ.
        """
        run = cls(path, backup)
        if environment.rank() != 0:
            return run.muted()  # rank 0 speaks and writes for all
        if run.path.exists() and not run.path.is_dir():
            raise TpukitError(f"{run.path} is a file; a run needs a folder of its own")
        if not (run.path / "config.json").exists() and run.backup and (run.backup / "config.json").exists():
            run._bring_back()
        if earlier and not (run.path / "config.json").exists():
            cls(path, earlier)._bring_back()
        with files.unwritable_explained(run.path):
            (run.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        if (run.path / "config.json").exists():
            run._check(task)
        files.write_whole(run.path / "config.json", json.dumps(_config(task), indent=1))
        return run

    @classmethod
    def find(cls, path):
        """Open a run for reading. Raises TpukitError if there is none."""
        if not (Path(path) / "config.json").is_file():
            near = sorted(p.parent for p in Path(path).glob("*/config.json")) if Path(path).is_dir() else []
            hint = f"; runs below it: {', '.join(map(str, near))}" if near else ""
            raise TpukitError(f"{path} is not a run directory (it has no config.json){hint}")
        return cls(path)

    @property
    def config(self):
        """dict(workload, settings) that the run was opened with. Raises TpukitError where the file is damaged."""
        try:
            found = json.loads((self.path / "config.json").read_text())
            return dict(found, workload=found["workload"], settings=dict(found["settings"]))
        except (ValueError, KeyError, TypeError) as error:
            raise TpukitError(f"{self.path}/config.json is damaged ({error}); choose another run folder") from error

    def _check(self, task):
        old, new = self.config, _config(task)
        if old["workload"] != new["workload"]:
            raise TpukitError(
                f"{self.path} holds a run of {old['workload']}, the task is {new['workload']}: choose another run folder"
            )
        fixed = [f.name for f in dataclasses.fields(task) if not f.metadata.get("free")]
        differing = [name for name in fixed if old["settings"].get(name) != new["settings"][name]]
        if differing:
            lines = [f"  {n}: the run has {old['settings'].get(n)!r}, the task {new['settings'][n]!r}" for n in differing]
            raise TpukitError(
                f"{self.path} holds a run with other settings:\n" + "\n".join(lines) + "\n"
                "Set them back to go on with it, or choose another run folder."
            )

    # Saying and recording

    def say(self, text):
        """Print a line and keep it in log.txt."""
        from tqdm import tqdm  # its write keeps a progress bar below the line

        if self.prints:
            # Whoever read along may be gone (`| head`); the run goes on, and so does log.txt.
            with contextlib.suppress(BrokenPipeError):
                tqdm.write(text)
        if not self._writes:
            return
        files.append(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def log(self, kind, step, **values):
        """Append one record. Floats that are not finite are kept as null, because JSON has no such numbers."""
        if not self._writes:
            return
        record = dict(kind=kind, step=step, time=round(time.time(), 3), **values)
        files.append(self.path / "records.jsonl", json.dumps(_finite(record)) + "\n")
        if kind == "start":
            self._events = Events(self.path / "tensorboard")
            for old in self.records():
                self._events.scalars(old["step"], old["time"], _scalars(old))
        elif self._events is not None:
            self._events.scalars(step, record["time"], _scalars(_finite(record)))

    def close(self):
        """Give the files back that stay open while a training writes."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def progress(self, *, step, total, **values):
        """Replace what `live` returns, at most twice a second and at the end: what a progress bar shows."""
        now = time.monotonic()
        if self._writes and (step == total or now - self._progress_at > 0.5):
            self._progress_at = now
            files.write_whole(
                self.path / "progress.json", json.dumps(_finite(dict(step=step, total=total, **values))), durable=False
            )

    def live(self):
        """What `progress` last said, or {}."""
        try:
            return json.loads((self.path / "progress.json").read_text(errors="replace"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def stop_asked(self):
        """The signal that the notebook's process passes on to its cores through the run directory, or None."""
        try:
            return int((self.path / "cores" / "stop").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def records(self, kind=None):
        """The records, oldest first. A last line cut short by a kill is left out."""
        path = self.path / "records.jsonl"
        records = []
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return [r for r in records if kind is None or r["kind"] == kind]

    def _records_size(self):
        path = self.path / "records.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _forget_records_after(self, size):
        """Cut the records back to what they were at a checkpoint: the resumed run writes the rest again."""
        if self._records_size() > size:
            files.write_whole(self.path / "records.jsonl", (self.path / "records.jsonl").read_bytes()[:size])

    # Checkpoints

    def save(self, state, step):
        """Write a checkpoint, whole or not at all. state: nest of CPU tensors, numbers and strings."""
        import torch

        path = self.path / "checkpoints" / f"step-{step:08d}.pt"
        with files.whole_file(path) as file:
            try:
                torch.save(dict(records_size=self._records_size(), state=state), file)
            except RuntimeError as error:  # in which torch hides that the disk is full
                raise error.__context__ if isinstance(error.__context__, OSError) else error
        old = [c for c in self.checkpoints() if c["file"] != path.name]
        kept = [dict(file=path.name, step=step, sha256=files.sha256(path)), *old][:KEEP]
        self._write_checkpoint_list(kept)
        self._back_up()

    def checkpoints(self):
        """list of dict(file, step, sha256), newest first."""
        try:
            return json.loads((self.path / "checkpoints" / "checkpoints.json").read_text(errors="replace"))
        except (FileNotFoundError, json.JSONDecodeError):
            files = sorted((self.path / "checkpoints").glob("step-*.pt"), reverse=True)
            return [dict(file=f.name, step=int(f.stem.split("-")[1]), sha256=None) for f in files]

    def _write_checkpoint_list(self, kept):
        folder = self.path / "checkpoints"
        files.write_whole(folder / "checkpoints.json", json.dumps(kept, indent=1))
        for file in [*folder.glob("step-*.pt"), *folder.glob(".step-*.partial")]:  # the latter from a process that was killed
            if file.name not in [c["file"] for c in kept]:
                file.unlink()

    def restore(self):
        """The newest whole checkpoint's state, or None where the run has none. A damaged one is named and passed over."""
        found = self.checkpoints()
        for checkpoint in found:
            saved, why = self._read_checkpoint(checkpoint)
            if saved is not None:
                self._forget_records_after(saved["records_size"])
                return saved["state"]
            self.say(f"checkpoint {checkpoint['file']} is damaged ({why}); going back to the one before")
        if found:
            raise TpukitError(
                f"none of the {len(found)} checkpoints in {self.path}/checkpoints can be read. Delete the folder "
                f"{self.path} to start anew, or bring the checkpoints back from a copy."
            )
        self._forget_records_after(0)
        return None

    def _read_checkpoint(self, checkpoint):
        """(state, None), or (None, why it cannot be used)."""
        import torch

        path = self.path / "checkpoints" / checkpoint["file"]
        if not path.exists():
            return None, "the file is missing"
        if checkpoint["sha256"] and files.sha256(path) != checkpoint["sha256"]:
            return None, f"its {path.stat().st_size} bytes do not match the recorded SHA-256"
        try:
            return torch.load(path, map_location="cpu", weights_only=True), None
        except Exception as error:  # torch raises many types for a damaged file; each means the same here
            return None, first_line(error)

    def save_best(self, weights, **values):
        """Write the best weights as best.safetensors. weights: name -> CPU tensor. values: kept as its metadata."""
        from safetensors.torch import save

        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        data = save(contiguous, metadata={name: str(value) for name, value in values.items()})
        files.write_whole(self.path / "best.safetensors", data)

    # The copy on Drive

    def _back_up(self):
        """Copy what changed to the backup folder, each file whole or not at all, the list of checkpoints last."""
        if not self.backup:
            return
        try:
            for name in ("config.json", "log.txt", "records.jsonl", "best.safetensors"):
                _copy_if_changed(self.path / name, self.backup / name)
            for checkpoint in self.checkpoints():
                name = Path("checkpoints") / checkpoint["file"]
                _copy_if_changed(self.path / name, self.backup / name)
            Run(self.backup)._write_checkpoint_list(self.checkpoints())
        except (OSError, TpukitError) as error:  # Drive may be full or gone; the training goes on without it
            if self._backup_works:
                self.say(f"backup to {self.backup} failed ({error}); training goes on, checkpoints stay in {self.path}")
            self._backup_works = False
        else:
            if not self._backup_works:
                self.say(f"backup to {self.backup} works again")
            self._backup_works = True

    def _bring_back(self):
        print(f"run: {self.path} is not here, bringing it back from {self.backup}")
        for source in sorted(self.backup.rglob("*")):
            # config.json last: it is what makes the folder a run
            if source.is_file() and source.name != "config.json" and not source.name.endswith(".partial"):
                files.copy_whole(source, self.path / source.relative_to(self.backup))
        files.copy_whole(self.backup / "config.json", self.path / "config.json")


def _config(task):
    from tpukit import __version__

    return dict(workload=task.name, settings=settings(task), tpukit=__version__)


def _scalars(record):
    """The numbers of a record, under the names that TensorBoard groups by: those of training intervals and evaluations."""
    if record["kind"] not in ("train", "evaluation"):
        return {}
    if record["kind"] == "evaluation":
        return {f"scores/{name}": value for name, value in record["scores"].items() if isinstance(value, (int, float))}
    speed = record["speed"]
    found = {"loss": record["loss"], "gradient norm": record["grad_norm"], "speed/samples a second": speed["images_per_s"]}
    found["speed/waiting for data"] = speed["wait_s"] / max(speed["seconds"], 1e-9)
    return found | {f"memory/device {n}, GiB": peak / GIB for n, (peak, _) in enumerate(speed["memory"])}


def _finite(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def _copy_if_changed(source, target):
    if not source.exists():
        return
    if target.exists():
        a, b = source.stat(), target.stat()
        if a.st_size == b.st_size and a.st_mtime <= b.st_mtime:
            return
    files.copy_whole(source, target)
