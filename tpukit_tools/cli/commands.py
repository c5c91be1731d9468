"""The table of commands: each is a function, of whose parameters tyro makes options, and of the settings of
a task if it has one."""

import difflib
import functools
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, Union, get_type_hints

import tyro
from tyro import conf

import tpukit
from tpukit import __version__, leaves
from tpukit.host.errors import TpukitError
from tpukit.host.text import printable
from tpukit_tools.cli import functions
from tpukit_tools.cli.doctor import doctor
from tpukit_tools.cli.functions import to_stderr
from tpukit_tools.cli.help import ALIASES, annotate_help, other_names

# Parameters of the library's functions, as a shell gives them
IN_SHELL = dict(run=functions.Trained, task=functions.TaskName, out=Path | None)


def of_library(function: Callable, is_good: Callable[[Any], bool] = bool, **defaults: Any) -> Callable:
    """Return a function of the library as a command, with other defaults. The command prints what it made;
    its exit code is 1 if that is not good."""

    def command(**settings: Any) -> int:
        made = function(**settings)
        print(printable(made))
        return 0 if is_good(made) else 1

    hints = get_type_hints(function, localns=dict(Run=Path, Task=str))
    command.__annotations__ = {name: IN_SHELL.get(name, kind) for name, kind in hints.items()}
    command.__doc__ = function.__doc__
    vars(command)["__signature__"] = inspect.signature(functools.partial(function, **defaults))
    return command


# The modules that commands need, which may be cut off: of the desk, of a task, or of the library
NEEDED = dict(
    doctor="tpukit_tools.doctor",
    predict="tpukit.inference.predict",
    export="tpukit_tools.export",
    plan="tpukit_tools.plan",
    compare="tpukit_tools.measure",
    migrate="tpukit_tools.migrate",
    emulate="tpukit_tools.emulate",
    simulate="tpukit_tasks.cdeit",
)


def is_offered(command: str) -> bool:
    """Return True if what a command needs is there."""
    return command not in NEEDED or leaves.is_there(NEEDED[command])


COMMANDS: dict[str, Callable[..., Any]] = dict(
    doctor=doctor,
    train=functions.train,
    test=functions.test,
    show=functions.show,
    report=functions.report,
    compare=functions.measure,
    migrate=functions.migrate,
)
if is_offered("predict"):
    COMMANDS["predict"] = functions.predict
if is_offered("export"):
    COMMANDS["export"] = of_library(tpukit.export, lambda exported: exported.is_equal())
if is_offered("plan"):
    COMMANDS["plan"] = of_library(tpukit.plan, lambda planned: bool(planned.largest_batch), log=to_stderr)
if is_offered("emulate"):
    COMMANDS["emulate"] = functions.emulate
if is_offered("simulate"):
    from tpukit_tasks.cdeit import simulate

    COMMANDS["simulate"] = of_library(simulate, out=Path("data"), samples=10_000, test_samples=500)
for one in COMMANDS.values():
    for name, kind in one.__annotations__.items():
        if others := other_names(name):
            one.__annotations__[name] = Annotated[kind, conf.arg(aliases=others)]
WITH_TASK = ("train", "plan", "compare")
CONFIG = (conf.OmitArgPrefixes, conf.DisallowNone, conf.PositionalRequiredArgs, conf.SuppressFixed)
HELP = ("-h", "--help", "help")
COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
OLD = {
    "main.py": "use `tpukit train mshnet` or `tpukit train cdeit`; see docs/OLD_GUIDES.md",
    "main-tpu.py": "use `tpukit train mshnet` or `tpukit train cdeit`; see docs/OLD_GUIDES.md",
    "--use-tpu": "leave it out; tpukit uses the accelerator it finds",
    "--data": "leave it out, the simulated set is the default; --dataset-dir DIR names another",
    "--mode": "use two commands: `tpukit train TASK` and `tpukit test RUN`",
}


def run(argv: list[str]) -> int | None:
    """Parse a command line and run its command. SystemExit ends it after a help text or wrong usage."""
    if argv[:1] == ["emulate"] and is_offered("emulate"):  # what follows is another command's
        return functions.emulate(*argv[1:])
    # A script's name stands where a command does: `migrate main.py` is the user's own.
    for word in [*argv[:1], *(word for word in argv[1:] if word.startswith("--"))]:
        if (name := word.partition("=")[0].replace("_tpu", "-tpu")) in OLD:
            raise TpukitError(f"`{word}` comes from the old guides: {OLD[name]}")
    if argv[:1] and argv[0].partition("=")[0] in COMPLETION:
        return tyro.cli(everything(), args=argv, prog="tpukit", config=(*CONFIG, conf.OmitSubcommandPrefixes))
    there = {name: one.__doc__ for name, one in COMMANDS.items() if is_offered(name)}
    command, words = choose(argv, there, "command", "tpukit"), argv[1:]
    function, names = COMMANDS[command], []
    if command == "compare" and words and not (words[0].isidentifier() or words[0] in HELP):
        function = functions.merge  # FILES instead of a task
    elif command == "simulate":
        choose(words, {"eit": function.__doc__}, "tank", "tpukit simulate")
        words = words[1:]
    elif command in WITH_TASK:
        summaries = {name: entry.summary for name, entry in leaves.tasks().items()}
        task = choose(words, summaries, "task", f"tpukit {command}")
        cls: Any = leaves.find(task)
        annotate_help(cls)
        function.__annotations__["task"] = Annotated[cls, conf.arg(name=task)]
        command, words, names = f"{command} {task}", words[1:], [field.name for field in fields(cls)]
    words = [todays(word) for word in words]
    check_options(words, [*names, *function.__annotations__], command)
    about, _, _ = (inspect.getdoc(function) or "").partition("\n\nArgs:")
    # Indented, because tyro joins lines that begin with a letter.
    about = "\n\n".join(fit_terminal(" ".join(paragraph.split()), 2) for paragraph in about.split("\n\n"))
    return tyro.cli(function, args=words, prog=f"tpukit {command}", config=CONFIG, description=about)


def fit_terminal(text: str, indent: int = 0) -> str:
    """Wrap a line at words to the terminal's width, and indent those that follow."""
    columns = max(40, shutil.get_terminal_size((120, 0)).columns)
    return textwrap.fill(text, columns, subsequent_indent=" " * indent)


def everything() -> Any:
    """Return all commands with all tasks as one type, whose words a shell completes."""

    def of_task(function, task):
        def command(**settings):
            pass

        command.__annotations__ = function.__annotations__ | dict(task=leaves.find(task))
        vars(command)["__signature__"] = inspect.signature(function)
        return command

    def choice(functions_by_name):
        named = functions_by_name.items()
        kinds = [Annotated[Any, conf.subcommand(name, constructor=one)] for name, one in named]
        return Union[tuple(kinds)]

    for task in leaves.tasks():
        annotate_help(leaves.find(task))
    with_task = {
        name: choice({task: of_task(COMMANDS[name], task) for task in leaves.tasks()})
        for name in WITH_TASK
        if name in COMMANDS
    }
    return choice(COMMANDS | with_task)


def check_options(words: list[str], names: list[str], command: str) -> None:
    """Exit with one sentence that names the nearest option if one of the words is no option of a command."""
    known = [f"--{name.replace('_', '-')}" for name in ("help", *names)]
    options = words[: words.index("--")] if "--" in words else words
    for option in (word.partition("=")[0].replace("_", "-") for word in options):
        if option.startswith("--") and option.replace("--no-", "--") not in known:
            nearest = difflib.get_close_matches(option, known, 1)
            meant = f"did you mean {nearest[0]}?" if nearest else f"`tpukit {command} --help` lists them"
            exit_wrong(f"`tpukit {command}` has no option {option}: {meant}")


def todays(word: str) -> str:
    """Return a word with today's name of its option."""
    name, equals, value = word.partition("=")
    return f"{ALIASES.get(name.replace('_', '-'), name)}{equals}{value}"


def choose(words: list[str], known: dict[str, Any], kind: str, prog: str) -> str:
    """Return the first word. If it is not known, exit with a list of what is, or with the nearest."""
    if not words or words[0] in HELP:
        summaries = {name: text.partition("\n")[0].partition(". ")[0] for name, text in known.items()}
        rows = [f"  {name:10} {summary.removesuffix('.')}" for name, summary in summaries.items()]
        lines = [fit_terminal(row, 13) for row in rows]
        usage = f"usage: {prog} {kind.upper()} [OPTIONS]; {prog} {kind.upper()} --help lists them"
        usage = fit_terminal(usage)
        if kind == "command":
            lines.append("\nCompletion: source <(tpukit --tyro-print-completion bash)")
        print("\n".join([usage, f"\ntpukit {__version__}: PyTorch training on TPU, GPU and CPU\n", *lines]))
        raise SystemExit(0 if words else 2)
    if words[0] not in known:
        nearest = difflib.get_close_matches(words[0], known, 1, 0.0)[0]
        exit_wrong(f"no {kind} {words[0]!r}, only {', '.join(known)}: did you mean {nearest}?")
    return words[0]


def exit_wrong(sentence: str) -> NoReturn:
    """Exit with 2, wrong usage, and a sentence on stderr."""
    print(printable(f"tpukit: {sentence}"), file=sys.stderr)
    raise SystemExit(2)
