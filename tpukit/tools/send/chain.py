"""A chain of sessions: what chain.json holds, and what follows what."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_type_hints

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.json_types import has_type
from tpukit.tools.send import Session

FILE = "chain.json"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
LONGEST = 36  # of a name: a kernel's, with tpukit- and a number, has at most 50 characters
KERNEL = re.compile(r"(\w[\w-]*/)?[a-z0-9][a-z0-9-]*", re.A)
DATASET = re.compile(r"\w[\w-]*/\w[\w.-]*", re.A)
# What may be better the next time -> what the user can do.
ADVICE = {
    "no accelerator": "Kaggle gives one to an account with a verified phone number and hours left, Colab to"
    " some accounts, when one is free; `follow` tries again",
    "cancelled": "somebody cancelled it there; `follow` goes on",
}
DONE = "done"


@dataclass(kw_only=True)
class Chain:
    name: str  # also of a task's run
    service: Literal["kaggle", "colab"]
    accelerator: Literal["tpu", "gpu", "none"]
    kind: Literal["task", "notebook", "check"]  # what is sent
    task: str = ""
    settings: list[dict]  # of a task or a notebook; a sweep has several, one after the other
    sessions: int = 1  # at most so many for each of them
    until_epochs: int | None = None
    hours: float = 8.5  # of a session
    internet: bool = False
    datasets: list[str] = field(default_factory=list)
    sent: list[Session] = field(default_factory=list)

    def sent_for(self, setting: int) -> list[Session]:
        """The sessions of one of the settings that had their accelerator."""
        mine = [session for session in self.sent if session.setting == setting]
        return [session for session in mine if session.state != "no accelerator"]

    def runs(self, setting: int) -> Path:
        """The folder in the chain's for the runs of one of the settings."""
        return Path("runs", str(setting + 1)) if len(self.settings) > 1 else Path("runs")


def check(chain: Chain) -> None:
    """Raise TpukitError for a value that cannot be."""
    for part in (chain, *chain.sent):
        for name, kind in get_type_hints(type(part)).items():
            if not has_type(vars(part)[name], kind):
                raise TpukitError(f"{name} is {vars(part)[name]!r}")
    named = f"a chain cannot be named {chain.name!r}: at most {LONGEST} of a-z, 0-9, single - within (--name)"
    until, kernels = chain.until_epochs, [session.kernel for session in chain.sent]
    kernels += [session.source for session in chain.sent if session.source]
    rules = [
        (NAME.fullmatch(chain.name) and len(chain.name) <= LONGEST, named),
        (all(map(DATASET.fullmatch, chain.datasets)), f"--dataset {chain.datasets}: it is OWNER/NAME"),
        (all(map(KERNEL.fullmatch, kernels)), f"a kernel cannot be named like one of {kernels}"),
        (all(each.setting in range(len(chain.settings)) for each in chain.sent), "there is no such setting"),
        (chain.settings, "there are no settings"),
        (chain.sessions >= 1, f"--sessions {chain.sessions}: it must be 1 or more"),
        (until is None or until >= 1, f"--until-epochs {until}: it must be 1 or more"),
        (0 < chain.hours <= 24, f"--hours {chain.hours:g}: a session has more than 0 and at most 24 hours"),
    ]
    for is_kept, otherwise in rules:
        if not is_kept:
            raise TpukitError(otherwise)


def write(folder: Path, chain: Chain) -> None:
    """Write chain.json, whole or not at all."""
    with files.explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(files.with_crc32(dataclasses.asdict(chain)), indent=1)
    files.write_atomic(folder / FILE, text)


def read(folder: Path) -> Chain:
    """Raises TpukitError where there is no chain, or a damaged one."""
    try:
        if (folder / FILE).is_fifo():  # reading it would wait for ever
            raise ValueError("it is a named pipe")
        values = files.parse_with_crc32((folder / FILE).read_bytes())
        values["sent"] = [Session(**session) for session in values["sent"]]
        chain = Chain(**values)
        check(chain)
    except FileNotFoundError as error:
        known = ", ".join(sorted(path.parent.name for path in folder.parent.glob(f"*/{FILE}"))) or "none"
        raise TpukitError(f"no chain {folder.name} was sent from here: there is {known}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TpukitError(
            f"{folder / FILE} is damaged ({error}): take it from a copy, or send again with another --name"
        ) from error
    return chain


# What follows


def decide(chain: Chain, *, again: bool = False) -> int | str:
    """The setting to send the next session of; or, in words, why none is to be sent. again: the user asks to
    go on after what may be better the next time."""
    if not chain.sent:
        return 0
    last = chain.sent[-1]
    mine = chain.sent_for(last.setting)
    # A notebook may train a part of the epochs; a task that ends before them has stopped early.
    is_finished = last.state == "done" and not (chain.kind == "notebook" and chain.until_epochs)
    is_finished |= bool(chain.until_epochs) and last.epochs >= (chain.until_epochs or 0)
    is_used_up = len(mine) >= chain.sessions
    if (is_finished or is_used_up or last.state == "failed") and last.setting + 1 < len(chain.settings):
        return last.setting + 1
    if is_finished:
        return DONE
    advice = "" if again else ADVICE.get(last.state, "")
    if last.state == "failed":
        advice = "it would fail again: correct it, and send it with another --name"
    elif not (again or advice) and _is_stuck(mine):
        advice = "the last two sessions came no step further; `follow` tries again"
    if advice:
        reason = f"{last.state}: {last.error}" if last.error else last.state
        return f"needs you ({reason}): {advice}"
    return _used_up(chain, mine) if is_used_up else last.setting


def _is_stuck(sessions: list[Session]) -> bool:
    steps = [0, *(session.step for session in sessions)]
    return len(sessions) > 1 and max(steps[-2:]) <= max(steps[:-2])


def _used_up(chain: Chain, sessions: list[Session]) -> str:
    used, more, text = len(sessions), 1, f"sessions used up: {len(sessions)}"
    epochs = max(session.epochs for session in sessions)
    if chain.until_epochs and epochs:
        more = -(-(chain.until_epochs - epochs) * used // epochs)
        text += f", with {epochs} of {chain.until_epochs} epochs; at {epochs / used:.1f} a session"
        text += f" about {more} more"
    return f"{text} (`tpukit send follow {chain.name} --sessions {used + more}`)"


def where(chain: Chain) -> str:
    """How far a chain is, by what was last fetched."""
    setting = chain.sent[-1].setting if chain.sent else 0
    mine = chain.sent_for(setting)
    text = f"session {len(mine)} of {chain.sessions}"
    if len(chain.settings) > 1:
        text = f"setting {setting + 1} of {len(chain.settings)}, {text}"
    if chain.until_epochs:
        epochs = max((session.epochs for session in mine), default=0)
        text += f" (epoch {epochs} of {chain.until_epochs} as last fetched)"
    return text
