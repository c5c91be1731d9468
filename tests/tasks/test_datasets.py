"""Datasets by their names: those of the tasks, their folders, and their synthetic sets."""

import dataclasses

import pytest

from tpukit import TpukitError, find_dataset, tasks
from tpukit.tasks import cdeit
from tpukit.tasks.datasets import make_synthetic
from tpukit.tasks.images.data import SPLITS
from tpukit.tasks.mshnet.data import LISTS


@pytest.mark.parametrize("name", ["cifar10", "IRSTD1k", "NUDT-SIRST", ""])
def test_a_name_that_no_task_knows_is_an_error_that_lists_the_names(here, tmp_path, name):
    known = {tasks.find(task).dataset for task in tasks.TASKS}
    assert len(known) == 4
    for ask in (lambda: find_dataset(here, name), lambda: make_synthetic(name, tmp_path / "made")):
        with pytest.raises(TpukitError) as error:
            ask()
        assert all(other in str(error.value) for other in known)
    assert not list(tmp_path.glob("**/*.png"))


def test_every_folder_that_a_task_looks_for_is_one_of_the_parts():
    names = {
        name for convention in (*cdeit.CONVENTIONS.values(), cdeit.TRAINING) for name in convention.folders
    }
    names |= {pattern.split("/")[0] for patterns in LISTS.values() for pattern in patterns if "/" in pattern}
    names |= set(SPLITS)
    parts = {name for key in tasks.TASKS for name in tasks.find(key).dataset_parts}
    assert names | {"images", "masks", "raw"} == parts


@pytest.mark.parametrize(
    "accelerator, name, size",
    [("tpu", "TPU", 9), ("cuda", "GPU", 9), ("xla", "CPU XLA device", 6), ("cpu", "CPU", 6)],
)
def test_an_accelerator_gets_a_larger_synthetic_set_and_the_number_is_printed(
    here, accelerator, name, size, monkeypatch, capsys
):
    monkeypatch.setattr(tasks.find("mshnet"), "synthetic_size", 6)
    monkeypatch.setattr(tasks.find("mshnet"), "synthetic_size_accelerator", 9)
    found = find_dataset(dataclasses.replace(here, accelerator=accelerator), "IRSTD-1k")
    assert found.name == f"IRSTD-1k-synthetic-{size}" and len(list((found / "images").iterdir())) == size
    printed = capsys.readouterr().out
    assert f"{size} synthetic samples, the default on a {name};" in printed and "RuiZhang97/ISNet" in printed


def test_a_given_size_and_a_task_of_one_size_hold_on_an_accelerator_too(here, monkeypatch):
    monkeypatch.setattr(tasks.find("mnist"), "synthetic_size_accelerator", 0)
    monkeypatch.setattr(tasks.find("mnist"), "synthetic_size", 18)
    tpu = dataclasses.replace(here, accelerator="tpu")
    assert find_dataset(tpu, "IRSTD-1k", size=5).name == "IRSTD-1k-synthetic-5"
    assert find_dataset(tpu, "mnist").name == "mnist-synthetic-18"


def test_the_sets_for_an_accelerator_are_large_and_those_for_a_cpu_small():
    sizes = {
        name: (task.synthetic_size, task.synthetic_size_accelerator)
        for name in tasks.TASKS
        if (task := tasks.find(name))
    }
    assert sizes["mshnet"] == (40, 400) and sizes["mnist"] == (6000, 12_000)
