"""Asks the command of a service. It keeps the user's token in files of its own, which nothing here reads."""

import re
import subprocess

from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tools.send import Unreachable

# How the words of an error show that it may pass.
PASSES = re.compile(
    r"\b(429|5\d\d) (Client|Server) Error|\w*(Connection|Timeout|Protocol|Encoding|SSL)Error|Max retries"
    r"|Read timed out|IncompleteRead|rate limited|problem on Kaggle's side|Expecting value",
    re.I,
)
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def ask(service: str, command: list, *, login: str, asks: str, text: str = "", timeout_s: float) -> str:
    """What the command of a service prints, errors last. Raises TpukitError with the reason where it fails.

    login: what to say where its words have the pattern `asks`, by which it shows that nobody is logged in.
    text: its input."""
    try:
        # Not by `run_python`: it ends what a command leaves running, as Google's does to keep a machine.
        options: dict = dict(capture_output=True, text=True, errors="replace", timeout=timeout_s)
        ran = subprocess.run([*map(str, command)], input=text, **options)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"{service}'s command gave no answer in {timeout_s:.0f} s") from error
    said = printable(COLOR.sub("", f"{ran.stdout}\n{ran.stderr}"))
    if re.search(asks, said):
        raise TpukitError(login)
    if ran.returncode:
        raise (Unreachable if PASSES.search(said) else TpukitError)(f"{service}: {reason(said)}")
    return said


def reason(said: str) -> str:
    """The line of a failed command's words that says most."""
    lines = [line for line in said.splitlines() if line.strip()] or ["it printed nothing"]
    return next((line for line in reversed(lines) if "rror" in line or "Cannot" in line), lines[-1])
