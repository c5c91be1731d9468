"""What several commands share: the options of a workload and of a launch, the dataset, where progress is said."""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

from tpukit.host.errors import TpukitError
from tpukit.workloads import WORKLOADS

# Flags of older training scripts -> what replaced them.
REMOVED = {
    "--use-tpu": "tpukit takes the TPU when the session has one (`tpukit doctor` shows it); leave the flag out",
    "--num-cores": "all cores are used unless --cores says how many; the batch size is global",
    "--multi-gpus": "all GPUs are used unless --cores says how many; the batch size is global",
    "--mode": "`tpukit train` and `tpukit test` are two commands now",
    "--weight-path": "give the weights file with --weights",
    "--if-checkpoint": "a run goes on by itself when started again with the same --run",
}


# Other names of options, as published training scripts have them.
ALIASES = {"--data-path": "--dataset-dir", "--global-batch-size": "--batch-size"}


def launch_options():
    import tyro

    from tpukit.launching.launcher import PARALLEL

    @dataclasses.dataclass(frozen=True)
    class LaunchOptions:
        run: Path | None = None
        """Folder of the run; the output folder of this machine and the workload's name unless given."""
        backup: Path | None = None
        """Folder that gets a copy of the run at every checkpoint, on Drive for instance."""
        cores: int | None = None
        """TPU cores or GPUs to use; all that are here unless given. On a CPU: processes, one unless given."""
        parallel: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PARALLEL) + "}")] = PARALLEL[0]
        """processes: one for each core. spmd: one program over all TPU cores of this host."""
        hang_timeout_s: float = 900.0
        """When no step ends for so many seconds, show every core's Python stack and end."""

    return LaunchOptions


def parse(command, argv, own_options=launch_options):
    """(workload, options of the command) from `WORKLOAD --options`."""
    import tyro

    from tpukit import workloads

    for argument in argv:
        if (flag := argument.split("=")[0].replace("_", "-")) in REMOVED:
            raise TpukitError(f"{flag} is gone: {REMOVED[flag]}")
    if not argv or argv[0].startswith("-"):
        raise TpukitError(f"`tpukit {command}` needs a workload: {', '.join(WORKLOADS)}. `tpukit --help` explains")
    workload = workloads.find(argv[0])
    for other, name in ALIASES.items():
        argv = [name + a[len(other) :] if a.replace("_", "-").split("=")[0] == other else a for a in argv]

    @dataclasses.dataclass(frozen=True)
    class Options:
        task: Annotated[workload, tyro.conf.arg(name="")]
        own: Annotated[own_options(), tyro.conf.arg(name="")]

    Options.__doc__ = workload.__doc__
    options = tyro.cli(
        Options,
        args=argv[1:],
        prog=f"tpukit {command} {argv[0]}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    return options.task, options.own


def launch_settings(options):
    return dict(cores=options.cores, parallel=options.parallel, hang_timeout_s=options.hang_timeout_s)


def with_dataset(task, env):
    from tpukit.workloads.datasets import find_dataset

    found = find_dataset(env, task.dataset, task.dataset_dir, fallback=task.fallback or False)
    return dataclasses.replace(task, dataset_dir=found)


@contextlib.contextmanager
def quiet_unless_first():
    """Within it, of the processes that torchrun started only rank 0's prints."""
    from tpukit.host import environment

    if environment.rank() == 0:
        yield
    else:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield


def to_stderr(text):
    print(text, file=sys.stderr, flush=True)
