"""The open page of a notebook, and a finished run of CDEIT."""

import pytest

from tests.conftest import random_run
from tests.tasks.cdeit.small import task_of
from tests.tpukit.reporting.conftest import page as page


@pytest.fixture
def tank_run(tank, tmp_path):
    """(task, run) of a CDEIT with random weights."""
    task = task_of(tank)
    train, _ = task.datasets()
    return task, random_run(tmp_path / "run", task, **task.metadata(train))
