"""The table of commands: each is a function, whose parameters, and the fields of the dataclasses among them,
tyro makes options of. A function with the parameters `task` and `options` is a command for each task."""

import difflib
import sys
from typing import Annotated, Any

import tyro

from tpukit import __version__, leaves, tasks
from tpukit.cli import runs, tools
from tpukit.cli.doctor import doctor
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tasks import TASKS

doctor.__annotations__["as_json"] = Annotated[bool, tyro.conf.arg(name="json")]  # there without tyro
COMMANDS = dict(
    doctor=doctor,
    train=runs.train,
    test=runs.test,
    predict=runs.predict,
    show=runs.show,
    report=runs.report,
    export=tools.export,
    plan=tools.plan,
    compare=tools.measure,
    migrate=tools.migrate,
    simulate=tools.simulate,
)
WITH_TASK = ("train", "test", "plan", "compare")
CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
# As published training scripts and the old guides call options.
ALIASES = {
    "--data-path": "--dataset-dir",
    "--global-batch-size": "--batch-size",
    "--model": "--model-name",
    "--num-cores": "--cores",
}
OLD = {
    "main.py": "`tpukit train mshnet` or `tpukit train cdeit`: the page docs/OLD_GUIDES.md",
    "main-tpu.py": "`tpukit train mshnet` or `tpukit train cdeit`: the page docs/OLD_GUIDES.md",
    "--use-tpu": "the accelerator that is here is used; leave it out",
    "--mode": "it is two commands: `tpukit train TASK` and `tpukit test TASK`",
}


def run(argv: list[str]) -> Any:
    """Parse a command line, run its command and return what that does. SystemExit ends it after a help text
    or wrong usage."""
    for word in argv:
        if (name := word.partition("=")[0].replace("_tpu", "-tpu")) in OLD:
            raise TpukitError(f"`{word}` is of the old guides: {OLD[name]}")
    there = {name: one.__doc__ for name, one in COMMANDS.items() if leaves.has_command(name)}
    command, words = choose(argv, there, "command", "tpukit"), argv[1:]
    if command == "compare" and words[:1] not in ([name] for name in (*TASKS, "-h", "--help")):
        return tyro.cli(tools.merge, args=words, prog="tpukit compare", config=CONFIG)
    function: Any = COMMANDS[command]
    if command in WITH_TASK:
        about = {name: entry.summary for name, entry in TASKS.items()}
        task = choose(words, about, "task", f"tpukit {command}")
        group, options = (tyro.conf.arg(name=name) for name in (task, command))
        function.__annotations__["task"] = Annotated[tasks.find(task), group]
        function.__annotations__["options"] = Annotated[function.__annotations__["options"], options]
        command, words = f"{command} {task}", words[1:]
    words = words if command == "doctor" else [todays(word) for word in words]  # its --model is a task
    return tyro.cli(function, args=words, prog=f"tpukit {command}", config=CONFIG)


def todays(word: str) -> str:
    """A word with today's name of its option."""
    name, equals, value = word.partition("=")
    return f"{ALIASES.get(name.replace('_', '-'), name)}{equals}{value}"


def choose(words: list[str], known: dict[str, Any], kind: str, prog: str) -> str:
    """The first word. SystemExit with a list of what is known, or with the nearest, where it is not."""
    if not words or words[0] in ("-h", "--help"):
        texts = {name: (text or "").partition("Args:")[0].split() for name, text in known.items()}
        lines = [f"  {name:10} {' '.join(text)}" for name, text in texts.items()]
        usage = f"usage: {prog} {kind.upper()} [OPTIONS]; {prog} {kind.upper()} --help lists them"
        print("\n".join([usage, f"\ntpukit {__version__}: PyTorch training on TPU, GPU and CPU\n", *lines]))
        raise SystemExit(0 if words else 2)
    if words[0] not in known:
        nearest = difflib.get_close_matches(words[0], known, 1, 0.0)[0]
        text = f"tpukit: no {kind} {words[0]!r} (of {', '.join(known)}): did you mean {nearest}?"
        print(printable(text), file=sys.stderr)
        raise SystemExit(2)
    return words[0]
