"""`tpukit predict`: the predictions of a finished run for a user's own files or images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpukit.host import environment, known_errors
from tpukit.host.bars import tqdm
from tpukit.host.errors import TpukitError
from tpukit.host.files import explain_unwritable, names_in
from tpukit.host.text import printable

if TYPE_CHECKING:
    from tpukit.runs.run import Run
    from tpukit.training.task import Task

SHOWN = 10  # errors of files that are printed


def predict(
    run: Run | str | Path,
    files: object,
    *,
    task: Task | str | None = None,
    out: str | Path | None = None,
    batch_size: int = 16,
    device: Literal["cpu", "auto"] = "cpu",
    progress: bool = True,
    **settings: Any,
) -> list[dict]:
    """Predict your own files with the best weights of a run. A file that cannot be read is left out.

    Args:
        run: a `Run`, the folder of one, a weights file, or demo, the small MSHNet that comes with tpukit.
        files: paths (files, folders, patterns), numpy arrays or PIL images; of CDEIT, files or arrays of
            voltages. demo: four infrared images that come with tpukit.
        task: a task of your own, or one with other settings, or the name of a task for a file that does not
            name its own.
        out: a new or empty folder for the results, with a picture of each sample; in a shell it is
            predictions, or a new one beside it.
        batch_size: samples, or windows of large images, that are predicted at once.
        device: cpu, or auto, what this machine has. After auto on a TPU, this process can launch no cores.
        progress: show a progress bar.
        **settings: settings of the task to replace, such as temperature=0.8 of a language model.

    Returns:
        A dict for each sample: the `name`, and what the task's `results` gives, or the `error` of a file that
        cannot be read or predicted.

    Raises:
        TpukitError: if no file can be predicted, or the run has no weights."""
    from tpukit.devices import open_runtime
    from tpukit.devices.runtime import Runtime
    from tpukit.inference import own, own_files
    from tpukit.inference.trained import find_trained, replaced

    if batch_size < 1:
        raise TpukitError(f"batch_size={batch_size}: it must be 1 or more")
    task, best = find_trained(run, task)
    task = replaced(task, settings)
    with known_errors.explain_known_errors(), own_files.as_files(files) as paths:
        if out is not None:
            out = Path(out)
            with explain_unwritable(out):
                out.mkdir(parents=True, exist_ok=True)
            if names := names_in(out, "[!.]*"):
                raise TpukitError(
                    f"{out} is not empty (it has {names[0]}): choose a new folder for the results"
                )
        runtime = Runtime("cpu")
        if device != "cpu":
            runtime = open_runtime(environment.detect(), task.precision)
        paths = tqdm(paths, desc=f"predicting {task.name}", unit="file", disable=not progress)
        samples = own_files.predict_files(task, best, paths, runtime, batch_size=batch_size)
        if out is None:
            results = [own.result_of(task, sample) for sample in samples]
        else:
            results = own.save_predictions(task, samples, out)
    errors = {result["name"]: result["error"] for result in results if "error" in result}
    for error in list(errors.values())[:SHOWN]:
        print(printable(f"left out: {error}"))
    if len(errors) == len(results):
        raise TpukitError(f"no file could be predicted: {next(iter(errors.values()))}")
    if errors:
        print(f"{len(errors)} files left out")
    if out is not None:
        print(printable(f"{len(results) - len(errors)} samples predicted: {out / 'predictions.csv'}"))
    return results
