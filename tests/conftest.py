"""Shared by all tests: small data, an environment that is not this machine's, and the reference folder."""

import contextlib
import getpass
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from release.size import lines_of_code
from tests import warm

ROOT = Path(__file__).parent.parent
# Where the compilers of `tpukit plan`, gigabytes, outlive the tests, which write nothing in the home.
TEMPORARY = Path(tempfile.gettempdir(), f"tpukit-{getpass.getuser()}")
COMPILERS = Path(os.environ.get("TPUKIT_TEST_COMPILERS") or TEMPORARY)
SMALL = dict(batch_size=8, log_every=3, num_workers=1)  # settings that make a training a matter of a second
XLA_FLAGS = "--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"

# The files that take most CPU time, the longest first: at the end of all, one of them would run alone.
LONGEST = """
test_notebooks.py test_docs.py tools/emulate/test_emulate.py tools/emulate/test_accidents.py
tools/plan/test_plan.py tasks/cdeit/test_attention.py tools/emulate/test_notebooks.py
tools/emulate/test_tasks.py test_jupyterlab.py tpukit/training/test_checkpoint.py
tpukit/training/test_loop.py tpukit/launching/test_core.py tpukit/launching/test_supervisor.py
tpukit/runs/test_own_loop.py tpukit/launching/test_launcher.py tasks/text/test_text.py
tools/test_export.py tpukit/devices/test_xla.py release/test_notebooks.py release/test_executed.py
tpukit/reporting/test_device_report.py tpukit/runs/test_faults.py tpukit/training/test_step.py
tools/test_hardware.py tpukit/reporting/test_display.py tools/cli/test_cli.py
release/test_install.py tpukit/training/test_saver.py tpukit/runs/test_backup.py
tasks/text/test_dropout.py tasks/text/test_memory.py tpukit/launching/test_share.py
""".split()


def pytest_collection_modifyitems(items):
    place = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_configure(config):
    # Before torch_xla is imported anywhere: the CPU XLA device, compiled quickly.
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
    if importlib.util.find_spec("torch_tpu"):  # which looks for a TPU for minutes: see `open_runtime`
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # For the processes that tests start, too: no dataset is downloaded, and decoded ones go with the tests.
    os.environ["TPUKIT_OFFLINE"] = "1"
    os.environ["TPUKIT_CACHE"] = cache = tempfile.mkdtemp(prefix="tpukit-cache-")
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    config.add_cleanup(warm.stop)


@pytest.fixture(scope="session", autouse=True)
def _compilers():
    try:
        from tpukit_tools.plan import compiler
    except ImportError:  # a tree without that tool
        yield
        return
    folder_of = compiler.folder_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "folder_of", lambda *packages: COMPILERS / folder_of(*packages).name)
        yield


@pytest.fixture(scope="module")
def warm_calls():
    """What tpukit itself calls in a process of its own is called in a warm one, see tests/warm.py."""
    from tpukit_tools import subprocess_call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess_call, "PYTHON", [*warm.python(), "-P"])
        yield


@pytest.fixture(scope="session", autouse=True)
def _opened():
    """An open CPU XLA runtime, or None. Opened before any gradient is computed: afterwards autograd refuses
    XLA."""
    try:
        import torch_xla  # noqa: F401
    except ImportError:
        return None
    from tpukit.devices.xla import XLARuntime

    return XLARuntime("xla")


@pytest.fixture
def xla(_opened):
    """A runtime that has counted nothing yet."""
    return type(_opened)("xla") if _opened else pytest.skip("torch_xla has wheels for Linux x86_64 only")


@pytest.fixture
def cpu():
    from tpukit.devices.runtime import Runtime

    return Runtime("cpu")


@pytest.fixture(scope="session")
def infrared(tmp_path_factory):
    """A synthetic IRSTD-1k of 20 images: 16 to train, 4 to test."""
    from tpukit.data.datasets import make_synthetic

    return make_synthetic("IRSTD-1k", tmp_path_factory.mktemp("data") / "infrared", size=20)


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A synthetic MNIST of 240 images: 200 to train, 40 to test."""
    from tpukit.data.datasets import make_synthetic

    return make_synthetic("mnist", tmp_path_factory.mktemp("data") / "mnist", size=240)


@pytest.fixture(scope="session")
def tank(tmp_path_factory):
    """A simulated set for electrical impedance tomography: 21 samples to train, 5 to test."""
    from tpukit_tasks.cdeit import simulator

    return simulator.simulate(tmp_path_factory.mktemp("tank") / "eit", samples=21, test_samples=5)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """Synthetic images in six class folders: 54 to train, 18 to test."""
    from tpukit.data.datasets import make_synthetic

    return make_synthetic("my-images", tmp_path_factory.mktemp("data") / "shapes", size=72)


@pytest.fixture(scope="session")
def topics(tmp_path_factory):
    """Two pages of Python's documentation, one to train and one to test, cut to 1500 characters."""
    from tpukit.data.datasets import make_synthetic

    folder = make_synthetic("my-text", tmp_path_factory.mktemp("data") / "topics", size=10)
    for split in ("train", "test"):
        first, *others = sorted((folder / split).glob("*.txt"))
        first.write_text(first.read_text()[:1500])
        for path in others:
            path.unlink()
    return folder


@pytest.fixture(scope="session")
def _trained(digits, tmp_path_factory):
    from tpukit import MNIST, Run, train
    from tpukit.devices.runtime import Runtime

    task = MNIST(dataset_dir=digits, epochs=2, batch_size=16, log_every=3)
    run = Run.open(tmp_path_factory.mktemp("trained") / "run", task)
    train(task, run, runtime=Runtime("cpu"), progress=False)
    return task, run.path


@pytest.fixture
def trained(_trained, tmp_path):
    """(task, run) of MNIST after two epochs of 12 steps; each test gets a copy."""
    from tpukit import Run

    task, path = _trained
    shutil.copytree(path, tmp_path / "run")
    return task, Run.find(tmp_path / "run")


@pytest.fixture
def infrared_run(tmp_path):
    """(task, run) of an MSHNet with random weights, trained on crops of 32 pixels."""
    from tests.tasks.mshnet.small import Narrow

    task = Narrow(base_size=32, crop_size=32)
    return task, random_run(tmp_path / "run", task)


@pytest.fixture
def bright(monkeypatch):
    """An MSHNet that takes a pixel for a target from a grey of 129 on, with a logit of its grey level less
    128. Images keep their size."""
    from tests.tasks.mshnet.small import Narrow
    from tpukit_tasks.mshnet import windows

    monkeypatch.setattr(windows, "scale", lambda image, size, smallest: image)
    monkeypatch.setattr(
        Narrow, "predictor", lambda *_, **__: lambda batch: batch["image"][:, :1].float() - 128
    )


@pytest.fixture
def colab(tmp_path):
    """The environment of a Colab session whose Drive is not mounted, rooted in tmp_path."""
    from tpukit.host import environment

    (tmp_path / "content").mkdir()
    return environment.detect({"COLAB_RELEASE_TAG": "release-colab"}, tmp_path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A local environment whose current folder is tmp_path."""
    monkeypatch.chdir(tmp_path)
    from tpukit import detect

    return detect({}, tmp_path)


@pytest.fixture
def kaggle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from tpukit import detect

    return detect({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, tmp_path)


@pytest.fixture
def versions(monkeypatch):
    """Set what seems to be installed: versions(torch="2.9.0", ...)."""
    from tpukit.host import environment

    def pretend(**installed):
        wanted = {name.replace("_cpu", "-cpu"): version for name, version in installed.items()}
        real = environment.version_of
        monkeypatch.setattr(
            environment, "version_of", lambda p: wanted.get(p) if p in environment.PACKAGES else real(p)
        )

    return pretend


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that nvidia-smi lists these GPUs."""
    return lambda *names: monkeypatch.setattr(
        "tpukit.host.environment.nvidia_gpus", lambda environ: list(names)
    )


def _folder(variable, default):
    folder = Path(os.environ.get(variable, ROOT.parent / "shared" / default))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; {variable} can name one")
    return folder


@pytest.fixture(scope="session")
def reference():
    """The folder of reference values computed with the published code."""
    return _folder("TPUKIT_REFERENCE", "reference")


@pytest.fixture(scope="session")
def real_data():
    """The folder that holds IRSTD-1k/, mnist/ and eit-uef2017/."""
    return _folder("TPUKIT_DATA", "data")


@pytest.fixture
def uef2017(real_data):
    return real_data / "eit-uef2017"


@contextlib.contextmanager
def refuses(*data):
    """Context manager: expect a TpukitError whose message holds all these data."""
    from tpukit import TpukitError

    with pytest.raises(TpukitError) as error:
        yield
    assert all(str(value) in str(error.value) for value in data), error.value


def random_run(folder, task, **metadata):
    """A run whose best weights are random, those too that a model begins as 0 or 1."""
    import torch

    from tpukit import Run

    run = Run(folder)
    run.path.mkdir()
    torch.manual_seed(0)
    state = task.model().state_dict()
    for values in filter(torch.is_floating_point, state.values()):
        values += 0.02 * torch.randn_like(values)
    run.save_best(state, task=task.name, **metadata)
    return run


LOADED = """
import sys
ours = [module for name, module in sys.modules.items() if name.startswith("tpukit")]
print("LOADED", *(module.__file__ for module in ours))
"""


def loaded_by(program, folder, env=os.environ):
    """(what a program in a process of its own prints, the parts of tpukit that it loads, their lines of
    code)."""
    command = [sys.executable, "-c", program + LOADED]
    env = {**env, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    printed, _, names = ran.stdout.partition("LOADED ")
    loaded = [Path(name) for name in names.split()]
    places = [path.relative_to(ROOT).parts for path in loaded]
    parts = {place[1] if place[0] == "tpukit" else place[0] for place in places} - {"__init__.py"}
    return printed, parts, lines_of_code(loaded)


def wait_for(condition, process=None, timeout_s=300):
    """Wait until a condition holds, while a process runs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.02)


# What tests ask of a finished run


def exact(run):
    """The records without what no two runs share: times, and how often a session started and compiled."""
    kept = [r for r in run.records() if r["kind"] not in ("start", "compile")]
    return [{k: v for k, v in r.items() if k not in ("time", "speed")} for r in kept]


def scores_of(task, model, data, runtime):
    """The scores of a model on a device over a test set."""
    from tpukit.training.data import BatchLoader
    from tpukit.training.prediction import predict_set

    loader = BatchLoader(data, runtime, on=task.data_on)
    batches = predict_set(task, model, loader, runtime, epoch=None)
    return task.evaluate(pair for pairs in batches for pair in pairs)


def best_weights(run):
    from tpukit.runs import weights

    return weights.read(run.path / "best.safetensors")


def checkpoint(run):
    import torch

    return torch.load(run.path / "checkpoints" / run.checkpoints()[0]["file"], weights_only=True)["state"]


def same(a, b):
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def flip(path, at=None):
    """Flip a bit in the middle of a file, or at this byte."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)
