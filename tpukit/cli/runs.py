"""`tpukit train`, `test`, `predict`, `show` and `report`: make, score, use and show a run."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

import tpukit
from tpukit.host import environment
from tpukit.host.tables import Sentences, printable
from tpukit.tasks.datasets import with_dataset
from tpukit.training.task import Task

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    run: Path | None = None
    """Folder of the run; by default TASK in this machine's output folder."""
    backup: Path | None = None
    """Folder (on Drive or in a mounted bucket, say) that gets a copy of the run at every checkpoint."""
    cores: int | None = None
    """TPU cores or GPUs to use; by default all. On a CPU: processes; by default one."""
    parallel: Literal["processes", "spmd"] = "processes"
    """processes: one for each core. spmd: one process and one compiled graph over all TPU cores of this
    host."""


def train(task: Task, options: LaunchOptions) -> None:
    """Train a task, or resume a run that was stopped."""
    from tpukit.reporting.findings import last_and_kept_tables

    env = tpukit.detect()
    task = with_dataset(task, env)
    path = options.run or env.outputs / task.name
    run = tpukit.Run.open(path, task, backup=options.backup)
    scores = tpukit.launch(tpukit.train, task, run, cores=options.cores, parallel=options.parallel)
    if scores and environment.rank() == 0:
        for table in last_and_kept_tables(run.records()):
            print(f"\n{table}")
        print(f"\nrun: {run.path}  (tpukit show {run.path})")


def test(
    run: RunFolder,
    dataset_dir: Path | None = None,
    batch_size: int | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    cores: int | None = None,
    task: str | None = None,
) -> None:
    """Score the best weights of a run, or a weights file, on the test set.

    Args:
        run: the folder of a run, or a weights file.
        dataset_dir: the dataset; by default the one that the run was trained on, or found as in training.
        batch_size: samples of a step, over all cores; by default as in training.
        precision: by default as in training.
        cores: TPU cores or GPUs to use; by default all. On a CPU: processes; by default one.
        task: the task, for a weights file that does not name its own.
    """
    from tpukit.reporting.findings import scores_table
    from tpukit.tasks.trained import find_trained

    env = tpukit.detect()
    trained, best = find_trained(run, task)
    given = dict(dataset_dir=dataset_dir, batch_size=batch_size, precision=precision)
    trained = dataclasses.replace(trained, **{name: value for name, value in given.items() if value})
    trained = with_dataset(trained, env)
    scored = tpukit.Run.find(run if run.is_dir() else env.outputs / f"{trained.name}-test", trained=False)
    scores = tpukit.launch(tpukit.test, trained, scored, cores=cores)
    if scores and environment.rank() == 0:
        print(f"\n{scores_table(scores)}")
        if trained.load_predictions(scored.path / "predictions"):
            tpukit.show_predictions(scored, trained, count=8)
            print(f"predictions: {scored.path / 'predictions'}")


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
    tensorboard: Path | None = None,
    dataset_dir: Path | None = None,
) -> None:
    """What the accelerator did in a run: compilations and their causes, where a step's time went, memory.

    Args:
        run: the folder of a run.
        follow: first print the log of a run that another process trains, and how far it is, until it ends.
        trace: also take this number of steps of its task again, here, keep a profiler's trace of them for
            TensorBoard, and name the lines whose operations fall back to the CPU or wait for the device.
        tensorboard: also write the numbers of the run as an event file for TensorBoard in this folder.
        dataset_dir: the dataset for these steps, if it has moved since the run.
    """
    from tpukit.reporting import display

    folder = tpukit.Run.find(run)
    if follow:
        display.follow(folder)
    display.show_report(folder)
    if tensorboard:
        from tpukit.tools.tensorboard import write_events

        print(f"\nevents for TensorBoard: {printable(write_events(folder, tensorboard))}")
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
