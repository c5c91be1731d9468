"""A trained run and the checkpoints of a loop, in memory."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.conftest import SMALL
from tests.tpukit.runs.store import filled
from tpukit import MNIST, Checkpoints, Run, train
from tpukit.devices.runtime import Runtime


@pytest.fixture
def tmp_path():
    """In memory, where there is such a folder: what is written here is flushed to the disk many times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def _trained(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    for epochs in (1, 2):  # a checkpoint at the end of each
        task = MNIST(dataset_dir=digits, epochs=epochs, **SMALL)
        train(task, Run.open(folder, task), runtime=Runtime("cpu"), progress=False)
    return task, folder


@pytest.fixture
def trained(_trained, tmp_path):
    """(task, run) of MNIST after two epochs of 25 steps."""
    task, folder = _trained
    return task, Run(shutil.copytree(folder, tmp_path / "run"))


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of the steps 1 and 2, with a backup."""
    saved = Checkpoints(tmp_path / "mine", backup=tmp_path / "drive/mine")
    for step in (1, 2):
        saved.save(filled(step), step)
    return saved
