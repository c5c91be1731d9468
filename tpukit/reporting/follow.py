"""`tpukit report --follow`: the log of a run that another process trains, as it grows."""

import time

from tpukit.host.tables import printable
from tpukit.reporting import findings
from tpukit.runs.run import Run

UPDATE_S = 2.0


def follow(run: Run) -> None:
    """Print the log's new lines, and how far the run is, until the checkpoint of its last step is there."""
    log, shown, before = run.path / "log.txt", 0, ""
    while True:
        is_finished = findings.is_finished(run.read_progress(), run.checkpoints())  # before the log is read
        whole = log.read_bytes().rpartition(b"\n")[0] if log.exists() else b""
        if new := whole[shown:].strip(b"\n"):
            print(printable(new.decode(errors="replace")), flush=True)
        shown = len(whole)
        now = findings.headline(run.records(), run.read_progress())
        if now != before:
            print(printable(now), flush=True)
        before = now
        if is_finished:
            return
        time.sleep(UPDATE_S)
