"""Download without hanging: ask a server first, and give up one that stalls. Nothing else here uses the
internet."""

import contextlib
import functools
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpukit.host.errors import TpukitError, explained, first_line

ANSWER_S = 2.5  # for a first answer, the look-up of the server's name included
STALL_S = 20.0  # without a byte


def check_reachable(url: str) -> None:
    """Raise TpukitError if no server answers for `url` within ANSWER_S seconds, or TPUKIT_OFFLINE is set."""
    if os.environ.get("TPUKIT_OFFLINE"):
        raise TpukitError("TPUKIT_OFFLINE forbids downloads")
    answers = []

    def ask():
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=2 * ANSWER_S):
                answers.append("")
        except Exception as error:  # urllib, http and ssl raise many types
            cause = getattr(error, "reason", error)
            answers.append(getattr(cause, "strerror", None) or first_line(cause))

    # In a thread, because a look-up of a name and a server of many addresses take longer than urlopen's
    # timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    reason = answers[0] if answers else f"no answer within {ANSWER_S:g} s"
    if reason:
        raise TpukitError(f"{url} does not answer ({reason})")


@contextlib.contextmanager
def stall_timeout() -> Iterator[None]:
    """Context manager: a connection opened here that gets no byte for STALL_S seconds raises TimeoutError."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def from_hub(name: str, *patterns: str) -> Path:
    """Return the folder of a model's files in the cache of the Hugging Face hub, downloaded if needed.
    patterns: of the files that are needed; those in folders of the model are left out. Raises TpukitError
    if neither has it."""
    with explained(f"{name} is looked for by huggingface_hub (pip install huggingface_hub)"):
        import huggingface_hub as library
    options: Any = dict(allow_patterns=list(patterns), ignore_patterns=["*/*"])
    download = functools.partial(library.snapshot_download, name, **options)
    try:
        check_reachable(library.constants.ENDPOINT)
        return Path(download())
    except Exception as error:  # the hub's, its HTTP library's, or a timeout
        with contextlib.suppress(OSError, ValueError):
            return Path(download(local_files_only=True))
        advice = "check its name and the internet"
        if "gated" in f"{type(error)} {error}".lower():
            advice = "accept its terms on its page, and give your token by `hf auth login` or as HF_TOKEN"
        raise TpukitError(
            f"{name} is not on this machine and cannot be downloaded: {first_line(error)}; {advice}"
        ) from error
