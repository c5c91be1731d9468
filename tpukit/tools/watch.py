"""`tpukit watch`: a run that another process trains, in a terminal: how far, how fast, its scores, and how busy the chip is."""

import shutil
import subprocess
import sys
import time

from tpukit.host.tables import printable
from tpukit.reporting import findings

MIB_IN_GIB = 1024  # nvidia-smi counts in MiB
QUERY = "index,name,utilization.gpu,memory.used,memory.total"


def watch(run, *, interval_s=2.0, once=False):
    """Show a run until its last step is done, or until Ctrl-C; once where asked, or where the output is no terminal."""
    if once or not sys.stdout.isatty():
        print(glimpse(run))
        return
    from rich.live import Live
    from rich.text import Text

    with Live(Text(glimpse(run)), auto_refresh=False) as shown:
        while not findings.is_finished(run.read_progress(), run.checkpoints()):
            time.sleep(interval_s)
            shown.update(Text(glimpse(run)), refresh=True)


def glimpse(run):
    """What there is to see now, as text."""
    try:
        age_s = time.time() - (run.path / "progress.json").stat().st_mtime
    except FileNotFoundError:  # a launch takes that of the one before away
        age_s = None
    table = findings.live_table(run.path.name, run.records(), run.read_progress(), run.checkpoints(), age_s)
    return printable("\n".join([str(table), *(chips() or _why_not(run))]))


def _why_not(run):
    device = next((r.get("accelerator") for r in reversed(findings.valid_records(run.records())) if r["kind"] == "start"), None)
    unseen = "  how busy the chip is cannot be seen: neither nvidia-smi nor tpu-info is here"
    return [unseen] if device in ("cuda", "tpu") else []


def chips():
    """A line for each GPU, as nvidia-smi says, and what tpu-info prints; nothing where neither is there."""
    lines = []
    if shutil.which("nvidia-smi"):
        said, trouble = _asked("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
        for line in said.splitlines():
            index, name, busy, used, total = (part.strip() for part in line.split(","))
            # A field that a card does not have reads [N/A].
            memory = "memory unknown"
            if used.isdigit() and total.isdigit():
                memory = f"{int(used) / MIB_IN_GIB:.1f} of {int(total) / MIB_IN_GIB:.1f} GiB"
            lines.append(f"  GPU {index} ({name}): {f'{busy}% busy' if busy.isdigit() else 'use unknown'}, {memory}")
        lines += [f"  nvidia-smi does not answer: {trouble}"] if trouble else []
    if shutil.which("tpu-info"):
        said, trouble = _asked("tpu-info")
        lines += [f"  tpu-info does not answer: {trouble}"] if trouble else said.rstrip().splitlines()
    return lines


def _asked(*command):
    """(what a command printed, what went wrong)."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", "no answer within 10 s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
    if ran.returncode:
        return "", (ran.stderr.strip() or ran.stdout.strip() or f"exit code {ran.returncode}").splitlines()[-1]
    return ran.stdout, ""
