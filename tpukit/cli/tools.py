"""`tpukit export`, `plan`, `compare`, `migrate` and `simulate`."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

import tpukit
from tpukit.cli.doctor import to_stderr
from tpukit.cli.runs import RunFolder
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tasks import TASKS
from tpukit.tasks.datasets import with_dataset
from tpukit.training.task import Task

Files = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE ...")]


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    chip: Literal["v5e-1", "v5e-8", "v6e-1"] = "v5e-1"
    """The TPU: one v5e chip (Colab), eight (Kaggle), or one v6e chip."""
    batch_sizes: tuple[int, ...] = ()
    """Global batch sizes to try; by default --batch-size alone."""


def plan(task: Task, options: PlanOptions) -> int:
    """Whether a training step fits a TPU, what it computes, and what it moves. Needs no TPU."""
    planned = tpukit.plan(task, **dataclasses.asdict(options), log=to_stderr)
    print(planned)
    return 0 if planned.largest_batch else 1


@dataclasses.dataclass(frozen=True)
class MeasureOptions:
    cores: int | None = None
    """TPU cores or GPUs to use; by default all. On a CPU: processes; by default one."""
    batch_sizes: tuple[int, ...] = ()
    """Global batch sizes; by default they double from --batch-size on, until a step does not fit; on a CPU
    once."""
    steps: int = 20
    """Timed steps of each batch size, after the first ones, in five rounds."""


def measure(task: Task, options: MeasureOptions) -> None:
    """Measure a task here at several batch sizes (TASK), or compare what machines measured (FILES)."""
    from tpukit.tools.measure import compare, measure_here

    env = tpukit.detect()
    folder = env.outputs / "comparison"
    task = with_dataset(task, env, demo=True)
    measured = measure_here(task, folder=folder, log=to_stderr, **dataclasses.asdict(options))
    for table in compare(measured, epochs=task.epochs):
        print(table)
    print(f"\nNext, with the files of other machines next to it: tpukit compare {folder}/*.json")


def merge(files: Files, epochs: int = 400) -> None:
    """Put side by side what several machines measured, and how long a whole training takes on each: a table
    for each task and size of its samples.

    Args:
        files: files that `tpukit compare TASK` wrote.
        epochs: epochs of the whole training.
    """
    from tpukit.tools.measure import compare, read

    names = ", ".join(TASKS)
    if not files:
        raise TpukitError(f"name a task ({names}) to measure here, or files of `tpukit compare TASK`")
    for path in files:
        if not path.exists():
            raise TpukitError(f"'{path}' is neither a task ({names}) nor a file of `tpukit compare TASK`")
    measurements = [measurement for path in files for measurement in read(path)]
    for table in compare(measurements, epochs=epochs):
        print(table)


def export(
    run: RunFolder,
    to: Literal["onnx", "peft", "transformers"],
    out: Path | None = None,
    task: str | None = None,
) -> int:
    """Write the best weights of a run for other programs, and measure on random samples how much the
    output differs. Exit code 1 if that is more than 1e-4.

    Args:
        run: the folder of a run, or a weights file.
        to: onnx, one file; of language models a folder, peft, the adapter alone, or transformers, the whole
            model with the adapter in it.
        out: a new file or folder; by default best.onnx, peft or transformers beside the weights.
        task: the task, for a weights file that does not name its own.
    """
    exported = tpukit.export(run, to=to, out=out, task=task)
    print(printable(exported))
    return 0 if exported.is_equal() else 1


def migrate(files: Files, fix: bool = False) -> int:
    """List what in PyTorch code will not work, or will be slow, on a TPU: by line, each with its fix. Runs
    none of the code. Exit code 1 if anything is left that will not work.

    Args:
        files: scripts, notebooks, or folders of them.
        fix: rewrite what is safe to rewrite, in place, and show the difference. A copy of each file as it was
            stays next to it (NAME.orig).
    """
    from tpukit.tools.migrate import as_text, examine, files_in

    findings = []
    for path in files_in(files):
        examined = examine(path)
        if fix and any(finding.fixable for finding in examined.findings):
            print(examined.difference())
            print(printable(f"{path} as it was: {examined.write()}"))
            examined = examine(path)
        findings += examined.findings
    print(as_text(findings))
    return 1 if any(finding.level == "error" for finding in findings) else 0


def simulate(
    what: tyro.conf.Positional[Literal["eit"]],
    out: Path = Path("data"),
    samples: int = 10_000,
    test_samples: int = 500,
) -> None:
    """Make a set for electrical impedance tomography: train/ and test/ with an npz file for every sample. A
    simulation that was stopped is resumed: files that are there already are kept.

    Args:
        what: eit, a tank for electrical impedance tomography.
        out: folder of the set.
        samples: training samples.
        test_samples: test samples.
    """
    from tpukit.tasks.cdeit import simulate

    simulate(out, samples=samples, test_samples=test_samples, workers=os.cpu_count() or 1)
    print(f"{samples} training and {test_samples} test samples: {out}")
