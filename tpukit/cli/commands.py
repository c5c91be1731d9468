"""The table of commands. tyro reads their options from the parameters of functions and the fields of
dataclasses; a function with a parameter `task` becomes a command with a subcommand for each task."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Union

import tyro

from tpukit import __version__, leaves, tasks
from tpukit.cli import runs, tools
from tpukit.cli.doctor import doctor
from tpukit.cli.options import resolve_aliases
from tpukit.tasks import TASKS

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
MERGE = "merge"  # the subcommand of `tpukit compare FILES`, which may be left out


def run(argv: list[str]) -> Any:
    """Parse a command line, run its command and return what that does. SystemExit ends it after a help text
    or wrong usage."""
    argv = resolve_aliases(argv)
    if argv[0] == "compare" and (len(argv) == 1 or argv[1] not in (*TASKS, MERGE, "-h", "--help")):
        argv.insert(1, MERGE)
    commands: Any = Union[tuple(_subcommand(name) for name in COMMANDS if leaves.has_command(name))]
    return tyro.cli(
        commands,
        args=argv,
        prog="tpukit",
        description=f"tpukit {__version__}: PyTorch training on TPU, GPU and CPU. See tpukit COMMAND --help",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


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


def _with_task(command: Callable, task_name: str) -> Callable:
    """The command as a function whose options are the settings of a task and the command's own."""
    options = inspect.signature(command).parameters["options"].annotation
    flat = tyro.conf.arg(name="")

    def with_settings(task, options):
        return command(task, options)

    with_settings.__annotations__ = dict(
        task=Annotated[tasks.find(task_name), flat], options=Annotated[options, flat]
    )
    return with_settings
