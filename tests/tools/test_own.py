"""A user's own files predicted by a run, and the run as one zip."""

import dataclasses
import datetime
import json
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tests.tasks.cdeit.small import task_of
from tpukit import Run
from tpukit.devices.runtime import Runtime
from tpukit.host.errors import TpukitError
from tpukit.tools import own, own_files
from tpukit.training import prediction


def predict_one(run, task, path):
    """(batch, prediction, name) of a file."""
    [sample] = own_files.predict_own(run.best(), task, path, limit=1)
    return sample.batch, sample.prediction, sample.name


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
    (pictures / "c.txt").write_text("no image")
    many = [tmp_path / f"{number}.png" for number in range(65)]
    for path in many:
        path.touch()
    gone, none = tmp_path / "gone", [tmp_path / "*.gif"]
    for paths, named in ((pictures, "c.txt"), (gone, "gone"), (none, "gif"), (many, "64")):
        with pytest.raises(TpukitError, match=named):
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


def test_the_zip_replaces_one_of_the_same_run_and_no_other_file(trained, tmp_path):
    task, run = trained
    os.utime(run.path / "config.json", (0, 0))  # 1970, of which a zip knows nothing
    assert own.save_zip(run) == own.save_zip(run)
    packed = (tmp_path / "run.zip").read_bytes()
    shutil.rmtree(run.path)  # and another one takes its name
    Run.open(run.path, task)
    for content in (packed, b"my dataset"):
        (tmp_path / "run.zip").write_bytes(content)
        with refuses(tmp_path / "run.zip"):
            own.save_zip(Run(run.path))
        assert (tmp_path / "run.zip").read_bytes() == content
    with refuses(tmp_path / "empty", "nothing to pack"):
        own.save_zip(Run(tmp_path / "empty"))


def test_files_whose_names_differ_in_the_ending_alone_get_a_mask_and_a_picture_each(
    bright, infrared_run, tmp_path
):
    task, run = infrared_run
    for name, size in (("night", (32, 16)), ("night.png", (16, 32)), ("Night.PNG", (48, 16))):
        Image.fromarray(np.full(size, 200, np.uint8)).save(tmp_path / name, format="PNG")
    files = [tmp_path / name for name in ("night", "night.png", "Night.PNG")]
    task = dataclasses.replace(task, weights=run.best())
    samples = own_files.predict_files(task, run.best(), files, Runtime("cpu"))
    own.save_predictions(task, samples, run.path / "own")
    listed = json.loads((run.path / "own/predictions.json").read_text())
    for kind in ("mask", "picture"):
        assert len({entry[kind].lower() for entry in listed}) == 3
    for entry in listed:
        assert Image.open(run.path / "own" / entry["mask"]).size == (entry["width"], entry["height"])
        assert (run.path / "own" / entry["picture"]).is_file()
    with zipfile.ZipFile(own.save_zip(run)) as archive:
        assert {f"run/own/{entry['mask']}" for entry in listed} <= set(archive.namelist())


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
    archive = run.path.with_name("run.zip")
    assert len(page.shown) == 3 and (run.path / "own/upload-a.png").exists() and not archive.exists()
    # What is uploaded later joins the zip that was made before.
    own.save_zip(run)
    content = memoryview((pictures / "b.jpg").read_bytes())
    button.set_trait("value", (dict(upload, name="b.png", content=content),))
    with zipfile.ZipFile(archive) as packed:
        assert {"run/own/upload-b.png", "run/own/predictions.csv"} <= set(packed.namelist())


def test_the_link_to_the_zip_leads_there_from_the_notebooks_folder(trained, page, tmp_path, monkeypatch):
    _, run = trained
    monkeypatch.chdir(run.path)
    own.save_zip(Run("."))
    assert [link.path for link in page.shown] == ["../run.zip"]


# Of MSHNet


BAD_IMAGES = {
    "cut short": b"\x89PNG\r\n\x1a\n",
    "empty": b"",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n",
}


@pytest.mark.parametrize("content", BAD_IMAGES.values(), ids=BAD_IMAGES)
def test_an_image_that_is_damaged_is_named_and_nothing_is_saved(content, infrared_run, tmp_path):
    task, run = infrared_run
    (tmp_path / "bad.png").write_bytes(content)
    with refuses(tmp_path / "bad.png"):
        own.show_own(run, task, tmp_path / "bad.png")
    assert not (run.path / "own").exists()


# Of CDEIT


@pytest.fixture
def tank_run(tank, tmp_path):
    """(task, run) of a CDEIT with random weights."""
    import torch

    task, run = task_of(tank), Run(tmp_path / "run")
    run.path.mkdir()
    torch.manual_seed(0)
    weights = task.model().state_dict()
    for values in filter(torch.is_floating_point, weights.values()):
        values += 0.02 * torch.randn_like(values)
    run.save_best(weights, **task.metadata(task.datasets()[0]))
    return task, run


def voltages_of(path):
    with np.load(path) as found:
        return found["ys"].reshape(-1)


@pytest.mark.parametrize("data", ["simulated", "uef2017"])
def test_a_file_of_the_test_set_is_predicted_as_the_test_set_is(data, tank_run, tank):
    task, run = tank_run
    task = dataclasses.replace(task, dataset_dir=tank / "test", data=data)  # in the units of that set
    batch, predicted, name = predict_one(run, task, sorted((tank / "test").glob("*.npz"))[0])
    tested, expected = prediction.predict_test_images(run, task, 1)
    np.testing.assert_array_equal(batch["voltages"], tested["voltages"])
    np.testing.assert_array_equal(predicted, expected.numpy())
    assert predicted.std() > 0.01 and name.endswith(".npz, 1")


def test_voltages_are_read_from_every_kind_of_file(tank_run, tank, tmp_path):
    task, run = tank_run
    volts = np.stack([voltages_of(path) for path in sorted((tank / "test").glob("*.npz"))[:2]])
    rows = [[f"{value:.9g}" for value in row] for row in volts]
    np.savez(tmp_path / "a.npz", ys=volts)
    np.save(tmp_path / "b.npy", volts.reshape(2, 16, 13).astype(np.float64))
    (tmp_path / "c.csv").write_text("\ufeff" + "\n".join(",".join(row) for row in rows), encoding="utf-8")
    (tmp_path / "e.txt").write_text("\n".join(" ".join(row) for row in rows))
    np.savetxt(tmp_path / "f.txt", volts[0])  # a column
    np.savetxt(tmp_path / "g.txt", volts[1].reshape(16, 13), delimiter="\t")
    batch, names = task.read_files(sorted(tmp_path.glob("?.*")), run.best())
    expected = task.test_set().batch(np.arange(2))["voltages"]
    np.testing.assert_allclose(batch["voltages"], np.concatenate([expected] * 5), rtol=1e-5, atol=1e-5)
    assert names[:2] == ["a.npz, 1", "a.npz, 2"] and names[-2:] == ["f.txt, 1", "g.txt, 1"]
    assert batch["key"].tolist() == list(range(10))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def write(path, values):
    if isinstance(values, bytes):
        path.write_bytes(values)
    elif path.suffix == ".npz":
        np.savez(path, **values)
    elif path.suffix == ".npy":
        np.save(path, values, allow_pickle=True)
    else:
        np.savetxt(path, values)


@pytest.mark.parametrize(
    "name, values",
    [
        ("count.txt", np.ones(207)),
        ("columns.csv", np.ones((208, 3))),  # a sample in each column: read by rows, all would be mixed
        ("transposed.npy", np.ones((13, 16))),
        ("nan.npy", np.full(208, np.nan)),
        ("large.npy", np.full(208, 1e300)),
        ("text.csv", b"one,two,three"),
        ("empty.txt", b""),
        ("other.npz", dict(xs=np.ones(208))),
        ("pickle.npy", np.array([Evil()] * 208, object)),
        ("pickle.npz", dict(ys=np.array([Evil()] * 208, object))),
        ("renamed.npy", pickle.dumps(Evil())),
        ("binary.csv", b"\xff\xfe\x00" * 99),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_are_no_voltages_is_refused_by_name_and_no_code_of_it_runs(
    name, values, tank_run, tmp_path, monkeypatch
):
    task, run = tank_run
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, values)
    with refuses(tmp_path / name), np.errstate(over="ignore"):
        predict_one(run, task, tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_more_samples_than_a_picture_shows_are_refused_and_nothing_is_saved(tank_run, tmp_path):
    task, run = tank_run
    np.save(tmp_path / "many.npy", np.ones((65, 208)))
    with refuses("64"):
        own.show_own(run, dataclasses.replace(task, sampling_steps=1), tmp_path / "many.npy")
    assert not (run.path / "own").exists()


def test_weights_that_do_not_say_how_voltages_were_normalised_are_refused(tank_run, tank, tmp_path):
    task, run = tank_run
    run.save_best(task.model().state_dict())
    with refuses("best.safetensors"):
        predict_one(run, task, sorted((tank / "test").glob("*.npz"))[0])
