"""Kaggle, by its own command in a process of its own."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.tools import child
from tpukit.tools.send import Quota, Session, State, Unreachable
from tpukit.tools.send.service import PASSES, Service

WORDS = dict(NEW_SCRIPT="queued", QUEUED="queued", RUNNING="running", COMPLETE="complete", ERROR="error")
WORDS |= dict(CANCEL_REQUESTED="cancelled", CANCEL_ACKNOWLEDGED="cancelled")
NO_TOKEN = (
    "Kaggle does not know who you are: run `kaggle auth login`, or put kaggle.json, from kaggle.com/settings,"
    " into ~/.kaggle"
)
NO_KERNEL = re.compile(r"Cannot access kernel|\b40[34] Client Error|resource was not found")
LOG_LIMIT_S = 900.0  # of one connection; the next one begins with the first line again
# An unpacked or synthetic dataset lies among the outputs too, and is made again where it is missing.
WANTED = r"^(?!outputs/datasets/)"


class Kaggle(Service):
    name = "Kaggle"
    command = [sys.executable, "-P", "-m", "kaggle", "-W"]
    login = NO_TOKEN
    asks = "Authentication required|Invalid credentials"

    def __init__(self):
        if importlib.util.find_spec("kaggle") is None:
            raise TpukitError("Kaggle's own command is missing: pip install 'tpukit[send]'")

    @functools.cached_property
    def owner(self) -> str:
        """The user's name there. Raises TpukitError without a token."""
        found = re.search(r"^- username: ([\w-]+)$", self.ask("config", "view"), re.M)
        if not found or found[1] == "None":
            raise TpukitError(NO_TOKEN)
        return found[1]

    def kernel(self, slug: str) -> str:
        return f"{self.owner}/{slug}"

    def url(self, kernel: str) -> str:
        return f"https://www.kaggle.com/code/{kernel}"

    def push(self, folder: Path, session: Session, runs: Path) -> None:
        """Raises TpukitError with Kaggle's reason, or for an input that Kaggle left out."""
        said = self.ask("kernels", "push", "-p", folder, "--timeout", round(session.hours * 3600))
        if found := re.search(r"Kernel push error: .*|The following are not valid .* sources? .*", said):
            raise (Unreachable if PASSES.search(found[0]) else TpukitError)(f"Kaggle: {found[0]}")

    def state(self, kernel: str) -> State:
        try:
            said = self.ask("kernels", "status", kernel)
        except TpukitError as error:
            if not NO_KERNEL.search(str(error)):
                raise
            self.ask("quota")  # the command words a token that is not valid in the same way; this one says it
            return State("unknown")
        word = re.search(r'has status "(?:KernelWorkerStatus\.)?(\w+)"', said)
        message = re.search(r'^Failure message: "(.*)"\s*$', said, re.M | re.S)
        if not word or word[1].upper() not in WORDS:
            raise TpukitError(f"Kaggle's command gave no state of {kernel}: {said.strip()[:200]}")
        return State(WORDS[word[1].upper()], message[1] if message else "")

    def log(self, kernel: str) -> Iterator[str]:
        # With -f it prints text also of a session that has ended; without, JSON.
        command = [*self.command, "kernels", "logs", "-f", kernel]
        with child.start(command, stderr=subprocess.DEVNULL) as process:
            # A connection on which nothing comes any more is not noticed there.
            limit = threading.Timer(LOG_LIMIT_S, process.kill)
            limit.start()
            try:
                yield from child.lines_of(process)
            finally:
                limit.cancel()
                process.kill()

    def fetch(self, kernel: str, folder: Path) -> None:
        self.ask("kernels", "output", kernel, "-p", folder, "--file-pattern", WANTED, timeout_s=7200)

    def quota(self, accelerator: str) -> Quota | None:
        """None where Kaggle says nothing of it."""
        said = self.ask("quota", "--format", "json")
        try:
            rows, _ = json.JSONDecoder().raw_decode(said)
            row = next(row for row in rows if row["resource"] == accelerator.upper())
            left, total = (float(row[name].rstrip("h")) for name in ("remaining", "total"))
            return Quota(left, total, str(row["refreshAt"]))
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
            return None
