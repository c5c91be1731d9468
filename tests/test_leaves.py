"""A leaf can be cut off: without any one of the tasks and tools, all else imports, the command line offers
the rest, and a neighbour trains."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tpukit import leaves

PACKAGE = Path(leaves.__file__).parent
LEAVES = sorted({f"tasks.{name}" for name in leaves.tasks()} | set(leaves.COMMANDS.values()))
# Imported once for all leaves, if it is installed
HEAVY = "torch._dynamo torch_xla torch.utils.tensorboard scipy.ndimage matplotlib.figure ipywidgets tyro"


@pytest.fixture(scope="session")
def outcomes():
    """Leaf -> what went wrong without it, or "". One process imports torch, and forks for each leaf."""
    command = [sys.executable, "-m", "tests.test_leaves", *LEAVES]
    pipes = dict(capture_output=True, text=True, timeout=550)
    ran = subprocess.run(command, cwd=PACKAGE.parent, **pipes)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
def test_without_a_leaf_all_else_imports_and_a_neighbour_trains(leaf, outcomes):
    assert outcomes[leaf] == ""


def test_every_leaf_is_there():
    assert len(leaves.tasks()) == 5 and all(map(leaves.has_command, leaves.COMMANDS))


# In the child


class Without:
    """A finder of modules for which a leaf is not there."""

    def __init__(self, leaf):
        self.leaf = leaf

    def find_spec(self, name, path=None, target=None):
        return None if is_part(name, self.leaf) else PathFinder.find_spec(name, path, target)


def is_part(module, leaf):
    return module.startswith(f"tpukit.{leaf}")


def cut_off(leaf):
    sys.meta_path = [Without(leaf) if finder is PathFinder else finder for finder in sys.meta_path]
    for name in [name for name in sys.modules if name.startswith(("tpukit", "tests."))]:
        del sys.modules[name]
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if not is_part(name, leaf) and not name.endswith("__main__"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:  # jax, say, which is not installed everywhere
                if (error.name or "").startswith("tpukit"):
                    raise
    from tpukit.leaves import COMMANDS, has_command, tasks

    assert [name for name in COMMANDS if not has_command(name)] == [
        name for name, module in COMMANDS.items() if module == leaf
    ]
    assert leaf not in [f"tasks.{name}" for name in tasks()]
    train_neighbour(leaf)


def train_neighbour(leaf):
    from tpukit import Run, train
    from tpukit.devices.runtime import Runtime
    from tpukit.tasks.datasets import make_synthetic

    folder = Path(tempfile.mkdtemp())
    os.environ["TPUKIT_CACHE"] = str(folder / "cache")
    if leaf == "tasks.mnist":
        from tests.tasks.mshnet.small import Narrow

        data = make_synthetic("IRSTD-1k", folder / "data", size=5)
        task = Narrow(dataset_dir=data, epochs=1, batch_size=2, base_size=32, crop_size=32)
    else:
        from tpukit import MNIST

        data = make_synthetic("mnist", folder / "data", size=60)
        task = MNIST(dataset_dir=data, epochs=1, batch_size=10, channels=2)
    run = Run.open(folder / "run", task)
    train(task, run, runtime=Runtime("cpu"), progress=False)
    assert any(record["kind"] == "evaluation" for record in run.records())


def outcome_of(leaf):
    """What went wrong without a leaf, found in a fork."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.dup2(2, 1)
            cut_off(leaf)
        except BaseException:
            os.write(writing, traceback.format_exc()[-4000:].encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read().decode(errors="replace")
    os.wait()
    return said


if __name__ == "__main__":
    for module in HEAVY.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    print(json.dumps({leaf: outcome_of(leaf) for leaf in sys.argv[1:]}))
