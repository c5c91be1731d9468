"""The functions that are commands and not functions of the library."""

import dataclasses
import itertools
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro import conf

import tpukit
from tpukit.data.datasets import Findable, find_dataset, is_demo, is_synthetic
from tpukit.host import files
from tpukit.host.environment import Environment
from tpukit.host.errors import TpukitError
from tpukit.host.files import explain_unwritable
from tpukit.host.tables import Sentences
from tpukit.host.text import one_line, printable
from tpukit.leaves import part_of
from tpukit.runs import weights
from tpukit.training.task import Task

# Parameters that several commands have.
RunFolder = Annotated[Path, conf.arg(metavar="RUN", help="the folder of a run")]
Trained = Annotated[
    Path,
    conf.arg(metavar="RUN", help="the folder of a run, a weights file, or demo (the small MSHNet of tpukit)"),
]
TaskName = Annotated[str | None, conf.arg(help="the task, if a weights file does not name its own")]
Cores = Annotated[int | None, conf.arg(help="TPU cores, GPUs or processes; by default all, or one on a CPU")]
FilesToPredict = Annotated[
    conf.Positional[tuple[str, ...]],
    conf.arg(metavar="FILE ...", help="files, folders or patterns such as 'night/*.png'"),
]
Files = Annotated[conf.Positional[tuple[str, ...]], conf.arg(metavar="FILE ...")]


def train(
    task: Task,
    run: Path | None = None,
    backup: Path | None = None,
    cores: Cores = None,
) -> None:
    """Train a task, or resume a run that was stopped.

    Args:
        run: folder of the run; by default TASK in this machine's output folder.
        backup: folder (on Drive or in a mounted bucket, say) that gets a copy of the run at every checkpoint.
    """
    from tpukit.reporting.findings import labels_of, last_and_kept_table

    env = tpukit.detect()
    if task.weights:
        weights.find(task.weights)  # before any data is made or downloaded
    task = with_dataset(task, env)
    opened = tpukit.Run.open(run or env.outputs / task.name, task, backup=backup)
    scores = tpukit.launch(tpukit.train, task, opened, cores=cores)
    if scores:
        if table := last_and_kept_table(opened.records(), labels_of(opened.config).names):
            print(f"\n{table}")
        print(f"\nrun: {opened.path}  (tpukit show {opened.path})")


def test(
    run: Trained,
    dataset_dir: Path | None = None,
    batch_size: int | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    cores: Cores = None,
    task: TaskName = None,
    model_name: str | None = None,
    network: str | None = None,
) -> None:
    """Score the best weights of a run, or a weights file, on the test set.

    Args:
        dataset_dir: the dataset; by default the one that the run was trained on, or found as in training.
        batch_size: samples of a step, over all cores; by default as in training.
        precision: by default as in training.
        model_name: the network that a weights file is of, which does not say so (images and text).
        network: published or small, for a weights file that does not say so (mshnet and cdeit).
    """
    from tpukit.inference.trained import find_trained, replaced
    from tpukit.reporting import display, findings

    env = tpukit.detect()
    trained, weights_file = find_trained(run, task)
    options = dict(dataset_dir=dataset_dir, batch_size=batch_size, precision=precision)
    options |= dict(model_name=model_name, network=network)
    trained = replaced(trained, {name: value for name, value in options.items() if value is not None})
    trained = with_dataset_of_test(trained, env, weights_file) if is_demo(run) else with_dataset(trained, env)
    scored = tpukit.Run(run if run.is_dir() else env.outputs / f"{trained.name}-test")
    if not run.is_dir():
        if files.exists(scored.path / "config.json"):
            raise TpukitError(f"{scored.path} is a run: rename it, because `tpukit test FILE` writes there")
        with explain_unwritable(scored.path):
            scored.path.mkdir(parents=True, exist_ok=True)
    scores = tpukit.launch(tpukit.test, trained, scored, cores=cores)
    if scores:
        kind = f" · {findings.SYNTHETIC}" if is_synthetic(trained.dataset_dir or "") else ""
        names = getattr(trained, "score_names", {})
        print(f"\n{findings.scores_table(scores, names, f'Scores{kind}')}")
        if display.load_predictions(trained, scored.path / "predictions"):
            tpukit.show_predictions(scored, trained, count=8)
            print(f"predictions: {scored.path / 'predictions'}")


def show(run: RunFolder) -> None:
    """Show the scores and curves of a run."""
    tpukit.show(run)


def report(run: RunFolder, trace: bool = False) -> None:
    """Show what the accelerator did in a run: compilations and their causes, the time of a step, memory.

    Args:
        trace: also name the lines whose operations fall back to the CPU or wait for the device, in a step
            that is run again, here.
    """
    folder = tpukit.Run.find(run)
    tpukit.show_report(folder)
    if trace:
        from tpukit.inference.trained import task_of
        from tpukit_tools.trace import trace as run_trace

        task = with_dataset(task_of(folder.config, folder.path), tpukit.detect())
        print(f"\n{Sentences(run_trace(task))}")


def measure(task: Task, cores: Cores = None, batch_sizes: tuple[int, ...] = (), steps: int = 20) -> None:
    """Measure a task here at several batch sizes (TASK), or compare what machines measured (FILES).

    Args:
        batch_sizes: global batch sizes; by default they double from --batch-size on, until a step does not
            fit; on a CPU only once.
        steps: steps to time at each batch size, in five rounds, after the first few.
    """
    from tpukit_tools.measure import compare, measure_here

    env = tpukit.detect()
    folder = env.outputs / "comparison"
    task = with_dataset(task, env, demo=True).choose_settings(env)
    measured = measure_here(
        task, folder=folder, batch_sizes=batch_sizes, steps=steps, cores=cores, log=to_stderr
    )
    for table in compare(measured, epochs=task.epochs):
        print(table)
    print(f"\nNext, put other machines' files into that folder, and run: tpukit compare {folder}/*.json")


def merge(files: Files, epochs: int = 400) -> None:
    """Compare what several machines measured, and how long a whole training run takes on each: one table for
    each task and sample size.

    Args:
        files: files that `tpukit compare TASK` wrote.
        epochs: epochs of the whole training run.
    """
    from tpukit_tools.measure import compare, read

    if not files:
        raise TpukitError("name a task to measure here, or files of `tpukit compare TASK`")
    measurements = [measurement for path in files for measurement in read(path)]
    for table in compare(measurements, epochs=epochs):
        print(table)


def migrate(files: Files, fix: bool = False) -> int:
    """List what in PyTorch code will not work on a TPU or will be slow, line by line, each with a fix. Runs
    none of the code. Exit code 1 if anything is left that will not work.

    Args:
        files: scripts, notebooks, or folders of them.
        fix: rewrite what is safe to rewrite, in place, and show the difference. The original of each file
            stays next to it (NAME.orig).
    """
    from tpukit_tools.migrate import as_text, examine, files_in, imported_beside

    findings, paths = [], files_in(files)
    for path in paths:
        examined = examine(path)
        if fix and any(finding.fixable for finding in examined.findings):
            if copy := examined.write():
                print(examined.difference())
                print(printable(f"{path} as it was: {copy}"))
            else:
                print(printable(f"{path} was edited meanwhile and is left as it is: run the command again"))
            examined = examine(path)
        findings += examined.findings
    print(as_text(findings))
    if others := ", ".join(map(str, imported_beside(paths))):
        print(printable(f"imported, but not looked at: {others} (a model may tie weights: give them, too)"))
    return 1 if any(finding.level == "error" for finding in findings) else 0


SHOWN = 10  # samples whose results are printed


def predict(
    run: Trained,
    files: FilesToPredict,
    out: Path | None = None,
    batch_size: int = 16,
    device: Literal["cpu", "auto"] = "auto",
    task: TaskName = None,
    model_name: str | None = None,
    network: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    new_tokens: int | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> int:
    """Predict your own files with the best weights of a run. A file that cannot be read is left out.

    Args:
        out: a new or empty folder for the results, with a picture of each sample; by default predictions, or
            a new one beside it.
        batch_size: samples, or windows of large images, that are predicted at once.
        device: cpu, or auto, what this machine has.
        model_name: the network that a weights file is of, which does not say so (images and text).
        network: published or small, for a weights file that does not say so (mshnet and cdeit).
        temperature: what logits are divided by before a token is drawn (text); 0: the most probable one.
        top_p: draw from the most probable tokens whose probabilities add up to this (text).
        new_tokens: tokens of an answer, at most (text).
        seed: the same seed draws the same answers (text).
        progress: show a progress bar.
    """
    folder = out or unused_folder(Path("predictions"))
    of_task = dict(model_name=model_name, network=network)
    of_task |= dict(temperature=temperature, top_p=top_p, new_tokens=new_tokens, seed=seed)
    settings: dict[str, Any] = dict(batch_size=batch_size, device=device, progress=progress)
    settings |= {name: value for name, value in of_task.items() if value is not None}
    results = tpukit.predict(run, files, task=task, out=folder, **settings)
    good = [result for result in results if "error" not in result]
    for result in good[:SHOWN]:
        print(printable(f"{one_line(result['name'])}: {as_words(result)}"))
    if len(good) > SHOWN:
        print(f"and {len(good) - SHOWN} more")
    if (folder / "pictures").is_dir():
        print(printable(f"pictures: {folder / 'pictures'}"))
    return int(len(good) < len(results))


def unused_folder(path: Path) -> Path:
    """Return the folder, or the first of PATH-2, PATH-3, ... that holds nothing."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    )
    return next(one for one in names if not files.exists(one) or files.is_folder(one) and not os.listdir(one))


def as_words(result: dict) -> str:
    """Return what was predicted for a sample in words: 2 targets; class cat, probability 0.98."""
    words = []
    for key, value in result.items():
        if isinstance(value, bool | int) and key.endswith("s"):
            words.append(f"{value} {key if value != 1 else key[:-1]}")
        elif isinstance(value, str | int | float) and key not in ("name", "height", "width"):
            text = f"{value:.3g}" if isinstance(value, float) else " ".join(str(value).split())
            words.append(f"{key} {text if len(text) <= 60 else text[:59] + '…'}")
    return ", ".join(words) or ", ".join(key for key in result if key != "name")


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def with_dataset(task: Task, env: Environment, *, demo: bool = False) -> Task:
    """Return the task with the folder of its dataset: the given one, one that is found here, or a synthetic
    set, for a task that needs the user's own data only with `demo`."""
    demo = demo or not part_of(task, Findable, "needs_own_data")
    folder = find_dataset(task.dataset, task.dataset_dir, demo=demo, env=env)
    return dataclasses.replace(task, dataset_dir=folder)


def with_dataset_of_test(task: Task, env: Environment, file: Path) -> Task:
    """Return the task with the real dataset that published weights were scored on. Raises TpukitError without
    it: scores on a synthetic set are not theirs."""
    known = weights.metadata(file).get(task.score)
    name = task.score_names.get(task.score, task.score)
    score = f" (there its {name} is {float(known):.3f})" if known else ""
    try:
        folder = find_dataset(task.dataset, task.dataset_dir, demo=False, env=env)
    except TpukitError as error:
        raise TpukitError(f"the demo's scores are those on {task.dataset}{score}: {error}") from error
    return dataclasses.replace(task, dataset_dir=folder)


def emulate(machine: str = "--help", *command: str) -> int:
    """Run a command on TPU chips that are not there: does my script work on eight?"""
    from tpukit_tools.emulate import MACHINES, emulate

    if machine in MACHINES and command:
        return emulate(machine, command)
    machines = "|".join(MACHINES)
    usage = f"usage: tpukit emulate {machines} COMMAND ..., such as `tpukit emulate v5e-8 python train.py`"
    if machine in ("-h", "--help", "help"):
        print(usage)
        return 0
    got = f"no command to run on {machine}" if machine in MACHINES else f"no emulated machine {machine!r}"
    print(f"tpukit: {got}; {usage}", file=sys.stderr)
    return 2
