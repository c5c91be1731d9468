"""The table of commands. tyro reads their options from the parameters of functions and the fields of
dataclasses; a function with a parameter `task` becomes a command with a subcommand for each task."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Annotated, Any, Union, get_type_hints

import tyro

from tpukit import __version__, leaves, tasks
from tpukit.cli import runs, tools
from tpukit.cli.doctor import doctor
from tpukit.cli.options import resolve_aliases
from tpukit.host.tables import printable
from tpukit.tasks import TASKS
from tpukit.training.task import Task

doctor.__annotations__["as_json"] = Annotated[bool, tyro.conf.arg(name="json")]  # there without tyro
COMMANDS = {
    "doctor": doctor,
    "train": runs.train,
    "test": runs.test,
    "predict": runs.predict,
    "show": runs.show,
    "report": runs.report,
    "export": tools.export,
    "plan": tools.plan,
    "compare": tools.measure,
    "migrate": tools.migrate,
    "simulate": tools.simulate,
}
WITH_TASK = ("train", "test", "plan", "compare")
# Settings by what they are about, for the help; the task's own have a group of its name.
GROUPS = {
    "data": ("dataset_dir", "images_dir", "test_share", "skip_bad"),
    "fine_tuning": ("weights", "pretrained", "freeze", "layer_decay"),
    "device": (
        *("cores", "parallel", "precision", "micro_batches", "batch_norm", "channels_last", "torch_compile"),
        *("cuda_graph", "data_on", "num_workers", "hang_timeout_s"),
    ),
}
RENAMED = {"as_json": "json", "output": "format"}  # parameters of functions -> their options
MERGE = "merge"  # the subcommand of `tpukit compare FILES`, which may be left out


def run(argv: list[str]) -> Any:
    """Parse a command line, run its command and return what that does. SystemExit ends it after a help text
    or wrong usage."""
    argv = resolve_aliases(argv)
    if argv[0] == "compare" and (len(argv) == 1 or argv[1] not in (*TASKS, MERGE, "-h", "--help")):
        argv.insert(1, MERGE)
    if problem := _misspelt(argv):
        print(printable(f"tpukit: {problem}"), file=sys.stderr)
        raise SystemExit(2)
    commands: Any = Union[tuple(_subcommand(name) for name in COMMANDS if leaves.has_command(name))]
    return tyro.cli(
        commands,
        args=argv,
        prog="tpukit",
        description=f"tpukit {__version__}: PyTorch training on TPU, GPU and CPU. See tpukit COMMAND --help",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.DisallowNone),
    )


def _misspelt(argv: list[str]) -> str:
    """What is wrong with a command line and what was probably meant, in one sentence: for an option that is
    not there, and for a command or a task that is nearly one. Empty where tyro knows better."""
    words = argv[: argv.index("--", 1)] if "--" in argv[1:] else argv
    places = [("command", words[0], [name for name in COMMANDS if leaves.has_command(name)])]
    places += [("task", word, [*TASKS, MERGE]) for word in words[1:2] if words[0] in WITH_TASK]
    for kind, word, known in places:
        if word not in known:
            nearest = difflib.get_close_matches(word, known, 1, 0.7)
            return f"no {kind} {word!r}: did you mean {nearest[0]}?" if nearest else ""
    command = " ".join(word for _, word, _ in places)
    known = [f"--{name.replace('_', '-')}" for name in ("help", *_options(*command.split()))]
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option.replace("--no-", "--") not in known:
            nearest = difflib.get_close_matches(option, known, 1)
            meant = f"did you mean {nearest[0]}?" if nearest else f"`tpukit {command} --help` lists them"
            return f"no option {option} of `tpukit {command}`: {meant}"
    return ""


def _options(command: str, task: str = MERGE) -> list[str]:
    """The names of a command's options."""
    if task in TASKS:
        kinds = _classes(COMMANDS[command], task)
        return [field.name for kind in kinds for field in dataclasses.fields(kind)]
    function = tools.merge if command == "compare" else COMMANDS[command]
    return [RENAMED.get(name, name) for name in inspect.signature(function).parameters]


def _classes(command: Callable, task: str) -> tuple[type, type]:
    """The dataclasses of a task's settings and of a command's own options."""
    return tasks.find(task), inspect.signature(command).parameters["options"].annotation


def _subcommand(name: str) -> Any:
    command = COMMANDS[name]
    if name not in WITH_TASK:
        return Annotated[Any, tyro.conf.subcommand(name, constructor=command)]
    nested: dict[str, dict[str, Any]]
    nested = {task: dict(description=entry.summary) for task, entry in TASKS.items()}
    for task, about in nested.items():  # imports the task, so not before it is needed
        about["constructor_factory"] = functools.partial(_with_task, command, task)
    if name == "compare":
        nested[MERGE] = dict(constructor=tools.merge)
    choices = tuple(Annotated[Any, tyro.conf.subcommand(word, **about)] for word, about in nested.items())
    one_of: Any = Union[choices]
    return Annotated[Any, tyro.conf.subcommand(name, constructor=one_of, description=command.__doc__)]


@functools.cache
def _with_task(command: Callable, task_name: str) -> Callable:
    """The command as a function whose options are the settings of a task and the command's own, in groups."""
    classes = _classes(command, task_name)
    grouped: dict[str, list] = {name: [] for name in ("data", "training", task_name, *GROUPS)}
    for kind in classes:
        docs, hints = _docs_of(kind), get_type_hints(kind)
        for field in dataclasses.fields(kind):
            group = next((name for name, words in GROUPS.items() if field.name in words), "training")
            if group == "training" and field.name not in Task.__dataclass_fields__:
                group = task_name if kind is classes[0] else command.__name__
            hint = Annotated[hints[field.name], tyro.conf.arg(help=docs.get(field.name, ""))]
            entry = (field.name, hint, dataclasses.field(default=field.default))
            grouped.setdefault(group, []).append(entry)
    boxes = {name: dataclasses.make_dataclass(name, fields) for name, fields in grouped.items() if fields}
    all_boxes = dataclasses.make_dataclass("settings", boxes.items(), namespace=dict(__doc__=""))

    def with_settings(settings):
        values = {name: value for box in vars(settings).values() for name, value in vars(box).items()}
        given = [[field.name for field in dataclasses.fields(kind)] for kind in classes]
        return command(
            *(kind(**{name: values[name] for name in names}) for kind, names in zip(classes, given))
        )

    with_settings.__annotations__ = dict(settings=Annotated[all_boxes, tyro.conf.arg(name="")])
    return with_settings


@functools.cache
def _docs_of(kind: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, and of those that it inherits, each in one line. tyro
    reads them of a class that has its own source only."""
    docs = {} if kind.__base__ in (object, None) else dict(_docs_of(kind.__base__))
    tree: Any = ast.parse(inspect.getsource(kind)).body[0]
    for field, text in itertools.pairwise(tree.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs
