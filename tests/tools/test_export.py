"""A trained model as one file: the same numbers as tpukit's own, at any batch, with what it takes to use
it."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch

from tests.conftest import refuses
from tests.tasks.cdeit.small import task_of
from tests.tasks.mshnet.small import Narrow
from tpukit import MNIST, ImageClassifier, Run, cli, export, predict
from tpukit.runs import weights
from tpukit.tools import export as export_module

BOTH = pytest.mark.parametrize("to", ["onnx", "torch-export"])


@pytest.fixture(autouse=True)
def _packages():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")


def model_of(task, run):
    model = task.model().eval()
    weights.load(model, run.best())
    return model


def output_of(path, inputs):
    """What a program without tpukit computes with the file."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return session.run(None, inputs)[0]
    tensors = {name: torch.as_tensor(values) for name, values in inputs.items()}
    with torch.no_grad():
        return torch.export.load(path).module()(tensors).numpy()


def metadata_of(path):
    if path.suffix == ".onnx":
        import onnx

        return {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    extra = {"metadata.json": ""}
    torch.export.load(path, extra_files=extra)
    return json.loads(extra["metadata.json"])


@BOTH
def test_mnist_becomes_a_file_that_gives_the_probabilities_of_any_batch(to, trained, capsys):
    task, run = trained
    assert cli.main(["export", str(run.path), "--to", to]) == 0
    path = run.path / f"best{export_module.FORMATS[to]}"
    assert str(path) in capsys.readouterr().out
    images = task.test_set().batch(np.arange(7))["image"]
    for count in (1, 7):
        with torch.no_grad():
            expected = model_of(task, run)(torch.as_tensor(images[:count]).float() / 255).softmax(1).numpy()
        np.testing.assert_allclose(output_of(path, dict(image=images[:count])), expected, atol=1e-5)
    about = metadata_of(path)
    assert about["task"] == "mnist" and about["compared_on"] == "16 test samples"
    assert "uint8 (batch, 1, 28, 28)" in about["inputs"]
    assert "in place of" not in capsys.readouterr().out
    assert cli.main(["export", str(run.path), "--to", to]) == 0  # again: it is beside the weights
    assert "in place of the file that was there" in capsys.readouterr().out
    if to == "onnx":
        import onnxruntime

        (image,) = onnxruntime.InferenceSession(str(path)).get_inputs()
        assert image.shape == ["batch", 1, 28, 28]


def test_the_file_is_run_where_no_other_user_can_write(trained, tmp_path, monkeypatch):
    task, run = trained
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    write_and_run, seen = export_module._write_and_run_torch_export, []

    def record(program, path, metadata, inputs):
        seen.append((path.parent.stat().st_mode & 0o077, list(shared.iterdir())))
        return write_and_run(program, path, metadata, inputs)

    monkeypatch.setattr(export_module, "_write_and_run_torch_export", record)
    path = shared / "model.pt2"
    assert export(run, to="torch-export", out=path, task=task).is_equal() and path.is_file()
    assert seen == [(0, [])]


@pytest.mark.slow
def test_mshnet_takes_any_batch_and_any_multiple_of_16_and_grey_levels_as_they_are(tmp_path):
    task, run = Narrow(base_size=64, crop_size=64), Run(tmp_path / "run")
    run.path.mkdir()
    torch.manual_seed(0)
    state = task.model().state_dict()
    for values in filter(torch.is_floating_point, state.values()):  # statistics of batch norm, too
        values += 0.02 * torch.rand_like(values) - 0.01 * (values.dim() > 1)
    run.save_best(state, task=task.name)
    exported = export(run, to="onnx", task=task)
    assert exported.is_equal()
    for size in ((1, 3, 32, 96), (4, 3, 64, 64)):
        image = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
        with torch.no_grad():
            expected = task.predict(model_of(task, run), dict(image=torch.as_tensor(image))).sigmoid().numpy()
        assert expected.std() > 1e-4
        np.testing.assert_allclose(output_of(exported.path, dict(image=image)), expected, atol=1e-4)


@pytest.mark.parametrize("change", [1.01, np.nan])
def test_a_file_that_differs_from_the_trained_model_is_reported_and_ends_with_1(
    change, trained, monkeypatch, capsys
):
    traced = export_module._trace

    def of_other_weights(task, model, inputs):
        with torch.no_grad():
            next(model.parameters()).mul_(change)
        return traced(task, model, inputs)

    monkeypatch.setattr(export_module, "_trace", of_other_weights)
    assert cli.main(["export", str(trained[1].path), "--to", "torch-export"]) == 1
    assert "MORE" in capsys.readouterr().out


def test_without_the_dataset_random_samples_are_compared(trained, tmp_path):
    _, run = trained
    task = MNIST(dataset_dir=tmp_path / "gone")
    exported = export(run.best(), to="torch-export", out=tmp_path / "a.pt2", task=task)
    assert exported.is_equal() and "16 random samples" in str(exported)


def test_a_missing_package_a_file_in_the_way_an_unknown_format_and_a_sampler_are_errors(
    trained, tank, tmp_path, monkeypatch
):
    _, run = trained
    (tmp_path / "mine.onnx").write_text("mine")
    with refuses(tmp_path / "mine.onnx"):
        export(run, out=tmp_path / "mine.onnx")
    assert (tmp_path / "mine.onnx").read_text() == "mine"
    with refuses("tflite", "onnx"):
        export(run, to="tflite")
    sampler = task_of(tank)
    torch.save(sampler.model().state_dict(), tmp_path / "cdeit.pth")
    with refuses("CDEIT", "tpukit predict"):
        export(tmp_path / "cdeit.pth", to="torch-export", task=sampler)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with refuses("pip install onnx onnxscript onnxruntime"):
        export(run)
    assert not (run.path / "best.onnx").exists()


def test_the_scores_of_the_trained_network_come_back_by_what_the_metadata_of_images_say(tmp_path):
    """A program without tpukit: the preprocessing and the classes are in the file."""
    pytest.importorskip("timm")
    from PIL import Image, ImageOps

    from tpukit.tasks.images.data import read_image

    settings = dict(model_name="test_resnet", image_size=32, pretrained="no")
    task, run = ImageClassifier(**settings), Run(tmp_path / "run")
    run.path.mkdir()
    run.save_best(task.model().state_dict(), task=task.name, classes=json.dumps(task.class_names))
    picture = np.random.default_rng(0).integers(0, 256, (50, 90, 3), np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.png")
    exported = export(run, to="onnx", task=task)
    about = metadata_of(exported.path)
    assert len(json.loads(about["classes"])) == 1000 and "each class" in about["output"]
    assert "EXIF" in about["preprocessing"] and "32x32" in about["preprocessing"]
    with Image.open(tmp_path / "a.png") as image:  # as it says
        image = ImageOps.exif_transpose(image).convert("RGB")
        image = image.resize((58, 32), Image.Resampling.BICUBIC).crop((13, 0, 45, 32))
    own, ours = np.asarray(image).astype(int), read_image(tmp_path / "a.png", 32).astype(int)
    assert abs(own - ours).mean() < 6, "the same part of the picture"
    inputs = dict(image=ours.astype(np.uint8).transpose(2, 0, 1)[None])
    (found,) = predict(run, tmp_path / "a.png", task=task, progress=False)
    scores = output_of(exported.path, inputs)[0]
    assert json.loads(about["classes"])[scores.argmax()] == found["class"]


def test_a_run_of_a_task_of_ones_own_is_used_with_that_task_and_says_so_without(trained):
    class Own(MNIST):
        name = "own"

    task, run = trained
    (run.path / "config.json").write_text(json.dumps(run.config | dict(task="own")))
    picture = np.zeros((28, 28), np.uint8)
    with refuses("own is a task of your own", "task=TASK"):
        export(run)
    with refuses("own is a task of your own", "task=TASK"):
        predict(run, [picture], progress=False)
    own = Own(**{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})
    assert "digit" in predict(run, [picture], task=own, progress=False)[0]
    assert export(run, to="torch-export", task=own).is_equal()
