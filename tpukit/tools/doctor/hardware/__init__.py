"""`tpukit doctor --hardware`: what tpukit assumes of an accelerator and no CPU can show.

Each check is a function whose docstring is what is assumed. It runs in a process of its own, with a limit:
one that hangs or fails costs itself alone. What they find is one JSON file, without names, paths and data,
that docs/hardware/ of tpukit's repository collects."""

import dataclasses
import getpass
import json
import os
import re
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tpukit import __version__
from tpukit.devices.chips import find_chip
from tpukit.host import environment, files
from tpukit.host.environment import Environment, detect
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import Table, printable
from tpukit.tools.child import last_line, run_python
from tpukit.tools.doctor.hardware import checks
from tpukit.tools.doctor.hardware.checks import FAIL, HARDWARE, SKIP, Outcome

FORMAT = "tpukit hardware 1"
REPORT = "hardware.json"  # in the machine's output folder
BUDGET_S = 600.0
LONGEST_TEXT = 400  # characters of an outcome
CHILD = "import sys; from tpukit.tools.doctor import hardware; hardware.answer(sys.argv[1])"
# On a processor the checks of a TPU are rehearsed by torch_xla, those of a GPU without it.
REHEARSED_ON = {"xla": "tpu", "cpu": "cuda"}
# Variables that decide how a TPU or XLA works; a host's others can hold secrets.
VARIABLES = ("PJRT_DEVICE", "TPU_ACCELERATOR_TYPE", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "COLAB_RELEASE_TAG")
PACKAGES = (*environment.PACKAGES, "jaxlib", "numpy", "triton")


@dataclasses.dataclass(frozen=True)
class HardwareCheck:
    """A check, and where it applies. function: its docstring says what it assumes. limit_s: seconds that it
    may take. by_torch_xla: whether it is about torch_xla alone, of a TPU's two backends."""

    function: Callable[[Environment], Outcome]
    limit_s: float
    accelerators: tuple[str, ...] = HARDWARE
    needs_several: bool = False
    by_torch_xla: bool = False

    @property
    def assumes(self) -> str:
        """One sentence."""
        return " ".join((self.function.__doc__ or "").split())

    def reason_to_skip(self, env: Environment) -> str | None:
        """Why the check does not apply to this machine, or None."""
        if self.needs_several and env.accelerator in HARDWARE and env.cores < 2:
            return "one chip is here"
        if self.by_torch_xla and env.uses_torch_tpu:
            return "it is about torch_xla, and this TPU is reached by torch_tpu"
        return None


# The most telling come first: what the budget does not reach is skipped.
CHECKS = dict(
    opens=HardwareCheck(checks.opens, 150),
    step=HardwareCheck(checks.step, 150),
    training=HardwareCheck(checks.training, 180),
    all_reduce=HardwareCheck(checks.all_reduce, 150, needs_several=True),
    all_cores=HardwareCheck(checks.all_cores, 360, needs_several=True),
    attention=HardwareCheck(checks.attention, 120, ("cuda",)),
    attention_kernels=HardwareCheck(checks.attention_kernels, 240, ("tpu",), by_torch_xla=True),
    replays=HardwareCheck(checks.replays, 120),
    run_ahead=HardwareCheck(checks.run_ahead, 120, ("tpu",)),
    precision=HardwareCheck(checks.precision, 120),
    speed=HardwareCheck(checks.speed, 90),
    overflow=HardwareCheck(checks.overflow, 90, ("cuda",)),
    copies=HardwareCheck(checks.copies, 60, ("cuda",)),
    micro_batches=HardwareCheck(checks.micro_batches, 120, ("tpu",)),
    libtpu_flag=HardwareCheck(checks.libtpu_flag, 90, ("tpu",), by_torch_xla=True),
    out_of_memory=HardwareCheck(checks.out_of_memory, 150),
)


def check_hardware(
    env: Environment,
    *,
    only: Iterable[str] = (),
    budget_s: float = BUDGET_S,
    path: Path | None = None,
    rehearse: bool = False,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Check the accelerator that `env` has, in processes that open it. Returns the report, see `describe`.

    only: names of `CHECKS`; by default all that are for this accelerator. budget_s: seconds for all of them;
    the rest is skipped. path: gets the report after each check, so that a session that dies leaves it; by
    default `REPORT` in the machine's output folder. rehearse: without an accelerator, try the checks
    themselves, in small; the report says so. log: gets a line before and after each check. Raises TpukitError
    where there is nothing to check."""
    kind = REHEARSED_ON.get(env.accelerator, env.accelerator)
    fitting = [name for name, check in CHECKS.items() if kind in check.accelerators]
    names = list(only) or fitting
    if env.accelerator not in HARDWARE and not rehearse:
        raise TpukitError(
            "no TPU and no GPU is here to be checked; --rehearse tries the checks themselves on the processor"
            f" ({environment.TPU_MENU[env.host]})"
        )
    if unknown := [name for name in names if name not in fitting]:
        raise TpukitError(f"no check {', '.join(unknown)} of this accelerator: it has {', '.join(fitting)}")
    path = path or env.outputs / REPORT
    if path.exists() and FORMAT not in path.read_text(errors="replace")[:100]:
        raise TpukitError(f"{path} is there already, and is no report: name another file with --report")
    path.parent.mkdir(parents=True, exist_ok=True)
    report, started = describe(env), time.monotonic()
    for number, name in enumerate(names, 1):
        log(f"{number}/{len(names)} {name}: {CHECKS[name].assumes}")
        began = time.monotonic()
        outcome = _run(name, env, budget_s - (began - started))
        outcome = dataclasses.replace(outcome, text=scrub(outcome.text))
        row = dict(name=name, **dataclasses.asdict(outcome), seconds=round(time.monotonic() - began, 1))
        report["checks"].append(row)
        files.write_atomic(path, json.dumps(report, indent=1) + "\n")
        log(f"    {row['outcome']} in {row['seconds']} s: {row['text']}")
    log(f"the report is {path}")
    return report


def describe(env: Environment) -> dict[str, Any]:
    """A report without its checks: dict of JSON. rehearsal: whether no accelerator was here, so that nothing
    in it was seen on hardware. checks: dicts of an `Outcome`, name and seconds."""
    chip = find_chip(env.device_name)
    versions = {name: version for name in PACKAGES if (version := environment.version_of(name))}
    return dict(
        format=FORMAT,
        tpukit=__version__,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        rehearsal=env.accelerator not in HARDWARE,
        host=env.host,
        accelerator=env.accelerator,
        backend=env.tpu_backend if env.accelerator in ("tpu", "xla") else None,
        chip=chip.name if chip else scrub(env.device_name),
        chips=env.cores,
        python=env.python,
        versions=versions,
        variables={name: scrub(os.environ[name]) for name in VARIABLES if os.environ.get(name)},
        checks=[],
    )


def scrub(text: str) -> str:
    """The text without what tells whose machine it came from: paths, addresses, names of user and host."""
    text = printable(" ".join(text.split()))
    for folder in (Path.home(), Path.cwd(), tempfile.gettempdir()):  # whose names may have blanks
        if len(str(folder)) > 1:
            text = text.replace(str(folder), "/path")
    text = re.sub(r"\w+://\S+|\b[\w.+-]+@[\w.-]+|\b\d+(?:\.\d+){3}:\d+", "(address)", text)
    text = re.sub(r"""(['"])[~/][^'"]*\1""", "(path)", text)  # may hold blanks
    # Elsewhere a blank belongs to a path where a slash follows in the next word.
    text = re.sub(
        r"(?:(?<![\w.)])(?:~/|/(?=[\w.-]))|\b[A-Za-z]:\\)(?:[^\s'\",;:()]|\s(?=[^\s'\",;:()]*[/\\]))*",
        "(path)",
        text,
    )
    try:
        names = {getpass.getuser(), socket.gethostname(), *socket.gethostname().split(".")}
    except (OSError, KeyError):  # a user without a name
        names = {socket.gethostname()}
    for name in sorted(filter(None, names - {"root"}), key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", "(name)", text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def table(report: dict[str, Any]) -> Table:
    """The outcomes of a report as a `Table`."""
    rows = [
        (row["name"], row["outcome"], f"{row['seconds']:.1f} s", CHECKS[row["name"]].assumes, row["text"])
        for row in report["checks"]
    ]
    kind = "Rehearsal, not seen on hardware" if report["rehearsal"] else "Hardware"
    title = f"{kind}: {report['chips']} x {report['chip']}"
    return Table(title, ("check", "outcome", "time", "assumed", "found"), rows)


def has_failed(report: dict[str, Any]) -> bool:
    """Whether a check found something else than it assumed."""
    return any(row["outcome"] == FAIL for row in report["checks"])


def _run(name: str, env: Environment, left_s: float) -> Outcome:
    """A check's outcome, from a process of its own. left_s: seconds of the budget."""
    check = CHECKS[name]
    if reason := check.reason_to_skip(env):
        return Outcome(SKIP, reason)
    if left_s <= 0:
        return Outcome(SKIP, "over the budget: a larger --budget, or --only with its name, runs it")
    limit_s = min(check.limit_s, left_s)
    try:
        ran = run_python("-c", CHILD, name, timeout_s=limit_s)
    except subprocess.TimeoutExpired:
        if limit_s < check.limit_s:
            return Outcome(SKIP, f"over the budget, which ended {limit_s:.0f} s after the check began")
        return Outcome(FAIL, f"it did not end within {limit_s:.0f} s, and was ended")
    answer = ran.stdout.strip().rpartition("\n")[2]  # the libraries may print too
    if not answer.startswith("{"):
        return Outcome(FAIL, f"its process ended without an answer: {last_line(ran)}")
    return Outcome(**json.loads(answer))


def answer(name: str) -> None:
    """In a check's process: print its outcome as the last line, and end without taking the device down, in
    which some libraries crash."""
    from tpukit.launching.supervisor import end_with_parent

    end_with_parent(os.getppid())  # a chip that is left open is lost for the session
    try:
        outcome = CHECKS[name].function(detect())
    except ModuleNotFoundError as error:  # of a leaf that was cut off, or of an extra
        outcome = Outcome(SKIP, first_line(error))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(frame.filename).name} line {frame.lineno}"
        outcome = Outcome(FAIL, f"{type(error).__name__}: {first_line(error)} ({at})")
    print(f"\n{json.dumps(dataclasses.asdict(outcome))}", flush=True)
    os._exit(0)
