"""The command line: `tpukit doctor`, `train WORKLOAD`, `test WORKLOAD`, `show RUN`, `plan WORKLOAD`, `simulate eit`, `cloud`.

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

  tpukit doctor [--model WORKLOAD] what is here, what is wrong, and how to mend it
  tpukit train WORKLOAD [options]  train, or go on with a run that was stopped
  tpukit test WORKLOAD [options]   scores of a weights file, or of a run's best weights
  tpukit show RUN                  scores, curves and what the accelerator did
  tpukit plan WORKLOAD [options]   whether a training step fits a TPU, and what bounds it; needs no TPU
  tpukit simulate eit [options]    make a training set for impedance tomography
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


# Other names of options, as published training scripts have them.
ALIASES = {"--data-path": "--dataset-dir", "--global-batch-size": "--batch-size"}


# Settings that a test does not take over from the training.
NOT_OF_THE_RUN = ("weights", "batch_size", "precision")


def main(argv=None):
    """Entry point. Returns the exit code: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = dict(doctor=doctor, train=train, test=test, show=show, plan=plan, simulate=simulate, cloud=cloud)
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

    from tpukit import environment, workloads
    from tpukit.tools import doctor as tool

    @dataclasses.dataclass(frozen=True)
    class Doctor:
        """What is here, what is wrong, and how to mend it. Exit code 1 if something blocks training."""

        json: bool = False
        """Print one JSON object, for machines."""
        model: str | None = None
        """Also compute this workload's loss and gradients on the device, in fp32, bf16 and (GPUs) fp16, and say how far the model's
        output moves."""
        weights: Path | None = None
        """Weights for that model; fresh ones unless given."""

    options = tyro.cli(Doctor, args=argv, prog="tpukit doctor", config=(tyro.conf.FlagCreatePairsOff,))
    workload = workloads.find(options.model) if options.model else None
    env = environment.detect()
    checks = tool.examine(env)
    if workload and not tool.blocked(checks):
        checks += tool.try_model(workload(weights=options.weights), env)
    if options.json:
        found = {**dataclasses.asdict(env), "checks": [dataclasses.asdict(c) for c in checks], "blocked": tool.blocked(checks)}
        print(json.dumps(found, indent=1, default=str))
    else:
        print(f"{env}\n\n{tool.table(checks)}")
    return 1 if tool.blocked(checks) else 0


def train(argv):
    from tpukit import environment, report
    from tpukit.launching import launch
    from tpukit.run import Run
    from tpukit.training import train as run_training

    task, options = _parse("train", argv)
    env = environment.detect()
    with _quiet_unless_first(environment):
        task = _with_dataset(task, env)
    run = Run.open(options.run or env.outputs / task.name, task, backup=options.backup)
    scores = launch(run_training, task, run, **_how(options))
    if scores and environment.rank() == 0:
        print(f"\n{report.scores_table(scores)}\n\nrun: {run.path}  (tpukit show {run.path})")


def test(argv):
    from tpukit import display, environment, report
    from tpukit.launching import launch
    from tpukit.run import Run
    from tpukit.training import test as run_test

    task, options = _parse("test", argv)
    env = environment.detect()
    path = options.run or env.outputs / (f"{task.name}-test" if task.weights else task.name)
    if task.weights and (path / "best.safetensors").exists():
        raise TpukitError(f"--weights {task.weights} or the best weights of the run {path}? Give one of --weights and --run")
    if (path / "config.json").is_file():
        task = _as_trained(task, Run.find(path).config)
    with _quiet_unless_first(environment):
        task = _with_dataset(task, env)
    path.mkdir(parents=True, exist_ok=True)
    run = Run(path)
    scores = launch(run_test, task, run, **_how(options))
    if scores and environment.rank() == 0:
        print(f"\n{report.scores_table(scores)}")
        if task.kept(run.path / "predictions"):
            display.show_predictions(run, task, count=8)
            print(f"predictions: {run.path / 'predictions'}")


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


def plan(argv):
    from tpukit.tools import plan as tool

    task, options = _parse("plan", argv, _plan_options)
    found = tool.plan(
        task, **{name: value for name, value in dataclasses.asdict(options).items() if name != "json"}, say=_to_stderr
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        print(found)
    return 0 if found.largest_batch else 1


def _to_stderr(text):
    print(text, file=sys.stderr, flush=True)


def _plan_options():
    import tyro

    from tpukit.tools.plan import CHIPS, PARTS

    @dataclasses.dataclass(frozen=True)
    class PlanOptions:
        chip: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(CHIPS) + "}")] = "v5e-1"
        """The TPU: one v5e chip (Colab), eight (Kaggle; 8 replicas and their gradient sum), or one v6e chip."""
        batch_sizes: tuple[int, ...] = ()
        """Global batch sizes to ask about; --batch-size alone unless given."""
        part: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PARTS) + "}")] = "train"
        """train: the whole training step. evaluate: the programs that predict a batch (of CDEIT: its sampler)."""
        find_batch: bool = False
        """Bisect the largest batch that fits, to within a sixteenth. Every try is a compilation."""
        json: bool = False
        """Print one JSON object, for machines."""

    return PlanOptions


def simulate(argv):
    import tyro

    from tpukit import simulator

    @dataclasses.dataclass(frozen=True)
    class Simulate:
        """Make a set for electrical impedance tomography: train/ and test/ with an npz file for every sample.

        Files that are there already are kept, so a simulation that was stopped goes on."""

        out: Path = Path("data")
        """Folder of the set."""
        samples: int = 10_000
        """Training samples."""
        test_samples: int = 500
        """Test samples."""
        workers: int = os.cpu_count() or 1
        """Processes."""
        seed: int = 0
        """Every sample depends on the seed and its number alone."""
        snr_db: float = 40.0
        """Signal to noise of the voltages, in decibels."""
        mismatch: float = 0.15
        """How far a real tank is from the model: relative deviation of every voltage's gain, and of the gain of all."""
        check: Path | None = None
        """Make nothing; compare the model with real samples in this folder (UEF2017's data2017/, for instance)."""

    if not argv or argv[0] != "eit":
        raise TpukitError("`tpukit simulate` knows one thing to simulate: eit, a tank for electrical impedance tomography")
    options = tyro.cli(Simulate, args=argv[1:], prog="tpukit simulate eit")
    if options.check:
        found = simulator.agreement(options.check)
        worst = min(found, key=found.get)
        print(
            f"correlation of simulated and measured voltages: {sum(found.values()) / len(found):.4f} on average over "
            f"{len(found)} samples, {found[worst]:.4f} for the worst ({worst})"
        )
        return
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name not in ("out", "check")}
    simulator.simulate(options.out, **settings)
    print(f"{options.samples} training and {options.test_samples} test samples: {options.out}")


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


def _launch_options():
    import tyro

    from tpukit.launching import PARALLEL

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


def _how(options):
    return dict(cores=options.cores, parallel=options.parallel, hang_timeout_s=options.hang_timeout_s)


def _with_dataset(task, env):
    from tpukit import storage

    found = storage.find_dataset(env, task.dataset, task.dataset_dir, fallback=task.fallback or False)
    return dataclasses.replace(task, dataset_dir=found)


def _as_trained(task, config):
    """The task with the run's own settings (of its model, above all), where the command line leaves them at their defaults."""
    if config["workload"] != task.name:
        return task
    own = {}
    for field in dataclasses.fields(task):
        value = config["settings"].get(field.name, field.default)
        if not field.metadata.get("free") and field.name not in NOT_OF_THE_RUN and getattr(task, field.name) == field.default:
            own[field.name] = value
    return dataclasses.replace(task, **own)


def _parse(command, argv, own_options=_launch_options):
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
