"""`tpukit export`: a trained model for other programs, compared with the model that was trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from tpukit.host import files
from tpukit.host.errors import TpukitError, explained
from tpukit.host.folders import atomic_folder
from tpukit.host.text import format_bytes, say
from tpukit.leaves import part_of

if TYPE_CHECKING:
    from torch import nn

    from tpukit.data.arrays import Arrays
    from tpukit.runs.run import Run
    from tpukit.training.data import Batch
    from tpukit.training.task import Task

LARGEST_DIFFERENCE = 1e-4  # between outputs, relative to the largest absolute one, or to 1 if that is smaller
FOLDERS = ("peft", "transformers")  # by a task's own `export_folder`
COMPARED = 16  # samples, which the graph is traced with, too; any number works later


class Exportable(Protocol):
    """The part of a task that only an export to ONNX asks for; what a task does not have is as here."""

    export_output: ClassVar[str] = "the prediction"
    """The result of the graph, in words, for those who use the file."""
    export_preprocessing: str = ""
    """The way from an image to an input of the graph, in words, if that is not in the graph."""
    export_multiple: ClassVar[int] = 0
    """Height and width of the inputs are any multiples of it; 0: they are fixed."""

    def predict(self, model: nn.Module, batch: Batch) -> Any: ...

    def export_inputs(self, batch: Arrays) -> Arrays:
        """Return the inputs of the graph.

        Args:
            batch: dict of arrays (B, ...), of the dataset or of `Task.example`.

        Returns:
            A dict of arrays (B, ...)."""
        return dict(image=batch["image"])

    def exported(self, model: nn.Module, inputs: Batch) -> Any:
        """Compute the output of the graph from raw inputs: normalisation belongs in here.

        Args:
            model: the model, on the CPU.
            inputs: dict of tensors (B, ...), as of `export_inputs`.

        Returns:
            A float32 tensor (B, ...)."""
        return self.predict(model, inputs).float()


@dataclasses.dataclass
class Exported:
    """A model that `export` wrote. Printing it shows its size and difference."""

    path: Path
    """The file, or the folder of files."""
    difference: float
    """Largest difference of its output from the trained model's, see `LARGEST_DIFFERENCE`."""

    def is_equal(self) -> bool:
        """Return whether the file computes what the trained model does, up to `LARGEST_DIFFERENCE`."""
        return self.difference <= LARGEST_DIFFERENCE  # NaN is not

    def __str__(self) -> str:
        size = sum(file.stat().st_size for file in [self.path, *self.path.glob("*")] if file.is_file())
        verdict = "" if self.is_equal() else f", MORE than {LARGEST_DIFFERENCE:g}: do not use it"
        difference = f"largest difference to the trained model on random inputs: {self.difference:.2g}"
        upload = f"\nto share it: hf upload USER/MODEL {self.path}" if self.path.is_dir() else ""
        return f"{self.path}: {format_bytes(size)}\n{difference}{verdict}{upload}"


def export(
    run: Run | str | Path,
    *,
    to: Literal["onnx", "peft", "transformers"] = "onnx",
    out: str | Path | None = None,
    task: Task | str | None = None,
) -> Exported:
    """Write the best weights of a run for other programs, and compare the output with the trained model's.

    Args:
        run: a `Run`, the folder of one, or a weights file.
        to: onnx, one file that takes a batch of any size; of a language model a folder, peft, its adapter
            alone, or transformers, the whole.
        out: a new file or folder. By default it is next to the weights, where an older best.onnx is replaced;
            of what comes with tpukit, in the current folder.
        task: a task of your own, or the name of a task for a file that does not name its own.

    Returns:
        An `Exported`, whose difference is measured on random samples.

    Raises:
        TpukitError: if a package is missing, or the model cannot be exported."""
    from tpukit.inference.trained import find_trained
    from tpukit.runs import weights

    task, best = find_trained(run, task)
    export_folder = getattr(task, "export_folder", None)
    choices = FOLDERS if export_folder else ("onnx",)
    if to not in choices:
        raise TpukitError(f"to={to!r} is not for the task {task.name}: choose one of {', '.join(choices)}")
    name = "best.onnx" if to == "onnx" else to
    path = Path(out) if out else Path(name) if is_inside_package(best) else best.with_name(name)
    if is_inside_package(path):
        raise TpukitError(f"{path} is in tpukit's own folder: choose another place")
    if files.exists(path) and (out or to in FOLDERS):
        raise TpukitError(f"{path} exists: choose another name")
    model = task.model().eval()
    weights.load(model, best)
    say(f"exporting {best}, which can take minutes")
    if export_folder is None:
        return _export_onnx(task, model, path, weights.metadata(best))
    with atomic_folder(path) as work:
        difference = export_folder(model, to, work)
    return Exported(path, difference)


def is_inside_package(path: Path) -> bool:
    """Return whether a path is in a folder of the library itself, which an export does not change."""
    home, place = Path(__file__).resolve().parents[1], path.resolve()
    return any(place.is_relative_to(home / name) for name in ("tpukit", "tpukit_tasks", "tpukit_tools"))


def _export_onnx(task, model, path, metadata):
    with explained("export to ONNX needs packages: pip install onnx onnxscript onnxruntime"):
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx needs it
    import torch

    given = part_of(task, Exportable, "export_inputs")(task.example(COMPARED))
    inputs = {name: np.ascontiguousarray(values) for name, values in given.items()}
    tensors = {name: torch.as_tensor(values) for name, values in inputs.items()}
    with torch.no_grad():
        expected = part_of(task, Exportable, "exported")(model, tensors).numpy()
    metadata |= dict(task=task.name, output=part_of(task, Exportable, "export_output"))
    if preprocessing := part_of(task, Exportable, "export_preprocessing"):
        metadata["preprocessing"] = preprocessing
    exported = torch.onnx.export(
        _trace(task, model, tensors),
        dynamo=True,
        verbose=False,
        input_names=list(inputs),
        output_names=["output"],
        optimize=False,
        dynamic_shapes=(dict.fromkeys(inputs, {0: "batch"}),),  # the axis's name
    )
    assert exported is not None  # as always with dynamo
    exported.model.metadata_props.update({name: str(value) for name, value in metadata.items()})
    data = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    found = np.asarray(session.run(None, inputs)[0])
    files.write_atomic(path, data)
    assert found.shape == expected.shape
    difference = float(np.abs(found - expected).max()) / max(float(np.abs(expected).max()), 1.0)
    return Exported(path, difference)


def _trace(task, model, inputs):
    """The `torch.export.ExportedProgram` of `task.exported`, with a batch of any size."""
    import torch
    from torch.export import Dim

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, inputs):
            return part_of(task, Exportable, "exported")(self.model, inputs)

    shape = {0: Dim("batch", min=1, max=65536)}
    if multiple := part_of(task, Exportable, "export_multiple"):
        shape |= {2: multiple * Dim("rows", min=2, max=512), 3: multiple * Dim("columns", min=2, max=512)}
    shapes = (dict.fromkeys(inputs, shape),)
    with explained(f"torch.export cannot trace {task.name}"), torch.no_grad():
        return torch.export.export(Module().eval(), (inputs,), dynamic_shapes=shapes)
