"""A chain of sessions: what chain.json holds, and what follows what."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.json_types import has_type
from tpukit.tools.send import Session

FILE = "chain.json"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
LONGEST = 36  # of a name: a kernel's, with tpukit- and a number, has at most 50 characters
ACCELERATORS = ("tpu", "gpu", "none")
KINDS = ("task", "notebook", "check")
NEEDED = dict(  # for an accelerator
    kaggle="Kaggle gives one to an account with a verified phone number and hours left, when one is free",
    colab="Colab gives one when one is free, to some accounts only",
)
PHASES = ("intended", "sent", "ended")
ENDINGS = ("", "done", "stopped", "failed", "no accelerator", "cancelled", "lost")
PATTERNS = dict(kernel=r"(\w[\w-]*/)?[a-z0-9][a-z0-9-]*", dataset=r"\w[\w-]*/\w[\w.-]*")


@dataclass(kw_only=True)
class Chain:
    name: str
    service: str
    accelerator: str
    kind: str  # what is sent: a task, a notebook, or the hardware check
    task: str = ""
    settings: list[dict]  # of a task or a notebook; a sweep has several, one after the other
    sessions: int = 1  # at most so many for each of them
    until_epochs: int | None = None
    hours: float = 8.5  # of a session
    internet: bool = False
    datasets: list[str] = field(default_factory=list)
    sent: list[Session] = field(default_factory=list)

    def run_name(self, setting: int) -> str:
        """The folder of a task's run, in a session and here."""
        return self.name if len(self.settings) == 1 else f"{self.name}-{setting + 1}"

    def of_setting(self, setting: int) -> list[Session]:
        """The sessions of one of the settings that had their accelerator."""
        mine = [session for session in self.sent if session.setting == setting]
        return [session for session in mine if session.ending != "no accelerator"]


def check(chain: Chain) -> None:
    """Raise TpukitError for a value that is not of its type or not one of those that it can be."""
    for part, kind in ((chain, Chain), *((session, Session) for session in chain.sent)):
        types = get_type_hints(kind) | (dict(sent=list, settings=list[dict]) if kind is Chain else {})
        wrong = [name for name, value in vars(part).items() if not has_type(value, types[name])]
        if wrong:
            raise TpukitError(f"{wrong[0]} is {getattr(part, wrong[0])!r}")
    chosen = [
        (chain.service, ("kaggle", "colab", "local")),
        (chain.accelerator, ACCELERATORS),
        (chain.kind, KINDS),
    ]
    for session in chain.sent:
        chosen += [(session.phase, PHASES), (session.ending, ENDINGS)]
        chosen += [(session.setting, range(len(chain.settings)))]
    for value, among in chosen:
        if value not in among:
            raise TpukitError(f"{value!r} is not one of {', '.join(map(str, among))}")
    kernels = [session.kernel for session in chain.sent]
    kernels += [session.source for session in chain.sent if session.source]
    for kind, names in dict(kernel=kernels, dataset=chain.datasets).items():
        if wrong := [name for name in names if not re.fullmatch(PATTERNS[kind], name, re.A)]:
            raise TpukitError(f"{wrong[0]!r} cannot be the name of a {kind}: it is OWNER/NAME")
    if not NAME.fullmatch(chain.name) or len(chain.name) > LONGEST:
        raise TpukitError(
            f"a chain cannot be named {chain.name!r}: at most {LONGEST} of a-z, 0-9 and single -, which does"
            " not begin or end it (--name)"
        )
    for name, value in dict(sessions=chain.sessions, until_epochs=chain.until_epochs).items():
        if value is not None and value < 1:
            raise TpukitError(f"--{name.replace('_', '-')} {value}: it must be 1 or more")
    if not 0 < chain.hours <= 24:
        raise TpukitError(
            f"--hours {chain.hours:g}: the limit of a session is more than 0 and at most 24 hours"
        )
    if not chain.settings:
        raise TpukitError("there are no settings")


def write(folder: Path, chain: Chain) -> None:
    """Write chain.json, whole or not at all."""
    with files.explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(files.with_crc32(dataclasses.asdict(chain)), indent=1)
    files.write_atomic(folder / FILE, text)


def read(folder: Path) -> Chain:
    """Raises TpukitError where there is no chain, or a damaged one."""
    try:
        values = files.parse_with_crc32((folder / FILE).read_bytes())
        sent = [Session(**session) for session in values.pop("sent")]
        chain = Chain(**values, sent=sent)
        check(chain)
    except FileNotFoundError as error:
        known = ", ".join(sorted(path.parent.name for path in folder.parent.glob(f"*/{FILE}")))
        raise TpukitError(
            f"no chain {folder.name} was sent from here: "
            + (f"there is {known}" if known else "there is none")
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TpukitError(
            f"{folder / FILE} is damaged ({error}): take it from a copy, or send again with another --name"
        ) from error
    return chain


def runs(folder: Path, session: Session) -> dict[str, Path]:
    """The runs that a session goes on with: their names there -> their folders here."""
    chain = read(folder)
    several = f"-{session.setting + 1}" if len(chain.settings) > 1 else ""
    there = "" if chain.kind == "task" else several  # a notebook's run gets its number here
    found = (folder / "runs").glob(f"[!.]*{several}")
    return {path.name.removesuffix(there): path for path in sorted(found)}


# What follows


@dataclass(frozen=True)
class Next:
    act: str  # push a session; watch the one that runs; end: nothing is to be done
    text: str = ""  # why it ends, in words
    setting: int = 0
    is_done: bool = False


def decide(chain: Chain, *, again: bool = False, stopped: bool = False) -> Next:
    """What follows in a chain. again: the user asks to go on after what may be better the next time. stopped:
    the user wants no more sessions."""
    following = _following(chain, again)
    return Next("end", "stopped by you") if stopped and following.act == "push" else following


def _following(chain: Chain, again: bool) -> Next:
    last = chain.sent[-1] if chain.sent else None
    if last is None:
        return Next("push")
    if last.phase != "ended":
        return Next("watch")
    following = last.setting + 1 if last.setting + 1 < len(chain.settings) else None
    if is_finished(chain, last):
        if following is not None:
            return Next("push", setting=following)
        return Next("end", "done", is_done=True)
    if last.ending == "failed" and last.repeats:
        if following is not None:  # a sweep goes on without it
            return Next("push", setting=following)
        return _needs_you(last, "it would fail again: correct it, and send it with another --name")
    if not again:
        if last.ending == "no accelerator":
            return _needs_you(last, f"{NEEDED[chain.service]}; `follow` tries again")
        if last.ending == "cancelled":
            return _needs_you(last, "somebody cancelled it there; `follow` goes on")
        if _is_stuck(chain.of_setting(last.setting)):
            return _needs_you(last, "the last two sessions came no step further; `follow` tries again")
    used = len(chain.of_setting(last.setting))
    if used >= chain.sessions:
        if following is not None:
            return Next("push", setting=following)
        return Next("end", _used_up(chain, last, used))
    return Next("push", setting=last.setting)


def is_finished(chain: Chain, session: Session) -> bool:
    """Whether the training that a session was for is over."""
    if chain.until_epochs and session.epochs >= chain.until_epochs:
        return True
    # A notebook may train a part of the epochs; a task that ends before them has stopped early.
    return session.ending == "done" and not (chain.kind == "notebook" and chain.until_epochs)


def _needs_you(last: Session, advice: str) -> Next:
    reason = f"{last.ending}: {last.error}" if last.error else last.ending
    return Next("end", f"needs you ({reason}): {advice}")


def _is_stuck(sessions: list[Session]) -> bool:
    """Whether the last two sessions of a setting brought no step."""
    before = sessions[-3].step if len(sessions) > 2 else 0
    return len(sessions) > 1 and sessions[-1].step <= before


def _used_up(chain: Chain, last: Session, used: int) -> str:
    text = f"sessions used up: {used}"
    if not (chain.until_epochs and last.epochs):
        return f"{text}; `tpukit send follow {chain.name} --sessions {used + 1}` sends another"
    per_session = last.epochs / used
    more = -(-(chain.until_epochs - last.epochs) // per_session)
    return (
        f"{text}, with {last.epochs} of {chain.until_epochs} epochs, {per_session:.1f} a session: about"
        f" {more:.0f} more (`tpukit send follow {chain.name} --sessions {used + more:.0f}`)"
    )


def where(chain: Chain) -> str:
    """How far a chain is, by what was last fetched."""
    number = len(chain.of_setting(chain.sent[-1].setting)) if chain.sent else 0
    text = f"session {number} of {chain.sessions}"
    if len(chain.settings) > 1 and chain.sent:
        text = f"setting {chain.sent[-1].setting + 1} of {len(chain.settings)}, {text}"
    fetched = (
        [s.epochs for s in chain.of_setting(chain.sent[-1].setting) if s.phase == "ended"]
        if chain.sent
        else []
    )
    if fetched and chain.until_epochs:
        text = f"{text} (epoch {fetched[-1]} of {chain.until_epochs} as last fetched)"
    return text
