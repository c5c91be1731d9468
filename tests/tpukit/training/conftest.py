"""How the tests of the training train."""

from tests.conftest import SMALL
from tests.tpukit.devices.conftest import emulated  # noqa: F401  a fixture
from tpukit import Run, train

DIGITS = dict(SMALL, channels=4)  # settings of an MNIST


def train_in(folder, task, runtime):
    """The run of a task in a folder, trained to the task's epochs."""
    run = Run.open(folder, task)
    train(task, run, runtime=runtime, progress=False)
    return run
