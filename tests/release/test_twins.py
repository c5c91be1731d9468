"""The twins of Colab's and Kaggle's images: their lists, and how a run ends. No environment is built."""

import os
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest

from release import twins
from tests.conftest import ROOT

BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Packages that the images' others bring
BROUGHT = dict(
    numpy="torchvision", pillow="torchvision", scipy="scikit-learn", safetensors="timm", tqdm="timm"
)


def executed(outcome):
    """A notebook with a cell that printed a text or failed with an error."""
    cell = nbformat.v4.new_code_cell()
    if isinstance(outcome, Exception):
        output = dict(ename=type(outcome).__name__, evalue=str(outcome), traceback=[])
        cell.outputs.append(nbformat.v4.new_output("error", **output))
    else:
        cell.outputs.append(nbformat.v4.new_output("stream", text=outcome))
    return nbformat.v4.new_notebook(cells=[cell])


@pytest.mark.parametrize("image", twins.IMAGES)
def test_an_image_has_torch_of_one_release_and_what_the_library_needs_but_what_it_lacks(image):
    listed = dict(package.partition("==")[::2] for package in twins.IMAGES[image]["packages"])
    lacks = set(twins.IMAGES[image]["lacks"])
    assert not lacks & {name.replace("_", "-") for name in listed}
    assert listed.get("torch_xla", listed["torch"]) == listed["torch"]
    assert ("torch-xla" in lacks) == ("torch_xla" not in listed) == ("GPU" in image)
    assert "torch_xla" not in listed or listed["jax"] == listed["jaxlib"] and listed["libtpu"]
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in {name.partition(">=")[0] for name in needed} - lacks:
        assert name in listed or BROUGHT[name] in listed, name


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_every_notebook_with_an_accelerator_is_run_on_the_cpu_and_shortly(path):
    notebook = nbformat.read(path, 4)
    found = twins.settings(notebook, path.stem)
    source = "".join(cell.source for cell in notebook.cells)
    assert ("require(ACCELERATOR" in source) == (found.get("ACCELERATOR") == "cpu")
    assert found.get("EPOCHS", 2) <= 3


def test_a_notebook_ends_well_by_its_own_copy_of_tpukit_or_where_the_image_lacks_a_package(tmp_path):
    def ended(outcome, name="one"):
        return twins.result(executed(outcome), name, tmp_path)

    assert ended(f"tpukit 1 from {tmp_path}/.cache/tpukit/0a/tpukit\n") == "ok"
    assert ended("tpukit 1 from /elsewhere") == "FAILED: tpukit came from /elsewhere"
    assert ended("nothing").startswith("FAILED") and ended(ValueError("no")).endswith("ValueError: no")
    offline = ImportError("peft is missing: switch the internet on")
    assert ended(offline, "finetune_llm") == "asks for the internet: the image has no peft"
    assert ended(offline).startswith("FAILED") and ended(OSError("internet"), "finetune_llm")[0] == "F"


def test_a_run_has_the_images_folder_and_no_network_and_writes_to_no_folder_of_this_machine(tmp_path):
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("this user may make no namespace here, in which a twin has no network")
    root, work = tmp_path / "root", tmp_path / "work"
    root.mkdir()
    work.mkdir()
    shell = "pwd; echo out > here; tail -n +3 /proc/net/dev"  # after two lines of headings
    command = ["unshare", "--net", "--mount", "bash", "-c", twins.SANDBOX, "bash"]
    command += [root, "/no/such/folder", work, "sh", "-c", shell]
    environ = dict(os.environ, PATH="/usr/bin:/bin")  # of a user who is not root
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    folder, *interfaces = ran.stdout.splitlines()
    assert folder == "/no/such/folder" and [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    assert (work / "here").read_text() == "out\n" and not list(root.iterdir())
    assert not Path("/no").exists()
