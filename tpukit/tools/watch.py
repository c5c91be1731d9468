"""`tpukit watch`: a run that another process trains, in a terminal: how far, how fast, its scores, and how
busy the chip is."""

import re
import shutil
import subprocess
import sys
import time

from tpukit.host.json_types import has_type
from tpukit.host.tables import Table, format_duration, printable
from tpukit.reporting import findings

MIB_IN_GIB = 1024  # nvidia-smi counts in MiB
UPDATE_S = 2.0
QUERY = "index,name,utilization.gpu,memory.used,memory.total"


def watch(run, *, once=False):
    """Show a run until its last step is done, or until Ctrl-C; once where asked, or where the output is not a
    terminal."""
    if once or not sys.stdout.isatty():
        print(describe(run))
        return
    from rich.live import Live
    from rich.text import Text

    with Live(Text(describe(run)), auto_refresh=False) as shown:
        while not findings.is_finished(run.read_progress(), run.checkpoints()):
            time.sleep(UPDATE_S)
            shown.update(Text(describe(run)), refresh=True)


def describe(run):
    """The run and the chips as they are now, as text."""
    try:
        age_s = time.time() - (run.path / "progress.json").stat().st_mtime
    except FileNotFoundError:  # a launch removes that of the launch before
        age_s = None
    records = run.records()
    table = live_table(run.path.name, records, run.read_progress(), run.checkpoints(), age_s)
    lines = describe_chips()
    starts = [record for record in findings.valid_records(records) if record["kind"] == "start"]
    if not lines and starts and starts[-1].get("accelerator") in ("cuda", "tpu"):
        lines = ["  chip utilization unknown: neither nvidia-smi nor tpu-info is installed"]
    return printable("\n".join([str(table), *lines]))


def describe_chips():
    """A line for each GPU from nvidia-smi, and what tpu-info prints; empty where neither is installed."""
    lines = []
    if shutil.which("nvidia-smi"):
        output, error = _run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
        for line in output.splitlines():
            row = re.fullmatch(r"(\d+), (.*), ([^,]*), ([^,]*), ([^,]*)", line.strip())
            if not row:
                lines.append(
                    f"  nvidia-smi: {line}"
                )  # it warns between its rows, of a damaged infoROM for instance
                continue
            index, name, busy, used, total = row.groups()
            # A field that a card does not have reads [N/A].
            use, memory = f"{busy}% busy" if busy.isdigit() else "utilization unknown", "memory unknown"
            if used.isdigit() and total.isdigit():
                memory = f"{int(used) / MIB_IN_GIB:.1f} of {int(total) / MIB_IN_GIB:.1f} GiB"
            lines.append(f"  GPU {index} ({name}): {use}, {memory}")
        lines += error
    if shutil.which("tpu-info"):
        output, error = _run("tpu-info")
        lines += error or output.rstrip().splitlines()
    return lines


def _run(*command):
    """(what a command printed, [a line about what went wrong])."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
        if ran.returncode == 0:
            return ran.stdout, []
        error = (ran.stderr.strip() or ran.stdout.strip() or f"exit code {ran.returncode}").splitlines()[-1]
    except (OSError, subprocess.TimeoutExpired) as failure:
        error = str(failure)
    return "", [f"  {command[0]} does not answer: {error}"]


def live_table(name: str, records: list, progress: dict, checkpoints: list, age_s: float | None) -> Table:
    """A run as it stands. progress: of `Run.read_progress`. age_s: seconds since it was written, None if it
    never was."""
    sessions = findings._sessions(records)
    if not sessions or age_s is None or not has_type(progress, findings.PROGRESS):
        return Table(f"{name}: has not started yet", ("what", "now"), [])
    session, step, total = sessions[-1], progress["step"], progress["total"]
    age = (
        f"finished {format_duration(age_s)} ago"
        if findings.is_finished(progress, checkpoints)
        else _format_age(age_s)
    )
    rows = [("device", session[0]["device"])]
    rows.append((progress["unit"], f"{step} of {total} ({step / max(total, 1):.1%}), {age}"))
    rows += [(what, progress[what]) for what in ("epoch", "loss") if progress.get(what)]
    for record in findings._of_kind(session, "train")[-1:]:
        speed = record["speed"]
        waited = f"waiting for data {speed['wait_s'] / max(speed['seconds'], 1e-9):.1%} of the time"
        rows.append(("speed", f"{speed['images_per_s']:.1f} samples per second, {waited}"))
    if left := findings._time_left(session, progress):
        rows.append(("left", f"about {left} of training, plus evaluations"))
    for record in findings._of_kind(session, "evaluation")[-1:]:
        scores = [f"{key} {value:.4g}" for key, value in record["scores"].items() if isinstance(value, float)]
        rows.append((f"scores of epoch {record['epoch'] + 1}", ", ".join(scores)))
    _, unexpected = findings._step_compilations(session)
    if unexpected:
        rows.append(("compiled again", "at step " + ", ".join(str(record["step"]) for record in unexpected)))
    steps = findings._checkpoint_steps(checkpoints)
    rows.append(("last checkpoint", f"step {steps[0]}" if steps else "none yet"))
    return Table(name, ("what", "now"), rows)


def _format_age(seconds):
    if seconds < 10:
        return "just now"
    age = f"{format_duration(seconds)} ago"
    return f"{age}: it waits, compiles, evaluates, or has died" if seconds > 60 else age
