"""Rules for users' data that tasks share: the files below a folder, names of splits, held-out samples if no
split is named, and test samples that are training samples."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

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


def files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted, those in linked folders too, but for hidden ones. Raises
    OSError for a folder that cannot be read: none is left out silently."""

    def refuse(error: OSError) -> None:
        raise error

    found, seen = [], {*folder.resolve().parents}  # a link may lead back to a folder that was seen
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(place)
        if here.resolve() in seen:
            folders.clear()
            continue
        seen.add(here.resolve())
        folders[:] = [name for name in folders if name[0] != "."]
        found += [here / name for name in names if name[0] != "."]
    return sorted(found)


def some(names: Sequence[str]) -> str:
    """Return the first names of several, for a sentence."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


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
