"""The built notebooks: one file each, with the library inside, and what Kaggle's command reads of each."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import requests

from release import notebooks, pack
from tests.conftest import ROOT
from tests.test_code import PACKAGES


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder of all built notebooks, built once, because packing takes seconds."""
    folder = tmp_path_factory.mktemp("dist")
    notebooks.build(folder)
    return folder


def archive_cell(path):
    [cell] = [
        cell for cell in nbformat.read(path, 4).cells if "tpukit-archive" in cell.metadata.get("tags", [])
    ]
    return cell


def run(source, home, **variables):
    """Run a program with another home folder, and without the packages that are installed here."""
    environ = dict(os.environ, HOME=str(home), PYTHONPATH="", **variables)
    pipes = dict(input=source, capture_output=True, text=True, timeout=120)
    return subprocess.run([sys.executable, "-S", "-"], env=environ, **pipes)


def unpack(cell, home, **variables):
    """Run the archive's cell with another home folder. Returns (the folder it names, the folder's files)."""
    ran = run(f"{cell.source}\nprint(EMBEDDED)", home, **variables)
    assert ran.returncode == 0, ran.stderr
    folder = Path(ran.stdout.strip())
    return folder, {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def is_of_mnist(name):
    """Whether a file is the library's, MNIST's, or of what every notebook carries of the desk."""
    package, part, *_ = name.removesuffix(".py").split("/")
    shared = ("pictures", "splits", "downloads")  # of several tasks
    wanted = dict(
        tpukit_tasks=("__init__", "mnist", "mnist_data", *shared), tpukit_tools=("__init__", *pack.DESK)
    )
    return package == "tpukit" or part in wanted[package]


def test_every_notebook_is_built_with_the_library_of_this_tree_inside_and_equal_files_give_equal_bytes(
    dist, tmp_path
):
    sources = {path.relative_to(ROOT / "notebooks") for path in (ROOT / "notebooks").glob("**/*.ipynb")}
    assert {path.relative_to(dist) for path in dist.glob("**/*.ipynb")} == sources
    embedded = {
        re.search('SHA256 = "(.+)"', archive_cell(path).source)[1] for path in dist.glob("**/*.ipynb")
    }
    assert len(embedded) == 9  # twelve notebooks, of which some use the same task and tools
    folder, files = unpack(archive_cell(dist / "mnist_quickstart.ipynb"), tmp_path)
    code = {
        path.relative_to(ROOT).as_posix(): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".csv", ".json", ".toml", ".txt")
    }
    code = {name: path for name, path in code.items() if is_of_mnist(name)}
    assert set(files) == {*code, "tpukit/LICENSE"}
    assert files["tpukit/LICENSE"].read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert all(files[name].read_bytes() == path.read_bytes() for name, path in code.items())
    assert folder.name in embedded and folder.parent == tmp_path / ".cache/tpukit"


FINDS_ALL = """
import ast, importlib, sys
# An editable installation would add the tasks of its own folder.
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
import tpukit
from tpukit import leaves
from tpukit_tools.cli import commands

assert tpukit.__path__[0].startswith(sys.path[0])
code = open(sys.argv[1]).read()
for node in ast.walk(ast.parse(code)):
    match node:
        case ast.ImportFrom(module=str(module), names=names) if module.startswith("tpukit"):
            for one in names:
                if not hasattr(importlib.import_module(module), one.name):
                    importlib.import_module(f"{module}.{one.name}")
        case ast.Attribute(value=ast.Name(id="tpukit"), attr=name):
            getattr(tpukit, name)
        case ast.Call(func=ast.Attribute(attr="find_dataset"), args=[ast.Constant(value=dataset)]):
            assert dataset in [entry.dataset for entry in leaves.tasks().values()]
print(*leaves.tasks(), *filter(commands.is_offered, commands.NEEDED))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, there",
    [
        ("colab_tpu_setup", "mshnet doctor predict export"),
        ("finetune_images", "images doctor predict export"),
        ("finetune_llm", "text doctor predict export plan"),
        ("gpu_to_tpu_migration", "mnist doctor predict export migrate"),
        ("hardware_check", "mnist mshnet cdeit doctor predict export simulate"),
        ("hardware_comparison", "mshnet doctor predict export plan compare"),
        ("kaggle_cdeit_tpu", "cdeit doctor predict export simulate"),
        ("your_own_loop", "mnist doctor predict export"),
    ],
)
def test_a_notebook_carries_all_that_its_code_uses_and_no_other_task_or_tool(name, there, dist, tmp_path):
    folder, _ = unpack(archive_cell(dist / f"{name}.ipynb"), tmp_path)
    cells = [
        cell.source for cell in nbformat.read(dist / f"{name}.ipynb", 4).cells if cell.cell_type == "code"
    ]
    (tmp_path / "code.py").write_text("\n".join(cell for cell in cells if "ARCHIVE = " not in cell))
    command = [sys.executable, "-P", "-c", FINDS_ALL, str(tmp_path / "code.py")]
    environ = dict(os.environ, PYTHONPATH=str(folder))
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == there, ran.stderr


def test_a_damaged_archive_says_so_and_unpacks_nothing(dist, tmp_path):
    source = archive_cell(dist / "mnist_quickstart.ipynb").source
    place = source.index('ARCHIVE = """') + 500
    other = "0" if source[place] != "0" else "1"
    ran = run(source[:place] + other + source[place + 1 :], tmp_path)
    assert "is damaged: download" in ran.stderr and not (tmp_path / ".cache").exists()


def test_the_tomography_notebooks_bring_the_part_of_pyeit_that_simulates_and_its_licence(dist, tmp_path):
    folder, files = unpack(archive_cell(dist / "kaggle_cdeit_tpu.ipynb"), tmp_path)
    assert "Benyuan Liu" in files["pyeit/LICENSE.txt"].read_text() and "pyeit/eit/fem.py" in files
    program = (
        "import sys, tpukit; sys.path.insert(0, sys.argv[1]); import pyeit; print(pyeit.__file__);"
        " from tpukit_tasks.cdeit import simulate"
    )
    command = [sys.executable, "-c", program, str(folder)]
    environ = dict(os.environ, PYTHONPATH=str(folder))
    ran = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert ran.stdout.strip() == str(folder / "pyeit/__init__.py"), ran.stderr


def test_an_unpacked_copy_is_used_again_and_one_with_other_files_is_left_as_it_is(dist, tmp_path):
    cell = archive_cell(dist / "mnist_quickstart.ipynb")
    folder, files = unpack(cell, tmp_path)
    before = {name: path.stat().st_mtime_ns for name, path in files.items()}
    again, files = unpack(cell, tmp_path)
    assert again == folder and {name: path.stat().st_mtime_ns for name, path in files.items()} == before
    (folder / "numpy.py").write_text("raise SystemExit('hostile')")
    other, files = unpack(cell, tmp_path)
    assert other != folder and "numpy.py" not in files and (folder / "numpy.py").exists()


def poison(folder):
    """Put what Python would run instead of the package's own code into an unpacked copy, which stays
    otherwise whole."""
    (folder / "tpukit/__pycache__").mkdir()
    (folder / f"tpukit/__pycache__/__init__.{sys.implementation.cache_tag}.pyc").write_bytes(
        b"of another user"
    )


def test_where_the_home_cannot_be_written_no_folder_that_others_could_have_made_is_used(dist, tmp_path):
    cell = archive_cell(dist / "mnist_quickstart.ipynb")
    theirs, _ = unpack(cell, tmp_path / "their-home")
    poison(theirs)
    shared = tmp_path / "shared"
    shutil.copytree(theirs, shared / theirs.name)
    folder, files = unpack(cell, Path("/dev/null"), TMPDIR=str(shared))
    assert folder.parent == shared and folder.name != theirs.name
    assert folder.stat().st_mode & 0o077 == 0 and not [name for name in files if name.endswith(".pyc")]


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder to another user"
)
@pytest.mark.parametrize("part", ["", ".cache", ".cache/tpukit", "the copy itself"])
def test_a_cache_folder_of_another_user_is_not_used(part, dist, tmp_path):
    cell, home = archive_cell(dist / "mnist_quickstart.ipynb"), tmp_path / "home"
    theirs, _ = unpack(cell, home)
    poison(theirs)
    os.chown(home / part if part in ("", ".cache", ".cache/tpukit") else theirs, 12345, 12345)
    folder, files = unpack(cell, home, TMPDIR=str(tmp_path))
    assert folder != theirs and not [name for name in files if name.endswith(".pyc")]
    assert folder.parent == (theirs.parent if part == "the copy itself" else tmp_path)


@pytest.fixture
def push(tmp_path, monkeypatch, capsys):
    """A function that runs `kaggle kernels push` on a folder, and returns the request that would go to Kaggle
    and what the command printed."""
    for name, value in dict(KAGGLE_CONFIG_DIR=str(tmp_path), KAGGLE_USERNAME="ada", KAGGLE_KEY="0").items():
        monkeypatch.setenv(name, value)
    cli = pytest.importorskip("kaggle.cli")
    sent = []

    def answer(session, request, **_):
        sent.append(request)
        response = requests.Response()
        response.status_code, response._content = 200, b'{"versionNumber": 1, "url": "a page"}'
        response.headers["Content-Type"] = "application/json"
        return response

    monkeypatch.setattr(requests.Session, "send", answer)

    def run(folder, *options):
        monkeypatch.setattr("sys.argv", ["kaggle", "-W", "kernels", "push", "-p", str(folder), *options])
        cli.main()
        request = sent.pop()
        assert request.url.endswith("/SaveKernel") and not sent
        return json.loads(request.body), capsys.readouterr().out

    return run


def test_kaggles_own_command_takes_every_built_notebook_with_its_accelerator(push, dist):
    asked = {"TpuV5E8": (True, False), "NvidiaTeslaT4": (False, True)}
    slugs = set()
    for path in sorted(dist.glob("**/*.ipynb")):
        request, printed = push(path.with_suffix(""))
        assert "successfully pushed" in printed and "does not resolve" not in printed  # title and slug agree
        assert (request["enableTpu"], request["enableGpu"]) == asked[request["machineShape"]]
        assert ("TPU" in nbformat.read(path, 4).metadata.accelerator) == request["enableTpu"]
        assert request["isPrivate"] and request["enableInternet"]
        assert archive_cell(path).source in [cell["source"] for cell in json.loads(request["text"])["cells"]]
        slugs.add(request["slug"])
    assert len(slugs) == len(list(dist.glob("**/*.ipynb")))
    assert f"{notebooks.OWNER}/tpukit-mnist-quickstart-zh" in slugs


def test_the_next_version_takes_an_accelerator_and_the_last_output_as_the_guide_says(push, dist, tmp_path):
    guide = (ROOT / "docs/KAGGLE_GUIDE.md").read_text()
    name, options = re.search(r"kaggle kernels push -p dist/(\w+) (--accelerator \w+)", guide).groups()
    shutil.copy(dist / f"{name}.ipynb", tmp_path)
    metadata = json.loads((dist / name / "kernel-metadata.json").read_text())
    metadata["id"] = metadata["id"].replace(notebooks.OWNER, "ada")
    metadata["kernel_sources"] = [metadata["id"]]
    (tmp_path / name).mkdir()
    (tmp_path / name / "kernel-metadata.json").write_text(json.dumps(metadata))
    request, _ = push(tmp_path / name, *options.split())
    assert request["machineShape"] == "TpuV5E8" and request["kernelDataSources"] == [request["slug"]]
    assert f'"kernel_sources": ["{request["slug"]}"]' in guide.replace("YOU", "ada")


@pytest.mark.nightly
def test_one_built_notebook_runs_alone_in_an_empty_folder_without_network(dist, tmp_path):
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("no network namespace can be made here, to run without network")
    folder = tmp_path / "empty"
    folder.mkdir()
    shutil.copy(dist / "mnist_quickstart.ipynb", folder)
    papermill = (
        f"{sys.executable} -m papermill mnist_quickstart.ipynb out.ipynb -k python3 -p ACCELERATOR cpu"
    )
    run = f"ip link set lo up; {papermill}"
    environ = dict(os.environ, HOME=str(tmp_path / "home"))
    environ.pop("PYTHONPATH", None)
    subprocess.run(
        ["unshare", "-n", "bash", "-c", run],
        cwd=folder,
        env=environ,
        check=True,
        capture_output=True,
        timeout=500,
    )
    cells = nbformat.read(folder / "out.ipynb", 4).cells
    [imports] = [cell for cell in cells if notebooks.IMPORT_LINE in f"\n{cell.source}"]
    assert str(tmp_path / "home/.cache/tpukit") in imports.outputs[0].text
    pictures = [
        cell for cell in cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert "tpukit.show_own" in pictures[-1].source
