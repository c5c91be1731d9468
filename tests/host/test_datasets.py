"""Datasets: found in order, unpacked, or synthetic."""

from pathlib import Path

import pytest

from tests.conftest import refuses
from tests.host.test_archives import make_archive
from tpukit import find_dataset


def touch(folder):
    folder.mkdir(parents=True)
    (folder / "trainval.txt").write_text("a\n")
    return folder


def test_a_given_path_is_taken_and_a_missing_one_is_an_error(here, tmp_path, capsys):
    place = touch(tmp_path / "mine")
    assert find_dataset(here, "IRSTD-1k", place) == place
    assert str(place) in capsys.readouterr().out
    with refuses(tmp_path / "mispelt"):
        find_dataset(here, "IRSTD-1k", tmp_path / "mispelt")


def test_a_missing_path_falls_back_only_when_allowed_and_this_is_printed(here, tmp_path, capsys):
    wanted = touch(tmp_path / "datasets/IRSTD-1k")
    assert find_dataset(here, "IRSTD-1k", tmp_path / "mispelt", fallback=True).resolve() == wanted
    out = capsys.readouterr().out
    assert str(tmp_path / "mispelt") in out and "./datasets" in out


def test_the_places_come_in_order_drive_then_folder_then_synthetic(colab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "synthetic" in find_dataset(colab, "IRSTD-1k", size=4).name
    assert "synthetic" in capsys.readouterr().out
    folder = touch(tmp_path / "datasets/IRSTD-1k")
    assert find_dataset(colab, "IRSTD-1k").resolve() == folder
    drive = touch(colab.drive / "datasets/IRSTD-1k")
    assert find_dataset(colab, "IRSTD-1k") == drive
    assert "on Drive" in capsys.readouterr().out


def test_a_name_of_the_users_own_is_fine_where_there_is_data(here, tmp_path):
    mine = touch(tmp_path / "anywhere")
    assert find_dataset(here, "cifar10", mine) == mine
    there = touch(tmp_path / "datasets/cifar10")
    assert find_dataset(here, "cifar10").resolve() == there


@pytest.mark.parametrize("place", ["irstd-1k", "someone-set/IRSTD-1k", "datasets/someone/irstd-1k"])
def test_kaggle_inputs_are_searched_whatever_their_nesting_and_case(kaggle, place, capsys):
    wanted = touch(kaggle.inputs / place)
    assert find_dataset(kaggle, "IRSTD-1k") == wanted
    assert "Kaggle inputs" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
@pytest.mark.parametrize("top", ["", "IRSTD-1k/"])
def test_an_archive_is_found_and_unpacked_whole_with_or_without_a_top_folder(here, tmp_path, ending, top):
    (tmp_path / "datasets").mkdir()
    make_archive(
        tmp_path / f"datasets/IRSTD-1k{ending}", {f"{top}trainval.txt": "a", f"{top}images/a.png": "x"}
    )
    found = find_dataset(here, "IRSTD-1k")
    assert (found / "trainval.txt").read_text() == "a" and (found / "images/a.png").exists()
    assert find_dataset(here, "IRSTD-1k") == found
    assert [p.name for p in found.parent.iterdir() if not p.name.startswith(".")] == ["IRSTD-1k"]


def test_another_archive_for_the_same_name_is_unpacked_beside_the_first(here, tmp_path, capsys):
    for name in ("IRSTD", "NUDT"):
        make_archive(tmp_path / f"{name}.zip", {"trainval.txt": name})
    first, second = (find_dataset(here, "IRSTD-1k", tmp_path / f"{name}.zip") for name in ("IRSTD", "NUDT"))
    assert [(folder / "trainval.txt").read_text() for folder in (first, second)] == ["IRSTD", "NUDT"]
    assert first.name == "IRSTD-1k" and second.name.startswith("IRSTD-1k-")
    capsys.readouterr()
    assert find_dataset(here, "IRSTD-1k", tmp_path / "NUDT.zip") == second
    assert find_dataset(here, "IRSTD-1k", tmp_path / "IRSTD.zip") == first
    assert "unpacking" not in capsys.readouterr().out
    make_archive(tmp_path / "IRSTD.zip", {"trainval.txt": "a newer one"})
    newer = find_dataset(here, "IRSTD-1k", tmp_path / "IRSTD.zip")
    assert (newer / "trainval.txt").read_text() == "a newer one"


def test_a_tasks_own_fallback_folder_is_taken_for_a_missing_path_and_named(here, capsys):
    with refuses("gone", "data"):
        find_dataset(here, "eit", "gone", fallback="data")
    Path("data").mkdir()
    assert find_dataset(here, "eit", "gone", fallback="data") == Path("data")
    assert "gone" in capsys.readouterr().out
    assert find_dataset(here, "eit", fallback="data") == Path("data")
