"""Predicting a user's own files: any size, any number, on every device; what is saved, and what is
refused."""

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tests.tasks.mshnet.small import Narrow
from tpukit import CDEIT, MNIST, MSHNet, Run, predict
from tpukit.host import environment
from tpukit.inference import own_files
from tpukit.runs import weights
from tpukit.runs.settings import model_settings
from tpukit.training import prediction
from tpukit_tasks.mshnet import windows
from tpukit_tools import cli
from tpukit_tools.cli.functions import as_words


@pytest.mark.parametrize("shape", [(256, 256), (100, 300), (1, 1), (32, 32), (70, 16)], ids=str)
def test_windows_cover_every_pixel_once_and_keep_away_from_their_edges_within_the_image(shape):
    image = np.arange(3 * np.prod(shape)).reshape(3, *shape)
    parts, join = windows.split(image, 32)
    assert {part.shape for part in parts} == {(3, 32, 32)}
    np.testing.assert_array_equal(join([part[:1] for part in parts])[0], image[:1])
    # from a window's edge
    far = np.minimum(*np.meshgrid(*[np.minimum(np.arange(32), np.arange(32)[::-1])] * 2))
    distance = join([far[None]] * len(parts))[0, 0]
    assert distance[4:-4, 4:-4].size == 0 or distance[4:-4, 4:-4].min() >= 4


def test_images_of_any_size_get_a_mask_and_boxes_in_their_own_pixels(infrared_run, bright, tmp_path):
    task, run = infrared_run
    grey = np.full((40, 70), 102, np.uint8)
    grey[10:12, 20:23] = 200
    for name, image in dict(spot=grey, dot=grey[:1, :1], long=np.full((100, 300), 102, np.uint8)).items():
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    results = predict(run, tmp_path / "*.png", task=task, out=tmp_path / "out", batch_size=64, progress=False)
    found = {result["name"]: result for result in results}
    assert found["spot.png"]["boxes"] == [dict(left=20, top=10, right=23, bottom=12, pixels=6, score=1.0)]
    assert found["spot.png"]["mask"].sum() == 6
    assert found["dot.png"]["boxes"] == found["long.png"]["boxes"] == []
    for name, (height, width) in {"spot.png": (40, 70), "dot.png": (1, 1), "long.png": (100, 300)}.items():
        assert found[name]["mask"].shape == (height, width)
        with Image.open(tmp_path / "out/masks" / name) as mask:
            assert mask.size == (width, height)


def test_on_xla_images_of_many_sizes_share_one_compiled_graph_and_equal_the_cpu(
    infrared_run, xla, monkeypatch
):
    task, run = infrared_run
    rng = np.random.default_rng(0)
    # 1, 4 and 1 windows
    images = [rng.integers(0, 256, size).astype(np.uint8) for size in ((20, 20), (70, 66), (30, 9))]
    shapes, opened = [], prediction.open_predictor

    def recording(*arguments):
        predictor = opened(*arguments)
        return lambda batch: (shapes.append(tuple(batch["image"].shape)), predictor(batch))[1]

    monkeypatch.setattr(own_files, "open_predictor", recording)
    with own_files.as_files(images) as paths:
        on_xla = list(own_files.predict_files(task, run.best(), paths, xla, batch_size=4))
    assert len(set(shapes)) == 1 and len(shapes) > 1
    on_cpu = predict(run, images, task=task, progress=False)
    for sample, expected in zip(on_xla, on_cpu, strict=True):
        mask = task.results(sample.batch, sample.prediction)[0]["mask"]
        assert np.mean(mask != expected["mask"]) < 0.01 and mask.shape == expected["mask"].shape


def test_batches_of_any_size_give_the_same_and_files_without_rows_keep_their_place(trained, tmp_path):
    task, run = trained
    rng = np.random.default_rng(0)
    for number in range(7):
        Image.fromarray(rng.integers(0, 256, (28, 28)).astype(np.uint8)).save(tmp_path / f"{number}.png")
    for number in (0, 3, 4, 6):
        (tmp_path / f"{number}.png").write_bytes(b"broken")
    found = [predict(run, tmp_path / "?.png", batch_size=size, progress=False) for size in (1, 2, 16)]
    assert found[0] == found[1] == found[2]
    assert [result["name"] for result in found[0]] == [f"{number}.png" for number in range(7)]
    assert [index for index, result in enumerate(found[0]) if "error" in result] == [0, 3, 4, 6]


# What is saved, by the command


def words(*parts):
    return ["predict", *map(str, parts), "--device", "cpu"]


def rows_of(folder):
    with open(folder / "predictions.csv") as file:
        return list(csv.DictReader(file))


def test_the_command_predicts_digits_names_a_broken_file_and_ends_with_1(trained, tmp_path, capsys):
    task, run = trained
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    for number, image in enumerate(task.test_set().batch(np.arange(2))["image"]):
        Image.fromarray(image[0]).save(mine / f"{number}.png")
    assert cli.main(words(run.path, mine / "*.png", "--out", tmp_path / "good")) == 0
    (mine / "\x1b[31m.png").write_bytes(b"no image")
    (mine / "more").mkdir()
    assert cli.main(words(run.path, mine, "--out", out)) == 1
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "1 files left out\n" in printed.out and "1 folders in it are not searched (more)" in printed.out
    listed = json.loads((out / "predictions.json").read_text())
    good = [entry for entry in listed if "error" not in entry]
    again = predict(run, mine / "?.png", progress=False)
    assert [entry["digit"] for entry in good] == [result["digit"] for result in again]
    assert all((out / entry["picture"]).read_bytes().startswith(b"\x89PNG") for entry in good)
    assert len(good) == 2 and len(listed) == 3
    predicted = {row["name"]: row["digit"] for row in rows_of(out) if not row["error"]}
    assert predicted == {entry["name"]: str(entry["digit"]) for entry in good}


def test_the_command_says_what_it_found_and_where_the_pictures_are_each_time_in_a_folder_of_its_own(
    trained, tmp_path, monkeypatch, capsys
):
    _, run = trained
    for number in range(12):
        Image.new("L", (28, 28), 20 * number).save(tmp_path / f"{number:02}.png")
    monkeypatch.chdir(tmp_path)
    for folder in ("predictions", "predictions-2", "predictions-3"):
        assert cli.main(words(run.path, tmp_path / "*.png")) == 0
        said = capsys.readouterr().out.splitlines()
        rows = rows_of(tmp_path / folder)
        told = [f"{row['name']}: digit {row['digit']}" for row in rows]
        assert len(told) == 12 and [line for line in said if ": digit" in line] == told[:10]
        assert "and 2 more" in said and f"pictures: {folder}/pictures" in said
        assert len(list((tmp_path / folder / "pictures").iterdir())) == 12


@pytest.mark.parametrize(
    "result, told",
    [
        (dict(name="a", height=3, width=4, targets=1, mask=np.zeros(2), boxes=[{}]), "1 target"),
        ({"name": "a", "class": "cat", "probability": 0.98765}, "class cat, probability 0.988"),
        (dict(name="a", digit=7), "digit 7"),
        (dict(name="a", prompt="x", written="two\nlines " + "y" * 99), "prompt x, written two lines yyy"),
        (dict(name="a", image=np.zeros((2, 2))), "image"),
    ],
)
def test_a_result_of_each_kind_in_words(result, told):
    assert as_words(result).startswith(told) and len(as_words(result)) < 90


def test_a_file_for_which_the_network_gives_no_numbers_has_an_error_and_not_no_target(
    infrared_run, monkeypatch, tmp_path
):
    task, run = infrared_run
    plain = Narrow.predict

    def predicted(self, model, batch, epoch=None):
        is_dark = batch["image"].amax((1, 2, 3), keepdim=True) < 10
        return plain(self, model, batch, epoch).where(~is_dark, np.nan)

    monkeypatch.setattr(Narrow, "predict", predicted)
    for name, grey in dict(dark=3, light=200).items():
        Image.new("L", (32, 32), grey).save(tmp_path / f"{name}.png")
    dark, light = predict(run, tmp_path / "*.png", task=task, out=tmp_path / "out", progress=False)
    assert "NaN or infinite" in dark["error"] and "targets" not in dark and light["mask"].shape == (32, 32)
    errors = {row["name"]: row["error"] for row in rows_of(tmp_path / "out")}
    assert errors["dark.png"] == dark["error"] and not errors["light.png"]
    with refuses("dark.png", "NaN or infinite"):
        predict(run, tmp_path / "dark.png", task=task, progress=False)


def test_a_name_of_a_file_is_no_formula_in_the_table(trained, tmp_path):
    (tmp_path / "=1+1\x1b.png").write_bytes(b"no image")
    with refuses("no file"):
        predict(trained[1], tmp_path / "=1+1\x1b.png", out=tmp_path / "out", progress=False)
    assert [row["name"] for row in rows_of(tmp_path / "out")] == [r"'=1+1\x1b.png"]


def test_the_table_has_a_line_for_each_box_and_one_for_an_image_without(infrared_run, bright, tmp_path):
    task, run = infrared_run
    two = np.zeros((40, 40), np.uint8)
    two[3, 4] = two[30:32, 30] = 255
    predict(run, [two, np.zeros((5, 5), np.uint8)], task=task, out=tmp_path / "out", progress=False)
    rows = [(row["name"], row["left"], row["bottom"]) for row in rows_of(tmp_path / "out")]
    assert rows == [("0000.png", "4", "4"), ("0000.png", "30", "32"), ("0001.png", "", "")]
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out/masks/0000.png")), two)


def test_voltages_become_images_from_files_and_from_arrays(tank_run, tank, tmp_path):
    task, run = tank_run
    [path, *_] = sorted((tank / "test").glob("*.npz"))
    [one] = predict(run, path, task=task, out=tmp_path / "out", progress=False)
    [other] = predict(run, [np.load(path)["ys"].astype(np.float32)], task=task, progress=False)
    np.testing.assert_array_equal(one["image"], other["image"])
    np.testing.assert_array_equal(np.load(tmp_path / f"out/images/{path.name}, 1.npy"), one["image"])
    assert one["image"].shape == (128, 128)
    assert np.isnan(one["image"][0, 0]) and np.isfinite(one["image"][64, 64])


# What is refused


def test_a_folder_that_holds_anything_is_not_written_in(trained, tmp_path, capsys):
    _, run = trained
    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/predictions.csv").write_text("mine")
    assert cli.main(words(run.path, tmp_path / "a.png", "--out", tmp_path / "out")) == 1
    assert str(tmp_path / "out") in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_no_image_no_readable_file_no_weights_and_no_run_are_errors_that_name_what_was_given(
    trained, tmp_path
):
    _, run = trained
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    Run.open(tmp_path / "new", MNIST())
    for source, images, *told in (
        (run, [object()], "object", "image"),
        (run, np.array(["a"]), "image"),
        (run, np.zeros((2, 3, 4, 5), np.uint8), "image"),
        (run, tmp_path / "a.png", tmp_path / "a.png"),
        (tmp_path / "empty", tmp_path / "a.png", tmp_path / "empty"),
        (tmp_path / "new", tmp_path / "a.png", tmp_path / "new", "no best weights"),
        (tmp_path / "gone.safetensors", tmp_path / "a.png", tmp_path / "gone.safetensors"),
    ):
        with refuses(*told):
            predict(source, images, progress=False)


def test_patterns_folders_and_files_are_taken_but_hidden_ones_nothing_and_two_of_one_name(tmp_path):
    for name in ("a.png", "b.png", "c.txt", ".hidden", "other/a.png", "empty/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for paths in ([tmp_path / "*.png", str(tmp_path / "c.txt")], str(tmp_path)):
        assert [path.name for path in own_files.list_files(paths)] == ["a.png", "b.png", "c.txt"]
    for nothing in (tmp_path / "empty", [], tmp_path / "*.gif"):
        with refuses():
            own_files.list_files(nothing)
    with refuses(tmp_path / "a.png", tmp_path / "other/a.png"):
        own_files.list_files([tmp_path, tmp_path / "other"])


# Weights alone


def test_a_weights_file_alone_carries_what_its_model_needs_and_no_path(trained, tmp_path):
    task, run = trained
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(run.best().read_bytes())
    image = task.test_set().batch([3])["image"][0, 0]
    expected = predict(run, image, progress=False)
    about = json.dumps(weights.metadata(alone))
    assert str(tmp_path) not in about and str(task.dataset_dir) not in about
    for named in (None, "mnist"):  # naming the task, too, changes nothing; another one is refused
        assert predict(alone, image, task=named, progress=False) == expected
    for source in (alone, run):
        with refuses("of the task mnist, not of mshnet"):
            predict(source, image, task="mshnet", progress=False)


def test_weights_whose_settings_or_statistics_are_missing_or_damaged_are_named(tank, tmp_path):
    task = CDEIT(dataset_dir=tank, network="small")
    state, path = task.model().state_dict(), tmp_path / "some.safetensors"
    about = dict(task="cdeit", settings=json.dumps(model_settings(task)), **task.metadata(task.datasets()[0]))
    for name, value, told in (
        ("voltages", "[[1], [2]]", "damaged"),
        ("voltages", "", "does not say how its voltages were normalised"),
        ("settings", '{"network": "x"}', "network='x'"),
    ):
        path.write_bytes(b"".join(weights.serialize(state, about | {name: value})))
        with refuses(path, told):
            predict(path, np.ones((1, 208)), progress=False)


def test_the_device_is_the_cpu_unless_the_machines_own_is_asked_for(trained, monkeypatch):
    _, run = trained
    opened = []
    monkeypatch.setattr(
        "tpukit.devices.open_runtime",
        lambda env, precision: opened.append(env.accelerator) or 1 / 0,
    )
    image = np.zeros((28, 28), np.uint8)
    predict(run, image, progress=False)
    assert not opened
    with pytest.raises(ZeroDivisionError):
        predict(run, image, device="auto", progress=False)
    assert opened == [environment.detect().accelerator]


def deepened(folder, place):
    """A copy of an infrared set with images of 14 bits: counts from 8,000 on."""
    shutil.copytree(folder, place)
    for path in (place / "images").iterdir():
        grey = np.asarray(Image.open(path)).astype(np.uint16)
        Image.fromarray(8000 + 9 * grey).save(path)
    return place


@pytest.mark.parametrize("bits", [8, 14])
@pytest.mark.parametrize("base_size", [32, 128])
def test_a_test_image_is_predicted_from_the_pixels_that_its_evaluation_sees(
    base_size, bits, infrared_run, infrared, tmp_path
):
    _, run = infrared_run
    folder = infrared if bits == 8 else deepened(infrared, tmp_path / "deep")
    train, test = MSHNet(dataset_dir=folder, base_size=base_size).datasets()
    assert (test.levels is None) == (bits == 8)
    run.save_best(Narrow().model().state_dict(), **MSHNet().metadata(train))
    task = MSHNet(base_size=base_size, weights=run.best())
    batch, _ = task.read_files([folder / f"images/{test.names[0]}.png"], run.best())
    (row,), _ = task.split(batch)
    difference = np.abs(row["image"].astype(int) - test.batch([0])["image"][0])
    # a grey level, by rounding
    assert row["image"].shape == (3, base_size, base_size) and difference.max() <= 1


BROKEN_NAME = "a\x1b[31m\n1 samples predicted: \tall good.png"


def test_a_line_break_in_a_files_name_ends_no_line_of_what_is_printed(tmp_path, capsys):
    (tmp_path / BROKEN_NAME).write_bytes(b"no image")
    assert cli.main(words("demo", tmp_path / BROKEN_NAME, "--out", tmp_path / "none")) == 1
    assert cli.main(words("demo", tmp_path / "no\nsuch.png", "--out", tmp_path / "none")) == 1
    Image.new("L", (16, 16)).save(tmp_path / f"b{BROKEN_NAME}")
    assert cli.main(words("demo", tmp_path, "--out", tmp_path / "one")) == 1
    printed = capsys.readouterr()
    lines = [*printed.out.splitlines(), *printed.err.splitlines()]
    assert len([line for line in lines if "1 samples predicted" in line]) == 5
    assert [line for line in lines if line.startswith("1 samples")] == [
        f"1 samples predicted: {tmp_path / 'one/predictions.csv'}"
    ]
    assert any("no\\nsuch.png: no such file" in line for line in lines)
