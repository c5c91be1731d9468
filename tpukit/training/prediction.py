"""Predicting a user's own files: read one by one, predicted in batches of one size, and given back in their
order."""

import collections
import contextlib
import dataclasses
import glob
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_map, tree_map_only

from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.runs import weights


@dataclasses.dataclass
class Sample:
    """A sample of a user's files: what the task read of it, and what was predicted. Of a file that cannot be
    read, `error`."""

    name: str
    batch: dict | None = None
    """arrays (1, ...)"""
    prediction: object = None
    """as the task's predictor makes it, of numpy arrays (1, ...)"""
    error: str | None = None


def open_predictor(task, best, runtime):
    """A function batch of tensors on the runtime's device -> predictions there, with the weights of the file
    `best`."""
    model = task.model().eval()
    weights.load(model, best)
    return task.predictor(
        runtime.place(model, channels_last=task.channels_last), runtime, weights.epoch_of(best)
    )


def predict_in_batches(predictor, runtime, rows, batch_size):
    """Yield the prediction of each row, an array or a nest of them, in order.

    rows: iterable of dicts of arrays of one shape each. On a device that compiles, the last batch is filled
    up with its last row, so that there is one compiled graph."""
    rows = iter(rows)
    while part := list(itertools.islice(rows, batch_size)):
        filled = part + [part[-1]] * (batch_size - len(part)) if runtime.compiles else part
        batch = {name: np.stack([row[name] for row in filled]) for name in part[0]}
        found = runtime.host(predictor(runtime.put_batch(batch)))
        for index in range(len(part)):
            yield tree_map_only(torch.Tensor, lambda values: values[index].numpy(), found)  # noqa: B023


def predict_files(task, best, paths, runtime, *, batch_size=16):
    """Yield a `Sample` for each sample of the files, in order: those of a batch when it is predicted.

    best: the file of the weights. paths: as `list_files` returns them. An unreadable file yields a `Sample`
    with `error`; the others are still predicted."""
    predictor = open_predictor(task, best, runtime)
    waiting = collections.deque()  # [sample, function that joins its rows' predictions, number of rows]
    predicted = []  # of the rows of waiting[0]

    def rows():
        for path in paths:
            try:
                batch, names = task.read_files([path], best)
            except TpukitError as error:
                waiting.append((Sample(path.name, error=printable(error)), None, 0))
                continue
            for index, name in enumerate(names):
                one = {key: values[index : index + 1] for key, values in batch.items()}
                parts, join = task.split(one)
                waiting.append((Sample(name, one), join, len(parts)))
                yield from parts

    for prediction in predict_in_batches(predictor, runtime, rows(), batch_size):
        while not waiting[0][2]:
            yield waiting.popleft()[0]
        predicted.append(prediction)
        sample, join, count = waiting[0]
        if len(predicted) == count:
            waiting.popleft()
            sample.prediction, predicted = join(predicted), []
            yield sample
    yield from (sample for sample, _, _ in waiting)


def stack(rows):
    """Predictions of rows, arrays or nests of them, as those of a batch: (N, ...)."""
    return tree_map(lambda *values: np.stack(values), *rows)


def list_files(paths):
    """The files that were named, those of a folder or a pattern (`*.png`) sorted by name, without hidden
    ones.

    Raises TpukitError where there is none, or two of one name, which could not be told apart in the results.
    """
    found = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        path = Path(path).expanduser()
        if path.is_dir():  # in which macOS leaves hidden files
            found += sorted(
                file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
            )
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise TpukitError(f"{path} is a device or a named pipe: copy what it gives to a file first")
        elif matching := sorted(map(Path, glob.glob(str(path), recursive=True))):
            found += [file for file in matching if file.is_file()]
        else:
            raise TpukitError(
                f"{path} does not exist: name a file of yours, a folder that holds some, or a pattern"
            )
    if not found:
        raise TpukitError("no files: name a file of yours, or a folder that holds some")
    count, name = max(
        (count, name) for name, count in collections.Counter(path.name for path in found).items()
    )
    if count > 1:
        raise TpukitError(
            f"{count} files are called {name}: rename them, so that their predictions can be told apart"
        )
    return found


@contextlib.contextmanager
def as_files(inputs):
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


def _as_file(one, stem):
    if isinstance(one, Image.Image):
        one = np.asarray(
            one if one.mode in ("1", "L", "LA", "RGB", "RGBA") or one.mode[0] == "I" else one.convert("RGB")
        )
    array = np.asarray(one)
    if array.dtype.kind not in "buif":
        raise TpukitError(f"{type(one).__name__} is not an image: give paths, numpy arrays or PIL images")
    if array.dtype == np.int32:  # how Pillow holds 16-bit images in some versions
        array = array.clip(0, 65535).astype(np.uint16)
    if array.dtype in (np.bool_, np.uint8, np.uint16):
        path = stem.with_suffix(".png")
        try:
            Image.fromarray(array).save(path, compress_level=1)
        except (TypeError, ValueError, SystemError, OSError) as error:
            raise TpukitError(
                f"an array {array.shape} of {array.dtype} is not an image ({error}): (H, W) or (H, W, 3)"
            ) from error
        return path
    path = stem.with_suffix(".npy")
    np.save(path, array, allow_pickle=False)
    return path
