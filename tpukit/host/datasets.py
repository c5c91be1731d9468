"""Finding a dataset on this host. Touches no accelerator and imports no torch."""

import glob
from collections.abc import Collection
from pathlib import Path

from tpukit.host import archives, arrays, drive, files
from tpukit.host.environment import Environment
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable


def find(
    env: Environment,
    name: str,
    path: str | Path | None = None,
    *,
    fallback: bool | str | Path = False,
    parts: Collection[str] = (),
) -> Path | None:
    """The folder of a dataset, or None where it is not found; prints which one was taken and why.

    In this order: `path`; Drive (MyDrive/datasets/NAME); Kaggle inputs; ./datasets/NAME; `fallback`, if it is
    a folder; on Colab a Drive that is not mounted yet, for which the user is asked once. Archives (.zip,
    .tar.gz) at these places are unpacked below `env.outputs`; parts: see `archives.unpack`. A given `path`
    that does not exist raises TpukitError, unless `fallback=True` allows the other places, or `fallback` is a
    folder, which is then taken."""
    instead = None if isinstance(fallback, bool) else Path(fallback)
    if path:
        path = Path(path).expanduser()
        if env.drive and env.drive.parent in path.parents:
            drive.ask_for_drive(env)
        if path.exists():
            return _take(env, name, parts, path, "the given path")
        if instead and instead.is_dir():
            return _take(env, name, parts, instead, f"because {path} does not exist")
        if fallback is not True:
            what = f"dataset path {path} does not exist{f', nor does {instead}' if instead else ''}"
            raise TpukitError(f"{what}. Check its spelling (is Drive mounted?), or leave it empty to search")
        print(printable(f"dataset {name}: {path} does not exist, looking elsewhere as allowed"))
    for found, why in _candidates(env, name, instead):
        if found.exists():
            return _take(env, name, parts, found, why)
    return None


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run of tpukit."""
    return (folder / "config.json").is_file() and (folder / "checkpoints").is_dir()


def _candidates(env, name, instead):
    """Yield (path, why) in the order of preference, archives beside folders. The user is asked for Drive at
    the end."""
    names = [f"{name}{ending}" for ending in ("", *archives.ENDINGS)]
    on_drive = [env.drive / "datasets" / file for file in names] if env.drive else []
    yield from ((found, "found on Drive") for found in on_drive)
    if env.inputs is not None:
        for depth in range(4):  # Kaggle nests a dataset below its owner and lower-cases names
            for found in sorted(env.inputs.glob("*/" * depth + "*")):
                # The output of an earlier version may hold a run of this name, as of `tpukit train mnist`.
                if (archives.stem(found) or found.name).lower() == name.lower() and not is_run(found):
                    yield found, "found in the Kaggle inputs"
    yield from ((Path("datasets") / file, "found in ./datasets") for file in names)
    if instead and instead.is_dir():
        yield instead, f"found at ./{instead}"
    if on_drive and drive.ask_for_drive(env):
        yield from ((found, "found on Drive") for found in on_drive)


def _take(env, name, parts, found, why):
    if found.is_file() and archives.stem(found):
        archive, found = found, _unpacked(env.outputs / "datasets" / name, name, found, parts)
        why = f"{why}, unpacked from {archive.name}"
    print(printable(f"dataset {name}: {found} ({why})"))
    return found


def _unpacked(folder, name, archive, parts):
    """The folder with the unpacked content of an archive: `folder`, or one next to it where that has other
    content."""
    try:
        content = arrays.content_key(archive.parent, like=(glob.escape(archive.name),))
    except OSError as error:
        raise TpukitError(f"{archive} cannot be read ({error.strerror}): copy it again") from error
    source = folder.with_name(f".{folder.name}.archive")  # holds the key of the content of `folder`
    with files.file_lock(folder):
        if not folder.exists():
            with files.explain_unwritable(folder.parent):
                folder.parent.mkdir(parents=True, exist_ok=True)
                files.write_atomic(source, content)
        elif not source.exists() or source.read_text() != content:
            folder = folder.with_name(f"{folder.name}-{content[:8]}")
        if not folder.exists():
            print(printable(f"dataset {name}: unpacking {archive}"))
            archives.unpack(archive, folder, parts=parts)
    return folder
