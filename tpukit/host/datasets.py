"""Finding a dataset on this host. Touches no accelerator and imports no torch."""

import glob
from pathlib import Path

from tpukit.host import archives, arrays, drive, files
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable


def find(env, name, path=None, *, fallback=False, parts=()):
    """The folder of a dataset, or None where no place holds it; prints which place was taken and why.

    In this order: `path`; Drive (MyDrive/datasets/NAME); Kaggle inputs; ./datasets/NAME; on Colab a Drive that is not mounted
    yet, for which the user is asked once. Archives (.zip, .tar.gz) at these places are unpacked below `env.outputs`; parts:
    folders of the dataset's own, see `archives.unpack`. A given `path` that does not exist raises TpukitError, unless
    `fallback=True` allows the other places, or `fallback` is a folder, which is then taken instead (and, where no path is
    given, before Drive is asked for).
    """
    instead = Path(fallback) if isinstance(fallback, (str, Path)) else None
    if path:
        path = Path(path).expanduser()
        if env.drive and env.drive.parent in path.parents:
            drive.ask_for_drive(env)
        if path.exists():
            return _take(env, name, parts, path, "the path that was given")
        if instead and instead.is_dir():
            return _take(env, name, parts, instead, f"because {path} does not exist")
        if fallback is not True:
            raise TpukitError(
                f"dataset path {path} does not exist{f', nor does {instead}' if instead else ''}. Check its spelling (is Drive "
                "mounted?), leave the path empty to search the usual places, or allow a fallback."
            )
        print(printable(f"dataset {name}: {path} does not exist, looking elsewhere as allowed"))
    for place, why in _places(env, name, instead):
        if place.exists():
            return _take(env, name, parts, place, why)
    return None


def is_run(folder):
    """Whether a folder holds a run of tpukit."""
    return (folder / "config.json").is_file() and (folder / "checkpoints").is_dir()


def _places(env, name, instead):
    """(path, why) in the order of preference, archives beside folders. Who reads on to the end is asked for Drive."""
    on_drive = [env.drive / "datasets" / f"{name}{ending}" for ending in ("", *archives.ENDINGS)] if env.drive else []
    yield from ((place, "found on Drive") for place in on_drive)
    if env.host == "kaggle":
        for depth in ("*", "*/*", "*/*/*", "*/*/*/*"):  # Kaggle nests a dataset below its owner and lower-cases names
            for place in sorted(env.inputs.glob(depth)):
                # A run of this name (`tpukit train mnist` makes one) comes with an earlier version's output.
                if (archives.stem(place) or place.name).lower() == name.lower() and not is_run(place):
                    yield place, "found in the Kaggle inputs"
    for ending in ("", *archives.ENDINGS):
        yield Path("datasets") / f"{name}{ending}", "found in ./datasets"
    if instead and instead.is_dir():
        yield instead, f"found at ./{instead}"
    if on_drive and drive.ask_for_drive(env):
        yield from ((place, "found on Drive") for place in on_drive)


def _take(env, name, parts, place, why):
    if place.is_file() and archives.stem(place):
        archive, place = place, _unpacked(env.outputs / "datasets" / name, name, place, parts)
        why = f"{why}, unpacked from {archive.name}"
    print(printable(f"dataset {name}: {place} ({why})"))
    return place


def _unpacked(folder, name, archive, parts):
    """`folder` with what an archive holds, unpacked now or before; where another archive's is there, a folder beside it."""
    try:
        content = arrays.content_key(archive.parent, like=(glob.escape(archive.name),))
    except OSError as error:
        raise TpukitError(f"{archive} cannot be read ({error.strerror}); copy or download it again") from error
    whose = folder.with_name(f".{folder.name}.archive")  # the content that `folder` was unpacked from
    with files.file_lock(folder):
        if not folder.exists():
            with files.explain_unwritable(folder.parent):
                folder.parent.mkdir(parents=True, exist_ok=True)
                files.write_atomic(whose, content)
        elif not whose.exists() or whose.read_text() != content:
            folder = folder.with_name(f"{folder.name}-{content[:8]}")
        if not folder.exists():
            print(printable(f"dataset {name}: unpacking {archive}"))
            archives.unpack(archive, folder, parts=parts)
    return folder
