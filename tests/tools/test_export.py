"""A trained model as one file: the same numbers as tpukit's own, at any batch, with what it takes to use
it."""

import json
import sys

import numpy as np
import pytest
import torch

from tests.conftest import random_run, refuses
from tests.tasks.cdeit.small import task_of
from tests.tasks.mshnet.small import Narrow
from tpukit import MNIST, ImageClassifier, export, predict
from tpukit.inference.trained import DEMO_FOLDER
from tpukit.runs import weights
from tpukit_tools import cli
from tpukit_tools import export as export_module

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


def model_of(task, run):
    model = task.model().eval()
    weights.load(model, run.best())
    return model


def session_of(path):
    """What a program without tpukit opens."""
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_mnist_becomes_a_file_that_gives_the_probabilities_of_any_batch(trained, capsys):
    task, run = trained
    path = run.path / "best.onnx"
    path.write_text("an older one, which is replaced")
    assert cli.main(["export", str(run.path), "--to", "onnx"]) == 0
    shown = capsys.readouterr().out
    assert str(path) in shown and "random inputs" in shown and "MORE" not in shown
    session = session_of(path)
    images = task.test_set().batch(np.arange(7))["image"]
    for count in (1, 7):
        with torch.no_grad():
            expected = model_of(task, run)(torch.as_tensor(images[:count]).float() / 255).softmax(1).numpy()
        np.testing.assert_allclose(session.run(None, dict(image=images[:count]))[0], expected, atol=1e-5)
    (image,) = session.get_inputs()
    assert (image.shape, image.type) == (["batch", 1, 28, 28], "tensor(uint8)")
    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["task"] == "mnist" and metadata["output"] == task.export_output


@pytest.mark.slow
def test_mshnet_takes_any_batch_and_any_multiple_of_16_and_grey_levels_as_they_are(tmp_path):
    task = Narrow(base_size=64, crop_size=64)
    run = random_run(tmp_path / "run", task)
    exported = export(run, task=task)
    assert exported.is_equal()
    session = session_of(exported.path)
    for size in ((1, 3, 32, 96), (4, 3, 64, 64)):
        image = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
        with torch.no_grad():
            expected = task.predict(model_of(task, run), dict(image=torch.as_tensor(image))).sigmoid().numpy()
        assert expected.std() > 1e-4
        np.testing.assert_allclose(session.run(None, dict(image=image))[0], expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["demo", "its file"])
def test_what_comes_with_tpukit_is_exported_into_the_current_folder_and_never_into_the_package(
    kind, tmp_path, monkeypatch, capsys
):
    def write(task, model, path, metadata):
        path.write_text("a file")
        return export_module.Exported(path, 0.0)

    monkeypatch.setattr(export_module, "_export_onnx", write)
    monkeypatch.chdir(tmp_path)
    before = sorted(DEMO_FOLDER.iterdir())
    source = "demo" if kind == "demo" else str(DEMO_FOLDER / "weights.safetensors")
    assert cli.main(["export", source]) == 0
    assert (tmp_path / "best.onnx").exists() and "best.onnx: 6 bytes" in capsys.readouterr().out
    (tmp_path / "link").symlink_to(DEMO_FOLDER)
    for place in (DEMO_FOLDER / "new.onnx", tmp_path / "link/new.onnx"):
        with refuses("tpukit's own folder"):
            export(source, out=place)
    assert sorted(DEMO_FOLDER.iterdir()) == before


def test_a_file_that_differs_from_the_trained_model_is_reported_and_ends_with_1(trained, monkeypatch, capsys):
    traced = export_module._trace

    def of_other_weights(task, model, inputs):
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        return traced(task, model, inputs)

    monkeypatch.setattr(export_module, "_trace", of_other_weights)
    assert cli.main(["export", str(trained[1].path), "--to", "onnx"]) == 1
    assert "MORE" in capsys.readouterr().out


def test_a_missing_package_a_file_in_the_way_an_unknown_format_and_a_sampler_are_errors(
    trained, tmp_path, monkeypatch
):
    _, run = trained
    (tmp_path / "mine.onnx").write_text("mine")
    with refuses(tmp_path / "mine.onnx"):
        export(run, out=tmp_path / "mine.onnx")
    assert (tmp_path / "mine.onnx").read_text() == "mine"
    with refuses("tflite", "onnx"):
        export(run, to="tflite")
    sampler = task_of(tmp_path / "gone")
    torch.save(sampler.model().state_dict(), tmp_path / "cdeit.pth")
    with refuses("CDEIT", "tpukit predict"):
        export(tmp_path / "cdeit.pth", task=sampler)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with refuses("pip install onnx onnxscript onnxruntime"):
        export(run)
    assert not (run.path / "best.onnx").exists()


@pytest.mark.slow
def test_the_metadata_of_images_say_what_goes_in_and_the_classes_that_come_out(tmp_path):
    pytest.importorskip("timm")
    task = ImageClassifier(model_name="test_resnet", image_size=32, pretrained="no")
    run = random_run(tmp_path / "run", task, classes=json.dumps(task.class_names))
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    session = session_of(export(run, task=task).path)
    metadata = session.get_modelmeta().custom_metadata_map
    assert "EXIF" in metadata["preprocessing"] and "32x32" in metadata["preprocessing"]
    (scores,) = session.run(None, dict(image=image.transpose(2, 0, 1)[None]))[0]
    (found,) = predict(run, image, task=task, progress=False)
    assert json.loads(metadata["classes"])[scores.argmax()] == found["class"]


def test_a_run_of_a_task_of_ones_own_needs_that_task(trained):
    class Own(MNIST):
        name = "own"

    task, run = trained
    (run.path / "config.json").write_text(json.dumps(run.config | dict(task="own")))
    picture = np.zeros((28, 28), np.uint8)
    for use in (export, lambda run: predict(run, picture, progress=False)):
        with refuses("own is a task of your own", "task=TASK"):
            use(run)
    own = Own(dataset_dir=task.dataset_dir)
    assert "digit" in predict(run, picture, task=own, progress=False)[0]
