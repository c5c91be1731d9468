"""A trained run."""

import pytest

from tests.conftest import SMALL
from tpukit import MNIST, Run, train


@pytest.fixture
def trained(digits, tmp_path, cpu):
    for epochs in (1, 2):  # a checkpoint at the end of each
        task = MNIST(dataset_dir=digits, epochs=epochs, **SMALL)
        run = Run.open(tmp_path / "run", task)
        train(task, run, runtime=cpu, progress=False)
    return task, run
