"""The checkpoints of a run: the newest two, and a list of them with their SHA-256.

A file is listed only once it has reached the disk and was read back, and removed only once the list has: a
kill at any point loses none. The list of a run without checkpoints is empty; if there is none, checkpoints
were deleted."""

import json
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tpukit.host import files
from tpukit.host.errors import Damaged, first_line
from tpukit.runs import weights

KEEP = 2  # the newest, and the one before in case it is damaged
LIST = "checkpoints.json"

Entry = dict[str, Any]  # file, step, sha256 (None if the list was damaged)


def save(folder: Path, content: Any, step: int) -> None:
    """Write a checkpoint, whole or not at all. content: pytree of CPU tensors, numbers and strings."""
    import torch

    path = folder / _file_name(step)
    with files.atomic_file(path, check=_check_crc32s) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # in which torch hides that the disk is full
            raise error.__context__ if isinstance(error.__context__, OSError) else error
    older = [entry for entry in entries(folder) if entry["file"] != path.name]
    write_list(folder, [dict(file=path.name, step=step, sha256=files.sha256(path)), *older][:KEEP])


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote to a file that `check` found whole: dict(records_size, state). Raises Damaged."""
    with weights.explain_damage(path):
        content = weights.load_tensors(path)
        return dict(records_size=content["records_size"], state=content["state"])


def check(path: Path, entry: Entry) -> None:
    """Raise Damaged if the file at `path` is not the checkpoint of this entry of a list."""
    try:
        if not entry["sha256"]:
            _check_crc32s(path)
        elif files.sha256(path) != entry["sha256"]:
            raise Damaged(f"its {path.stat().st_size} bytes do not match the recorded SHA-256")
    except OSError as error:
        raise Damaged(first_line(error)) from error


def _check_crc32s(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes CRC-32s, and does not check them
            part = archive.testzip()
    except Exception as error:  # zipfile raises many types for a damaged file
        raise Damaged(first_line(error)) from error
    if part:
        raise Damaged(f"{part} in it does not match its CRC-32")


def entries(folder: Path) -> list[Entry]:
    """Those in the list, newest first. If it is damaged: of the files found, with sha256=None."""
    return read_list(folder) or entries_of(path.name for path in folder.glob("step-*.pt"))


def read_list(folder: Path) -> list[Entry] | None:
    """The list, which may be empty; None if it cannot be read."""
    try:
        listed = json.loads((folder / LIST).read_bytes())
        found = [files.parse_with_crc32(json.dumps(entry)) for entry in listed]
        if all(entry["file"] == _file_name(entry["step"]) and "sha256" in entry for entry in found):
            return found
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def entries_of(names: Iterable[str]) -> list[Entry]:
    """What `entries` returns, for the files of these names alone."""
    steps = {step for name in names if (step := step_of(name)) is not None}
    return [dict(file=_file_name(step), step=step, sha256=None) for step in sorted(steps, reverse=True)]


def list_text(entries: Sequence[Entry]) -> str:
    """The content of the list of these checkpoints."""
    return json.dumps([files.with_crc32(entry) for entry in entries], indent=1)


def write_list(folder: Path, entries: Sequence[Entry]) -> None:
    """Replace the list, then remove the checkpoints that it no longer has, and what killed processes left."""
    files.write_atomic(folder / LIST, list_text(entries))
    kept = {entry["file"] for entry in entries}
    for path in folder.glob("step-*.pt"):
        if path.name not in kept and step_of(path.name) is not None:
            path.unlink()
    files.remove_partials(folder)
    files.remove_partials(folder.parent)


def _file_name(step: int) -> str:
    return f"step-{step:08d}.pt"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's file, None for a file of another name, which is not tpukit's."""
    found = re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})\.pt", name)
    return int(found[1]) if found else None
