"""The twins of Colab's and Kaggle's images: their lists, the settings of a run, what a result says. No
environment is built."""

import datetime
import os
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest

from release import twins
from tests.conftest import ROOT

BOOKS = sorted((ROOT / "notebooks").glob("**/*.ipynb"))
DATE = datetime.date(2026, 2, 1)


def executed(*cells):
    """A notebook with cells that printed a text, or failed with an error."""
    notebook = nbformat.v4.new_notebook()
    for outcome in cells:
        cell = nbformat.v4.new_code_cell()
        if isinstance(outcome, Exception):
            name, text = type(outcome).__name__, str(outcome)
            cell.outputs.append(nbformat.v4.new_output("error", ename=name, evalue=text, traceback=[]))
        else:
            cell.outputs.append(nbformat.v4.new_output("stream", text=outcome))
        notebook.cells.append(cell)
    return notebook


@pytest.mark.parametrize("image", twins.IMAGES)
def test_an_image_has_torch_of_one_release_and_what_the_library_needs_but_what_it_lacks(image):
    listed = {
        package.partition("==")[0]: package.partition("==")[2] for package in twins.IMAGES[image]["packages"]
    }
    lacks = set(twins.IMAGES[image]["lacks"])
    assert not lacks & {name.replace("_", "-") for name in listed}
    assert listed["torch"].startswith("2.") and listed.get("torch_xla", listed["torch"]) == listed["torch"]
    assert ("torch-xla" in lacks) == ("torch_xla" not in listed) == ("GPU" in image)
    assert {"tyro", "libcst", "pyeit"} <= lacks
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    brought = {
        "numpy": "torchvision",
        "pillow": "torchvision",
        "scipy": "scikit-learn",
        "safetensors": "timm",
        "tqdm": "timm",
    }
    for name in {name.partition(">=")[0] for name in needed} - lacks:
        assert name in listed or brought[name] in listed, name


def test_an_image_with_torch_xla_has_the_jax_that_lowers_kernels_and_the_libtpu_that_reads_them():
    for about in twins.IMAGES.values():
        listed = dict(package.split("==") for package in about["packages"] if "==" in package)
        assert {"jax", "jaxlib", "libtpu"} <= listed.keys() or "torch_xla" not in listed
        assert listed.get("jax") == listed.get("jaxlib")


@pytest.mark.parametrize(
    "script, datum",
    [
        ("""test "$4" && echo '{"forward": "", "backward": ""}'""", None),
        ("echo 'ValueError: no' >&2; exit 1", "ValueError: no"),
        ("""case "$4" in *256*) echo 'it ended' >&2; exit 1;; esac""", "it ended"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_jax_that_lowers_no_kernel_is_a_failure_of_its_image(script, datum, tmp_path, monkeypatch):
    monkeypatch.setattr(twins, "TWINS", tmp_path)
    python = tmp_path / "kaggle-tpu/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    found = twins.lower_kernels("Kaggle TPU")
    assert (found["state"], found.get("error")) == ("refused" if datum else "ok", datum)


@pytest.mark.parametrize("path", BOOKS, ids=[path.stem for path in BOOKS])
def test_every_notebook_with_an_accelerator_is_run_on_the_cpu_and_shortly(path):
    notebook = nbformat.read(path, 4)
    found = twins.settings(notebook, path.stem)
    source = "".join(cell.source for cell in notebook.cells)
    assert ("env.require(" in source) == (found.get("ACCELERATOR") == "cpu")
    assert found.get("EPOCHS", 2) <= 3


def test_a_missing_interpreter_is_named(tmp_path):
    with pytest.raises(LookupError, match="3.99"):
        twins.interpreter("3.99", dict(PYENV_ROOT=str(tmp_path), PATH=str(tmp_path)))


def test_an_interpreter_of_pyenv_is_found_and_one_of_another_version_is_not(tmp_path):
    for folder, version in (("3.98.1", "3.97.0"), ("3.98.2", "3.98.2")):
        python = tmp_path / "versions" / folder / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho Python {version}\n")
        python.chmod(0o755)
    assert twins.interpreter("3.98", dict(PYENV_ROOT=str(tmp_path), PATH="/nowhere")) == python


def test_a_result_names_the_copy_of_tpukit_or_the_failing_cell(tmp_path):
    own = f"tpukit 1 from {tmp_path}/.cache/tpukit/0a/tpukit\n"
    assert twins.result(executed("", own), "one", 5, tmp_path)["state"] == "ok"
    assert twins.result(executed("", "tpukit 1 from /elsewhere"), "one", 5, tmp_path)["copy"] == "/elsewhere"
    failed = twins.result(executed(own, ValueError("first\nlast | line")), "one", 5, tmp_path)
    assert (failed["state"], failed["cell"], failed["error"]) == ("failed", 2, "last | line")
    words = twins.PAGES["docs/STATUS.md"]
    assert "last \\| line" in twins.table(
        {"An image": "Python 3"}, {("one", "An image"): failed}, words, DATE
    )


def test_only_the_package_that_needs_the_internet_excuses_a_notebook(tmp_path, monkeypatch):
    name = "gpu_to_tpu_migration"
    monkeypatch.setitem(twins.NEEDS_INTERNET, name, "libcst")
    excused = executed(ImportError("libcst is missing: switch the internet on"))
    assert twins.result(excused, name, 5, tmp_path)["state"] == "internet"
    assert twins.result(excused, "mnist_quickstart", 5, tmp_path)["state"] == "failed"
    assert twins.result(executed(ImportError("no internet")), name, 5, tmp_path)["state"] == "failed"


@pytest.mark.parametrize("page", twins.PAGES)
def test_a_page_has_the_section_and_every_state_has_its_sentence(page):
    text = (ROOT / page).read_text()
    assert text.count(twins.BEGIN) == text.count(twins.END) == 1 and text.index(twins.BEGIN) < text.index(
        twins.END
    )
    states = [
        dict(state="ok", seconds=5, copy="x"),
        dict(state="other", seconds=5, copy="/elsewhere"),
        dict(state="internet", cell=3, package="libcst"),
        dict(state="failed", cell=4, error="E: f"),
        dict(state="refused", error="ValueError: g"),
    ]
    results = {(state["state"], "An image"): state for state in states}
    heads = {"An image": "Python 3", "Another": "no Python 3.99"}
    lines = twins.table(heads, results, twins.PAGES[page], DATE).splitlines()
    assert (
        "2026-02-01" in lines[0]
        and "no Python 3.99" in lines[4]
        and {line.count("|") for line in lines[2:]} == {4}
    )
    for line, datum in zip(lines[5:], ("5", "/elsewhere", "libcst", "E: f", "ValueError: g"), strict=True):
        assert datum in line


@pytest.mark.parametrize("chinese, rows", [("ok", ["one"]), ("failed", ["one", "zh-CN/one"])])
def test_translated_notebooks_have_rows_of_their_own_only_where_one_ended_otherwise(chinese, rows):
    ended = dict(ok=dict(state="ok", seconds=5, copy="x"), failed=dict(state="failed", cell=4, error="E: f"))
    results = {("one", "An image"): ended["ok"], ("zh-CN/one", "An image"): ended[chinese]}
    lines = twins.table({"An image": "Python 3"}, results, twins.PAGES["docs/STATUS.md"], DATE).splitlines()
    assert [line.split("|")[1].strip() for line in lines[lines.index("| | Python 3 |") + 1 :]] == rows
    assert any("1 Chinese notebooks" in line for line in lines) == (chinese == "ok")


def test_a_run_has_the_images_folder_and_no_network_and_writes_to_no_folder_of_this_machine(tmp_path):
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not allowed here")
    root, work = tmp_path / "root", tmp_path / "work"
    root.mkdir()
    work.mkdir()
    command = [
        "unshare",
        "--net",
        "--mount",
        "bash",
        "-c",
        twins.SANDBOX,
        "bash",
        root,
        "/no/such/folder",
        work,
    ]
    # two lines of headings, then a line for each
    command += ["sh", "-c", "pwd; echo out > here; tail -n +3 /proc/net/dev"]
    environ = dict(os.environ, PATH="/usr/bin:/bin")  # of a user who is not root
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    folder, *interfaces = ran.stdout.splitlines()
    assert folder == "/no/such/folder" and [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    assert (work / "here").read_text() == "out\n" and not list(root.iterdir())
    assert not Path("/no").exists()
