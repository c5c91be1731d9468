"""The table of commands: each is a function, whose parameters, and the fields of the dataclasses among them,
tyro makes options of. A function with the parameters `task` and `options` is a command for each task."""

import dataclasses
import difflib
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, get_type_hints

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
WITH_TASK = ("train", "plan", "compare")
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
    "--mode": "it is two commands: `tpukit train TASK` and `tpukit test RUN`",
}


def run(argv: list[str]) -> Any:
    """Parse a command line, run its command and return what that does. SystemExit ends it after a help text
    or wrong usage."""
    for word in argv:
        if (name := word.partition("=")[0].replace("_tpu", "-tpu")) in OLD:
            raise TpukitError(f"`{word}` is of the old guides: {OLD[name]}")
    there = {name: one.__doc__ for name, one in COMMANDS.items() if leaves.has_command(name)}
    command, words = choose(argv, there, "command", "tpukit"), argv[1:]
    function: Any = COMMANDS[command]
    if command == "compare" and words[:1] not in ([name] for name in (*TASKS, "-h", "--help")):
        function = tools.merge
    elif command in WITH_TASK:
        summaries = {name: entry.summary for name, entry in TASKS.items()}
        task = choose(words, summaries, "task", f"tpukit {command}")
        group, options = (tyro.conf.arg(name=name) for name in (task, command))
        function.__annotations__["task"] = Annotated[tasks.find(task), group]
        function.__annotations__["options"] = Annotated[function.__annotations__["options"], options]
        command, words = f"{command} {task}", words[1:]
    words = [todays(word) for word in words]
    check_options(words, function, command)
    return tyro.cli(function, args=words, prog=f"tpukit {command}", config=CONFIG)


def check_options(words: list[str], function: Callable, command: str) -> None:
    """Exit with one sentence that names the nearest option if one of the words is no option of a command."""
    known = ["--help", "--json"]
    for name, kind in get_type_hints(function).items():
        is_group = dataclasses.is_dataclass(kind)
        names = [field.name for field in dataclasses.fields(kind)] if is_group else [name]
        known += [f"--{name.replace('_', '-')}" for name in names]
    options = words[: words.index("--")] if "--" in words else words
    for option in (word.partition("=")[0].replace("_", "-") for word in options):
        if option.startswith("--") and option.replace("--no-", "--") not in known:
            nearest = difflib.get_close_matches(option, known, 1)
            meant = f"did you mean {nearest[0]}?" if nearest else f"`tpukit {command} --help` lists them"
            exit_wrong(f"`tpukit {command}` has no option {option}: {meant}")


def todays(word: str) -> str:
    """A word with today's name of its option."""
    name, equals, value = word.partition("=")
    return f"{ALIASES.get(name.replace('_', '-'), name)}{equals}{value}"


def choose(words: list[str], known: dict[str, Any], kind: str, prog: str) -> str:
    """The first word. SystemExit with a list of what is known, or with the nearest, where it is not."""
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:10} {first_sentence(text or '')}" for name, text in known.items()]
        usage = f"usage: {prog} {kind.upper()} [OPTIONS]; {prog} {kind.upper()} --help lists them"
        print("\n".join([usage, f"\ntpukit {__version__}: PyTorch training on TPU, GPU and CPU\n", *lines]))
        raise SystemExit(0 if words else 2)
    if words[0] not in known:
        nearest = difflib.get_close_matches(words[0], known, 1, 0.0)[0]
        exit_wrong(f"no {kind} {words[0]!r} (of {', '.join(known)}): did you mean {nearest}?")
    return words[0]


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring, in one line."""
    summary = " ".join(docstring.partition("\n\n")[0].split())
    return summary.partition(". ")[0].removesuffix(".")


def exit_wrong(sentence: str) -> NoReturn:
    """Exit with 2, wrong usage, and a sentence on stderr."""
    print(printable(f"tpukit: {sentence}"), file=sys.stderr)
    raise SystemExit(2)
