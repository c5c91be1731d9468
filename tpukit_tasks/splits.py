"""Rules for users' data that tasks share: the files below a folder, names of splits, held-out samples if no
split is named, and test samples that are training samples."""

import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tpukit.host.text import one_line

SPLITS = {  # names of folders, of files and in a column of splits, in lower case
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), "val"),
    **dict.fromkeys(("test", "testing", "tst"), "test"),
}
CHINESE = {"训练": "train", "验证": "val", "测试": "test"}


def split_of(name: str) -> str | None:
    """Return train, val or test of a name that has the word: train, seg_train, train_images, PublicTest,
    训练集; None for any other name, and for one that has two."""
    words = map(str.lower, re.findall("[A-Z]?[a-z]+|[A-Z]+", name))
    words = [re.sub("(set|data|images?|imgs?)$", "", word) for word in words]
    found = {SPLITS[word] for word in words if word in SPLITS}
    found |= {split for word, split in CHINESE.items() if word in name}
    return found.pop() if len(found) == 1 else None


class Listing:
    """Folders as they were when they were first asked for: each is read once, however often it is asked for.

    Hidden names are left out. Folders and files are texts, which take a tenth of the time of a `Path`. Raises
    OSError for a folder that cannot be read: none is left out silently."""

    # Two changes within one tick of a disk's clock leave the same time, so a time this young proves nothing.
    UNSETTLED_NS = 50_000_000

    def __init__(self) -> None:
        self._read: dict[str, tuple[list[str], dict[str, bool]]] = {}  # by the folder without links
        self._real: dict[str, str] = {}  # folders without links
        self._states: dict[str, tuple[int, int] | None] = {}
        self._is_settled = True

    def files(self, folder: str) -> list[str]:
        """Return the files in a folder, sorted."""
        names, _ = self._names_in(folder)
        return [os.path.join(folder, name) for name in names]

    def folders(self, folder: str) -> list[str]:
        """Return the folders in a folder, sorted, linked ones too."""
        _, folders = self._names_in(folder)
        return [os.path.join(folder, name) for name in folders]

    def files_below(self, folder: str) -> list[str]:
        """Return the files below a folder, in the order of their paths, those in linked folders too; but none
        twice where a link leads to a folder that was already searched, or back."""
        searched = {str(parent) for parent in Path(self.real(folder)).parents}
        return self._below(folder, searched)

    def _below(self, folder: str, searched: set[str]) -> list[str]:
        real = self.real(folder)
        if real in searched:
            return []
        searched.add(real)
        files, folders = self._names_in(folder)
        place = os.path.join(folder, "")  # with a separator at its end
        found = []
        for name in sorted([*files, *folders]) if folders else files:
            if name in folders:
                found += self._below(place + name, searched)
            else:
                found.append(place + name)
        return found

    def real(self, folder: str) -> str:
        """Return a folder without links."""
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        return self._real[folder]

    def _names_in(self, folder: str) -> tuple[list[str], dict[str, bool]]:
        """Return (names of the files in a folder; dict of its folders: name -> whether it is a link)."""
        real = self.real(folder)
        if real not in self._read:
            self.watch(real)
            files, folders = [], {}
            with os.scandir(real) as entries:
                for entry in entries:
                    if entry.name[0] == ".":
                        continue
                    if _is_folder(entry):
                        folders[entry.name] = entry.is_symlink()
                    else:
                        files.append(entry.name)
            self._read[real] = sorted(files), dict(sorted(folders.items()))
        files, folders = self._read[real]
        for name, is_link in folders.items():
            if not is_link:
                self._real.setdefault(os.path.join(folder, name), os.path.join(real, name))
        return files, folders

    # Whether it still holds

    def watch(self, path: str) -> None:
        """Let `is_current` compare a file or a folder, too, which may be missing."""
        if path in self._states:
            return
        state = _state_of(path)
        self._states[path] = state
        if state and time.time_ns() - state[0] < self.UNSETTLED_NS:
            self._is_settled = False

    def is_current(self) -> bool:
        """Return True if no folder that was read, and nothing that is watched, has changed since."""
        return self._is_settled and all(_state_of(path) == old for path, old in self._states.items())


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to where nobody may look
        return False


def _state_of(path: str) -> tuple[int, int] | None:
    """Return (time of the last change, size), which a folder has, too; None for what is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted, those in linked folders too, but for hidden ones. Raises
    OSError for a folder that cannot be read: none is left out silently."""
    return list(map(Path, Listing().files_below(str(folder))))


def some(names: Sequence[str]) -> str:
    """Return the first names of several, for a sentence."""
    return ", ".join(map(one_line, names[:3])) + (", ..." if len(names) > 3 else "")


def find_copies(learned: Iterable, tested: Iterable, names: Sequence[str], kind: str) -> list[str]:
    """Return a sentence if test samples are training samples, too; else none.

    learned, tested: what tells the samples of each set apart, such as digests of their pixels. names: of the
    test samples. kind: what they are, such as "images"."""
    known = set(learned)
    found = [name for name, key in zip(names, tested) if key in known]
    told = f"{len(found)} of {len(names)} test {kind} are training {kind}, too ({some(found)})"
    return [f"{told}: the scores say nothing about new {kind}"] if found else []


def hold_out(names: Collection[str], share: float) -> set[str]:
    """Return the names of a share of the samples for tests, at least one and not all: those that come first
    by their SHA-256, so that every process and session chooses the same, in no order that a camera or a
    person gave them."""
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    return set(by_hash[: min(max(1, round(share * len(names))), len(names) - 1)])
