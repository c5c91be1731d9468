"""A service, asked by its own command. That keeps the user's token in files of its own, which nothing here
reads."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tools.send import Quota, Session, State, Unreachable

# How the words of an error show that it may pass.
PASSES = re.compile(
    r"\b(429|5\d\d) (Client|Server) Error|\w*(Connection|Timeout|Protocol|Encoding|SSL)Error|Max retries"
    r"|Read timed out|IncompleteRead|rate limited|problem on Kaggle's side|Expecting value",
    re.I,
)
COLOR = re.compile(r"\x1b\[[0-9;]*m")


class Service(Protocol):
    """Kaggle or Colab. A method raises `Unreachable`, or another TpukitError for what does not pass."""

    name: str
    command: list[str]
    login: str  # what a user is told whom it does not know
    asks: str  # pattern of the words by which its command shows that
    timeout_s: float = 300  # of one answer
    attached: bool = False  # whether a session needs the command that sent it, which then follows at once

    def kernel(self, slug: str) -> str:
        """The full name of a kernel of this user."""
        return slug

    def push(self, folder: Path, session: Session, runs: Path) -> None:
        """Start a session. folder: holds session.ipynb and kernel-metadata.json. runs: the folder of the runs
        that the sessions before have brought."""

    def state(self, kernel: str) -> State: ...

    def log(self, kernel: str) -> Iterator[str]:
        """The lines that a session has printed, from the first one on, and that it prints until its end."""
        ...

    def fetch(self, kernel: str, folder: Path) -> None:
        """Bring the output files of a session into an empty folder, and write none outside it."""

    def quota(self, accelerator: str) -> Quota | None: ...

    def url(self, kernel: str) -> str: ...

    def ask(self, *words: object, text: str = "", timeout_s: float | None = None) -> str:
        """What the command prints, errors last. Raises TpukitError with the reason where it fails. text: its
        input."""
        timeout_s = timeout_s or self.timeout_s
        try:
            # Not by `run_python`: it ends what a command leaves running, as Google's does to keep a machine.
            options: dict = dict(capture_output=True, text=True, errors="replace", timeout=timeout_s)
            ran = subprocess.run([*self.command, *map(str, words)], input=text, **options)
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"{self.name}'s command gave no answer in {timeout_s:.0f} s") from error
        said = printable(COLOR.sub("", f"{ran.stdout}\n{ran.stderr}"))
        if re.search(self.asks, said):
            raise TpukitError(self.login)
        if ran.returncode:
            raise (Unreachable if PASSES.search(said) else TpukitError)(f"{self.name}: {reason(said)}")
        return said


def reason(said: str) -> str:
    """The line of a failed command's words that says most."""
    lines = [line for line in said.splitlines() if line.strip()] or ["it printed nothing"]
    return next((line for line in reversed(lines) if "rror" in line or "Cannot" in line), lines[-1])
