"""The small MSHNet that comes with tpukit."""

import json
import shutil

import pytest

import tpukit
from release import demo as release_demo
from tpukit.host.errors import TpukitError
from tpukit.inference.trained import DEMO_FOLDER, find_trained
from tpukit.runs import weights
from tpukit_tasks.mshnet.overlay import HIT, MISSED

IMAGES = {"XDU674.png", "XDU889.png", "XDU516.png", "XDU637.png"}
TARGETS = 2  # of each of these images, at least, as labelled in IRSTD-1k


def test_the_demo_finds_targets_in_its_images():
    results = tpukit.predict("demo", "demo", progress=False)
    assert {result["name"] for result in results} == IMAGES
    found = [result["targets"] for result in results]
    assert sum(map(bool, found)) >= 3 and max(found) <= 3 * TARGETS


def test_the_demo_is_small_and_says_how_it_was_trained():
    path = DEMO_FOLDER / "weights.safetensors"
    assert path.stat().st_size <= release_demo.MAX_BYTES
    metadata = weights.metadata(path)
    assert json.loads(metadata["settings"])["network"] == "small"
    assert float(metadata["iou"]) > 0.5
    assert "/" not in metadata["settings"]


def test_a_folder_called_demo_is_taken_for_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    with pytest.raises(TpukitError, match="demo"):
        find_trained("demo")


def test_show_own_shows_the_detections_in_the_images_of_the_demo(monkeypatch):
    shown = []
    monkeypatch.setattr("tpukit.inference.own.present_figure", shown.append)
    tpukit.show_own("demo")
    titles = [axis.get_title() for axis in shown[0].axes]
    assert all(any(name in title for title in titles) for name in IMAGES)


def test_the_demo_rings_what_it_misses(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr("tpukit.inference.own.present_figure", shown.append)
    tpukit.show_own("demo")
    rings = {}
    for axis in shown[0].axes[::3]:  # three panels of each image
        said, name = axis.get_title().split("\n")
        pixels = axis.images[0].get_array()
        colours = {colour for colour in (HIT, MISSED) if (pixels == colour).all(2).any()}
        rings[name] = (said.split(": ")[1], colours)
    missed = {"XDU674.png": ("0 of 2 hit, 0 false", {MISSED})}
    assert {name: ring for name, ring in rings.items() if MISSED in ring[1]} == missed
    assert all(ring[1] == {HIT} for name, ring in rings.items() if name not in missed)

    shutil.copy(DEMO_FOLDER / "XDU674.png", tmp_path)  # a user's own: nothing is known of its targets
    tpukit.show_own("demo", paths=tmp_path)
    assert shown[1].axes[0].get_title().startswith("0 targets")
