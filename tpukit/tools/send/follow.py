"""Does what a chain needs: sends a session, waits for it, brings what it left, and sends the next one.

outputs/sent/NAME/
  chain.json        written before and after each push: whoever is interrupted goes on from there
  notebook.ipynb    the user's, if one is sent
  push/             the last session's notebook
  runs/             the runs, as far as they have come back whole; of a sweep in 1/, 2/ ...
  sessions/3/       what else the third session left, and what it printed, log.txt"""

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from tpukit.host import files
from tpukit.host.errors import Damaged, TpukitError
from tpukit.host.json_types import has_type
from tpukit.host.tables import printable
from tpukit.runs import checkpoints
from tpukit.runs.backup import Backup
from tpukit.runs.run import Run
from tpukit.tools import pack
from tpukit.tools.send import Ending, Session, State, Unreachable
from tpukit.tools.send import chain as chains
from tpukit.tools.send import session as notebooks
from tpukit.tools.send.chain import Chain
from tpukit.tools.send.service import Service

PAUSES_S = (5.0, 20.0, 60.0, 300.0)  # before a service that did not answer is asked again
POLL_S = 20.0
STOPPED = "stopped"  # a file of a chain's folder, which `tpukit send stop` makes while another follows
LEAST_HOURS = 0.5  # of quota that are worth a session

T = TypeVar("T")
Say = Callable[[str], None]


def follow(folder: Path, service: Service, say: Say, *, push: bool = True, wait: bool = True) -> str:
    """Go on with a chain until nothing is to be done, and return why, in words.

    push=False: bring what the last session left, if it has ended, and send nothing. wait=False: send one
    session, and return."""
    chain, again = chains.read(folder), push
    # Now: another version may be installed while a session runs.
    library = pack.cell(pack.library()) if push else {}
    while True:
        last = chain.sent[-1] if chain.sent else None
        if last and last.state == "sent":
            state, lines = _watch(service, last, say, wait=push)
            if state.word in ("queued", "running"):
                return state.word
            _collect(folder, chain, service, state, lines, say)
            again = False
        elif last and last.state == "intended" and service.state(last.kernel).word != "unknown":
            last.state = "sent"  # its push was not heard of
            chains.write(folder, chain)
            continue
        is_intended = last is not None and last.state == "intended"
        following = last.setting if last and is_intended else chains.decide(chain, again=again)
        if isinstance(following, str):
            return following
        if (folder / STOPPED).exists():
            return "stopped by you"
        if not push:
            return "the next session can be sent: `follow`"
        if not is_intended and (waits := _intend(folder, chain, service, following, say)):
            return waits
        _push(folder, chain, service, library, say)
        if not wait:
            return "sent"
        again = False


def send(folder: Path, chain: Chain, service: Service, contents: Mapping[str, bytes], say: Say) -> str:
    """Send the first session of a new chain. Returns "sent", or why it was not.

    contents: files of the chain's folder, name -> content."""
    service.kernel(chain.name)  # who am I, before anything is written
    chains.write(folder, chain)
    for name, content in contents.items():
        files.write_atomic(folder / name, content)
    with files.exclusive_lock(folder / ".lock"):
        return follow(folder, service, say, wait=False)


def _patiently(say: Say, call: Callable[[], T]) -> T:
    for pause_s in PAUSES_S:
        try:
            return call()
        except Unreachable as error:
            say(f"{error}; once more in {pause_s:.0f} s")
            time.sleep(pause_s)
    return call()


def _intend(folder: Path, chain: Chain, service: Service, setting: int, say: Say) -> str:
    """Write down that one more session is to be sent; or return why it has to wait."""
    hours = chain.hours
    quota = _patiently(say, lambda: service.quota(chain.accelerator)) if chain.accelerator != "none" else None
    if quota:
        if quota.left_h < LEAST_HOURS:
            has = f"{quota.left_h:.1f} of {quota.total_h:.0f} hours are left"
            return f"waiting for quota until {quota.renewed}: {has}; `follow` then goes on"
        hours = min(hours, quota.left_h)
    kernel = service.kernel(f"tpukit-{chain.name}-{len(chain.sent) + 1}")
    if _patiently(say, lambda: service.state(kernel)).word != "unknown":
        raise TpukitError(
            f"{service.url(kernel)} is there already and not of this chain: take another --name"
        )
    source = next((s.kernel for s in reversed(chain.sent_for(setting)) if s.step), None)
    chain.sent.append(Session(kernel, hours, setting, source))
    chains.write(folder, chain)
    return ""


def _push(folder: Path, chain: Chain, service: Service, library: notebooks.Cell, say: Say) -> None:
    last = chain.sent[-1]
    notebooks.write(folder / "push", chain, last, library)

    def push():
        if service.state(last.kernel).word == "unknown":  # else it has arrived, and the answer was lost
            service.push(folder / "push", last, folder / chain.runs(last.setting))

    _patiently(say, push)
    last.state = "sent"
    chains.write(folder, chain)
    say(f"{chains.where(chain)}, at most {last.hours:.3g} h: {service.url(last.kernel)}")


def _watch(service: Service, last: Session, say: Say, *, wait: bool) -> tuple[State, list[str]]:
    """Wait for a session's end and print its log. Returns its state and the lines."""
    lines, word, doubts = [], "", 2
    while True:
        state = _patiently(say, lambda: service.state(last.kernel))
        if state.word == "unknown" and doubts:  # one that was just sent may not be listed yet
            doubts -= 1
            time.sleep(2.0)
            continue
        is_over = state.word not in ("queued", "running")
        if not (wait or is_over):
            return state, lines
        if state.word != word and not is_over:
            say(f"{last.kernel} is {state.word}")
        word = state.word
        if word not in ("queued", "unknown"):
            # From its first line, each time.
            for line in itertools.islice(service.log(last.kernel), len(lines), None):
                lines.append(line)
                say(f"  {line}")
        if is_over:
            return state, lines
        time.sleep(POLL_S)


def _collect(folder: Path, chain: Chain, service: Service, state: State, lines: list[str], say: Say) -> None:
    """Bring what a session left, check it, and write down how it ended."""
    last, place = chain.sent[-1], folder / "sessions" / str(len(chain.sent))

    def bring():
        shutil.rmtree(place, ignore_errors=True)
        with files.explain_unwritable(folder):
            place.mkdir(parents=True)
        if state.word != "unknown":
            service.fetch(last.kernel, place)

    _patiently(say, bring)
    files.write_atomic(place / "log.txt", "".join(f"{line}\n" for line in lines))
    ending, last.error = ending_of(place / "outputs/session.json", state)
    for config in sorted(place.glob("outputs/*/config.json")):
        run = config.parent
        try:
            step, epochs = take(run, folder / chain.runs(last.setting))
            last.step, last.epochs = max(last.step, step), max(last.epochs, epochs)
        except TpukitError as error:
            say(f"what {last.kernel} left of the run {run.name} is not taken: {error}")
    last.state = ending
    chains.write(folder, chain)


def ending_of(path: Path, state: State) -> tuple[Ending, str]:
    """How a session ended, with its error: by its session.json or, without a valid one, by the service."""
    message = "it is there no more" if state.word == "unknown" else state.message
    ending: Ending = "cancelled" if state.word == "cancelled" else "lost"
    if "memory" in message.lower():
        ending = "failed"
    with contextlib.suppress(OSError, ValueError):
        values = files.parse_with_crc32(path.read_bytes()) if path.stat().st_size < 1 << 16 else {}
        if has_type(values, dict(ending=Ending, error=str)):
            ending, message = values["ending"], values["error"]
    return ending, " ".join(printable(message).split())[:500]


def take(path: Path, folder: Path) -> tuple[int, int]:
    """Bring the run of its name in a folder up to the one that came back. Returns (step, epochs) that it can
    be resumed from. Raises TpukitError where what came back is no run, is damaged, another, or less far."""
    if printable(path.name) != path.name or path.name.startswith("."):
        raise TpukitError("it has a name that cannot be printed, or begins with a dot")
    run = Run.find(path)
    for entry in run.checkpoints():
        with contextlib.suppress(Damaged):
            checkpoints.check(path / "checkpoints" / entry["file"], entry)
            with files.explain_unwritable(folder):
                Backup(folder / path.name).copy(run)
            shutil.rmtree(path / "checkpoints")  # the rest of what it left is small
            saved = [record for record in run.records("epoch") if record["step"] <= entry["step"]]
            epochs = [record["epoch"] + 1 for record in saved if has_type(record.get("epoch"), int)]
            return entry["step"], max(epochs, default=0)
    raise TpukitError("it has no whole checkpoint")
