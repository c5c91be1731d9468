"""The checkpoints of a run: the newest two, and a list of them with their SHA-256.

A file is listed only once it has reached the disk, and removed only once the list has: a kill at any point loses none.
"""

import json
import re
import zipfile

from tpukit.host import files
from tpukit.runs import weights

KEEP = 2  # the newest, and the one before in case it is damaged
LIST = "checkpoints.json"


def save(folder, content, step):
    """Write a checkpoint, whole or not at all. content: nest of CPU tensors, numbers and strings."""
    import torch

    path = folder / _file_name(step)
    with files.atomic_file(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # in which torch hides that the disk is full
            raise error.__context__ if isinstance(error.__context__, OSError) else error
    older = [entry for entry in read_list(folder) if entry["file"] != path.name]
    write_list(folder, [dict(file=path.name, step=step, sha256=files.sha256(path)), *older][:KEEP])


def load(folder, entry):
    """What `save` wrote, for an entry of the list. A damaged file raises ValueError, or what torch and zipfile raise for it."""
    path = folder / entry["file"]
    if entry["sha256"]:
        if files.sha256(path) != entry["sha256"]:
            raise ValueError(f"its {path.stat().st_size} bytes do not match the recorded SHA-256")
    else:
        with zipfile.ZipFile(path) as archive:  # torch writes CRC-32s, and does not check them
            if part := archive.testzip():
                raise ValueError(f"{part} in it does not match its CRC-32")
    content = weights.load_tensors(path)
    return dict(records_size=content["records_size"], state=content["state"])


def read_list(folder):
    """list of dict(file, step, sha256), newest first. Where the list is damaged: of the files found, with sha256=None."""
    try:
        found = json.loads((folder / LIST).read_bytes())
        if found and all(entry["file"] == _file_name(entry["step"]) and "sha256" in entry for entry in found):
            return found
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return [dict(file=_file_name(step), step=step, sha256=None) for step in sorted(_steps_in(folder), reverse=True)]


def write_list(folder, entries):
    """Replace the list, then remove the checkpoints that are no longer in it, and what killed processes left."""
    files.write_atomic(folder / LIST, json.dumps(entries, indent=1))
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
