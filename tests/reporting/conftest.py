"""A run to report on."""

import pytest


@pytest.fixture
def trained(digits, tmp_path, cpu):
    from tpukit import MNIST, Run, train

    task = MNIST(dataset_dir=digits, epochs=2, batch_size=16, log_every=3)
    run = Run.open(tmp_path / "run", task)
    train(task, run, runtime=cpu, progress=False)
    return task, run
