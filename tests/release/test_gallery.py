"""The pictures of the pages: what they show is what was counted, and all cards have one size."""

import io
import json
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import tpukit
from release import gallery, pictures
from tests.conftest import ROOT
from tpukit.devices.runtime import Runtime
from tpukit.tasks.mshnet import scores

CARDS = sorted((ROOT / "docs/gallery").glob("*.png"))


def scene(*, targets=(), predicted=(), contrast=100):
    """A sample of `pictures.examine`: squares of 3 x 3 pixels at these corners in an image of 64 x 64."""
    image = np.zeros((1, 64, 64), np.uint8)
    image[:, ::2] = contrast
    masks = np.zeros((2, 64, 64), bool)
    for mask, corners in zip(masks, (targets, predicted)):
        for row, column in corners:
            mask[row : row + 3, column : column + 3] = True
    return pictures.examine(image, masks[0], np.where(masks[1], 9.0, -9.0))


@pytest.fixture(scope="module")
def run(infrared, tmp_path_factory):
    task = tpukit.MSHNet(dataset_dir=infrared, epochs=2, base_size=32, crop_size=32, warm_epoch=0)
    run = tpukit.Run.open(tmp_path_factory.mktemp("gallery") / "run", task)
    tpukit.train(task, run, runtime=Runtime("cpu"), progress=False)
    return run


def test_a_picture_counts_targets_as_the_scores_do():
    rng = np.random.default_rng(0)
    corners = [tuple(10 * pair) for pair in rng.integers(1, 6, (8, 2))]
    sample = scene(targets=corners[:4], predicted=corners[2:])
    logits = np.where(sample["predicted"], 9.0, -9.0)
    counts = scores.count(logits, sample["label"])
    assert (len(sample["found"]), len(sample["missed"])) == (
        counts["detected"],
        counts["targets"] - counts["detected"],
    )
    assert sum(area for area, _ in sample["false"]) == counts["false_area"] > 0
    assert sample["iou"] == counts["intersection"] / counts["union"]


def test_the_images_of_a_picture_show_hits_a_miss_and_a_false_alarm_and_the_most_contrast():
    one, two, far = (10, 10), (10, 45), (45, 10)
    samples = [
        scene(targets=[one, two], predicted=[one, two], contrast=10),
        scene(targets=[one, two], predicted=[one, two], contrast=90),
        scene(targets=[one, two], predicted=[one, two], contrast=50),
        scene(targets=[one, two], predicted=[one, two], contrast=30),
        scene(targets=[one], predicted=[one], contrast=200),  # one target alone comes after those with two
        scene(targets=[one, two, far], predicted=[one, two]),
        scene(targets=[one], predicted=[one, far]),
        scene(targets=[one, (10, 16)], predicted=[one, (10, 16)], contrast=250),  # too near to be marked
        scene(targets=[one], predicted=[]),
    ]
    assert pictures.choose(samples) == [1, 2, 3, 5, 6]
    assert pictures.choose(samples[8:]) == []


def test_the_story_of_a_run_is_added_up_from_its_records(run):
    records = run.records()
    told = pictures.story(run)
    assert (told["epochs"], told["of"], told["interruptions"]) == (2, 2, 0)
    seconds = sum(record["speed"]["seconds"] for record in records if "speed" in record)
    assert told["hours"] == pytest.approx(seconds / 3600)
    best = max(record["scores"]["iou"] for record in records if record["kind"] == "evaluation")
    assert told["best"]["iou"] == best


def test_an_interruption_is_a_start_after_the_first_one(run, tmp_path):
    lines = (run.path / "records.jsonl").read_text().splitlines()
    starts = [
        {"kind": "start", "step": step, "time": 0.0, "device": "cpu", "versions": {}} for step in (3, 7)
    ]
    (tmp_path / "config.json").write_text((run.path / "config.json").read_text())
    (tmp_path / "records.jsonl").write_text("\n".join([*lines, *map(json.dumps, starts)]))
    told = pictures.story(tpukit.Run(tmp_path))
    assert (told["interruptions"], told["interrupted_at"]) == (2, [3, 7])


def test_a_run_that_is_shown_is_only_read(run, infrared, tmp_path, capsys):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    copy, task = gallery.snapshot(run.path, str(tmp_path), dataset_dir=infrared)
    assert task.dataset_dir == infrared and task.crop_size == 32
    tpukit.test(task, copy, runtime=Runtime("cpu"), progress=False)
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_curves_are_svg_with_the_papers_scores_and_a_dark_form(run, tmp_path):
    config = json.loads((run.path / "config.json").read_text())
    config["settings"]["dataset_dir"] = "datasets/IRSTD-1k"  # the set whose scores the paper states
    del config["crc32"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "records.jsonl").write_text((run.path / "records.jsonl").read_text())
    svg = pictures.curves(tpukit.Run(tmp_path))
    ElementTree.fromstring(svg)
    assert svg.count("prefers-color-scheme: dark") == 1 and svg.count("the paper, after") == 2
    assert len(svg) < 100_000 and "the paper, after" not in pictures.curves(run)  # of another set


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_cards_have_one_size_and_are_small(path):
    with Image.open(path) as picture:
        assert picture.size == tuple(pictures.DPI * side for side in pictures.CARD)
    assert path.stat().st_size < 120_000


def test_the_live_chart_moves_and_is_small():
    path = ROOT / "docs/gallery/live.gif"
    with Image.open(path) as picture:
        assert picture.n_frames == gallery.FRAMES
    assert path.stat().st_size < 300_000


def test_a_transparent_picture_gets_a_light_ground_and_keeps_its_few_coloured_pixels():
    drawn = np.zeros((40, 40, 4), np.uint8)
    drawn[:20] = (120, 120, 120, 255)
    drawn[5, 5] = (213, 94, 0, 255)
    small = Image.open(io.BytesIO(pictures.shrink(Image.fromarray(drawn)))).convert("RGB")
    assert min(small.getpixel((30, 30))) > 230
    red, green, blue = small.getpixel((5, 5))
    assert red > 180 and green < 130 and blue < 40


def test_a_card_of_a_tank_has_the_truth_two_classical_methods_and_the_network(tank, tmp_path, capsys):
    sizes = dict(patch=16, width=16, heads=2, window=4, levels=1, batch_size=4, sampling_steps=1)
    task = tpukit.CDEIT(dataset_dir=tank, epochs=1, **sizes)
    run = tpukit.Run.open(tmp_path / "run", task)
    tpukit.train(task, run, runtime=Runtime("cpu"), progress=False)
    (tmp_path / "eit-uef2017").mkdir()
    (tmp_path / "eit-uef2017/test").symlink_to(tank / "test")
    made = gallery.tank(SimpleNamespace(data=tmp_path, cdeit=run.path))
    with Image.open(io.BytesIO(made["gallery/cdeit.png"])) as picture:
        assert picture.size == (800, 500)
    words = capsys.readouterr().out
    assert "real measurements: " in words and "zero (" in words
    assert not (run.path / "predictions").exists()


def test_mnist_becomes_folders_of_classes(tmp_path):
    rng = np.random.default_rng(0)
    arrays = dict(x_train=rng.integers(0, 256, (20, 28, 28), np.uint8), y_train=np.arange(20) % 10)
    arrays |= dict(x_test=arrays["x_train"][:10], y_test=arrays["y_train"][:10])
    np.savez(tmp_path / "mnist.npz", **arrays)
    gallery.write_folders(tmp_path / "mnist.npz", tmp_path / "png")
    assert len(list((tmp_path / "png/train").glob("*/*.png"))) == 20
    with Image.open(tmp_path / "png/train/3/00013.png") as picture:
        assert (np.asarray(picture) == arrays["x_train"][13]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mnist.npz", "png"]
