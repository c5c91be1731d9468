"""`tpukit rent`: a training on a rented TPU or GPU of Google Cloud, through SkyPilot. Guide: docs/RENTING.md.

SkyPilot finds a zone with free capacity, creates the machine, runs the training, recovers from preemption and
deletes what it created. This module shows the cost first, writes SkyPilot's task file, starts it on request,
and explains the errors of `sky`. Every task that it writes deletes its machine when idle."""

import collections
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tpukit.devices.chips import CHIPS
from tpukit.host import files
from tpukit.host.errors import TpukitError, first_line
from tpukit.tasks import TASKS
from tpukit.tools import prices

GITHUB = "git+https://github.com/"
SOURCE = f"{GITHUB}TPUKIT_SOURCE"
IDLE_MINUTES = 10
PYTHON = "~/tpukit-python"  # a virtual environment: the images' own Python is older than tpukit needs
INSTALL = "pip install 'skypilot[gcp]>=0.14,<0.15', in a virtual environment of its own"
LOG_IN = (
    "gcloud auth login && gcloud auth application-default login && gcloud config set project PROJECT && sky"
    " check gcp"
)

# Code -> text in the output of `sky`, what to do. The first that matches is shown: causes stand above what
# follows from them. The texts are those of SkyPilot 0.14.1 and of the errors of Google Cloud that it passes
# on.
ERRORS = {
    "access": (
        (
            r"NoCloudAccessError|access is disabled|To enable access|no cloud"
            r" storage|RefreshError|Reauthentication|invalid_grant"
        ),
        f"SkyPilot has no access to Google Cloud, or the login has expired: {LOG_IN}",
    ),
    "quota": (
        r"(?i)quota\w* .*(exceeded|exhausted)|quotaExceeded|quotaFailure|found no quota",
        (
            "the project's quota is too small: https://console.cloud.google.com/iam-admin/quotas (separate"
            " for spot)"
        ),
    ),
    "capacity": (
        (
            r"no more capacity|RESOURCE_POOL_EXHAUSTED|insufficientCapacity|reserved capacity|while in state"
            r" PREEMPTED"
        ),
        (
            "no free machine of this type: try later, without --zone, with or without --spot, or --jobs,"
            " which waits for one"
        ),
    ),
    "permission": (
        r"PERMISSION_DENIED|SERVICE_DISABLED|Policy update access denied|access is unauthorized",
        (
            "the account lacks a permission, or the zone or API is closed to the project: `sky check gcp`"
            " names what is missing"
        ),
    ),
    "not-offered": (
        r"No resource satisfying|No launchable resource|invalid AcceleratorType|Catalog does not contain",
        "this type is not offered there: `sky gpus list TYPE --all-regions` lists where it is",
    ),
    "name-taken": (
        r"do not match the existing cluster",
        (
            "a machine with this name but of another type exists: choose another --name, or delete it with"
            " `sky down`"
        ),
    ),
}


class RentError(TpukitError):
    """SkyPilot is missing or refused. code: "not-installed", "invalid-task", one of ERRORS, or "unknown"."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Accelerator(NamedTuple):
    sky_name: str
    hardware: str
    count: int  # chips or cards
    image: str | None  # runtime version of a TPU; None for a GPU


def parse_accelerator(name):
    """The Accelerator of a type like v5litepod-8 or T4:1. Raises TpukitError for anything else."""
    if gpu := re.fullmatch(r"([A-Za-z][A-Za-z0-9-]{0,30}):([1-9][0-9]?)", name):
        return Accelerator(name, gpu[1], int(gpu[2]), None)
    tpu = re.fullmatch(r"([a-z0-9]+)-([1-9][0-9]{0,4})", name)
    chip = tpu and next((chip for chip in CHIPS if chip.cloud_type == tpu[1]), None)
    if not chip:
        types = ", ".join(f"{known.cloud_type}-NUMBER" for known in CHIPS)
        raise TpukitError(
            f"accelerator {name!r}: use a TPU ({types}; a v5e is called v5litepod) or a GPU with its count,"
            " T4:1"
        )
    if int(tpu[2]) % chip.cores_counted:
        raise TpukitError(f"accelerator {name!r}: the number counts cores, two per chip; use an even one")
    return Accelerator(f"tpu-{name}", chip.name, int(tpu[2]) // chip.cores_counted, chip.image)


def describe_cost(accelerator, *, spot=False, hours=1.0):
    """What the machine costs, in a sentence, by the list prices of prices.csv."""
    machine = parse_accelerator(accelerator)
    title = f"{accelerator}: {machine.count} x {machine.hardware}, {'spot' if spot else 'on demand'}"
    listed = [price for price in prices.read() if price.place == "Google Cloud"]
    price = next((price for price in listed if price.hardware.lower() == machine.hardware.lower()), None)
    usd = price and price.per_hour(chips=machine.count, spot=spot)
    if usd is None:
        return (
            f"{title}. Its price is not in tpukit's table; `sky gpus list"
            f" {machine.sky_name.partition(':')[0]}` shows it."
        )
    host = f" {prices.HOST_BILLED_SEPARATELY.capitalize()}." if price.excludes_host else ""
    return (
        f"{title}. About ${usd:.2f} per hour, ${usd * hours:.2f} for {hours:g} h (list price of"
        f" {price.as_of}).{host} Installing, and {IDLE_MINUTES} idle minutes until the machine is deleted,"
        " are billed too."
    )


def rent(
    accelerator: str,
    command: tuple[str, ...] = (),
    /,
    *,
    name: str = "tpukit",
    spot: bool = False,
    zone: str = "",
    hours: float = 4.0,
    data: str = "",
    bucket: str = "",
    jobs: bool = False,
    source: str = SOURCE,
    out: Path | None = None,
    start: bool = False,
    yes: bool = False,
):
    """Train on a rented TPU or GPU of Google Cloud, through SkyPilot: shows the cost, writes the task, starts
    it on request.

    The machine is deleted 10 minutes after the training ended. Example: tpukit rent v5litepod-8 --spot
    --bucket gs://my-runs
    --start -- train mshnet --epochs 100

    Args:
        accelerator: a TPU with its number of chips (v5litepod-8, v6e-4) or cores (v5p-8, v4-8), or a GPU with
        its count (T4:1). command: after `--`, what tpukit should run: train TASK [options]. name: name of the
        machine or job, and of the run's folder in the bucket. spot: spare capacity: cheaper, but can be taken
        away at any time. zone: use this zone alone (us-central1-a); by default SkyPilot chooses. hours: the
        training is stopped after this time, counted from each start; it saves a checkpoint first. data: a
        bucket (gs://...) that is copied to /data on the machine. bucket: a bucket (gs://...) that keeps a
        copy of the run; it resumes from there. Without one it is lost. jobs: a managed job (`sky jobs
        launch`), which is restarted when a spot machine is preempted. Needs --bucket. source: what pip
        installs tpukit from on the machine. out: the task file; by default NAME.yaml. start: start it now.
        yes: do not ask for confirmation.
    """
    if jobs and not bucket:
        raise TpukitError(
            "--jobs deletes the machine as soon as the training ends: give a --bucket, which keeps the run"
        )
    task = task_yaml(
        accelerator,
        command,
        name=name,
        spot=spot,
        zone=zone,
        hours=hours,
        data=data,
        bucket=bucket,
        source=source,
    )
    path = Path(out or f"{name}.yaml")
    print(describe_cost(accelerator, spot=spot, hours=hours))
    if jobs:
        print(
            "A managed job also has a small controller machine: about $0.25 per hour while jobs run"
            " (SkyPilot's figure)."
        )
    if not bucket:
        print("Without --bucket the run is lost when the machine is deleted: copy it first.")
    if path.is_dir():
        raise TpukitError(f"{path} is a folder: give a file as --out")
    if path.exists() and not (path.is_file() and path.read_text(errors="replace") == task):
        raise TpukitError(
            f"{path} exists and differs: delete it, give another --out, or start it as it is with `sky`"
        )
    files.write_atomic(path, task)
    checked = " (SkyPilot's parser accepts it)" if _parsed_by_skypilot(path) else ""
    print(f"task file: {path}{checked}")
    kind = ["jobs", "launch", "--name"] if jobs else ["launch", "--cluster"]
    words = [*kind, name, "--detach-run", "--yes", str(path.resolve())]
    if not start:
        print(f"Nothing was started. To start it: add --start, or {shlex.join(['sky', *words])}")
        return path
    _start(
        words,
        f"Rent {accelerator} for this?",
        yes,
        delete=f"sky jobs cancel -n {name}" if jobs else f"sky down {name}",
    )
    print(_next_commands(name, jobs, bucket))
    return path


def task_yaml(accelerator, command, *, name, spot, zone, hours, data, bucket, source):
    """SkyPilot's task file, as text. Raises TpukitError for values that cannot be used.

    Scalars are JSON strings, which are YAML. The scripts are block scalars, in which YAML interprets nothing:
    a line stays one line because every word from outside is printable, and `shlex` quotes it for the shell.
    """
    machine = parse_accelerator(accelerator)
    _check_words(command, source)
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?", name):
        raise TpukitError(
            f"name {name!r}: use lower-case letters, digits and hyphens, a letter first, at most 30"
        )
    if zone and not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z0-9]+", zone):
        raise TpukitError(f"zone {zone!r}: a zone has a name like us-central1-a, with its last letter")
    if not (math.isfinite(hours) and 0 < hours <= 24 * 7):
        raise TpukitError(f"hours {hours:g}: use more than 0 and at most {24 * 7}, a week")
    for address in filter(None, (data, bucket)):
        if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", address):
            raise TpukitError(f"bucket {address!r}: use the address of a Google Cloud bucket, gs://NAME")
    infra = f"gcp/{zone.rpartition('-')[0]}/{zone}" if zone else "gcp"
    arguments = f"\n  accelerator_args: {{runtime_version: {_yaml(machine.image)}}}" if machine.image else ""
    torch = "'torch==2.9.0' 'torch_xla[tpu]==2.9.0'" if machine.image else "torch"
    training = shlex.join(command)
    mounts = "file_mounts:\n" if data or bucket else ""
    if data:
        mounts += f"  /data: {_yaml(data)}\n"
    if bucket:
        mounts += f"  /backup: {{source: {_yaml(bucket)}, mode: MOUNT}}\n"
        training += f" --backup /backup/{name}"
    return f"""\
name: {_yaml(name)}
resources:
  infra: {_yaml(infra)}
  accelerators: {_yaml(machine.sky_name)}{arguments}
  use_spot: {str(spot).lower()}
  autostop:
    idle_minutes: {IDLE_MINUTES}
    wait_for: jobs  # an open ssh session does not keep the machine
    down: true  # deleted, not stopped
{mounts}setup: |
  set -e
  [ -x ~/.local/bin/uv ] || pip install --quiet --user uv
  ~/.local/bin/uv venv --quiet --allow-existing --python 3.12 {PYTHON}
  ~/.local/bin/uv pip install --quiet --python {PYTHON}/bin/python {torch} {shlex.quote(source)}
run: |
  cd ~
  timeout --kill-after=10m {math.ceil(hours * 3600)}s {PYTHON}/bin/tpukit {training}
"""


def _yaml(text):
    return json.dumps(text, ensure_ascii=False)


def _check_words(command, source):
    """Raises TpukitError for what is not a training, for words of several lines, and for a source that pip
    cannot install."""
    if len(command) < 2 or command[0] != "train" or command[1] not in TASKS:
        raise TpukitError(f"give the training after `--`: train TASK [options]. Tasks: {', '.join(TASKS)}")
    for word in (*command, source):
        if not word.isprintable():
            raise TpukitError(f"{word!r} has characters that cannot be printed, such as a line break")
    unfilled = source.startswith(GITHUB) and "/" not in source.removeprefix(GITHUB)
    if unfilled or not source or source.startswith("-"):
        raise TpukitError(
            f"source {source!r} names no repository to install tpukit from on the machine: give --source"
            f" {GITHUB}OWNER/NAME"
        )


def _parsed_by_skypilot(path):
    """Let SkyPilot's own parser read the file. False where SkyPilot is not installed in this environment."""
    try:
        from sky import Task
    except ImportError:
        return False
    try:
        Task.from_yaml(str(path))
    except Exception as error:  # many types, none of them public
        raise RentError("invalid-task", f"SkyPilot's parser refuses {path}: {first_line(error)}") from error
    return True


def _start(words, question, yes, *, delete):
    """Ask, then run `sky`, whose output is shown as it comes. Raises RentError that explains it where it
    fails."""
    if not shutil.which("sky"):
        raise RentError(
            "not-installed", f"SkyPilot is not installed (no `sky` on PATH): {INSTALL}. Then: {LOG_IN}"
        )
    if not yes:
        if not sys.stdin or not sys.stdin.isatty():
            raise TpukitError(
                "cannot ask for confirmation (no terminal), so nothing was started: confirm with --yes"
            )
        print(f"{question} [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise TpukitError("nothing was started")
    last = collections.deque(maxlen=500)
    find_and_delete = (
        f"A machine that it created costs money until it is deleted: sky status --refresh; {delete}"
    )
    try:
        with subprocess.Popen(
            ["sky", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                last.append(line)
    except KeyboardInterrupt:
        print(
            f"\ninterrupted, but SkyPilot may continue in the background. {find_and_delete}", file=sys.stderr
        )
        raise
    if process.returncode:
        code, advice = explain("".join(last))
        raise RentError(code, f"sky ended with exit code {process.returncode}: {advice}. {find_and_delete}")


def explain(output):
    """Code and advice for the output of a `sky` that failed."""
    for code, (pattern, advice) in ERRORS.items():
        if re.search(pattern, output):
            return code, advice
    return "unknown", "its output above says why; `sky check gcp` examines the access to Google Cloud"


def _next_commands(name, jobs, bucket):
    copy = f"gcloud storage cp -r {bucket}/{name} outputs/" if bucket else f"scp -r {name}:outputs ."
    if jobs:
        commands = [
            f"sky jobs logs -n {name}",
            "sky jobs queue",
            f"sky jobs cancel -n {name}",
            "sky status -u --refresh",
            copy,
        ]
    else:
        commands = [f"sky logs {name}", "sky status --refresh", f"ssh {name}", copy, f"sky down {name}"]
    title = (
        "Next commands, explained in tpukit's repository on the page 'Renting a TPU or a GPU' of the docs:"
    )
    return "\n".join([title, *(f"  {command}" for command in commands)])
