"""`tpukit train`, `test`, `predict`, `show`, `report` and `watch`: make, score, use and show a run."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tpukit.cli.options import CoreOptions, RunFolder, with_dataset
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Sentences, printable

# Settings that a test does not take over from the training.
NOT_INHERITED = ("weights", "batch_size", "precision")


def train(task, options):
    """Train a task, or resume a run that was stopped."""
    from tpukit.host import environment
    from tpukit.launching.launcher import launch
    from tpukit.reporting import findings
    from tpukit.runs.backup import find_run
    from tpukit.runs.run import Run
    from tpukit.training.loop import train as run_training

    env = environment.detect()
    task = with_dataset(task, env)
    path = options.run or env.outputs / task.name
    earlier = None if (path / "config.json").is_file() else find_run(env, path.name)
    run = Run.open(path, task, backup=options.backup, earlier=earlier)
    scores = launch(run_training, task, run, **_launch_settings(options))
    if scores and environment.rank() == 0:
        for table in findings.last_and_kept_tables(run.records()):
            print(f"\n{table}")
        print(f"\nrun: {run.path}  (tpukit show {run.path})")


def test(task, options):
    """Score a weights file, or the best weights of a run."""
    from tpukit.host import environment
    from tpukit.launching.launcher import launch
    from tpukit.reporting import display, findings
    from tpukit.runs import weights
    from tpukit.runs.run import Run
    from tpukit.tasks.trained import config_of
    from tpukit.training.evaluation import test as run_test

    env = environment.detect()
    path = options.run or env.outputs / (f"{task.name}-test" if task.weights else task.name)
    if task.weights and (path / "best.safetensors").exists():
        raise TpukitError(
            f"--weights {task.weights} and the run {path}, which has best weights: give only one of --weights"
            " and --run"
        )
    if (path / "config.json").is_file():
        task = _as_trained(task, Run.find(path).config, path)
    elif task.weights and (config := config_of(weights.local(task.weights))):
        task = _as_trained(task, config, task.weights)
    task = with_dataset(task, env)
    run = Run.find(path, trained=False)
    scores = launch(run_test, task, run, **_launch_settings(options))
    if scores and environment.rank() == 0:
        print(f"\n{findings.scores_table(scores)}")
        if task.load_predictions(run.path / "predictions"):
            display.show_predictions(run, task, count=8)
            print(f"predictions: {run.path / 'predictions'}")


def _as_trained(task, config, source):
    """The task with the settings of its training (of the model, above all), where the command line leaves
    them at their defaults. source: the run or file that has this config."""
    from tpukit.tasks.trained import task_of

    if config["task"] != task.name:
        raise TpukitError(f"{source} is of the task {config['task']}, not of {task.name}")
    trained = task_of(config)
    fixed = [
        f for f in dataclasses.fields(task) if not f.metadata.get("free") and f.name not in NOT_INHERITED
    ]
    own = {f.name: getattr(trained, f.name) for f in fixed if getattr(task, f.name) == f.default}
    return dataclasses.replace(task, **own)


def _launch_settings(options):
    return dict(cores=options.cores, parallel=options.parallel, hang_timeout_s=options.hang_timeout_s)


def show(run: RunFolder):
    """Scores and curves of a run.

    Args:
        run: the folder of a run.
    """
    from tpukit.reporting import display

    display.show(run)


def report(
    run: RunFolder,
    trace: int = 0,
    hlo: bool = False,
    dataset_dir: Path | None = None,
    on: Annotated[CoreOptions, tyro.conf.arg(name="")] = CoreOptions(),
):
    """What the accelerator did in a run: compilations and their causes, where a step's time went, memory.

    Args:
        run: the folder of a run.
        trace: also run this number of steps of its task again, here, and keep a profiler's trace of them for
        TensorBoard.
            Names the lines of operations that ran on the CPU instead or waited for the device. The run is not
            changed.
        hlo: also keep the step's compiled graph as the XLA device receives it, with the line of each
        operation. dataset_dir: the dataset for these steps, if it has moved since the run. on: the cores for
        these steps.
    """
    from tpukit.host import environment
    from tpukit.reporting import display
    from tpukit.runs.run import Run

    run = Run.find(run)
    display.show_report(run)
    if trace or hlo:
        from tpukit.tools import trace as tool

        task = with_dataset(_task_of(run, dataset_dir), environment.detect())
        traced = tool.trace(task, run, steps=trace or 1, hlo=hlo, cores=on.cores, parallel=on.parallel)
        print(f"\n{Sentences(traced.findings())}")


def _task_of(run, dataset_dir):
    """The task of a run, with fresh weights: those that it started from may be gone."""
    from tpukit.tasks.trained import task_of

    task = task_of(run.config)
    return dataclasses.replace(task, dataset_dir=dataset_dir or task.dataset_dir or Path("."))


def watch(run: RunFolder, once: bool = False):
    """Follow a run that another process trains: progress, speed, scores, and chip utilization.

    Args:
        run: the folder of a run.
        once: show it once.
    """
    from tpukit.runs.run import Run
    from tpukit.tools import watch as tool

    tool.watch(Run.find(run), once=once)


def predict(
    run: RunFolder,
    files: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE ...")],
    out: Path,
    task: str | None = None,
    batch_size: int = 16,
    pictures: bool = True,
    device: Literal["auto", "cpu"] = "auto",
):
    """Predict your own files with the best weights of a run: results as JSON and CSV, masks or images,
    pictures. Exit code 1 if a file could not be read; the others are predicted.

    Args:
        run: the folder of a run, or a weights file.
        files: files, folders of them, or patterns such as 'night/*.png'.
        out: a new or empty folder for the results.
        task: the task, for a weights file that does not name its own.
        batch_size: samples, or windows of large images, that are predicted at once.
        pictures: also draw a picture of every sample.
        device: auto, what this machine has, or the CPU.
    """
    from tpukit.tools.predict import predict as run_predict

    results = run_predict(
        run, files, task=task, out=out, batch_size=batch_size, pictures=pictures, device=device
    )
    broken = [result for result in results if "error" in result]
    print(printable(f"{len(results) - len(broken)} samples predicted: {out / 'predictions.csv'}"))
    return 1 if broken else 0
