"""Predict a user's own files: samples of any kind that a task reads."""

import collections
import contextlib
import dataclasses
import glob
import itertools
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_map, tree_map_only

from tpukit.data.arrays import Arrays
from tpukit.data.datasets import is_demo
from tpukit.devices.runtime import Batch, Runtime
from tpukit.host.errors import TpukitError, explained
from tpukit.host.text import one_line, printable
from tpukit.inference.trained import DEMO_FOLDER
from tpukit.leaves import part_of
from tpukit.training.prediction import BATCH_SIZE, open_predictor, predict_batches
from tpukit.training.task import Task

MAX_NAME = 200  # bytes of the name of a file in the results, without what is added to it


class OwnFiles(Protocol):
    """The part of a task that only a user's own files ask for; what a task does not have is as here."""

    def read_files(self, paths: Sequence[Path], best: Path) -> tuple[Arrays, list[str]]:
        """Read a user's own files, without labels. `panels` shows such a batch. Arrays that a user gives come
        as files, too: NAME.png of uint8, uint16 and bool, NAME.npy of all others.

        Args:
            paths: the files.
            best: the file of the weights, whose metadata may say how the input was normalised.

        Returns:
            (dict of arrays (N, ...) for `predict`, N names).

        Raises:
            TpukitError: if a file cannot be read, which it names; or if the task does not implement it."""
        raise TpukitError(
            f"{type(self).__name__} must implement read_files() to predict a user's own files:"
            " tpukit_tasks/mnist.py shows how"
        )

    def results(self, batch: Arrays, predictions: Any) -> list[dict]:
        """Return a user's results for files of their own.

        Args:
            batch: dict of arrays (N, ...), as `panels` gets it.
            predictions: arrays (N, ...), as `panels` gets them.

        Returns:
            A dict for each sample, of numbers, strings, lists of dicts (each is a line of the table), and
            arrays, which are saved as files: (H, W) of bool as a mask.

        Raises:
            TpukitError: for a prediction that says nothing, such as NaN."""
        values = np.asarray(predictions)
        return [dict(prediction=value if np.ndim(value) else value.item()) for value in values]

    def split(self, batch: Arrays) -> tuple[list[Arrays], Callable[[list], object]]:
        """Split a sample of a user's own into rows of one shape for all samples. By default it is one row; a
        task with samples of any size may cut one into several.

        Args:
            batch: dict of arrays (1, ...).

        Returns:
            (rows, join): a list of dicts of arrays without the batch's axis; and a function from the list
            of their predictions to that of the sample, (1, ...)."""
        row = {name: values[0] for name, values in batch.items()}
        return [row], lambda predictions: tree_map(lambda *values: np.stack(values), *predictions)


@dataclasses.dataclass
class Sample:
    """A sample of a user's files: what the task read of it, and what was predicted. For a file that cannot be
    read, `error`."""

    name: str
    batch: dict[str, np.ndarray] | None = None
    """arrays (1, ...)"""
    prediction: Any = None
    """as the task's predictor makes it, of numpy arrays (1, ...)"""
    error: str | None = None


def predict_files(
    task: Task, best: Path, paths: Iterable[Path], runtime: Runtime, *, batch_size: int = BATCH_SIZE
) -> Iterator[Sample]:
    """Yield a `Sample` for each sample of the files, in order: those of a batch when it is predicted.

    best: the file of the weights. paths: as `list_files` returns them. An unreadable file yields a `Sample`
    with `error`; the others are still predicted."""
    predictor = open_predictor(task, best, runtime)
    # Reading is ahead of predicting: a batch is filled with the rows of several samples, and the device has
    # the next one before the last one's predictions come. Meanwhile their samples wait here, in order.
    waiting: collections.deque[_Waiting] = collections.deque()

    def rows() -> Iterator[Arrays]:
        for one, rows_of_one in _read_samples(task, best, paths):
            waiting.append(one)
            yield from rows_of_one

    for prediction in _predict_rows(predictor, rows(), runtime, batch_size):
        first = next(one for one in waiting if one.lacking)  # as predictions come in the order of the rows
        first.add(prediction)
        while waiting and not waiting[0].lacking:
            yield waiting.popleft().sample
    for one in waiting:  # the last files, if they cannot be read
        yield one.sample


@dataclasses.dataclass
class _Waiting:
    """A sample that was read and not yet yielded."""

    sample: Sample
    lacking: int = 0
    """its rows without a prediction so far; a file that cannot be read has none"""
    join: Callable[[list], object] = list
    """see `OwnFiles.split`"""
    predictions: list[Any] = dataclasses.field(default_factory=list)
    """of its first rows"""

    def add(self, prediction: Any) -> None:
        """Take the prediction of the next row; with that of the last one the sample has its own."""
        self.predictions.append(prediction)
        self.lacking -= 1
        if not self.lacking:
            self.sample.prediction = self.join(self.predictions)


def _read_samples(task: Task, best: Path, paths: Iterable[Path]) -> Iterator[tuple[_Waiting, list[Arrays]]]:
    """Yield each sample of the files with its rows, in order."""
    read_files, split = part_of(task, OwnFiles, "read_files"), part_of(task, OwnFiles, "split")
    for path in paths:
        try:
            batch, names = read_files([path], best)
        except TpukitError as error:
            told = printable(error)
            for name in (str(path), path.name):
                told = told.replace(printable(name), one_line(name))
            yield _Waiting(Sample(path.name, error=told)), []
            continue
        for index, name in enumerate(names):
            one = {key: values[index : index + 1] for key, values in batch.items()}
            rows, join = split(one)
            yield _Waiting(Sample(name, one), len(rows), join), rows


def _predict_rows(
    predictor: Callable[[Batch], object], rows: Iterator[Arrays], runtime: Runtime, batch_size: int
) -> Iterator[Any]:
    """Yield the prediction of each row, of numpy arrays, in order."""
    batches = _batches(rows, runtime, batch_size)
    for prediction, batch in predict_batches(predictor, batches, runtime, keys=()):
        for index in range(int(batch["valid"].sum())):
            yield tree_map_only(torch.Tensor, lambda values: values[index].numpy(), prediction)


def _batches(rows: Iterator[Arrays], runtime: Runtime, batch_size: int) -> Iterator[Batch]:
    """Yield the rows as batches on the device, each with `valid`."""
    while part := list(itertools.islice(rows, batch_size)):
        filled = part
        if runtime.compiles:  # the last batch is filled up, so that there is one compiled graph
            filled = part + [part[-1]] * (batch_size - len(part))
        batch = {name: np.stack([row[name] for row in filled]) for name in part[0]}
        batch["valid"] = np.arange(len(filled)) < len(part)
        yield runtime.put_batch(batch)


def list_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the files that were named, those of a folder or a pattern (`*.png`) sorted by name, without
    hidden ones; for "demo", the infrared images that come with tpukit.

    Raises TpukitError if there is none, or two whose results would have one name.
    """
    found = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        path = DEMO_FOLDER / "*.png" if is_demo(path) else Path(path).expanduser()
        pattern = f"{glob.escape(str(path))}/*" if path.is_dir() else str(path)  # without hidden files
        entries = [path] if path.is_file() else list(map(Path, sorted(glob.glob(pattern, recursive=True))))
        files = [entry for entry in entries if entry.is_file()]
        if path.is_dir() and (folders := [entry.name for entry in entries if entry.is_dir()]):
            told = f"{path}: {len(folders)} folders in it are not searched ({', '.join(folders[:3])})"
            print(one_line(told))
        if not files:
            other = "a device or a named pipe" if path.exists() else "no such file"
            what = "no file in it" if path.is_dir() else other
            raise TpukitError(f"{one_line(path)}: {what}. Give a file, a folder of files or a pattern.")
        found += files
    if not found:
        raise TpukitError("no files: name a file, or a folder of files")
    by_stem = {}
    for path in found:
        first = by_stem.setdefault(stem_of(path.name).lower(), path)
        if first is not path:
            names = f"{one_line(first)} and {one_line(path)}"
            raise TpukitError(f"the results of {names} would have one name: rename one of the two")
    return found


def stem_of(name: str) -> str:
    """Return the name of a sample's files in the results, without their ending: night of night.png. The 255
    bytes that a disk takes have room for that ending, too."""
    name = re.sub(r"\.png$", "", printable(name).replace("/", "_"), flags=re.IGNORECASE)
    return name.encode()[:MAX_NAME].decode(errors="ignore")


@contextlib.contextmanager
def as_files(inputs: Any) -> Iterator[list[Path]]:
    """Context manager: the files of `inputs`, for `list_files`: paths, or arrays and PIL images, which become
    files in a temporary folder. Arrays of uint8 or uint16 are images, (H, W) or (H, W, 3); all others are
    numbers, such as voltages."""
    if isinstance(inputs, (str, Path, np.ndarray, Image.Image)):
        inputs = [inputs]
    if all(isinstance(one, (str, Path)) for one in inputs):
        yield list_files(inputs)
        return
    with tempfile.TemporaryDirectory(prefix="tpukit-") as folder:
        yield [_as_file(one, Path(folder) / f"{number:04d}") for number, one in enumerate(inputs)]


def _as_file(one: Any, stem: Path) -> Path:
    path = stem.with_suffix(".png")
    about = "not an image: give paths, PIL images, or numpy arrays (H, W) or (H, W, 3)"
    with explained(f"{type(one).__name__} is {about}"):
        if not isinstance(one, Image.Image):
            array = np.asarray(one)
            if array.dtype not in (np.bool_, np.uint8, np.uint16):
                np.save(stem, array, allow_pickle=False)
                return stem.with_suffix(".npy")
            one = Image.fromarray(array)
        has_png_mode = one.mode in ("1", "L", "LA", "P", "RGB", "RGBA") or one.mode[0] == "I"
        (one if has_png_mode else one.convert("RGB")).save(path, compress_level=1)
    return path
