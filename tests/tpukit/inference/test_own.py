"""A user's own files predicted by a run, and the run as one zip."""

import dataclasses
import datetime
import json
import os
import zipfile

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tpukit import Run, predict
from tpukit.devices.runtime import Runtime
from tpukit.inference import own, own_files
from tpukit.inference.trained import find_trained
from tpukit.training import prediction


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, size in (("a.png", (28, 28)), ("b.jpg", (60, 40))):
        pixels = np.random.default_rng(0).integers(0, 255, size[::-1]).astype(np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def test_files_that_are_missing_too_many_or_no_images_are_refused_by_name(trained, pictures, tmp_path):
    task, run = trained
    (pictures / "c.txt").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n")  # which another program would run
    many = [tmp_path / f"{number}.png" for number in range(65)]
    for path in many:
        path.touch()
    for paths, named in ((pictures, "c.txt"), (tmp_path / "gone", "gone"), (many, "64")):
        with refuses(named):
            own.show_own(run, task, paths)
    assert not (run.path / "own").exists()


def test_own_images_are_predicted_saved_and_packed_with_the_run_but_for_its_checkpoints(trained, pictures):
    task, run = trained
    image = task.test_set().batch([3])["image"][0, 0]
    Image.fromarray(image).save(pictures / "a.png")
    own.show_own(run, task, pictures)
    saved = json.loads((run.path / "own/predictions.json").read_text())
    assert [entry["name"] for entry in saved] == ["a.png", "b.jpg"]
    [a, b] = [entry["digit"] for entry in saved]
    assert a == prediction.predict_test_images(run, task, 40)[1][3] and b in range(10)
    assert (run.path / "own/predictions.png").read_bytes().startswith(b"\x89PNG")
    with zipfile.ZipFile(own.save_zip(run)) as archive:
        names = {name.removeprefix(f"{run.path.name}/") for name in archive.namelist()}
        assert archive.testzip() is None
    assert {"best.safetensors", "config.json", "records.jsonl", "own/predictions.json"} <= names
    assert {"own/predictions.png", "own/predictions.csv"} <= names
    assert not [name for name in names if name.startswith("checkpoints")]


def test_the_zip_is_in_the_folder_of_the_run_and_neither_in_itself_nor_in_a_backup(trained, tmp_path):
    task, run = trained
    os.utime(run.path / "config.json", (0, 0))  # 1970, of which a zip knows nothing
    run = Run(run.path.rename(tmp_path / "best"), backup=tmp_path / "backup")  # as its weights are called
    sizes = {path: path.stat().st_size for path in (own.save_zip(run), own.save_zip(run))}
    with zipfile.ZipFile(run.path / "best.zip") as archive:
        assert list(sizes) == [run.path / "best.zip"] and "best/best.zip" not in archive.namelist()
    run.update_backup()
    restored = Run.open(tmp_path / "again", task, backup=tmp_path / "backup")
    assert restored.checkpoints() and not [*tmp_path.glob("backup/*.zip"), *restored.path.glob("*.zip")]
    with refuses(tmp_path / "empty", "nothing to pack"):
        own.save_zip(Run(tmp_path / "empty"))


@pytest.mark.parametrize(
    "first, second", [("night", "night.PNG"), ("a.jpg", "A.jpg"), (200 * "x", 201 * "x")]
)
def test_files_whose_results_would_have_one_name_are_refused_before_any_is_predicted(
    first, second, infrared_run, tmp_path
):
    task, run = infrared_run
    (tmp_path / "mine").mkdir()
    for name in (first, second):
        Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "mine" / name, format="PNG")
    with refuses("one name", first, second):
        predict(run, tmp_path / "mine", task=task, out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_no_sample_takes_the_place_of_anothers_files(infrared_run, bright, tmp_path):
    task, run = infrared_run
    Image.fromarray(np.full((16, 16), 200, np.uint8)).save(tmp_path / "night.png")
    samples = list(own_files.predict_files(task, run.best(), [tmp_path / "night.png"] * 2, Runtime("cpu")))
    with refuses("two samples", "night"):
        own.save_predictions(task, samples, tmp_path / "out")


# On an open page


@pytest.mark.parametrize("new", [True, False], ids=["ipywidgets 8", "ipywidgets 7"])
def test_an_upload_is_written_under_its_own_name_in_the_folder_and_nowhere_else(new, tmp_path):
    content, name = memoryview(b"data"), "../../evil\x1b.png"
    value = ({"name": name, "content": content},) if new else {name: {"content": content}}
    [path] = own.save_uploads(value, tmp_path / "own")
    assert path.parent == tmp_path / "own" and path.read_bytes() == b"data" and "\x1b" not in path.name
    assert [entry.name for entry in tmp_path.iterdir()] == ["own"]


def test_an_upload_is_predicted_into_the_output_of_the_cell_and_a_bad_one_takes_the_place_of_the_picture(
    trained, pictures, page
):
    task, run = trained
    own.show_own(run, task)
    _, box, picture = page.shown  # after a style
    [button] = box.children  # alone, so that no long message makes it narrow
    upload = dict(name="a.png", type="", size=1, last_modified=datetime.datetime(2025, 1, 1))
    upload["content"] = memoryview(b"no image")
    button.set_trait("value", (upload,))
    [message] = page.updates[0]
    assert "upload-a.png" in message and "<ul" in page.updates[0]._repr_html_()  # it wraps
    button.set_trait("value", (dict(upload, content=memoryview((pictures / "a.png").read_bytes())),))
    assert len(page.updates) == 2 and page.updates[1].data != picture.data
    archive = run.path / "run.zip"
    assert len(page.shown) == 3 and (run.path / "own/upload-a.png").exists() and not archive.exists()
    # What is uploaded later joins the zip that was made before.
    own.save_zip(run)
    content = memoryview((pictures / "b.jpg").read_bytes())
    button.set_trait("value", (dict(upload, name="b.png", content=content),))
    with zipfile.ZipFile(archive) as packed:
        assert {"run/own/upload-b.png", "run/own/predictions.csv"} <= set(packed.namelist())


# Of CDEIT


@pytest.mark.parametrize("data", ["simulated", "uef2017"])
def test_a_file_of_the_test_set_is_predicted_as_the_test_set_is(data, tank_run, tank, tmp_path):
    task, run = tank_run
    (tmp_path / "test").symlink_to(tank / "test")
    (tmp_path / "data2017").symlink_to(tank / "test")
    task = dataclasses.replace(task, dataset_dir=tmp_path, data=data)  # in the units of that set
    trained, best = find_trained(run, task)
    first = min((tank / "test").glob("*.npz"))
    [sample] = own_files.predict_files(trained, best, [first], Runtime("cpu"))
    tested, expected = prediction.predict_test_images(run, task, 1)
    np.testing.assert_array_equal(sample.batch["voltages"], tested["voltages"])
    np.testing.assert_array_equal(sample.prediction, expected.numpy())
    assert sample.prediction.std() > 0.01 and sample.name.endswith(".npz, 1")
