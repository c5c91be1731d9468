"""The command line: `tpukit doctor`, `tpukit train WORKLOAD`, `tpukit test WORKLOAD`, `tpukit show RUN`, `tpukit cloud`.

Each command imports what it needs when it runs, so that `tpukit doctor` answers where torch is broken. The options of
train and test are the fields of the workload's dataclass.
"""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

from tpukit import __version__
from tpukit.errors import TpukitError
from tpukit.workloads import WORKLOADS

USAGE = f"""tpukit {__version__}: PyTorch training that simply works on Colab, Kaggle and a laptop

  tpukit doctor [--json]           what is here, what is wrong, and how to mend it
  tpukit train WORKLOAD [options]  train, or go on with a run that was stopped
  tpukit test WORKLOAD [options]   scores of a weights file, or of a run's best weights
  tpukit show RUN                  scores, curves and what the accelerator did
  tpukit cloud gcloud|skypilot [options] -- train WORKLOAD [options]
                                   write a script or task that does it on rented machines

Workloads
{chr(10).join(f"  {name:8} {line}" for name, (_, _, line) in WORKLOADS.items())}

`tpukit COMMAND [WORKLOAD] --help` lists the options."""

# Flags of older training scripts -> what replaced them.
REMOVED = {
    "--use-tpu": "tpukit takes the TPU when the session has one (`tpukit doctor` shows it); leave the flag out",
    "--num-cores": "all cores are used unless --cores says how many; the batch size is global",
    "--multi-gpus": "all GPUs are used unless --cores says how many; the batch size is global",
    "--mode": "`tpukit train` and `tpukit test` are two commands now",
    "--weight-path": "give the weights file with --weights",
    "--if-checkpoint": "a run goes on by itself when started again with the same --run",
}


def main(argv=None):
    """Entry point. Returns the exit code: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = dict(doctor=doctor, train=train, test=test, show=show, cloud=cloud)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    try:
        if argv[0] not in commands:
            raise TpukitError(f"no command {argv[0]!r}; there are: {', '.join(commands)}")
        return commands[argv[0]](argv[1:]) or 0
    except TpukitError as error:
        print(f"tpukit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def doctor(argv):
    import tyro

    from tpukit import environment
    from tpukit.tools import doctor as tool

    def options(json: bool = False) -> bool:
        """What is here, what is wrong, and how to mend it. Exit code 1 if something blocks training.

        Args:
            json: print one JSON object, for machines.
        """
        return json

    as_json = tyro.cli(options, args=argv, prog="tpukit doctor", config=(tyro.conf.FlagCreatePairsOff,))
    env = environment.detect()
    checks = tool.examine(env)
    if as_json:
        found = {**dataclasses.asdict(env), "checks": [dataclasses.asdict(c) for c in checks], "blocked": tool.blocked(checks)}
        print(json.dumps(found, indent=1, default=str))
    else:
        print(f"{env}\n\n{tool.table(checks)}")
    return 1 if tool.blocked(checks) else 0


def train(argv):
    import tyro

    from tpukit import Run, environment, report, storage
    from tpukit.launching import PARALLEL, launch
    from tpukit.training import train as run_training

    @dataclasses.dataclass(frozen=True)
    class Launch(_run_options()):
        cores: int | None = None
        """TPU cores or GPUs to train on; all that are here unless given. On a CPU: processes, one unless given."""
        parallel: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PARALLEL) + "}")] = PARALLEL[0]
        """processes: one for each core. spmd: one program over all TPU cores of this host."""
        hang_timeout_s: float = 900.0
        """When no step ends for so many seconds, show every core's Python stack and end."""

    task, options, env = _parse("train", argv, Launch)
    with _quiet_unless_first(environment):
        task = dataclasses.replace(task, dataset_dir=storage.find_dataset(env, task.dataset, task.dataset_dir))
    run = Run.open(options.run or env.outputs / task.name, task, backup=options.backup)
    how = dict(cores=options.cores, parallel=options.parallel, hang_timeout_s=options.hang_timeout_s)
    scores = launch(run_training, task, run, **how)
    if scores and environment.rank() == 0:
        print(f"\n{report.scores_table(scores)}\n\nrun: {run.path}  (tpukit show {run.path})")


def test(argv):
    from tpukit import environment, report, storage, weights
    from tpukit.runtime import open_runtime
    from tpukit.training import evaluate

    task, options, env = _parse("test", argv, _run_options())
    path = task.weights or (options.run or env.outputs / task.name) / "best.safetensors"
    model = task.model()
    weights.load(model, path)
    task = dataclasses.replace(task, dataset_dir=storage.find_dataset(env, task.dataset, task.dataset_dir))
    with environment.explained():
        runtime = open_runtime(env, task.precision)
        _, data = task.datasets()
        scores = evaluate(task, runtime.place(model), data, runtime, epoch=weights.epoch_of(path))
    print(f"{path} on {runtime}: {len(data)} test samples\n\n{report.scores_table(scores)}")


def show(argv):
    import tyro

    from tpukit import display

    def options(run: Annotated[Path, tyro.conf.Positional]) -> Path:
        """Scores, curves and what the accelerator did.

        Args:
            run: the folder of a run.
        """
        return run

    display.show(tyro.cli(options, args=argv, prog="tpukit show"))


def cloud(argv):
    import tyro

    from tpukit.tools import cloud as tool

    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, ["train", "mshnet"])
    writers = dict(gcloud=tool.gcloud_script, skypilot=tool.skypilot_task)
    if not own or own[0] not in writers:
        raise TpukitError(
            "`tpukit cloud gcloud` writes a bash script for TPUs, `tpukit cloud skypilot` a task file for TPUs and GPUs"
        )
    if len(command) < 2 or command[0] != "train" or command[1] not in WORKLOADS:
        raise TpukitError(f"what to run comes after `--`: train WORKLOAD [options]. Workloads: {', '.join(WORKLOADS)}")
    print(writers[own[0]](tyro.cli(tool.Machine, args=own[1:], prog=f"tpukit cloud {own[0]}"), command), end="")


@contextlib.contextmanager
def _quiet_unless_first(environment):
    """Within it, of the processes that torchrun started only rank 0's prints."""
    if environment.rank() == 0:
        yield
    else:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield


def _run_options():
    @dataclasses.dataclass(frozen=True)
    class RunOptions:
        run: Path | None = None
        """Folder of the run; the output folder of this machine and the workload's name unless given."""
        backup: Path | None = None
        """Folder that gets a copy of the run at every checkpoint, on Drive for instance."""

    return RunOptions


def _parse(command, argv, options):
    """(workload, options, environment) from `WORKLOAD --options`. options: the dataclass of the command's own options."""
    import tyro

    from tpukit import environment, workloads

    for argument in argv:
        if (flag := argument.split("=")[0].replace("_", "-")) in REMOVED:
            raise TpukitError(f"{flag} is gone: {REMOVED[flag]}")
    if not argv or argv[0].startswith("-"):
        raise TpukitError(f"`tpukit {command}` needs a workload: {', '.join(WORKLOADS)}. `tpukit --help` explains")
    workload = workloads.find(argv[0])

    @dataclasses.dataclass(frozen=True)
    class Options:
        task: Annotated[workload, tyro.conf.arg(name="")]
        own: Annotated[options, tyro.conf.arg(name="")]

    Options.__doc__ = workload.__doc__
    options = tyro.cli(
        Options,
        args=argv[1:],
        prog=f"tpukit {command} {argv[0]}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    return options.task, options.own, environment.detect()
