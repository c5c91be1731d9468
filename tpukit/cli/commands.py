"""The table of commands. tyro reads their options from the parameters of functions and the fields of
dataclasses; a function with a parameter `task` becomes a command with a subcommand for each task."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Union, get_type_hints

import tyro

from tpukit import __version__, leaves, tasks
from tpukit.cli import runs, send, tools
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
    "send": send.COMMANDS,
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
    if argv[0] == "send":
        argv = send.with_words(argv)
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
    if words[0] == "send":
        places += [
            ("command of `tpukit send`", word, [*send.SERVICES, *send.COMMANDS]) for word in words[1:2]
        ]
        tasks_there = [word for word in words[2:3] if words[1] in send.SERVICES]
        places += [("task", word, [*TASKS, *send.OTHERS]) for word in tasks_there]
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


def _options(command: str, *words: str) -> list[str]:
    """The names of a command's options. words: of a task, or of a command within it."""
    found: Any = send.find(*words) if command == "send" else COMMANDS[command]
    if words and words[-1] in TASKS:
        return [field.name for kind in _classes(found, words[-1]) for field in dataclasses.fields(kind)]
    if command == "compare":
        found = tools.merge
    parameters = inspect.signature(found).parameters if found else []
    names = [RENAMED.get(name, name) for name in parameters]
    return [*names, *send.ChainOptions.__dataclass_fields__] if "options" in names else names


def _classes(command: Callable, task: str) -> tuple[type, type]:
    """The dataclasses of a task's settings and of a command's own options."""
    return tasks.find(task), inspect.signature(command).parameters["options"].annotation


def _subcommand(name: str) -> Any:
    if name == "send":
        functions = [_called(word, function) for word, function in send.COMMANDS.items()]
        return _one_of(name, send.__doc__, [*map(_service, send.SERVICES), *functions])
    if name not in WITH_TASK:
        return _called(name, COMMANDS[name])
    merge = [_called(MERGE, tools.merge)] if name == "compare" else []
    return _one_of(name, COMMANDS[name].__doc__, [*_by_task(COMMANDS[name]), *merge])


def _service(name: str) -> Any:
    """The subcommand of `tpukit send` for a service."""
    command = send.SERVICES[name]["task"]
    others = [_called(word, send.SERVICES[name][word]) for word in send.OTHERS]
    return _one_of(name, command.__doc__, [*_by_task(command), *others])


def _called(name: str, function: Callable) -> Any:
    return Annotated[Any, tyro.conf.subcommand(name, constructor=function)]


def _one_of(name: str, description: str | None, choices: Iterable[Any]) -> Any:
    one: Any = Union[tuple(choices)]
    return Annotated[Any, tyro.conf.subcommand(name, constructor=one, description=description)]


def _by_task(command: Callable) -> list[Any]:
    """A subcommand for each task, which is not imported before it is needed."""
    return [
        Annotated[
            Any,
            tyro.conf.subcommand(
                task,
                description=entry.summary,
                constructor_factory=functools.partial(_with_task, command, task),
            ),
        ]
        for task, entry in TASKS.items()
    ]


@functools.cache
def _with_task(command: Callable, task_name: str) -> Callable:
    """The command as a function whose options are the settings of a task and the command's own, in groups."""
    classes = _classes(command, task_name)
    grouped: dict[str, list] = {name: [] for name in ("data", "training", task_name, *GROUPS)}
    for kind in classes:
        docs, hints = _docs_of(kind), get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            group = next((name for name, words in GROUPS.items() if field.name in words), "training")
            is_setting = kind is classes[0]
            if group == "training" and not (is_setting and field.name in Task.__dataclass_fields__):
                group = task_name if is_setting else command.__name__
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
