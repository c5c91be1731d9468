"""What a report of hardware may say of a failure: its cause in one line, and nothing of whose machine it is.

How cores failed is read from the message of a `CoreFailed`, see launching/supervisor.py."""

import collections
import os
import re
import socket
from pathlib import Path

from tpukit.host.text import printable

LONGEST_TEXT = 400  # characters of what was found
# What begins like a path or a URL: as folders may have blanks, nobody can tell where it ends.
# The files by which a chip is opened are the same on all machines.
OF_A_CHIP = r"/(?:dev/(?:vfio/\d+|accel\d+)|tmp/libtpu_lockfile)(?![\w/.-])"
PATH = re.compile(rf"(\w+://|(?<![\w.)])(?!{OF_A_CHIP})~?/(?=[\w.-])|\b[A-Za-z]:\\).*")
# Mail addresses, and internet addresses of versions 4 and 6
ADDRESS = re.compile(r"\S+@\S+|\b\d+(\.\d+){3}\b|(?<![\w:])([0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])")
FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+),? in (?P<function>.+)')
RAISED_AT = re.compile(r"([\w.]*\.)?(?P<error>\w+)(: (?P<words>.*))?$")
LAST_WORDS = (r"^F\d{4}|Check failed|what\(\)", r"Error\b|^Fatal ", "")  # the most telling first


def cause_of_cores(message: str) -> str:
    """Return in one line what made cores fail: the error of the one that failed first and its place; the
    cause of death of those that died; or where each of those that hang is."""
    first, *lines = [line for line in message.splitlines() if "What each core printed: " not in line]
    if is_hang := re.match(r"(.*?)\. What each was doing", first):
        return f"{is_hang[1]}: {_places(lines)}"
    if " ended unexpectedly: " in first:
        told = [
            line for line in lines if not FRAME.match(line) and not line.startswith(("Thread", "Current"))
        ]
        words = next((line for kind in LAST_WORDS for line in told[::-1] if re.search(kind, line)), "")
        return f"{first}{place_of(chr(10).join(lines))}" + (f": {words}" if words else "")
    where = first.removesuffix(":")
    frames = [number for number, line in enumerate(lines) if FRAME.match(line)]
    if not frames:  # a sentence of tpukit's own
        return " ".join(filter(None, [first, *lines]))
    # The first line after the last frame, its source and its marks
    words = next((line for line in lines[frames[-1] + 1 :] if line[:1].strip()), "")
    found = RAISED_AT.match(words)
    error, what = (found["error"], found["words"] or "") if found else ("an error", words)
    return f"{where}: {error} in {_place(lines[frames[-1]])}" + (f": {what}" if what else "")


def _place(line: str) -> str:
    """Return the file, without its folder, and the line of one line of a traceback."""
    frame = FRAME.match(line)
    assert frame
    return f"{Path(frame['file']).name} line {frame['line']}"


def _innermost(lines: list[str]) -> str:
    """Return the place of the first of tpukit's own lines of a stack, most recent call first, else of any."""
    frames = [line for line in lines if FRAME.match(line)]
    ours = [line for line in frames if re.search(r"/tpukit(_tools|_tasks|(?!/launching))/", line)]
    return _place((ours or frames)[0]) if frames else "nowhere in Python"


def place_of(stacks: str | bytes | None) -> str:
    """Return where a process was, by what faulthandler wrote to its stderr, in words; "" if it wrote none."""
    text = stacks.decode(errors="replace") if isinstance(stacks, bytes) else stacks or ""
    lines = re.split(r"(?m)^(?:Thread|Current thread) 0x", text)[-1].splitlines()  # the main thread is last
    return f", in {_innermost(lines)}" if any(map(FRAME.match, lines)) else ""


def _places(lines: list[str]) -> str:
    """Return where cores hang, those at one place together."""
    places = collections.defaultdict(list)
    parts = re.split(r"(?m)^core (\d+) \(full stack: .*\)$", "\n".join(lines))
    for core, stacks in zip(parts[1::2], parts[2::2]):
        threads = re.split(r"(?m)^(?:Thread|Current thread) 0x", stacks)
        places[_innermost(threads[-1].splitlines())].append(core)
    return "; ".join(f"core {', '.join(cores)} in {place}" for place, cores in places.items())


def scrub(text: str) -> str:
    """Return a text without what tells whose machine it came from: what follows a path or a URL, addresses,
    names of user and host."""
    text = PATH.sub("(path)", printable(" ".join(text.split())[:LONGEST_TEXT]))
    text = ADDRESS.sub("(address)", text)
    host = socket.gethostname()
    names = {host, host.partition(".")[0], os.environ.get("USER", "")} - {"root", ""}
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", "(name)", text)
    return text
