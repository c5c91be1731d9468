"""Names of files and classes: one name may be written in two Unicode forms, as macOS and all others write é,
and that of a file in another case."""

import contextlib
import math
import os
import unicodedata

from tpukit_tasks import pictures

# What pandas writes for a missing value, or takes for one
MISSING = {
    "",
    "<NA>",
    "NaN",
    "nan",
    "-NaN",
    "-nan",
    "NaT",
    "None",
    "NULL",
    "null",
    "NA",
    "N/A",
    "n/a",
    "#N/A",
    "#NA",
}


def composed(name: str) -> str:
    """Return a name in the form in which names are compared, NFC."""
    return unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    """Return what names that differ only in form and case have in common."""
    return composed(composed(name).casefold())


def number(name: str) -> float | None:
    """Return the number that a name is; None if it is none, as 1_2, which Python takes for 12."""
    with contextlib.suppress(ValueError):
        return float(name) if "_" not in name and math.isfinite(float(name)) else None
    return None


class Lookup:
    """Files by paths that may be written in another form or case, or, of images, without an ending. Each
    folder is read once."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, list[str]]] = {}  # of a folder: what is in it, by its folded name

    def find(self, folder: str, path: str) -> str | None:
        """Return the only file that a relative path may mean; None for none or several, and for a path that
        leads out of the folder."""
        *parts, last = [part for part in path.split("/") if part != "."]
        for part in parts:
            if (inner := self._only(folder, part)) is None:
                return None
            folder = inner
        endings = [""] if pictures.is_image(last) else ["", *pictures.ENDINGS]
        found = (self._only(folder, last + ending) for ending in endings)
        return next((path for path in found if path and os.path.isfile(path)), None)

    def _only(self, folder, name):
        """Return what a name means in a folder; None for nothing or several."""
        if folder not in self._names:
            self._names[folder] = {}
            with contextlib.suppress(OSError):
                for entry in sorted(os.listdir(folder)):
                    self._names[folder].setdefault(folded(entry), []).append(entry)
        found = self._names[folder].get(folded(name), [])
        found = [name] if name in found else found
        return os.path.join(folder, found[0]) if len(found) == 1 else None
