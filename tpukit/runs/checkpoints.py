"""The checkpoints of a run: the newest two, and a list of them with their SHA-256.

A file is listed only once it has reached the disk and was read back, and removed only once the list has: a
kill at any point loses none. The list of a run without checkpoints is empty; where there is none, checkpoints
were deleted."""

import json
import re
import zipfile

from tpukit.host import files
from tpukit.host.errors import Damaged, first_line
from tpukit.runs import weights

KEEP = 2  # the newest, and the one before in case it is damaged
LIST = "checkpoints.json"


def save(folder, content, step):
    """Write a checkpoint, whole or not at all. content: nest of CPU tensors, numbers and strings."""
    import torch

    path = folder / _file_name(step)
    with files.atomic_file(path, check=_check_crc32s) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # in which torch hides that the disk is full
            raise error.__context__ if isinstance(error.__context__, OSError) else error
    older = [entry for entry in read_list(folder) if entry["file"] != path.name]
    write_list(folder, [dict(file=path.name, step=step, sha256=files.sha256(path)), *older][:KEEP])


def load(folder, entry):
    """What `save` wrote, for an entry of the list. A damaged file raises Damaged, or what torch raises for
    it."""
    path = folder / entry["file"]
    check(path, entry)
    content = weights.load_tensors(path)
    return dict(records_size=content["records_size"], state=content["state"])


def check(path, entry):
    """Raise Damaged where the file at `path` is not the checkpoint of this entry of a list."""
    try:
        if not entry["sha256"]:
            _check_crc32s(path)
        elif files.sha256(path) != entry["sha256"]:
            raise Damaged(f"its {path.stat().st_size} bytes do not match the recorded SHA-256")
    except OSError as error:
        raise Damaged(first_line(error)) from error


def _check_crc32s(path):
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes CRC-32s, and does not check them
            part = archive.testzip()
    except Exception as error:  # zipfile raises many types for a damaged file
        raise Damaged(first_line(error)) from error
    if part:
        raise Damaged(f"{part} in it does not match its CRC-32")


def read_list(folder):
    """list of dict(file, step, sha256), newest first. Where the list is damaged: of the files found, with
    sha256=None."""
    found = _parsed(folder)
    return found or entries_of(path.name for path in folder.glob("step-*.pt"))


def has_list(folder):
    """Whether the list can be read, though it may be empty."""
    return _parsed(folder) is not None


def _parsed(folder):
    try:
        found = [
            files.parse_with_crc32(json.dumps(entry)) for entry in json.loads((folder / LIST).read_bytes())
        ]
        if all(entry["file"] == _file_name(entry["step"]) and "sha256" in entry for entry in found):
            return found
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def entries_of(names):
    """What `read_list` returns, for the files of these names alone."""
    steps = {step_of(name) for name in names} - {None}
    return [dict(file=_file_name(step), step=step, sha256=None) for step in sorted(steps, reverse=True)]


def list_text(entries):
    """The content of the list of these checkpoints."""
    return json.dumps([files.with_crc32(entry) for entry in entries], indent=1)


def write_list(folder, entries):
    """Replace the list, then remove the checkpoints that are no longer in it, and what killed processes
    left."""
    files.write_atomic(folder / LIST, list_text(entries))
    for step in _steps_in(folder) - {entry["step"] for entry in entries}:
        (folder / _file_name(step)).unlink()
    files.remove_partials(folder)
    files.remove_partials(folder.parent)


def _file_name(step):
    return f"step-{step:08d}.pt"


def step_of(name):
    """The step of a checkpoint's file, None for a file of another name, which is not tpukit's."""
    found = re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})\.pt", name)
    return int(found[1]) if found else None


def _steps_in(folder):
    """Steps of the checkpoints in a folder."""
    return {step_of(path.name) for path in folder.glob("step-*.pt")} - {None}
