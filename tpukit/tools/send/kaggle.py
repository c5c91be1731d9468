"""Kaggle, by its own command in a process of its own. The user's token stays where that command keeps it:
nothing here reads it."""

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
from tpukit.host.tables import printable
from tpukit.tools.child import run_python
from tpukit.tools.send import Quota, Session, State, Unreachable

SHAPES = dict(tpu="TpuV5E8", gpu="NvidiaTeslaT4")  # Kaggle's names of accelerators
WORDS = dict(NEW_SCRIPT="queued", QUEUED="queued", RUNNING="running", COMPLETE="complete", ERROR="error")
WORDS |= dict(CANCEL_REQUESTED="cancelled", CANCEL_ACKNOWLEDGED="cancelled")
# How the words of an error show that it may pass.
PASSES = re.compile(
    r"\b(429|5\d\d) (Client|Server) Error|\w*(Connection|Timeout|Protocol|Encoding|SSL)Error|Max retries"
    r"|Read timed out|IncompleteRead|rate limited|problem on Kaggle's side|Expecting value",
    re.I,
)
NO_TOKEN = (
    "Kaggle does not know who you are: run `kaggle auth login`, or put kaggle.json, from kaggle.com/settings,"
    " into ~/.kaggle"
)
LOG_LIMIT_S = 900.0  # of one connection; the next one begins with the first line again
# An unpacked or synthetic dataset lies among the outputs too, and is made again where it is missing.
WANTED = r"^(?!outputs/datasets/)"


class Kaggle:
    """Kaggle as `tpukit.tools.send.Service` has it."""

    attached = False

    def __init__(self):
        if importlib.util.find_spec("kaggle") is None:
            raise TpukitError("Kaggle's own command is missing: pip install 'tpukit[send]'")

    @functools.cached_property
    def owner(self) -> str:
        """The user's name there. Raises TpukitError without a token."""
        found = re.search(r"^- username: ([\w-]+)$", _run("config", "view"), re.M)
        if not found or found[1] == "None":
            raise TpukitError(NO_TOKEN)
        return found[1]

    def kernel(self, slug: str) -> str:
        return f"{self.owner}/{slug}"

    def url(self, kernel: str) -> str:
        return f"https://www.kaggle.com/code/{kernel}"

    def push(self, folder: Path, session: Session) -> None:
        """Raises TpukitError with Kaggle's reason, or for an input that Kaggle left out."""
        shape = json.loads((folder / "kernel-metadata.json").read_text())["machine_shape"]
        accelerator = ("--accelerator", shape) if shape else ()
        limit = ("--timeout", str(round(session.hours * 3600)))
        said = _run("kernels", "push", "-p", folder, *limit, *accelerator)
        for pattern in (r"Kernel push error: (.*)", r"(The following are not valid .* sources? .*)"):
            if found := re.search(pattern, said):
                raise (Unreachable if PASSES.search(found[1]) else TpukitError)(f"Kaggle: {found[1]}")

    def state(self, kernel: str) -> State:
        try:
            said = _run("kernels", "status", kernel)
        except _NoKernel:
            _run("quota")  # the command words a token that is not valid in the same way; this one says it
            return State("unknown")
        word = re.search(r'has status "(?:KernelWorkerStatus\.)?(\w+)"', said)
        message = re.search(r'^Failure message: "(.*)"\s*$', said, re.M | re.S)
        if not word or word[1].upper() not in WORDS:
            raise TpukitError(f"Kaggle's command gave no state of {kernel}: {said.strip()[:200]}")
        return State(WORDS[word[1].upper()], message[1] if message else "")

    def log(self, kernel: str, follow: bool) -> Iterator[str]:
        # With -f it prints text also of a session that has ended; without, JSON.
        command = [sys.executable, "-P", "-m", "kaggle", "-W", "kernels", "logs", "-f", kernel]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            # A connection on which nothing comes any more is not noticed there.
            limit = threading.Timer(LOG_LIMIT_S, process.kill)
            limit.start()
            try:
                for line in process.stdout or ():
                    yield printable(line.rstrip("\n"))
            finally:
                limit.cancel()
                process.kill()

    def fetch(self, kernel: str, folder: Path) -> None:
        _run("kernels", "output", kernel, "-p", folder, "--file-pattern", WANTED, timeout_s=7200)

    def quota(self, accelerator: str) -> Quota | None:
        """None where Kaggle says nothing of it."""
        said = _run("quota", "--format", "json")
        try:
            rows = json.loads(said)
            row = next(row for row in rows if row["resource"] == accelerator.upper())
            left, total, renewed = row["remaining"], row["total"], row["refreshAt"]
            return Quota(float(left.rstrip("h")), float(total.rstrip("h")), str(renewed))
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
            return None


class _NoKernel(TpukitError):
    """There is none of this name, or it is another user's."""


def _run(*words: object, timeout_s: float = 300) -> str:
    """What Kaggle's command prints. Raises TpukitError with its last words where it fails."""
    try:
        ran = run_python("-m", "kaggle", "-W", *words, timeout_s=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"Kaggle's command gave no answer in {timeout_s:.0f} s") from error
    said = printable(f"{ran.stdout}\n{ran.stderr}")
    if "Authentication required" in said or "Invalid credentials" in said:
        raise TpukitError(NO_TOKEN)
    if ran.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        reason = next((line for line in lines if "rror" in line or "Cannot" in line), (lines or ["?"])[0])
        kind = Unreachable if PASSES.search(said) else TpukitError
        if re.search(r"Cannot access kernel|\b40[34] Client Error|resource was not found", said):
            kind = _NoKernel
        raise kind(f"`kaggle {words[0]}` failed: {reason}")
    return printable(ran.stdout)
