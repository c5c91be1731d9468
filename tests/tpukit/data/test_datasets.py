"""Datasets by their names: found in order, unpacked, or synthetic."""

import dataclasses
import re
import socket
import tarfile
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import refuses
from tests.tpukit.data.test_archives import make_archive
from tpukit import TpukitError, find_dataset, leaves
from tpukit.data.datasets import Findable, make_synthetic
from tpukit.leaves import part_of
from tpukit_tasks import cdeit, downloads
from tpukit_tasks.mshnet.lists import LISTS
from tpukit_tasks.splits import SPLITS


def touch(folder):
    folder.mkdir(parents=True)
    (folder / "trainval.txt").write_text("a\n")
    return folder


def test_a_given_path_is_taken_and_a_missing_one_is_an_error(here, tmp_path, capsys):
    mine, missing = touch(tmp_path / "mine"), tmp_path / "mispelt"
    touch(tmp_path / "datasets/IRSTD-1k")
    assert find_dataset("IRSTD-1k", mine, env=here) == mine and str(mine) in capsys.readouterr().out
    number: Any = 7  # as papermill gives it
    for path in (missing, number):
        with refuses(path, "does not exist"):
            find_dataset("IRSTD-1k", path, env=here)
    there = touch(tmp_path / "datasets/cifar10")  # of a name of the user's own
    assert find_dataset("cifar10", env=here).resolve() == there


def test_the_places_come_in_order_drive_then_folder_then_synthetic(colab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "synthetic" in find_dataset("IRSTD-1k", size=4, env=colab).name
    assert "synthetic" in capsys.readouterr().out
    folder = touch(tmp_path / "datasets/IRSTD-1k")
    assert find_dataset("IRSTD-1k", env=colab).resolve() == folder
    drive = touch(colab.drive / "datasets/IRSTD-1k")
    assert find_dataset("IRSTD-1k", env=colab) == drive
    assert "on Drive" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["irstd-1k", "someone-set/IRSTD-1k", "datasets/someone/irstd-1k"])
def test_kaggle_inputs_are_searched_whatever_their_nesting_and_case(kaggle, place, capsys):
    wanted = touch(kaggle.inputs / place)
    assert find_dataset("IRSTD-1k", env=kaggle) == wanted
    assert "Kaggle inputs" in capsys.readouterr().out


@pytest.mark.parametrize("top", ["", "IRSTD-1k/"])
def test_an_archive_is_found_and_unpacked_once_with_or_without_a_top_folder(here, tmp_path, top, capsys):
    (tmp_path / "datasets").mkdir()
    content = {f"{top}trainval.txt": "a", f"{top}images/a.png": "x"}
    make_archive(tmp_path / "datasets/IRSTD-1k.zip", content)
    found = find_dataset("IRSTD-1k", env=here)
    assert (found / "trainval.txt").read_text() == "a" and (found / "images/a.png").exists()
    assert found.name.startswith("IRSTD-1k-") and "unpacking" in capsys.readouterr().out
    assert find_dataset("IRSTD-1k", env=here) == found and "unpacking" not in capsys.readouterr().out
    make_archive(tmp_path / "datasets/IRSTD-1k.zip", {"trainval.txt": "another"})
    newer = find_dataset("IRSTD-1k", env=here)
    assert [(folder / "trainval.txt").read_text() for folder in (found, newer)] == ["a", "another"]
    assert {path.name for path in found.parent.glob("[!.]*")} == {found.name, newer.name}


@pytest.mark.parametrize("ending", [".tar.gz", ".TGZ"])
def test_an_archive_that_is_no_zip_is_found_and_refused(here, tmp_path, ending):
    (tmp_path / "datasets").mkdir()
    with tarfile.open(tmp_path / f"datasets/mnist{ending}", "w:gz"):
        pass
    with refuses(f"mnist{ending}", "not a zip file", "unpack it yourself and give its folder"):
        find_dataset("mnist", tmp_path / f"datasets/mnist{ending}", env=here)


def test_a_tasks_own_fallback_folder_is_taken_but_not_for_a_missing_path(here):
    Path("data").mkdir()
    assert find_dataset("eit", env=here) == Path("data")
    assert find_dataset("mine", fallback="data", env=here) == Path("data")
    with refuses("gone"):
        find_dataset("eit", "gone", env=here)


@pytest.mark.parametrize("name", ["cifar10", ""])
def test_a_name_that_no_task_knows_is_an_error_that_lists_the_names(here, tmp_path, name):
    known = {leaves.find(task).dataset for task in leaves.tasks()}
    assert len(known) == 5
    for ask in (lambda: find_dataset(name, env=here), lambda: make_synthetic(name, tmp_path / "made")):
        with pytest.raises(TpukitError) as error:
            ask()
        assert all(other in str(error.value) for other in known)
    assert not list(tmp_path.glob("**/*.png"))


def test_every_folder_that_a_task_looks_for_is_one_of_the_parts():
    conventions = (*cdeit.sets.CONVENTIONS.values(), cdeit.sets.TRAINING)
    names = {name for convention in conventions for name in convention.folders} | set(SPLITS)
    names |= {path.split("/")[0] for lists in LISTS.values() for path in lists.split() if "/" in path}
    parts = {name for key in leaves.tasks() for name in part_of(leaves.find(key), Findable, "dataset_parts")}
    assert names | {"images", "masks"} == parts


@pytest.mark.parametrize("accelerator, size", [("tpu", 9), ("cuda", 9), ("xla", 6), ("cpu", 6)])
def test_an_accelerator_gets_a_larger_synthetic_set_and_the_number_is_printed(
    here, accelerator, size, monkeypatch, capsys
):
    task = leaves.find("mshnet")
    assert (task.synthetic_size, task.synthetic_size_accelerator) == (40, 400)
    monkeypatch.setattr(task, "synthetic_size", 6)
    monkeypatch.setattr(task, "synthetic_size_accelerator", 9)
    found = find_dataset("IRSTD-1k", env=dataclasses.replace(here, accelerator=accelerator))
    assert found.name == f"IRSTD-1k-synthetic-{size}" and len(list((found / "images").iterdir())) == size
    printed = capsys.readouterr().out
    assert f"{size} synthetic samples, not real data" in printed and "RuiZhang97/ISNet" in printed


@pytest.mark.parametrize("name", ["mnist", "IRSTD-1k", "my-images", "eit"])
def test_why_data_are_synthetic_is_one_sentence_without_brackets_in_brackets(name, here, monkeypatch, capsys):
    monkeypatch.setattr(leaves.find("mnist"), "synthesize", staticmethod(lambda *_: None))
    monkeypatch.setattr("tpukit_tasks.downloads.urllib.request.urlopen", unreachable)
    monkeypatch.delenv("TPUKIT_OFFLINE", raising=False)
    find_dataset(name, size=2, env=here)
    said = " ".join(capsys.readouterr().out.split())
    assert "not found" in said and "2 synthetic samples, not real data" in said
    assert not re.search(r"\([^)]*\(|\[Errno|<urlopen", said)
    with pytest.raises(TpukitError) as error:
        find_dataset(name, demo=False, env=here)
    assert not re.search(r"\([^)]*\(|\[Errno|<urlopen", str(error.value))
    assert "--dataset-dir demo" in str(error.value)


def unreachable(*_, **__):
    raise urllib.error.URLError(socket.gaierror(-2, "Name or service not known"))


@pytest.mark.parametrize("gated", [False, True])
def test_missing_weights_are_one_sentence_that_speaks_of_tokens_only_where_one_helps(gated, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def refused(*_, local_files_only=False, **__):
        raise OSError("Access to model x/y is gated") if gated else OSError("nothing there (at all)")

    monkeypatch.setattr(hub, "snapshot_download", refused)
    monkeypatch.setattr(downloads, "check_reachable", lambda url: None)
    with pytest.raises(TpukitError) as error:
        downloads.from_hub("x/y", "*.json")
    text = str(error.value)
    assert ("HF_TOKEN" in text) == gated and ("check its name" in text) != gated
    assert not re.search(r"\([^)]*\(", text) and "\n" not in text
