"""`tpukit report RUN --follow`: the log of a run that another process trains."""

import time

from tpukit.host.tables import printable
from tpukit.reporting import findings
from tpukit.runs.run import Run

UPDATE_S = 2.0  # between two looks at the run


def follow(run: Run) -> None:
    """Print the log's new lines of a run that another process trains, and how far it is, until the checkpoint
    of its last step is there."""
    log, shown, before = run.path / "log.txt", 0, ""
    while True:
        ended = is_finished(run.read_progress(), run.checkpoints())  # before the log is read
        whole = log.read_bytes().rpartition(b"\n")[0] if log.exists() else b""
        if new := whole[shown:].strip(b"\n"):
            print(printable(new.decode(errors="replace")), flush=True)
        shown = len(whole)
        now = findings.headline(run.records(), run.read_progress())
        if now != before:
            print(printable(now), flush=True)
        before = now
        if ended:
            return
        time.sleep(UPDATE_S)


def is_finished(progress: dict, checkpoints: list) -> bool:
    """Return True if nothing will follow: the checkpoint of the last step comes after its evaluation."""
    saved = max((entry["step"] for entry in checkpoints), default=-1)
    return bool(progress) and min(progress["step"], saved) >= progress["total"]
