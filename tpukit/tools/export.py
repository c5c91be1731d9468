"""`tpukit export`: a trained model as one file for other programs, compared with the model that was
trained."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpukit.host import files
from tpukit.host.errors import TpukitError, first_line

if TYPE_CHECKING:
    from tpukit.runs.run import Run
    from tpukit.training.task import Task

LARGEST_DIFFERENCE = 1e-4  # of an output, relative to the largest absolute output, or to 1 if that is smaller
FORMATS = {"onnx": ".onnx", "torch-export": ".pt2"}
FOLDERS = ("peft", "transformers")  # by a task's own `export_folder`
PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # that ONNX needs
BATCH = 3  # samples that the graph is traced with; any number works later
COMPARED = 16  # samples


@dataclasses.dataclass
class Exported:
    """The file, its metadata (str each), and how much its output differs from the trained model's."""

    path: Path
    """the file, or the folder of files"""
    difference: float
    """see `LARGEST_DIFFERENCE`"""
    metadata: dict[str, str]
    replaced: bool = False
    """whether another file was there"""

    def is_equal(self) -> bool:
        return self.difference <= LARGEST_DIFFERENCE  # NaN is not

    def __str__(self) -> str:
        shapes = json.loads(self.metadata["inputs"])
        inputs = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
        size = sum(file.stat().st_size for file in [self.path, *self.path.glob("*")] if file.is_file())
        verdict = "" if self.is_equal() else f", MORE than {LARGEST_DIFFERENCE:g}: do not use it"
        replaced = ", in place of the file that was there" if self.replaced else ""
        return (
            f"{self.path}: {size / 1e6:.1f} MB{replaced}\ninput {inputs}\noutput:"
            f" {self.metadata['output']}\nlargest difference to the trained model on"
            f" {self.metadata['compared_on']}: {self.difference:.2g}{verdict}"
        )


def export(
    run: Run | str | Path,
    *,
    to: str = "onnx",
    out: str | Path | None = None,
    task: Task | str | None = None,
) -> Exported:
    """Write the best weights of a run for use without tpukit: as one file, "onnx", or "torch-export" for
    `torch.export.load`; a language model as a folder, "peft", its adapter, or "transformers", the whole.

    run: a `Run`, the path of one, or a weights file. out: the file; by default it is beside the weights. A
    file that is there is replaced only beside the weights. task: as for `predict`. The batch's size is
    dynamic. Returns an `Exported`, whose `difference` is measured on 16 test samples, or random ones where
    there is no dataset. Raises TpukitError where a package is missing or the model cannot be exported."""
    import torch

    from tpukit.runs import weights
    from tpukit.tasks.trained import find_trained

    if to not in (*FORMATS, *FOLDERS):
        raise TpukitError(f"to={to!r}: choose one of {', '.join((*FORMATS, *FOLDERS))}")
    if to == "onnx" and (missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]):
        raise TpukitError(f"export to ONNX needs {', '.join(missing)}: pip install {' '.join(PACKAGES)}")
    task, best = find_trained(run, task)
    if (to in FOLDERS) != hasattr(task, "export_folder"):
        fitting = FOLDERS if to in FORMATS else FORMATS
        raise TpukitError(f"to={to!r} is not for the task {task.name}: choose one of {', '.join(fitting)}")
    if to in FOLDERS:
        return _export_folder(task, best, to, Path(out) if out else best.with_name(to))
    path = Path(out) if out else best.with_name(f"{best.stem}{FORMATS[to]}")
    if out and path.exists():
        raise TpukitError(f"{path} exists: choose another file")
    model = task.model().eval()
    weights.load(model, best)
    batch, source = _samples(task)
    inputs = {name: np.ascontiguousarray(values) for name, values in task.export_inputs(batch).items()}
    tensors = {name: torch.as_tensor(values) for name, values in inputs.items()}
    with torch.no_grad():
        expected = task.exported(model, tensors).numpy()
    metadata = {name: text for name, text in weights.metadata(best).items() if not name.startswith("tpukit.")}
    metadata |= dict(task=task.name, output=task.export_output, compared_on=source)
    if task.export_preprocessing:
        metadata["preprocessing"] = task.export_preprocessing
    multiple = getattr(task, "export_multiple", 0)
    described = {name: _describe(values, multiple) for name, values in inputs.items()}
    metadata["inputs"] = json.dumps(described)
    program = _trace(task, model, tensors)
    with tempfile.TemporaryDirectory(prefix="tpukit-") as folder:
        # Run where no other user can write: torch.export.load unpickles, which can run code.
        written = Path(folder) / f"model{FORMATS[to]}"
        write_and_run = _write_and_run_onnx if to == "onnx" else _write_and_run_torch_export
        found = write_and_run(program, written, metadata, inputs)
        with files.explain_unwritable(path.parent):
            replaced = path.exists()
            files.copy_atomic(written, path)
    difference = float("nan")
    if found.shape == expected.shape:
        difference = float(np.abs(found - expected).max()) / max(float(np.abs(expected).max()), 1.0)
    return Exported(path, difference, metadata, replaced)


def _export_folder(task, best, to, folder):
    from tpukit.runs import weights

    if folder.exists():
        raise TpukitError(f"{folder} exists: choose another folder")
    model = task.model().eval()
    weights.load(model, best)
    with files.explain_unwritable(folder.parent), files.atomic_folder(folder) as work:
        difference, inputs = task.export_folder(model, to, work)
    metadata = dict(task=task.name, output=task.export_output, inputs=json.dumps(inputs))
    return Exported(folder, difference, metadata | dict(compared_on="random tokens"))


def _samples(task):
    """(batch of arrays (N, ...), where it is from): test samples where the dataset is there, else random
    ones."""
    if task.dataset_dir is not None and Path(task.dataset_dir).is_dir():
        data = task.test_set()
        indices = np.linspace(0, len(data) - 1, min(COMPARED, len(data))).astype(int)
        return data.batch(indices), f"{len(indices)} test samples"
    return task.example(COMPARED), f"{COMPARED} random samples"


def _describe(values, multiple):
    """The type and the shape of an input, for those who use the file."""
    shape = [str(size) for size in values.shape[1:]]
    if multiple:
        shape[-2:] = [f"height: any multiple of {multiple}", f"width: any multiple of {multiple}"]
    return f"{values.dtype} (batch, {', '.join(shape)})"


def _trace(task, model, inputs):
    """The `torch.export.ExportedProgram` of `task.exported`, with a batch of any size."""
    import torch
    from torch.export import Dim

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, inputs):
            return task.exported(self.model, inputs)

    shape = {0: Dim("batch", min=1, max=65536)}
    if multiple := getattr(task, "export_multiple", 0):
        shape |= {2: multiple * Dim("rows", min=2, max=512), 3: multiple * Dim("columns", min=2, max=512)}
    few = {name: values[:BATCH] for name, values in inputs.items()}
    shapes = (dict.fromkeys(inputs, shape),)
    try:
        with torch.no_grad():
            return torch.export.export(Module().eval(), (few,), dynamic_shapes=shapes)
    except Exception as error:  # torch raises many types for what it cannot trace
        raise TpukitError(f"torch.export cannot trace {task.name} ({first_line(error)})") from error


def _write_and_run_onnx(program, path, metadata, inputs):
    """Write the file. Returns its output for the inputs, by onnxruntime on the CPU."""
    import onnxruntime
    import torch

    decompositions = torch.export.default_decompositions()
    decompositions[torch.ops.aten.adaptive_max_pool2d.default] = _largest_of_each_channel
    with contextlib.redirect_stdout(io.StringIO()):  # its progress
        program = program.run_decompositions(decompositions)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=list(inputs),
            output_names=["output"],
            optimize=False,
            dynamic_shapes=(dict.fromkeys(inputs, {0: "batch"}),),  # the axis's name
        )
    assert exported is not None  # as always with dynamo
    exported.model.metadata_props.update({name: str(value) for name, value in metadata.items()})
    exported.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


def _largest_of_each_channel(x, size):
    """`adaptive_max_pool2d` to (1, 1), which ONNX has only for images of a fixed size: (the maxima, their
    places, not used)."""
    import torch

    if list(size) != [1, 1]:
        raise TpukitError(f"adaptive_max_pool2d to {list(size)} cannot be exported to ONNX: only to [1, 1]")
    largest = x.amax((-2, -1), keepdim=True)
    return largest, torch.zeros_like(largest, dtype=torch.int64)


def _write_and_run_torch_export(program, path, metadata, inputs):
    """Write the file. Returns its output for the inputs, by torch."""
    import torch

    text = json.dumps(metadata | dict(order=list(inputs)), indent=1)
    torch.export.save(program, path, extra_files={"metadata.json": text})
    with torch.no_grad(), warnings.catch_warnings():
        # torch reads its own archive so.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        tensors = {name: torch.as_tensor(values) for name, values in inputs.items()}
        return torch.export.load(path).module()(tensors).numpy()
