"""A dataset, of a task or any other: found on this host, downloaded or synthetic. Touches no accelerator.

What only an archive, a download or a synthetic set needs is imported there: a folder that is here is found
without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from tpukit.host import drive, environment
from tpukit.host.errors import TpukitError
from tpukit.host.text import say
from tpukit.leaves import find, part_of, tasks

if TYPE_CHECKING:
    from tpukit.host.environment import Environment

SYNTHETIC_NOTE = "Synthetic, made by tpukit; not real data.\n"
DEMO = "demo"  # in place of a folder: what comes with tpukit, or is made by it
ARCHIVES = (".zip", ".tar.gz", ".tgz")  # found by these endings; only .zip is unpacked


class Findable(Protocol):
    """The part of a task's class that only `find_dataset` asks for. What has a default may be left out."""

    synthetic_size: ClassVar[int]
    """Samples of the synthetic dataset, train and test together, by default."""
    synthetic_size_accelerator: ClassVar[int] = 0
    """The same on a TPU or a GPU; 0: as many as without."""
    dataset_parts: ClassVar[tuple[str, ...]] = ()
    """Folders that the dataset consists of, in lower case; `archives.unpack` leaves them where they are."""
    needs_own_data: ClassVar[bool] = False
    """If True, the command line stops if the data are missing, unless a synthetic set is requested."""
    fallback: ClassVar[Path | None] = None
    """A folder that may hold the dataset, too."""

    @staticmethod
    def synthesize(folder: Path, size: int, rng: np.random.Generator) -> None:
        """Write a synthetic dataset, in the layout of the real one.

        Args:
            folder: an empty folder.
            size: number of samples, train and test together.
            rng: source of all random numbers."""

    def download(self, folder: Path) -> None:
        """Download the real dataset and verify its checksums.

        Args:
            folder: an empty folder.

        Raises:
            TpukitError: if that fails, or the dataset cannot be downloaded."""
        raise TpukitError("tpukit knows no download")


def is_demo(place: object) -> bool:
    """Return True if a user names no file or folder but `DEMO`."""
    return str(place) == DEMO and not Path(DEMO).exists()


def find_dataset(
    name: str,
    path: Path | str | None = None,
    *,
    fallback: Path | str | None = None,
    size: int | None = None,
    demo: bool = True,
    env: Environment | None = None,
) -> Path:
    """Find a dataset's folder and print which one is used and why; download it or make a synthetic set if
    there is none.

    Without a `path`, these places are searched in this order: Drive (MyDrive/datasets/NAME); Kaggle inputs;
    ./datasets/NAME; `fallback`; on Colab a Drive that is not mounted yet, for which the user is asked once.
    Then a download, if the task has one and its server answers; then a synthetic set. Archives (.zip) at
    these places are unpacked below `env.outputs`.

    Args:
        name: name of the dataset. A task has it as `task.dataset`.
        path: a folder or an archive, which is used; "demo" is the synthetic set. None: search.
        fallback: another folder to search; by default the task's own, if it has one.
        size: samples of the synthetic set; by default the task's, more of them with a TPU or a GPU.
        demo: False: raise an error instead of making a synthetic set.
        env: this machine; by default what `detect()` returns.

    Returns:
        The folder of the dataset.

    Raises:
        TpukitError: if a given `path` does not exist, or no place holds the dataset and no task can make
            it."""
    env = env or environment.detect()
    if is_demo(path):
        return _synthetic(env, name, size, "was asked for as `demo`")
    places = _places(env, name, fallback)
    if path:
        given = Path(str(path)).expanduser()
        if env.drive and env.drive.parent in given.parents:
            drive.ask_for_drive(env)
        places = [(given, "the given path")]
    for place, why in places:
        if place.exists():
            if place.is_file() and archive_stem(place):
                why = f"{why}, unpacked from {place.name}"
                place = _unpacked(env.outputs / "datasets" / name, place, _task_of(name))
            say(f"dataset {name}: {place} ({why})")
            return place
    if path:
        raise TpukitError(
            f"dataset path {path} does not exist. Check its spelling (is Drive mounted?), or leave it empty"
            " to search the usual places"
        )
    task = _require_task(name)
    try:
        folder = _made(env.outputs / "datasets" / f"{name}-downloaded", part_of(task, Findable, "download"))
    except TpukitError as error:
        unseen = ", Drive is not mounted" if env.drive and not env.has_drive else ""
        why = f"not found on Drive, in Kaggle inputs or in ./datasets{unseen}, and not downloaded: {error}"
        if not demo:
            raise TpukitError(
                f"dataset {name} {why}. Name its folder by --dataset-dir FOLDER, or try it with a set that"
                f" tpukit makes by --dataset-dir {DEMO}"
            ) from error
        return _synthetic(env, name, size, why)
    say(f"dataset {name}: {folder} (downloaded, checksums verified)")
    return folder


def make_synthetic(name: str, folder: Path | str, *, size: int | None = None) -> Path:
    """Make the synthetic set of a task's dataset, whole or not at all; kept if already there.

    size: number of samples, train and test together. Returns the folder, whose name gets the size. Raises
    TpukitError for a name that no task has, and if the folder cannot be written."""
    task = _require_task(name)
    size, folder = size or task.synthetic_size, Path(folder)

    def make(work):
        task.synthesize(work, size, np.random.default_rng(0))
        (work / "README.txt").write_text(SYNTHETIC_NOTE)

    return _made(folder.with_name(f"{folder.name}-{size}"), make)


def is_synthetic(folder: Path | str) -> bool:
    """Return whether `make_synthetic` made this dataset."""
    note = Path(folder) / "README.txt"
    return note.is_file() and note.read_bytes() == SYNTHETIC_NOTE.encode()


def _places(env, name, fallback):
    """Yield (path, why) in the order of preference, archives next to folders. The user is asked for Drive at
    the end."""
    on_drive = env.drive / "datasets" if env.drive else None
    if on_drive:
        yield from _named(on_drive, name, "found on Drive")
    if env.host == "kaggle":
        yield from _kaggle_inputs(env.inputs, name)
    yield from _named(Path("datasets"), name, "found in ./datasets")
    fallback = fallback or part_of(_task_of(name), Findable, "fallback")
    if fallback:
        yield Path(fallback), f"found at {fallback}"
    if on_drive and drive.ask_for_drive(env):
        yield from _named(on_drive, name, "found on Drive")


def _named(folder, name, why):
    """Yield (path, why) of what has this name in a folder, archives last."""
    for ending in ("", *ARCHIVES):
        yield folder / f"{name}{ending}", why


def _kaggle_inputs(inputs, name):
    """Yield (path, why) of the inputs of this name."""
    from tpukit.runs.inputs import is_run

    for depth in range(1, 5):  # Kaggle nests a dataset below its owner and lower-cases names
        for place in sorted(inputs.glob("/".join("*" * depth))):
            # The output of an earlier version may hold a run of this name, as `tpukit train` makes.
            if (archive_stem(place) or place.name).lower() == name.lower() and not is_run(place):
                yield place, "found in the Kaggle inputs"


def archive_stem(path: Path) -> str | None:
    """Return the name of an archive without its ending, or None if it is not an archive."""
    for ending in ARCHIVES:
        if path.name.lower().endswith(ending):
            return path.name[: -len(ending)]
    return None


def _unpacked(folder, archive, task):
    """Return the folder with the unpacked content of an archive; its name tells one content from another."""
    from tpukit.data import archives, arrays
    from tpukit.host import files

    folder = folder.with_name(f"{folder.name}-{arrays.digest(arrays.state_of([archive]))[:8]}")
    with files.file_lock(folder):
        if not folder.exists():
            say(f"unpacking {archive}")
            archives.unpack(archive, folder, parts=part_of(task, Findable, "dataset_parts"))
    return folder


def _synthetic(env, name, size, why):
    """Make a synthetic set in the outputs, and print why."""
    task = _require_task(name)
    if not size and env.accelerator in ("tpu", "cuda"):
        size = part_of(task, Findable, "synthetic_size_accelerator")
    size = size or task.synthetic_size
    folder = make_synthetic(name, env.outputs / "datasets" / f"{name}-synthetic", size=size)
    say(f"dataset {name} {why}; using {size:,} synthetic samples, not real data: {folder}")
    return folder


def _made(folder, make):
    """Return a folder that `make` fills, whole or not at all; kept if already there."""
    from tpukit.host import files
    from tpukit.host.folders import atomic_folder

    with files.file_lock(folder):
        if not folder.exists():
            with atomic_folder(folder) as work:
                make(work)
    return folder


def _task_of(name: str) -> Any:
    """Return the class of the task with a dataset of this name, a `Findable`, or None."""
    return next((find(key) for key, entry in tasks().items() if entry.dataset.lower() == name.lower()), None)


def _require_task(name):
    task = _task_of(name)
    if task is None:
        names = ", ".join(entry.dataset for entry in tasks().values())
        raise TpukitError(
            f"no dataset {name!r} was found; tpukit can synthesize {names}. Give a path, or put yours into"
            " ./datasets"
        )
    return task
