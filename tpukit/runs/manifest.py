"""The manifest of a folder: SHA-256 of its weights files, the newest two checkpoints and best.safetensors.

It is written last: a file is on the disk before the manifest names it, and is removed after the manifest has
dropped it. While a file replaces one of the same name, the manifest has the SHA-256 of both. So a kill at any
point loses no file. A folder without weights has an empty manifest; a missing one means that files were
deleted.

Only saving removes files or drops them from the manifest. An error of the disk while something is read is
`Unreadable` and no damage: whoever reads ends there."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from tpukit.host import files
from tpukit.host.errors import Damaged, reading, unreadable

KEEP = 2  # checkpoints: the newest, and the one before in case it is damaged
FILE = "checkpoints/checkpoints.json"
BEST = "best.safetensors"

Manifest = dict[str, list[str]]  # name in the folder, newest first -> SHA-256; two while it is replaced


def put(folder: Path, name: str, write_to: Callable[[BinaryIO], object]) -> None:
    """Write a weights file, whole or not at all, and put it at the head of the manifest.

    name: in the folder. write_to: called with the open file."""
    others = read(folder)
    if others is None:  # from now on, files without a manifest mean that it was deleted
        write(folder, others := {})
    old = others.pop(name, [])
    new: list[str] = []

    def announce(partial: Path) -> None:
        new.append(files.sha256(partial))
        if old:
            write(folder, {name: new + old, **others})

    with files.atomic_file(folder / name, check=announce) as file:
        with files.explain_unwritable(folder / name):
            write_to(file)
    write_newest(folder, {name: new, **others})


def check(path: Path, digests: Collection[str]) -> None:
    """Raise Damaged if the file is missing or has none of these SHA-256."""
    with reading(path, f"{path} is damaged"):
        digest, size = files.sha256(path), path.stat().st_size
        # A disk that stutters may give other bytes than it has, once.
        if digest not in digests and (again := files.sha256(path)) not in digests:
            if again != digest:
                raise unreadable(path, "it reads otherwise each time")
            raise Damaged(f"{path} is damaged: its {size} bytes do not match the recorded SHA-256")


def read_whole(path: Path, digests: Collection[str]) -> bytes:
    """Return the content of a file that has one of these SHA-256. Raises Damaged, as `check` does."""
    data = files.read_bytes(path)
    if hashlib.sha256(data).hexdigest() in digests:
        return data
    check(path, digests)
    raise unreadable(path, "it reads otherwise each time")


def is_whole(path: Path, digests: Collection[str]) -> bool:
    """Return whether the file has one of these SHA-256."""
    try:
        check(path, digests)
        return True
    except Damaged:
        return False


def read_best(path: Path) -> bytes:
    """Return the content of a file of best weights, which is checked if a run's manifest lies beside it.
    Raises Damaged."""
    if (listed := read(path.parent)) is None:
        return files.read_bytes(path)
    try:
        return read_whole(path, listed.get(BEST, []))
    except Damaged:  # or training has replaced both since the manifest was read
        return read_whole(path, (read(path.parent) or {}).get(BEST, []))


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, None if it is missing. Raises Damaged."""
    path = folder / FILE
    advice = "restore it from a copy of the folder, or choose another one"
    with reading(path, f"{path} is damaged ({advice})"):
        if not files.exists(path):
            return None
        listed = json.loads(files.read_bytes(path))
        if not all(_is_ours(name) and isinstance(digests, list) for name, digests in listed.items()):
            raise ValueError("it names other files")
        return listed


def write(folder: Path, listed: Manifest) -> None:
    """Replace the manifest. Removes nothing."""
    path = folder / FILE
    with files.explain_unwritable(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, json.dumps(listed, indent=1))


def write_newest(folder: Path, listed: Manifest) -> None:
    """Replace the manifest, with only the newest of the checkpoints that are there. Then remove the others,
    and what killed processes left."""
    newest = list(steps_there(folder, listed))[:KEEP]
    dropped = steps(listed).keys() - set(newest)
    kept = {name: digests for name, digests in listed.items() if name not in dropped}
    write(folder, kept)
    with contextlib.suppress(OSError):  # what cannot be removed now is removed after the next checkpoint
        for path in (folder / FILE).parent.glob("step-*.pt"):
            name = f"checkpoints/{path.name}"
            if name not in kept and _is_ours(name):  # files of other names stay
                path.unlink(missing_ok=True)
        files.remove_partials(folder / "checkpoints")
        files.remove_partials(folder)


def steps(listed: Manifest) -> dict[str, int]:
    """Return the checkpoints of a manifest, newest first: name -> step."""
    return {name: step for name in listed if (step := step_of(name)) is not None}


def steps_there(folder: Path, listed: Manifest) -> dict[str, int]:
    """Return those of `steps` that are in the folder: a damaged one that was set aside is not."""
    return {name: step for name, step in steps(listed).items() if files.exists(folder / name)}


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint by its name in the folder; None if the file is not tpukit's."""
    match = re.fullmatch(r"checkpoints/step-(\d{8,})\.pt", name)
    return int(match[1]) if match else None


def _is_ours(name: str) -> bool:
    return name == BEST or step_of(name) is not None
