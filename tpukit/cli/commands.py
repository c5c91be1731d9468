"""The table of commands. tyro reads their options from the parameters of functions and the fields of
dataclasses."""

import functools
from typing import Annotated, Any, Union

import tyro

from tpukit import __version__, leaves, tasks
from tpukit.cli import compare, runs, tools
from tpukit.cli.doctor import doctor
from tpukit.cli.options import LaunchOptions, resolve_aliases
from tpukit.tasks import TASKS
from tpukit.tools.rent import rent

COMMANDS = {
    "doctor": doctor,
    "train": runs.train,
    "test": runs.test,
    "predict": runs.predict,
    "show": runs.show,
    "report": runs.report,
    "watch": runs.watch,
    "export": tools.export,
    "plan": tools.plan,
    "compare": compare.measure,
    "migrate": tools.migrate,
    "simulate": tools.simulate,
    "rent": rent,
}
# The commands with a subcommand for each task, and their options besides the task's settings.
OPTIONS_WITH_TASK = {
    "train": LaunchOptions,
    "test": LaunchOptions,
    "plan": tools.PlanOptions,
    "compare": compare.MeasureOptions,
}
MERGE = "merge"  # the subcommand of `tpukit compare FILES`, which may be left out


def run(argv):
    """Parse a command line, run its command and return what that does. SystemExit ends it after a help text
    or wrong usage."""
    argv = resolve_aliases(argv)
    if argv[0] == "compare" and (len(argv) == 1 or argv[1] not in (*TASKS, MERGE, "-h", "--help")):
        argv.insert(1, MERGE)
    return tyro.cli(
        Union[tuple(_subcommand(name) for name in COMMANDS if leaves.has_command(name))],
        args=argv,
        prog="tpukit",
        description=(
            f"tpukit {__version__}: PyTorch training on TPU, GPU and CPU. `tpukit COMMAND --help` lists the"
            " options."
        ),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _subcommand(name):
    if name not in OPTIONS_WITH_TASK:
        return Annotated[Any, tyro.conf.subcommand(name, constructor=COMMANDS[name])]
    nested = []
    for task, entry in TASKS.items():
        factory = functools.partial(_with_task, name, task)  # imports the task, so not before it is asked for
        nested.append(
            Annotated[Any, tyro.conf.subcommand(task, constructor_factory=factory, description=entry.summary)]
        )
    if name == "compare":
        nested.append(Annotated[Any, tyro.conf.subcommand(MERGE, constructor=compare.merge)])
    return Annotated[
        Any, tyro.conf.subcommand(name, constructor=Union[tuple(nested)], description=COMMANDS[name].__doc__)
    ]


def _with_task(name, task):
    """The command as a function whose options are the settings of a task and the command's own."""
    settings, own_options = tasks.find(task), OPTIONS_WITH_TASK[name]

    def command(
        task: Annotated[settings, tyro.conf.arg(name="")],
        options: Annotated[own_options, tyro.conf.arg(name="")],
    ):
        return COMMANDS[name](task, options)

    return command
