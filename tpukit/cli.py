"""The command line: `tpukit doctor`, `train WORKLOAD`, `test WORKLOAD`, `show RUN`, `report RUN`, `watch RUN`, `plan WORKLOAD`, `compare WORKLOAD|FILES`, `migrate FILES`, `simulate eit`,
`cloud`.

Each command imports what it needs when it runs, so that `tpukit doctor` answers where torch is broken. The options of
train and test are the fields of the workload's dataclass.
"""

import contextlib
import dataclasses
import functools
import inspect
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
  tpukit show RUN                  scores and curves
  tpukit report RUN [--trace N]    why it compiled, where a step's time went, memory; a profiler's trace of N steps
  tpukit watch RUN                 a run that another process trains, live: how far, how fast, how busy the chip is
  tpukit plan WORKLOAD [options]   whether a training step fits a TPU, and what bounds it; needs no TPU
  tpukit compare WORKLOAD [options]
                                   measure a recipe on what is here, at several batch sizes, and keep it as a small file
  tpukit compare FILES [options]   merge such files of several machines: speed, cost, and which hardware finishes in time
  tpukit migrate FILES [options]   what in PyTorch code will not work on a TPU, by line; --fix mends what is safe
  tpukit simulate eit [options]    make a training set for impedance tomography
  tpukit cloud create|list|open|run|watch|fetch|delete [NAME] [options]
                                   a rented TPU: says what it costs, asks, deletes itself in the end, finds what was forgotten

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
    commands = dict(doctor=doctor, train=train, test=test, show=show, report=report, watch=watch, plan=plan, compare=compare)
    commands |= dict(migrate=migrate, simulate=simulate, cloud=cloud)
    try:
        if not argv or argv[0] in ("-h", "--help", "--version"):
            print(__version__ if argv == ["--version"] else USAGE, flush=True)
            return 0 if argv else 2
        if argv[0] not in commands:
            raise TpukitError(f"no command {argv[0]!r}; there are: {', '.join(commands)}")
        code = commands[argv[0]](argv[1:]) or 0
        sys.stdout.flush()
        return code
    except TpukitError as error:
        print(f"tpukit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone (`| head`); what Python still holds back goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def doctor(argv):
    import tyro

    from tpukit import environment, workloads
    from tpukit.tools import doctor as tool
    from tpukit.troubles import about

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
        error: str | None = None
        """Look at nothing; say what to do about this error message."""

    options = tyro.cli(Doctor, args=argv, prog="tpukit doctor", config=(tyro.conf.FlagCreatePairsOff,))
    if options.error is not None:
        mend = about(options.error)
        print(
            mend
            or "This message is not known here. `tpukit doctor` looks at the machine; docs/TROUBLESHOOTING.md lists what is known."
        )
        return 0 if mend else 1
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
    from tpukit.scoring import test as run_test

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
        """Scores and curves of a run.

        Args:
            run: the folder of a run.
        """
        return run

    display.show(tyro.cli(options, args=argv, prog="tpukit show"))


def report(argv):
    import tyro

    from tpukit import display, environment, workloads
    from tpukit.run import Run

    def options(
        run: Annotated[Path, tyro.conf.Positional],
        trace: int = 0,
        hlo: bool = False,
        dataset_dir: Path | None = None,
        cores: int | None = None,
        parallel: str = "processes",
    ):
        """What the accelerator did in a run: compilations and their causes, where a step's time went, memory.

        Args:
            run: the folder of a run.
            trace: also run so many steps of its task once more, here, and keep a profiler's trace of them for TensorBoard. Names the lines of
                operations that ran on the CPU instead or waited for the device. The run itself is not touched.
            hlo: also keep the step's program as the XLA device gets it, with the line of each operation.
            dataset_dir: the dataset for these steps, where it is not where the run found it.
            cores: of these steps, as for train.
            parallel: of these steps, as for train.
        """
        return Run.find(run), trace, hlo, dataset_dir, dict(cores=cores, parallel=parallel)

    run, steps, hlo, dataset_dir, how = tyro.cli(
        options, args=argv, prog="tpukit report", config=(tyro.conf.FlagCreatePairsOff,)
    )
    display.show_report(run)
    if steps or hlo:
        from tpukit.tools.look import look

        workload, own = workloads.find(run.config["workload"]), run.config["settings"]
        kept = {
            f.name: own[f.name]
            for f in dataclasses.fields(workload)
            if f.name in own and f.name not in ("weights", "dataset_dir")
        }
        task = workload(**kept, dataset_dir=dataset_dir or Path(own["dataset_dir"] or "."))
        seen = look(_with_dataset(task, environment.detect()), run, steps=steps or 1, hlo=hlo, **how)
        print("\n" + "\n".join(f"- {said}" for said in seen.findings()))
        if seen.rows:
            print(f"\n{seen.table()}")


def watch(argv):
    import tyro

    from tpukit.run import Run
    from tpukit.tools import watch as tool

    def options(run: Annotated[Path, tyro.conf.Positional], interval_s: float = 2.0, once: bool = False):
        """A run that another process trains: how far, how fast, what it scored, and how busy the chip is.

        Args:
            run: the folder of a run.
            interval_s: seconds from one look to the next.
            once: look once.
        """
        return Run.find(run), interval_s, once

    run, interval_s, once = tyro.cli(options, args=argv, prog="tpukit watch", config=(tyro.conf.FlagCreatePairsOff,))
    tool.watch(run, interval_s=interval_s, once=once)


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


def compare(argv):
    if argv and argv[0] in WORKLOADS:
        return _measure(argv)
    return _merge(argv)


def _measure(argv):
    from tpukit import environment, storage
    from tpukit.tools import compare as tool

    task, options = _parse("compare", argv, _compare_options)
    env = environment.detect()
    size = tool.SYNTHETIC_IMAGES.get(task.name)
    out = options.out or tool.file_for(env.outputs / "comparison", task, env, options.cores)
    tool.check_writable(out)  # before a dataset is unpacked
    found = storage.find_dataset(env, task.dataset, task.dataset_dir, fallback=task.fallback or False, size=size)
    how = {name: value for name, value in dataclasses.asdict(options).items() if name != "out"}
    measured = tool.measure_here(dataclasses.replace(task, dataset_dir=found), out=out, say=_to_stderr, **how)
    print(f"{measured.table()}\n\nNext, with the files of other machines beside it: tpukit compare {out.parent}/*.json")


def _compare_options():
    import tyro

    from tpukit.launching import PARALLEL

    @dataclasses.dataclass(frozen=True)
    class CompareOptions:
        batch_sizes: tuple[int, ...] = ()
        """Global batch sizes; unless given they double from --batch-size on, until a step does not fit."""
        steps: int = 20
        """Timed steps of each batch size, after the first ones."""
        max_batch: int | None = None
        """Where doubling ends; on a CPU after one doubling unless given."""
        out: Path | None = None
        """The JSON file; comparison/WORKLOAD-HARDWARE-PLACE.json in the output folder of this machine unless given."""
        cores: int | None = None
        """TPU cores or GPUs to use; all that are here unless given. On a CPU: processes, one unless given."""
        parallel: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PARALLEL) + "}")] = PARALLEL[0]
        """processes: one for each core. spmd: one program over all TPU cores of this host."""

    return CompareOptions


def _merge(argv):
    import tyro

    from tpukit import display, environment
    from tpukit.tools import compare as tool
    from tpukit.tools import prices as price_table

    @dataclasses.dataclass(frozen=True)
    class Merge:
        """Which hardware finishes a training in time, in how many sessions, at what cost: from files that `tpukit compare WORKLOAD` wrote
        here and elsewhere, published figures, and the bounds of `tpukit plan`.

        `tpukit compare WORKLOAD --help` lists the options of measuring."""

        files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
        """Files of one workload; without any, the published figures alone."""
        epochs: int = 400
        """Of the whole training."""
        images: int | None = None
        """Of an epoch; those of the measured set unless given, or 800 as published where it was made up."""
        batch_size: int | None = None
        """Count with this batch size alone; with each hardware's fastest unless given."""
        deadline_h: float | None = None
        """Hours on the calendar until it has to be done."""
        budget_usd: float | None = None
        """US dollars that it may cost."""
        spot: bool = False
        """Count with Google Cloud's prices of spare capacity, which can be taken away at any time."""
        prices: Path | None = None
        """A copy of the table of prices, edited."""
        prices_out: Path | None = None
        """Write a copy of the table of prices there, to be edited, and do nothing else."""
        usd_per_kwh: float = price_table.USD_PER_KWH
        """Electricity, for local cards."""
        plan: tuple[str, ...] = ()
        """TPUs that are not here (v5e-1, v5e-8, v6e-1): ask their compiler for bounds. Takes minutes."""
        picture: Path | None = None
        """Keep the plots there as a PNG file; beside the first file, or where that cannot be written in the output folder, unless given."""

    for name in argv[:1]:
        if not name.startswith("-") and not Path(name).exists():
            raise TpukitError(f"{name!r} is neither a workload ({', '.join(WORKLOADS)}) nor a file of `tpukit compare`")
    options = tyro.cli(Merge, args=argv, prog="tpukit compare", config=(tyro.conf.FlagCreatePairsOff,))
    if options.prices_out:
        path = price_table.copy(options.prices_out)
        print(f"prices: {path}. Edit it, then: tpukit compare FILES --prices {path}")
        return
    if options.picture and options.picture.suffix.lower() != ".png":
        raise TpukitError(f"--picture {options.picture}: the plots are a PNG file, whose name ends in .png")
    measurements = [tool.Measurement.read(path) for path in options.files]
    picture = options.picture or _place_of_picture(options.files, environment.detect().outputs / "comparison")
    tool.check_writable(picture)
    prices = price_table.read(options.prices)
    plans = tool.plan_recipe(measurements, options.plan, batch_size=options.batch_size, say=_to_stderr)
    counted = {name: getattr(options, name) for name in ("epochs", "images", "batch_size")}
    asked = {name: getattr(options, name) for name in ("deadline_h", "budget_usd", "spot", "usd_per_kwh")}
    found = tool.compare(measurements, plans=plans, prices=prices, **counted, **asked)
    display.show_comparison(found, picture)


def _place_of_picture(files, outputs):
    from tpukit.tools import compare as tool

    if files:
        with contextlib.suppress(TpukitError):  # such as Kaggle's inputs, which are read-only
            tool.check_writable(files[0].parent / "comparison.png")
            return files[0].parent / "comparison.png"
    return outputs / "comparison.png"


def migrate(argv):
    import tyro

    from tpukit.tools import migrate as tool

    def options(
        files: Annotated[tuple[Path, ...], tyro.conf.Positional],
        fix: bool = False,
        format: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(tool.FORMATS) + "}")] = "text",
    ):
        """What in PyTorch code will not work, or will be slow, on a TPU: by line, each with its mend. Runs nothing of it.

        Exit code 1 where something that will not work is left.

        Args:
            files: scripts, notebooks, or folders of them.
            fix: rewrite what is safe to rewrite, in place, and show the difference.
            format: text, json, github (annotations of a workflow) or sarif (editors, code scanning).
        """
        return files, fix, format

    files, fix, form = tyro.cli(options, args=argv, prog="tpukit migrate", config=(tyro.conf.FlagCreatePairsOff,))
    if form not in tool.FORMATS:
        raise TpukitError(f"no format {form!r}; there are: {', '.join(tool.FORMATS)}")
    findings = []
    for path in tool.files_in(files):
        found, mended = tool.examine(path)
        if fix and any(f.fixable for f in found):
            _to_stderr(tool.difference(path, mended)) if form != "text" else print(tool.difference(path, mended))
            tool.write(path, mended)
            found, _ = tool.examine(path)
        findings += found
    print(tool.FORMATS[form](findings))
    return 1 if any(f.level == "error" for f in findings) else 0


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

    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    verb, *own = own or [""]
    if verb in ("-h", "--help"):
        for name, act in (tool.VERBS | tool.WRITERS).items():
            print(f"  tpukit cloud {name:9}{act.__doc__.splitlines()[0]}")
        return
    if verb not in tool.VERBS | tool.WRITERS:
        raise TpukitError(f"`tpukit cloud {verb}`: there are {', '.join(tool.VERBS | tool.WRITERS)}")
    if command and verb not in ("run", "skypilot"):
        raise TpukitError(f"`tpukit cloud {verb}` takes nothing after `--`; got: {' '.join(command)}. Options come before it")
    prog, config = f"tpukit cloud {verb}", (tyro.conf.FlagCreatePairsOff,)
    if verb == "skypilot":
        machine = tyro.cli(tool.Task, args=own, prog=prog)
        print(tool.skypilot_task(machine, command or ["train", "mshnet"]), end="")
        return
    act = tool.VERBS[verb]
    if verb == "run":
        act = _with_command(act, command)
    tyro.cli(act, args=own, prog=prog, config=config)


def _with_command(act, command):
    """The same function without its parameter `command`, which gets these words."""

    @functools.wraps(act)
    def acting(*names, **options):
        return act(*names, command, **options)

    signature = inspect.signature(act)
    acting.__signature__ = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "command"])
    return acting


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
