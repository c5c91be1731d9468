"""What the library needs beside torch: four packages. Images, scores, charts and the command line need more,
and say so in one sentence."""

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

FOUR = ("numpy", "safetensors", "rich", "tqdm")
EXTRAS = ("pillow", "scipy", "matplotlib", "tyro")
PARTS = """
import numpy as np, torch, tpukit

tpukit.detect().require("any")
assert tpukit.mount_drive() is None

def train(epochs):
    core, saved = tpukit.core(), tpukit.Checkpoints("mine")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = saved.restore() or dict(model=model.state_dict(), epoch=0)
    model.load_state_dict(state["model"])
    for epoch in range(state["epoch"], epochs):
        model(torch.ones(2, 4) * core.rank).sum().backward()
        core.optimizer_step(optimizer)
        optimizer.zero_grad()
        saved.save(dict(model=model.state_dict(), epoch=epoch + 1), epoch + 1)
    return core.size

with tpukit.metrics_report():
    torch.ones(2) + 1
print(tpukit.launch(train, 2, cores=2), tpukit.Checkpoints("mine").restore()["epoch"])
"""


def needed_by(names):
    """Return the distributions that distributions need here, themselves and all that they bring."""
    needed, todo = set(), list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in needed:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # one of another platform
            continue
        needed.add(name)
        todo += [re.match(r"[\w.-]+", one)[0] for one in requirements if "extra ==" not in one]
    return needed


@pytest.fixture(scope="module")
def only_these(tmp_path_factory):
    """A folder with links to torch and the four packages, and to what these need: all that a Python finds."""
    folder = tmp_path_factory.mktemp("site")
    for name in needed_by(["torch", *FOUR]):
        distribution = importlib.metadata.distribution(name)
        for part in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / part).exists():
                (folder / part).symlink_to(distribution.locate_file(part))
    for name in EXTRAS:
        assert not (folder / {"pillow": "PIL"}.get(name, name)).exists()
    return folder


def run(program, site, folder):
    """Run a program that finds only the packages of a folder and this tree's tpukit."""
    environ = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    environ |= dict(PYTHONPATH=f"{ROOT}{os.pathsep}{site}", PYTHONNOUSERSITE="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-S", "-c", program]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_parts_of_ones_own_loop_need_four_packages_and_torch(only_these, tmp_path):
    ran = run(PARTS, only_these, tmp_path)
    assert ran.stdout.strip().endswith("2 2"), ran.stderr


@pytest.mark.parametrize(
    "use, package",
    [
        ("tpukit.MNIST", "pillow"),
        ("tpukit.show_own", "pillow"),
        ("tpukit.MSHNet", "scipy"),
        ("tpukit.leaves.find('cdeit')", "scipy"),
        ("figures.subplots(1, 1, 2.0)", "matplotlib"),
        ("cli.main(['train'])", "tyro"),
    ],
)
def test_a_package_of_an_extra_that_is_missing_is_one_sentence_with_what_to_do(use, package, tmp_path):
    module = {"pillow": "PIL"}.get(package, package)
    program = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "import tpukit, tpukit.leaves\n"
        "from tpukit.reporting import figures\n"
        "from tpukit_tools import cli\n"
        f"try:\n    {use}\nexcept tpukit.TpukitError as error:\n    print('tpukit:', error, file=sys.stderr)"
    )
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    [line] = ran.stderr.splitlines()
    assert line.startswith(f"tpukit: {package} is not installed") and f"pip install {package}" in line
