"""The open page of a notebook, and a finished run of CDEIT."""

import pytest

from tests.reporting.conftest import page as page


@pytest.fixture
def tank_run(tank, tmp_path):
    """(task, run) of a CDEIT with random weights."""
    import torch

    from tests.tasks.cdeit.small import task_of
    from tpukit import Run

    task, run = task_of(tank), Run(tmp_path / "run")
    run.path.mkdir()
    torch.manual_seed(0)
    weights = task.model().state_dict()
    for values in filter(torch.is_floating_point, weights.values()):
        values += 0.02 * torch.randn_like(values)
    run.save_best(weights, **task.metadata(task.datasets()[0]))
    return task, run
