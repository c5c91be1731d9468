"""`tpukit train`, `test`, `predict`, `show` and `report`: make, score, use and show a run."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

import tpukit
from tpukit.cli.options import LaunchOptions, RunFolder
from tpukit.host import environment
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Sentences, printable
from tpukit.runs.run import Fitted
from tpukit.tasks.datasets import with_dataset
from tpukit.training.task import Task

# Settings that a test does not take over from the training.
NOT_INHERITED = ("weights", "batch_size", "precision")


def train(task: Task, options: LaunchOptions) -> None:
    """Train a task, or resume a run that was stopped."""
    from tpukit.reporting.findings import last_and_kept_tables

    env = tpukit.detect()
    task = with_dataset(task, env)
    path = options.run or env.outputs / task.name
    earlier = None if (path / "config.json").is_file() else tpukit.find_run(env, path.name)
    run = tpukit.Run.open(path, task, backup=options.backup, earlier=earlier)
    scores = tpukit.launch(tpukit.train, task, run, **options.of_launch())
    if scores and environment.rank() == 0:
        for table in last_and_kept_tables(run.records()):
            print(f"\n{table}")
        print(f"\nrun: {run.path}  (tpukit show {run.path})")


def test(task: Task, options: LaunchOptions) -> None:
    """Score a weights file, or the best weights of a run."""
    from tpukit.reporting.findings import scores_table
    from tpukit.runs import weights
    from tpukit.tasks.trained import config_of

    env = tpukit.detect()
    path = options.run or env.outputs / (f"{task.name}-test" if task.weights else task.name)
    if task.weights and (path / "best.safetensors").exists():
        both = f"--weights {task.weights} and the run {path}, which has best weights"
        raise TpukitError(f"{both}: give only one of --weights and --run")
    if (path / "config.json").is_file():
        task = _as_trained(task, tpukit.Run.find(path).config, path)
    elif task.weights and (config := config_of(weights.local(task.weights))):
        task = _as_trained(task, config, task.weights)
    task = with_dataset(task, env)
    run = tpukit.Run.find(path, trained=False)
    scores = tpukit.launch(tpukit.test, task, run, **options.of_launch())
    if scores and environment.rank() == 0:
        print(f"\n{scores_table(scores)}")
        if task.load_predictions(run.path / "predictions"):
            tpukit.show_predictions(run, task, count=8)
            print(f"predictions: {run.path / 'predictions'}")


def _as_trained(task: Task, config: dict, source: Path | str) -> Task:
    """The task with the settings of its training (of the model, above all), where the command line leaves
    them at their defaults. source: the run or file that has this config."""
    from tpukit.tasks.trained import task_of

    if config["task"] != task.name:
        raise TpukitError(f"{source} is of the task {config['task']}, not of {task.name}")
    trained = task_of(config)
    inherited = {}
    for field in dataclasses.fields(task):
        is_free = field.metadata.get("free") or field.name in NOT_INHERITED
        value = getattr(task, field.name)
        if not is_free and (value == field.default or isinstance(value, Fitted)):
            inherited[field.name] = getattr(trained, field.name)
    return dataclasses.replace(task, **inherited)


def show(run: RunFolder) -> None:
    """Scores and curves of a run.

    Args:
        run: the folder of a run.
    """
    tpukit.show(run)


def report(
    run: RunFolder,
    follow: bool = False,
    trace: int = 0,
    dataset_dir: Path | None = None,
) -> None:
    """What the accelerator did in a run: compilations and their causes, where a step's time went, memory.

    Args:
        run: the folder of a run.
        follow: first print the log of a run that another process trains, and how far it is, until it ends.
        trace: also run this number of steps of its task again, here, and keep a profiler's trace of them for
            TensorBoard, and the compiled graph of an XLA device, with each operation's line. Names the lines
            of operations that ran on the CPU instead or waited for the device. The run is not changed.
        dataset_dir: the dataset for these steps, if it has moved since the run.
    """
    from tpukit.reporting import display

    folder = tpukit.Run.find(run)
    if follow:
        display.follow(folder)
    display.show_report(folder)
    if trace:
        from tpukit.tasks.trained import task_of
        from tpukit.tools.trace import trace as run_trace

        task = task_of(folder.config)  # with fresh weights: those that it started from may be gone
        task = dataclasses.replace(task, dataset_dir=dataset_dir or task.dataset_dir or Path("."))
        task = with_dataset(task, tpukit.detect())
        print(f"\n{Sentences(run_trace(task, folder, steps=trace))}")


def predict(
    run: RunFolder,
    files: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE ...")],
    out: Path,
    task: str | None = None,
    batch_size: int = 16,
    device: Literal["auto", "cpu"] = "auto",
) -> int:
    """Predict your own files with the best weights of a run: results as JSON and CSV, masks or images,
    pictures. Exit code 1 if a file could not be read; the others are predicted.

    Args:
        run: the folder of a run, or a weights file.
        files: files, folders of them, or patterns such as 'night/*.png'.
        out: a new or empty folder for the results.
        task: the task, for a weights file that does not name its own.
        batch_size: samples, or windows of large images, that are predicted at once.
        device: auto, what this machine has, or the CPU.
    """
    results = tpukit.predict(run, files, task=task, out=out, batch_size=batch_size, device=device)
    broken = [result for result in results if "error" in result]
    print(printable(f"{len(results) - len(broken)} samples predicted: {out / 'predictions.csv'}"))
    return 1 if broken else 0
