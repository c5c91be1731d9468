"""Errors meant for the user."""

import contextlib
import errno
import importlib.util
import os
from collections.abc import Generator
from pathlib import Path

from tpukit.host.text import printable


class TpukitError(ValueError):
    """An error that the user can fix: it says what it got, what it needs and what to do. The command line and
    notebooks print it without a traceback."""

    def __init__(self, *args: object) -> None:
        # A notebook and tyro print them as they are, with the names of files in them.
        super().__init__(*(printable(value) if isinstance(value, str) else value for value in args))

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of a traceback: the sentence."""
        return [f"{type(self).__name__}: {self}"]


class Damaged(TpukitError):
    """A file that is missing, or whose content is not what was written."""


class Unreadable(TpukitError):
    """A file that cannot be read now, which says nothing about its content."""


_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ADVICE = {
    errno.ENOMEM: "end what uses up this machine's memory",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "end what holds too many files open"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "get the permission to read it"),
}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def explained(what: str, kind: type[TpukitError] = TpukitError) -> Generator[None]:
    """Context manager: raise any error of a foreign library as one of this kind that begins with `what`. A
    TpukitError stays as it is."""
    try:
        yield
    except TpukitError:
        raise
    except Exception as error:
        raise kind(f"{what}: {first_line(error)}") from error


# Packages that only a part of tpukit needs, by the name that is imported: name for pip, what needs it
_OPTIONAL = {
    "PIL": ("pillow", "image files"),
    "scipy": ("scipy", "the scores of images"),
    "matplotlib": ("matplotlib", "charts"),
    "tyro": ("tyro", "the command line"),
}


@contextlib.contextmanager
def importing() -> Generator[None]:
    """Context manager: raise a missing package that only a part of tpukit needs as one sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        package, need = _OPTIONAL.get((error.name or "").partition(".")[0], ("", ""))
        if not package:
            raise
        raise TpukitError(
            f"{package} is not installed, and {need} need it: pip install {package}"
            " (the extra `standard` of tpukit brings it and all else that the notebooks use)"
        ) from error


def check_installed(package: str) -> None:
    """Raise ModuleNotFoundError if a package is missing, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


@contextlib.contextmanager
def reading(path: Path, wrong: str, kind: type[TpukitError] = Damaged) -> Generator[None]:
    """Context manager: raise what is wrong with a file's content, or that it is missing, as an error of this
    kind that begins with `wrong`. An error of the disk, or a lack of memory, is no damage: it is raised as
    Unreadable. A TpukitError stays as it is."""
    try:
        yield
    except TpukitError:
        raise
    except Exception as error:
        if of_disk := as_unreadable(error, path):
            raise of_disk from error
        raise kind(f"{wrong}: {first_line(error)}") from error


def as_unreadable(error: Exception, path: Path) -> Unreadable | None:
    """Return an error as Unreadable if it says nothing about the content of the file that was being read;
    None if it does, or if the file is missing."""
    if isinstance(error, Unreadable):
        return error
    # Pillow, zipfile and others raise an OSError without a number for content that they do not understand.
    number = error.errno if isinstance(error, OSError) and not isinstance(error, _MISSING) else None
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's
        number = errno.ENOMEM
    if number is None:
        return None
    return unreadable(path, f"{os.strerror(number)}, errno {number}", _ADVICE.get(number, ""))


def unreadable(path: Path, reason: str, advice: str = "") -> Unreadable:
    """Return the error for a file that cannot be read now. advice: what to do first, by default to mount the
    file's disk again."""
    return Unreadable(
        f"{path} cannot be read now ({reason}). It may be whole, so nothing is deleted:"
        f" {advice or remount(path)}, and start again"
    )


def remount(path: Path) -> str:
    """Return the advice for a file whose disk is gone."""
    if str(path).startswith("/content/drive/"):
        return "mount Drive again, drive.mount('/content/drive', force_remount=True)"
    return "mount its disk again"
