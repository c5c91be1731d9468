"""A user's own files predicted by a run, and the run as one zip."""

import zipfile

import numpy as np
import pytest
from PIL import Image

from tpukit.host.errors import TpukitError
from tpukit.reporting import own


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, size in (("a.png", (28, 28)), ("b.jpg", (60, 40))):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, size[::-1]).astype(np.uint8)).save(folder / name)
    return folder


def test_own_images_are_predicted_as_the_same_images_in_the_test_set_are(trained, tmp_path):
    import torch

    task, run = trained
    data = task.test_set()
    batch = data.batch(np.arange(4))
    for number, image in enumerate(batch["image"]):
        Image.fromarray(image[0]).save(tmp_path / f"{number}.png")
    found, predictions, names = own.predict_files(run, task, [tmp_path / f"{number}.png" for number in range(4)])
    assert names == [f"{number}.png" for number in range(4)]
    np.testing.assert_array_equal(found["image"], batch["image"])
    expected = own.open_predictor(run, task)({"image": torch.as_tensor(batch["image"])})
    np.testing.assert_array_equal(predictions, expected.numpy())


def test_what_is_predicted_is_saved_in_the_runs_folder(trained, pictures):
    task, run = trained
    own.show_own(run, task, pictures)
    with np.load(run.path / "own/predictions.npz", allow_pickle=False) as saved:
        assert saved["names"].tolist() == ["a.png", "b.jpg"] and saved["predictions"].shape == (2,)
    assert (run.path / "own/predictions.png").read_bytes().startswith(b"\x89PNG")


def test_files_that_are_missing_too_many_or_no_images_are_refused_by_name(trained, pictures, tmp_path):
    task, run = trained
    (pictures / "c.txt").write_text("no image")
    for paths, named in ((pictures, "c.txt"), (tmp_path / "gone", "gone"), ([], "0 files"), ([pictures / "a.png"] * 65, "65")):
        with pytest.raises(TpukitError, match=named):
            own.predict_files(run, task, paths)


@pytest.mark.parametrize("new", [True, False], ids=["ipywidgets 8", "ipywidgets 7"])
def test_an_upload_is_written_under_its_own_name_in_the_folder_and_nowhere_else(new, tmp_path):
    content, name = memoryview(b"data"), "../../evil\x1b.png"
    value = ({"name": name, "content": content},) if new else {name: {"content": content}}
    [path] = own.save_uploads(value, tmp_path / "own")
    assert path.parent == tmp_path / "own" and path.read_bytes() == b"data" and "\x1b" not in path.name
    assert [entry.name for entry in tmp_path.iterdir()] == ["own"]


def test_the_zip_holds_weights_settings_records_and_pictures_and_no_checkpoint(trained, pictures):
    task, run = trained
    own.show_own(run, task, pictures)
    with zipfile.ZipFile(own.save_zip(run)) as archive:
        names = {name.removeprefix(f"{run.path.name}/") for name in archive.namelist()}
        assert archive.testzip() is None
    assert {"best.safetensors", "config.json", "records.jsonl", "own/predictions.npz"} <= names
    assert not [name for name in names if name.startswith("checkpoints")]


def test_a_run_without_anything_to_pack_says_so(tmp_path):
    from tpukit.runs.run import Run

    with pytest.raises(TpukitError, match=str(tmp_path)):
        own.save_zip(Run(tmp_path / "empty"))
    assert not list(tmp_path.iterdir())
