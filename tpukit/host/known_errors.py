"""Known errors of accelerators, with causes and fixes: for `tpukit doctor`, error messages and a page.

They are data: known_errors.toml, next to this file.
"""

import contextlib
import dataclasses
import re
import tomllib
import traceback
from collections.abc import Generator
from pathlib import Path

from tpukit.host.errors import TpukitError


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownError:
    """A known problem; known_errors.toml says what each field is."""

    title: str
    fix: str
    source: str
    cause: str = ""
    harmless: bool = False
    pattern: str | None = None
    phrases: str | None = None


_ENTRIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KNOWN_ERRORS = {code: KnownError(**entry) for code, entry in _ENTRIES.items()}


def match(message: str) -> KnownError | None:
    """Return the first known error whose pattern matches an error message."""
    for known in KNOWN_ERRORS.values():
        if known.pattern and re.search(known.pattern, message, re.IGNORECASE):
            return known
    return None


def fix_for(message: str) -> str | None:
    """Return the fix for an error of an accelerator's runtime, or None for an unknown message."""
    known = match(message)
    return known.fix if known else None


@contextlib.contextmanager
def explain_known_errors() -> Generator[None]:
    """Context manager: raise an error of an accelerator's runtime as a TpukitError with the fix, if known."""
    try:
        yield
    except TpukitError:
        raise
    except Exception as error:
        fix = fix_for(str(error))
        if fix is None:
            raise
        traceback.clear_frames(error.__traceback__)  # a notebook keeps it, and with it a step's activations
        # The first lines name the problem and a shape that changed; the rest is the runtime's own stack.
        lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
        raise TpukitError("\n".join([*lines[:3], fix])) from error
