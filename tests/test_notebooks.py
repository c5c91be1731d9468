"""The notebooks as a user meets them: run whole by papermill, by nbval, and in a real JupyterLab in a browser."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import papermill
import pytest
from PIL import Image

from tests.conftest import ROOT

SMALL = dict(EPOCHS=2, WARM_EPOCH=0, IMAGE_SIZE=32, RUN_NAME="run")


def run_notebook(name, tmp_path, replace=None, **parameters):
    """Execute a notebook in tmp_path, with one text of its cells replaced by another. Returns it."""
    source, done = tmp_path / "source.ipynb", tmp_path / name
    book = nbformat.read(ROOT / "notebooks" / name, 4)
    if replace:
        [cell] = [cell for cell in book.cells if replace[0] in cell.source]
        cell.source = cell.source.replace(*replace)
    nbformat.write(book, source)
    papermill.execute_notebook(
        str(source), str(done), {**parameters, "OUTPUTS": str(tmp_path / "outputs")},
        cwd=str(tmp_path), progress_bar=False, kernel_name="python3",
    )  # fmt: skip
    return nbformat.read(done, 4)


def outputs(notebook, mime):
    return [o["data"][mime] for c in notebook.cells for o in c.get("outputs", []) if mime in o.get("data", {})]


def text(notebook):
    streams = "".join(o["text"] for c in notebook.cells for o in c.get("outputs", []) if o["output_type"] == "stream")
    return streams + "".join(outputs(notebook, "text/plain"))


@pytest.mark.slow
def test_the_tpu_notebook_runs_on_the_cpu_xla_device(tmp_path):
    pytest.importorskip("torch_xla")
    notebook = run_notebook("colab_tpu_setup.ipynb", tmp_path, **SMALL)
    output = text(notebook)
    for words in (
        "no real ones were found",
        "compiling the training step",
        "epoch 2: loss",
        "No operation fell back",
        "IoU ",
    ):
        assert words in output, words
    assert len(outputs(notebook, "image/png")) == 8  # samples, curves, ROC, report, predictions, threshold, own, runs
    assert "CPU XLA device" in "".join(outputs(notebook, "text/html"))
    assert (tmp_path / "outputs/run/best.safetensors").exists()


ON_MOCK_CHIPS = f"""import sys
sys.path.append({str(ROOT)!r})
from tests.devices import torch_tpu_mock
from tpukit.host import environment
mock = torch_tpu_mock.install()
environment.detect = lambda: torch_tpu_mock.machine(4)
"""


@pytest.mark.slow
def test_the_eight_core_notebook_runs_unchanged_through_torch_tpu_on_four_mock_chips(tmp_path):
    mocked = ("env = tpukit.detect()", f"{ON_MOCK_CHIPS}env = tpukit.detect()")
    notebook = run_notebook("kaggle_tpu_v5e.ipynb", tmp_path, mocked, **SMALL | dict(EPOCHS=1, CORES=4, BATCH_SIZE=4))
    output = text(notebook)
    for words in ("core 3: TPU v5 lite through torch_tpu", "1 samples", "all 4 cores started", "epoch 1: loss", "IoU "):
        assert words in output, words
    assert (tmp_path / "outputs/run/best.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("parallel, share", [("processes", "2 samples"), ("spmd", "2 samples")])
def test_the_eight_core_notebook_runs_on_two_cpu_xla_devices(parallel, share, tmp_path):
    pytest.importorskip("torch_xla")
    small = dict(SMALL, EPOCHS=1, CORES=2, BATCH_SIZE=4, PARALLEL=parallel)
    notebook = run_notebook("kaggle_tpu_v5e.ipynb", tmp_path, **small)
    output = text(notebook)
    for words in (
        "core 0: ",
        f"core 1: CPU{':1' * (parallel == 'spmd')}",
        share,
        "all 2 cores started",
        "epoch 1: loss",
        "IoU ",
    ):
        assert words in output, words
    assert len(outputs(notebook, "image/png")) == 8
    assert "It ran on 2 x xla" in output
    assert len(outputs(notebook, "application/vnd.jupyter.widget-view+json")) == 1  # the bar of core 0, live


@pytest.mark.slow
def test_the_cdeit_notebook_simulates_trains_on_two_devices_samples_and_shows_the_grid(tmp_path):
    pytest.importorskip("torch_xla")
    small = dict(SAMPLES=8, EPOCHS=1, BATCH_SIZE=4, CORES=2, RUN_NAME="run")
    tiny = ("patch=8, width=128, heads=4, window=8, levels=3", "patch=16, width=16, heads=2, window=4, levels=1")
    notebook = run_notebook("kaggle_cdeit_tpu.ipynb", tmp_path, replace=tiny, **small)
    output = text(notebook)
    for words in ("voltage statistics: computed", "all 2 cores started", "epoch 1: loss", "It ran on 2 x xla", "correlation "):
        assert words in output, words
    assert len(outputs(notebook, "image/png")) == 6  # samples, curves, report, the grid, own, runs
    shown = "".join(outputs(notebook, "text/html"))
    assert all(f">{column}<" in shown for column in ("Tikhonov", "Gauss-Newton", "all zero"))
    for name in ("best.safetensors", "predictions/simulated.npz", "pictures/predictions.png"):
        assert (tmp_path / "outputs/run" / name).exists(), name


def test_the_cdeit_notebook_asks_for_a_gpu_by_its_metadata_alone():
    tpu, gpu = (nbformat.read(ROOT / f"notebooks/kaggle_cdeit_{kind}.ipynb", 4) for kind in ("tpu", "gpu"))
    tpu_code, gpu_code = ([cell.source for cell in book.cells if cell.cell_type == "code"] for book in (tpu, gpu))
    assert tpu_code == gpu_code
    assert (tpu.metadata.accelerator, gpu.metadata.accelerator) == ("TPU", "GPU")
    assert (tpu.metadata.kaggle.accelerator, gpu.metadata.kaggle.accelerator) == ("tpuV5e8", "nvidiaTeslaT4")


@pytest.mark.slow
def test_a_function_and_a_class_of_a_cell_run_on_all_cores_again_and_again_until_the_kernel_uses_the_device(tmp_path, digits):
    pytest.importorskip("torch_xla")
    cells = [
        f"import sys, dataclasses; sys.path.insert(0, {str(ROOT)!r}); import tpukit\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class Mine(tpukit.MNIST):\n"
        "    def loss(self, model, batch, epoch):\n"
        "        return super().loss(model, batch, epoch) * 2\n"
        "def mine(task, run, *, runtime):\n"
        "    print('from core', runtime.world.rank)\n"
        "    return dict(cores=runtime.cores, **tpukit.train(task, run, runtime=runtime))\n"
        f"task = Mine(dataset_dir={str(digits)!r}, epochs=1, batch_size=8, channels=4)",
        "for name in ('one', 'two'):\n    print(tpukit.launch(mine, task, tpukit.Run.open(name, task), cores=2))",
        "tpukit.launch(mine, task, tpukit.Run.open('three', task), cores=1)",
        "try: tpukit.launch(mine, task, tpukit.Run.open('four', task), cores=2)\nexcept tpukit.TpukitError as e: "
        "print('REFUSED', e)",
    ]
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbformat.write(written, tmp_path / "cells.ipynb")
    papermill.execute_notebook(
        str(tmp_path / "cells.ipynb"),
        str(tmp_path / "done.ipynb"),
        cwd=str(tmp_path),
        progress_bar=False,
        kernel_name="python3",
    )
    output = text(nbformat.read(tmp_path / "done.ipynb", 4))
    assert output.count("'cores': 2") == 2 and output.count("all 2 cores started") == 2
    assert "from core 1" not in output and "from core 1" in (tmp_path / "two/cores/rank-01.log").read_text()
    assert "REFUSED Runtime is already initialized" in output and "Restart the session" in output


@pytest.mark.slow
def test_the_migration_notebook_mends_a_script_runs_it_and_reads_ones_own(tmp_path):
    pytest.importorskip("torch_xla")
    own = tmp_path / "own.py"
    own.write_text("model = model.cuda()\n")
    notebook = run_notebook("gpu_to_tpu_migration.ipynb", tmp_path, SCRIPT=str(own))
    output = text(notebook)
    for words in (
        "scaler = GradScaler()",
        "+    model = Net().to(torch_xla.device())",
        "epoch 4: loss",
        "on xla:0",
        "nothing found that will not work on a TPU",
        f"{own}:1:9: error [cuda]",
    ):
        assert words in output, words
    assert output.count("epoch 4: loss") == 2 and "did not run" not in output and own.read_text() == "model = model.cuda()\n"
    assert any("7 that will not work on a TPU, 3 that will be slow" in shown for shown in outputs(notebook, "text/html"))
    (table,) = [shown for shown in outputs(notebook, "text/html") if "images per second" in shown]
    assert "nan" not in table and "tpukit, 1 x " in table


@pytest.mark.slow
def test_the_gpu_notebook_runs_on_the_cpu_when_told_to(tmp_path, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE")
    notebook = run_notebook("colab_setup.ipynb", tmp_path, ACCELERATOR="cpu", **SMALL)
    assert "Nothing is compiled on this device" in text(notebook)
    assert len(outputs(notebook, "image/png")) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, menu",
    [("colab_tpu_setup.ipynb", "TPU needed"), ("colab_setup.ipynb", "GPU needed"), ("kaggle_cdeit_gpu.ipynb", "GPU needed")],
)
def test_a_notebook_without_its_hardware_stops_with_the_menu_to_open(name, menu, tmp_path, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    with pytest.raises(papermill.PapermillExecutionError, match=rf"(?s){menu}.*Accelerator > "):
        run_notebook(name, tmp_path, **SMALL)


@pytest.mark.slow
def test_the_quickstart_trains_goes_on_and_shows(digits, tmp_path):
    notebook = run_notebook("mnist_quickstart.ipynb", tmp_path, RUN_NAME="mnist", DATASET_DIR=str(digits), BATCH_SIZE=8)
    output = text(notebook)
    assert "resuming at step 25 of 50" in output and "class MNIST(Workload)" in output
    assert len(outputs(notebook, "image/png")) == 5  # samples, curves, report, predictions, own
    assert len(outputs(notebook, "application/vnd.jupyter.widget-view+json")) == 2  # a live bar for each training


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_the_fine_tuning_notebook_trains_shows_the_mistakes_predicts_and_exports(cores, shapes, tmp_path):
    pytest.importorskip("timm")
    own = sorted(shapes.glob("test/*/*.png"))[0]
    small = dict(MODEL="test_resnet", PRETRAINED="no", IMAGE_SIZE=32, EPOCHS=2, BATCH_SIZE=8, CORES=cores, MICRO_BATCHES=2)
    parameters = dict(DATASET_DIR=str(shapes), RUN_NAME="run", **small)
    notebook = run_notebook("finetune_images.ipynb", tmp_path, replace=('OWN = ""', f"OWN = {str(own)!r}"), **parameters)
    output, tables = text(notebook), "".join(outputs(notebook, "text/html"))
    assert "9 of each" in tables and all(f">{name}<" in tables for name in ("precision", "recall", "ring"))
    assert "epoch 2: loss" in output and "largest difference to the trained model" in output and "accuracy " in output
    assert len(outputs(notebook, "image/png")) == 8  # labels, samples, curves, confusion, report, worst, own, runs
    for name in ("best.pt2", "predictions/per_class.csv", "predictions/worst.npz", "own/predictions.csv"):
        assert (tmp_path / "outputs/run" / name).exists(), name


@pytest.mark.slow
def test_the_notebook_on_ones_own_targets_names_wrong_masks_and_starts_from_weights_without_a_warm_up(infrared, tmp_path):
    data = shutil.copytree(infrared, tmp_path / "mine")
    for listing in ("trainval.txt", "test.txt"):
        (data / listing).unlink()
    for number, path in enumerate(sorted((data / "masks").glob("*.png"))):
        if number < 12:  # more than are tested
            Image.open(path).point(lambda value: value // 255).save(path)  # 0 and 1
    small = dict(DATASET_DIR=str(data), IMAGE_SIZE=32, EPOCHS=1, WARM_EPOCH=0, BATCH_SIZE=8, CORES=1)
    notebook = run_notebook("segment_your_own.ipynb", tmp_path, RUN_NAME="run", **small)
    tables = "".join(outputs(notebook, "text/html"))
    assert "hold no value of 128 or more" in tables and "IoU " in text(notebook)
    assert len(outputs(notebook, "image/png")) == 9  # labels, samples, curves, ROC, report, predictions, threshold, own, runs
    again = run_notebook(
        "segment_your_own.ipynb", tmp_path, RUN_NAME="more", WEIGHTS=str(tmp_path / "outputs/run/best.safetensors"), **small
    )
    settings = json.loads((tmp_path / "outputs/more/config.json").read_text())["settings"]
    assert settings["warm_epoch"] == -1 and settings["weights"].endswith("run/best.safetensors") and "IoU " in text(again)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["colab", "kaggle"])
def test_a_session_that_ended_is_resumed_from_drive_or_from_the_output_of_an_earlier_version(platform, digits, tmp_path):
    drive, inputs = tmp_path / "drive/MyDrive", tmp_path / "input"
    drive.mkdir(parents=True)
    where = f"host={platform!r}, drive=Path({str(drive)!r}) if {platform == 'colab'} else None, inputs=Path({str(inputs)!r})"
    fake = ("env = tpukit.detect()", f"import dataclasses\nenv = dataclasses.replace(tpukit.detect(), {where})")
    small = dict(DATASET_DIR=str(digits), BATCH_SIZE=8, RUN_NAME="mnist", SAVE_TO_DRIVE=platform == "colab")
    for session in ("first", "second"):
        (tmp_path / session).mkdir()
    run_notebook("mnist_quickstart.ipynb", tmp_path / "first", replace=fake, EPOCHS=2, **small)
    if platform == "kaggle":  # a saved version, added as an input
        shutil.copytree(tmp_path / "first/outputs", inputs / "my-notebook/outputs")
    again = text(run_notebook("mnist_quickstart.ipynb", tmp_path / "second", replace=fake, EPOCHS=3, **small))
    assert "resuming at step 50 of 75" in again
    records = [json.loads(line) for line in (tmp_path / "second/outputs/mnist/records.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if record["kind"] == "evaluation"] == [0, 1, 2]
    assert (drive / "tpukit/mnist/best.safetensors").exists() == (platform == "colab")


OUTPUTS = json.loads((ROOT / "tests/notebook_outputs.json").read_text())  # what no machine changes: notebook -> cell -> text
SANITIZE = "[folders]\nregex: (/[^\\s/]+)+/(?=tpukit.yaml|outputs/)\nreplace: /folder/\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist_quickstart", *OUTPUTS])
def test_the_quick_notebooks_pass_nbval_with_the_outputs_that_do_not_depend_on_the_machine(name, tmp_path):
    if name == "gpu_to_tpu_migration":
        pytest.importorskip("torch_xla")
    book, expected = nbformat.read(ROOT / f"notebooks/{name}.ipynb", 4), dict(OUTPUTS.get(name, {}))
    for cell in book.cells:
        if cell.id in expected:
            cell.metadata.tags, cell.execution_count = ["nbval-check-output"], 1
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=expected.pop(cell.id))]
    assert not expected, "cells that the notebook no longer has"
    nbformat.write(book, tmp_path / f"{name}.ipynb")
    (tmp_path / "sanitize.cfg").write_text(SANITIZE)
    command = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "--nbval-cell-timeout", "300", "-p", "no:cacheprovider"]
    command += ["--nbval-sanitize-with", "sanitize.cfg", "--nbval-kernel-name", "python3", f"{name}.ipynb"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout[-3000:]


# The cell that finds tpukit. It is the same in all of them (test_code.py).


@pytest.fixture
def find_cell(tmp_path):
    """Runs that cell in tmp_path/content, or in `folder`, with a Kaggle below tmp_path. Returns its output, or its error.

    embedded: the folder that a built notebook unpacked its copy to. A fake pip only prints that it was called.
    """
    cell = nbformat.read(ROOT / "notebooks/mnist_quickstart.ipynb", 4).cells[2].source
    assert cell.count('"/kaggle/input') == 1
    cell = cell.replace('"/kaggle/input', f'"{tmp_path}/kaggle/input')
    pip = "import subprocess\ndef run(command, check): print('asked:', *command[1:]); raise SystemExit\nsubprocess.run = run\n"
    tell = "\nprint(os.environ['PYTHONPATH'].split(os.pathsep)[0] == sys.path[0])"

    def run(folder=tmp_path / "content", embedded=None):
        folder.mkdir(parents=True, exist_ok=True)
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        given = f"import pathlib; EMBEDDED = pathlib.Path({str(embedded)!r})\n" if embedded else ""
        # -S: without the packages that are installed here, which tpukit may be one of.
        command = [sys.executable, "-S", "-c", pip + given + cell + tell]
        ran = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        return ran.stdout.strip() or ran.stderr.strip().splitlines()[-1]

    return run


def place_tpukit(folder, layers=9):
    """A repository with a package tpukit/ of that many layers in it. Returns what the cell prints when it takes it."""
    (folder / "tpukit").mkdir(parents=True)
    (folder / "tpukit/__init__.py").write_text("__version__ = '7.0'\n")
    for number in range(layers):
        (folder / f"tpukit/layer{number}").mkdir()
        (folder / f"tpukit/layer{number}/__init__.py").touch()
    return f"tpukit 7.0 from {folder / 'tpukit'}\nTrue"


ASKED = re.compile(r"asked: -m pip install -q git\+https://github\.com/\S+")


@pytest.mark.parametrize("notebook", ["repository/notebooks", "repository/notebooks/zh-CN", "repository"])
def test_a_clone_around_the_notebook_comes_before_the_copy_inside_it_and_a_kaggle_input(notebook, find_cell, tmp_path):
    assert ASKED.fullmatch(find_cell(tmp_path / notebook))
    clone = place_tpukit(tmp_path / "repository")
    place_tpukit(tmp_path / "kaggle/input/tpukit")
    place_tpukit(tmp_path / "embedded")
    assert find_cell(tmp_path / notebook, tmp_path / "embedded") == clone


def test_the_copy_inside_the_notebook_comes_before_a_kaggle_input(find_cell, tmp_path):
    from_input, embedded = place_tpukit(tmp_path / "kaggle/input/tpukit"), place_tpukit(tmp_path / "embedded")
    assert find_cell() == from_input and find_cell(embedded=tmp_path / "embedded") == embedded


def test_a_clone_in_the_current_folder_is_taken_and_a_folder_without_code_is_not(find_cell, tmp_path):
    (tmp_path / "content/tpukit/docs").mkdir(parents=True)
    assert ASKED.fullmatch(find_cell())
    assert place_tpukit(tmp_path / "content/tpukit") == find_cell()


def test_half_a_tpukit_is_left_aside_for_the_copy_and_refused_where_there_is_none(find_cell, tmp_path):
    place_tpukit(tmp_path / "content", layers=5)
    embedded = place_tpukit(tmp_path / "embedded")
    assert find_cell(embedded=tmp_path / "embedded") == embedded
    refused = find_cell()
    assert refused.startswith("ImportError") and str(tmp_path / "content/tpukit") in refused


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder to another user")
def test_another_users_tpukit_above_the_notebook_is_not_run(find_cell, tmp_path):
    place_tpukit(tmp_path)
    os.chown(tmp_path / "tpukit", 12345, 12345)
    assert find_cell().startswith("ImportError")
    embedded = place_tpukit(tmp_path / "embedded")
    assert find_cell(embedded=tmp_path / "embedded") == embedded


@pytest.mark.parametrize("place", ["tpukit", "datasets/me/tpukit", "tpukit/tpukit-main", "datasets/me/tpukit/a/b"])
def test_a_kaggle_input_of_that_name_is_taken_whatever_its_nesting(place, find_cell, tmp_path):
    output = place_tpukit(tmp_path / "kaggle/input" / place)
    assert find_cell() == output


@pytest.mark.parametrize(
    "place", ["some-images", "some-images/tpukit", "datasets/a-stranger/images", "datasets/a-stranger/images/tpukit", "."]
)
def test_no_code_of_an_input_of_another_name_is_run(place, find_cell, tmp_path):
    place_tpukit(tmp_path / "kaggle/input" / place)
    assert ASKED.fullmatch(find_cell())


@pytest.mark.slow
def test_a_kernel_knows_whether_somebody_could_answer_a_question():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(env=dict(os.environ, PYTHONPATH=str(ROOT)))
    output = []
    try:
        for answers in (True, False):  # a page; papermill
            client.execute_interactive(
                "from tpukit.host import environment; print(environment.has_open_page())",
                allow_stdin=answers,
                stdin_hook=pytest.fail,
                timeout=60,
                output_hook=lambda message: output.append(message["content"].get("text", "").strip()),
            )
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert [word for word in output if word] == ["True", "False"]


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab on loopback serving tmp_path; yields its address."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    settings = {
        "notebook-extension/tracker": '{"windowingMode": "none"}',  # render all cells, not the visible ones alone
        "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    }
    for name, content in settings.items():
        path = tmp_path / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(content)
    token = secrets.token_hex(8)
    environ = {
        **os.environ,
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1"]
    log = open(tmp_path / "lab.log", "w")
    server = subprocess.Popen(
        [*command, f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={tmp_path}"], env=environ, stdout=log, stderr=log
    )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api?token={token}", timeout=2)
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None, (tmp_path / "lab.log").read_text()
                time.sleep(0.3)
        yield lambda path: f"{address}/lab/tree/{path}?token={token}"
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@pytest.mark.slow
def test_run_all_in_a_real_jupyterlab_shows_live_bars_and_plots(lab, tmp_path):
    browser = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import expect, sync_playwright

    shutil.copy(ROOT / "notebooks/mnist_quickstart.ipynb", tmp_path)
    with sync_playwright() as playwright:
        quiet = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]
        chromium = playwright.chromium.launch(executable_path=shutil.which(browser), args=quiet)
        page = chromium.new_page(viewport=dict(width=1200, height=1600))
        page.goto(lab("mnist_quickstart.ipynb"))
        expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=60_000)
        expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=60_000)
        last = page.locator(".jp-CodeCell").last.locator(".jp-OutputArea-output")
        select = page.get_by_role("button", name="Select Kernel")  # JupyterLab asks when its list of kernels comes late
        deadline, asked = time.monotonic() + 180, False
        while not last.count():
            assert time.monotonic() < deadline, page.screenshot(path=str(tmp_path / "stuck.png")) and tmp_path
            if select.is_visible():
                select.click()
                asked = False
            if not asked:
                page.get_by_role("menuitem", name="Run", exact=True).click()
                page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
                asked = True
            page.wait_for_timeout(500)
        expect(last.first).to_contain_text("class MNIST(Workload)")
        bars = page.locator(".jupyter-widgets .widget-hprogress, .widget-hprogress")
        expect(bars).to_have_count(2)
        pictures = page.locator(".jp-OutputArea-output img")
        expect(pictures).to_have_count(7)  # two live charts, samples, curves, report, predictions, own
        for index in range(7):
            assert pictures.nth(index).evaluate("image => image.complete && image.naturalWidth") > 300
        expect(page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']")).to_have_count(0)
        page.locator(".jp-CodeCell").nth(5).scroll_into_view_if_needed()
        page.screenshot(path=str(tmp_path / "quickstart.png"))
        chromium.close()
    assert (tmp_path / "quickstart.png").stat().st_size > 50_000
