"""Does what a chain needs: sends a session, waits for it, brings what it left, and sends the next one.

outputs/sent/NAME/
  chain.json        written before and after each push: whoever is interrupted goes on from there
  notebook.ipynb    the user's, if one is sent
  push/             the last session's notebook
  runs/             the runs, as far as they have come back whole
  sessions/3/       what else the third session left, and what it printed, log.txt"""

import contextlib
import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from tpukit import tasks
from tpukit.host import files
from tpukit.host.errors import Damaged, TpukitError
from tpukit.host.json_types import has_type
from tpukit.host.tables import Table, printable
from tpukit.reporting import findings
from tpukit.runs import checkpoints
from tpukit.runs.run import Run
from tpukit.tools.send import Service, Session, State, Unreachable
from tpukit.tools.send import chain as chains
from tpukit.tools.send import session as notebooks
from tpukit.tools.send.chain import Chain, Next

PAUSES_S = (5.0, 20.0, 60.0, 300.0)  # before a service that did not answer is asked again
LONGEST_POLL_S = 60.0
STOPPED = "stopped"  # a file of a chain's folder, which `tpukit send stop` makes while another follows
REPORT_FORM = "https://github.com/TPUKIT_SOURCE/issues/new?template=hardware.yml"
LEAST_HOURS = 0.5  # of quota that are worth a session

T = TypeVar("T")
Say = Callable[[str], None]


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Context manager: keep others from working on a chain. Raises TpukitError while one does."""
    if not (folder / chains.FILE).exists():
        chains.read(folder)  # which says what there is
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.exclusive_lock(folder / ".lock"))
        except TpukitError as error:
            raise TpukitError(
                f"another `tpukit send` is at work on {folder.name}: end it, or wait"
            ) from error
        yield


def follow(folder: Path, service: Service, say: Say, *, push: bool = True) -> Next:
    """Go on with a chain until nothing is to be done, and return why. push=False: bring what the last session
    left, if it has ended, and send nothing."""
    chain, again, is_stopped = chains.read(folder), push, (folder / STOPPED).exists
    while True:
        last = chain.sent[-1] if chain.sent else None
        if last and last.phase == "intended" and push:
            if is_stopped() and service.state(last.kernel).word == "unknown":
                return Next("end", "stopped by you")
            _deliver(folder, chain, service, say, is_new=False)
        if last and last.phase == "sent":
            state, printed = _watch(service, last, say, wait=push)
            if state.word in ("queued", "running"):
                return Next("end", state.word)
            _collect(folder, chain, service, state, printed, say)
            again = False
        following = chains.decide(chain, again=again, stopped=is_stopped())
        if following.act != "push" or not push:
            return following
        if waits := _push(folder, chain, service, following.setting, say):
            return waits
        again = False


def send(
    folder: Path, chain: Chain, service: Service, contents: Mapping[str, bytes], say: Say
) -> Next | None:
    """Send the first session of a new chain. Returns why it was not sent, if so.

    contents: files of the chain's folder, name -> content."""
    service.kernel(chain.name)  # who am I, before anything is written
    with files.explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        files.write_atomic(folder / name, content)
    chains.write(folder, chain)
    with lock(folder):
        return _push(folder, chain, service, 0, say)


def _patiently(call: Callable[[], T], say: Say) -> T:
    for pause_s in (*PAUSES_S, None):
        try:
            return call()
        except Unreachable as error:
            if pause_s is None:
                raise
            say(f"{error}; once more in {pause_s:.0f} s")
            time.sleep(pause_s)
    raise AssertionError


def _push(folder: Path, chain: Chain, service: Service, setting: int, say: Say) -> Next | None:
    """Send one more session, if the quota allows."""
    hours = chain.hours
    if chain.accelerator != "none":
        quota = _patiently(lambda: service.quota(chain.accelerator), say)
        if quota and quota.left_h < LEAST_HOURS:
            has = f"{quota.left_h:.1f} of {quota.total_h:.0f} hours are left"
            return Next("end", f"waiting for quota until {quota.renewed}: {has}; `follow` then goes on")
        hours = min(hours, quota.left_h) if quota else hours
    kernel = service.kernel(f"tpukit-{chain.name}-{len(chain.sent) + 1}")
    if _patiently(lambda: service.state(kernel), say).word != "unknown":
        raise TpukitError(
            f"{service.url(kernel)} is there already and not of this chain: take another --name"
        )
    source = next((s.kernel for s in reversed(chain.of_setting(setting)) if s.brought), None)
    chain.sent.append(Session(kernel, hours, setting, source))
    chains.write(folder, chain)
    _deliver(folder, chain, service, say, is_new=True)
    return None


def _deliver(folder: Path, chain: Chain, service: Service, say: Say, *, is_new: bool) -> None:
    """Push the session that chain.json says is to be pushed. is_new: it was not tried yet; else it may be
    there although nobody heard so."""
    last = chain.sent[-1]
    notebooks.write(folder / "push", chain, last)
    tries = itertools.count(0 if is_new else 1)

    def push():
        if next(tries) == 0 or service.state(last.kernel).word == "unknown":
            service.push(folder / "push", last)

    _patiently(push, say)
    last.phase = "sent"
    chains.write(folder, chain)
    say(f"{chains.where(chain)}, at most {last.hours:.3g} h: {service.url(last.kernel)}")


def _watch(service: Service, last: Session, say: Say, *, wait: bool) -> tuple[State, int]:
    """Wait for a session's end and print its log. Returns its state, and the number of lines printed."""
    printed, word, pause_s, doubts = 0, "", 1.0, iter((1, 2))
    while True:
        state = _patiently(lambda: service.state(last.kernel), say)
        if state.word == "unknown" and next(doubts, None):  # one that was just sent may not be listed yet
            time.sleep(2.0)
            continue
        if state.word not in ("queued", "running") or not wait:
            return state, printed
        if state.word != word:
            word, pause_s = state.word, 1.0
            say(f"{last.kernel} is {word}")
        if word == "running":
            # From its first line, each time.
            for line in itertools.islice(service.log(last.kernel, follow=True), printed, None):
                printed += 1
                say(f"  {line}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)


def _collect(folder: Path, chain: Chain, service: Service, state: State, printed: int, say: Say) -> None:
    """Bring what a session left, check it, and write down how it ended."""
    last, place = chain.sent[-1], folder / "sessions" / str(len(chain.sent))
    part = place.with_suffix(".part")

    def bring():
        shutil.rmtree(part, ignore_errors=True)
        with files.explain_unwritable(folder):
            part.mkdir(parents=True)
        if state.word != "unknown":
            service.fetch(last.kernel, part)

    _patiently(bring, say)
    if state.word != "unknown":
        lines = list(service.log(last.kernel, follow=True))
        for line in lines[printed:]:
            say(f"  {line}")
        files.write_atomic(part / "log.txt", "".join(f"{line}\n" for line in lines))
    last.ending, last.error, last.repeats = _ending(part / "session.json", state)
    earlier = [session for session in chain.of_setting(last.setting) if session is not last]
    last.step = max((session.step for session in earlier), default=0)
    last.epochs = max((session.epochs for session in earlier), default=0)
    for config in sorted(part.glob("outputs/*/config.json")):
        if name := _run_name(chain, last.setting, config.parent.name):
            try:
                step, epochs = _take_over(config.parent, folder / "runs" / name, chain.task)
            except TpukitError as error:
                say(f"what {last.kernel} left of the run {name} is not taken: {error}")
                continue
            last.brought = True
            last.step, last.epochs = max(last.step, step), max(last.epochs, epochs)
    shutil.rmtree(place, ignore_errors=True)
    part.rename(place)
    last.phase = "ended"
    chains.write(folder, chain)


def _ending(path: Path, state: State) -> tuple[str, str, bool]:
    """(ending, error, whether that repeats): what session.json says, or, without a valid one, the service."""
    with contextlib.suppress(OSError, ValueError):
        values = files.parse_with_crc32(path.read_bytes()) if path.stat().st_size < 1 << 16 else {}
        is_valid = has_type(values, dict(ending=str, error=str, repeats=bool))
        if is_valid and values["ending"] in ("done", "stopped", "failed", "no accelerator"):
            return values["ending"], printable(values["error"])[:500], values["repeats"]
    message = "it is there no more" if state.word == "unknown" else " ".join(state.message.split())[:500]
    if state.word == "cancelled":
        return "cancelled", message, False
    if "memory" in message.lower():
        return "failed", message, True
    return "lost", message, False


def _run_name(chain: Chain, setting: int, found: str) -> str:
    """The folder below runs/ for a run of this name in a session; empty for one that is not the chain's."""
    if chain.kind == "task":
        return found if found == chain.run_name(setting) else ""
    several = f"-{setting + 1}" if len(chain.settings) > 1 else ""
    return f"{found}{several}" if printable(found) == found and found[0] != "." else ""


def _take_over(new: Path, place: Path, task: str) -> tuple[int, int]:
    """Let a run that came back take the place of the one that is here. Returns how far it is. Raises
    TpukitError where it is damaged, another run, or less far; the one that is here then stays."""
    step, epochs = progress(new)
    run_id, before = Run(new).config.get("id"), place.with_name(f".{place.name}.before")
    if task and Run(new).config["task"] != task:
        raise TpukitError(f"it is of the task {Run(new).config['task']}")
    if before.exists() and not place.exists():  # a kill came between the two renames
        before.rename(place)
    if place.exists():
        if Run(place).config.get("id") != run_id:
            raise TpukitError("it does not continue the run that is here")
        if progress(place)[0] > step:
            raise TpukitError(f"it stands at step {step}, and the one here is further")
        shutil.rmtree(before, ignore_errors=True)
        place.rename(before)
    place.parent.mkdir(exist_ok=True)
    new.rename(place)
    shutil.rmtree(before, ignore_errors=True)
    return step, epochs


def progress(path: Path) -> tuple[int, int]:
    """(step, epochs) that a run can resume from: its newest whole checkpoint. Raises TpukitError where it has
    none, or is no run."""
    run = Run.find(path)
    for entry in run.checkpoints():
        with contextlib.suppress(Damaged):
            checkpoints.check(path / "checkpoints" / entry["file"], entry)
            saved = [record for record in run.records("epoch") if record["step"] <= entry["step"]]
            epochs = [record["epoch"] + 1 for record in saved if has_type(record.get("epoch"), int)]
            return entry["step"], max(epochs, default=0)
    raise TpukitError("it has no whole checkpoint")


def results(folder: Path, chain: Chain) -> Iterator[Table | str]:
    """What a chain has brought, for its user: runs, a sweep's in a table, or a report."""
    if chain.kind == "check":
        for report in sorted(folder.glob("sessions/*/outputs/hardware.json"))[-1:]:
            files.copy_atomic(report, folder / report.name)
            yield f"report: {folder / report.name}. Please send it: {REPORT_FORM}"
        return
    runs = sorted(path.parent for path in folder.glob("runs/*/config.json"))
    if len(chain.settings) > 1 and runs:
        yield _sweep_table(folder, chain)
    for run in runs:
        yield f"run: {run}  (tpukit show {run})"


def _sweep_table(folder: Path, chain: Chain) -> Table:
    """The runs of a sweep, the best first."""
    names = dict.fromkeys(name for settings in chain.settings for name in settings)
    varied = [name for name in names if len({str(each.get(name)) for each in chain.settings}) > 1]
    rows = []
    for number, settings in enumerate(chain.settings):
        ended = [session for session in chain.of_setting(number) if session.phase == "ended"]
        last = ended[-1] if ended else None
        score = max(map(_best_score, folder.glob(f"runs/*-{number + 1}")), default=-math.inf)
        shown = f"{score:.4g}" if score > -math.inf else ""
        values = [settings.get(name) for name in varied]
        rows.append(
            (score, [*values, last.epochs if last else 0, shown, last.ending if last else "not sent"])
        )
    rows.sort(key=lambda row: -row[0])
    return Table(
        "Sweep, the best first", (*varied, "epochs", "best score", "ended"), [row for _, row in rows]
    )


def _best_score(path: Path) -> float:
    """The score of the evaluation whose weights a run keeps."""
    run = Run.find(path)
    kept = [r for r in findings.valid_records(run.records("evaluation")) if r.get("kept")]
    task = run.config["task"]
    score = kept[-1]["scores"].get(tasks.find(task).score) if kept and task in tasks.TASKS else None
    return float(score) if score is not None and has_type(score, float) else -math.inf
