"""The notebooks as a user meets them: each is run whole by papermill, once for all questions. The copies of
docs/executed are run by tests/release/test_executed.py, hardware_comparison by
tests/tools/cli/test_compare.py."""

import json
import re
import shutil
import zipfile

import nbformat
import papermill
import pytest
import torch
from PIL import Image

import tpukit
from tests import warm
from tests.conftest import ROOT
from tpukit import Checkpoints, MSHNet, Run
from tpukit.launching.core import Core, running

# What no machine changes: notebook -> cell -> text.
OUTPUTS = json.loads((ROOT / "tests/notebook_outputs.json").read_text())
SMALL = dict(EPOCHS=2, WARM_EPOCH=0, IMAGE_SIZE=32, RUN_NAME="run")


def execute(book, folder, **parameters):
    """Execute a notebook in a folder. Returns it with its outputs."""
    source, done = folder / "source.ipynb", folder / "done.ipynb"
    nbformat.write(book, source)
    papermill.execute_notebook(
        str(source), str(done), parameters,
        cwd=str(folder), progress_bar=False, kernel_name=warm.kernel(), start_timeout=300,
        execution_timeout=500,
    )  # fmt: skip
    return nbformat.read(done, 4)


def run_notebook(name, tmp_path, replace=None, **parameters):
    """Execute a notebook in tmp_path, with one text of its cells replaced by another. Returns it."""
    book = nbformat.read(ROOT / "notebooks" / name, 4)
    if replace:
        [cell] = [cell for cell in book.cells if replace[0] in cell.source]
        cell.source = cell.source.replace(*replace)
    return execute(book, tmp_path, **parameters, OUTPUTS=str(tmp_path / "outputs"))


def imported(module, name):
    """The start of a call of what one of the tests' modules has, in a cell."""
    return (
        f"[__import__('sys').path.insert(0, {str(ROOT)!r}), __import__({module!r}, fromlist='a').{name}][1]("
    )


def outputs(notebook, mime):
    return [
        o["data"][mime] for c in notebook.cells for o in c.get("outputs", []) if mime in o.get("data", {})
    ]


def text(notebook):
    streams = "".join(
        o["text"] for c in notebook.cells for o in c.get("outputs", []) if o["output_type"] == "stream"
    )
    return streams + "".join(outputs(notebook, "text/plain"))


def printed(notebook, cell_id, folder):
    """What a cell printed, with the folder of the test called /folder."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    stdout = "".join(o["text"] for o in cell.outputs if o["output_type"] == "stream")
    return stdout.replace(str(folder), "/folder")


@pytest.mark.slow
def test_the_eight_core_notebook_runs_on_two_cpu_xla_devices(infrared, tmp_path):
    pytest.importorskip("torch_xla")
    small = dict(SMALL, EPOCHS=1, CORES=2, BATCH_SIZE=4, DATASET_DIR=str(infrared))
    narrow = imported("tests.tasks.mshnet.small", "Narrow")
    notebook = run_notebook("kaggle_tpu_v5e.ipynb", tmp_path, replace=("tpukit.MSHNet(", narrow), **small)
    output = text(notebook)
    for words in (
        "core 0: ",
        "core 1: CPU",
        "16 samples",
        "all 2 cores started",
        "epoch 1: loss",
        "No operation fell back",
        "It ran on 2 x xla",
    ):
        assert words in output, words
    assert ">IoU<" in "".join(outputs(notebook, "text/html"))
    assert len(outputs(notebook, "image/png")) == 6
    assert text(notebook).count("100%|") == 1  # the bar of core 0, as text
    assert not outputs(notebook, "application/vnd.jupyter.widget-view+json")


@pytest.mark.slow
def test_the_cdeit_notebook_simulates_trains_on_two_devices_samples_and_shows_the_grid(tmp_path):
    pytest.importorskip("torch_xla")
    small = dict(SAMPLES=8, EPOCHS=1, BATCH_SIZE=4, CORES=2, RUN_NAME="run")
    tiny = imported("tests.tasks.cdeit.small", "Tiny")
    notebook = run_notebook("kaggle_cdeit_tpu.ipynb", tmp_path, replace=("tpukit.CDEIT(", tiny), **small)
    output = text(notebook)
    for words in (
        "voltage statistics: computed",
        "all 2 cores started",
        "epoch 1: loss",
        "It ran on 2 x xla",
    ):
        assert words in output, words
    assert len(outputs(notebook, "image/png")) == 4  # samples, curves, the grid, own
    shown = "".join(outputs(notebook, "text/html"))
    assert all(f">{column}<" in shown for column in ("Tikhonov", "Gauss-Newton", "all zero"))
    for name in ("best.safetensors", "predictions/simulated.npz", "pictures/predictions.png"):
        assert (tmp_path / "outputs/run" / name).exists(), name


@pytest.mark.slow
def test_a_function_and_a_class_of_a_cell_run_on_all_cores_again_and_again_until_the_kernel_uses_the_device(
    tmp_path, digits
):
    pytest.importorskip("torch_xla")
    cells = [
        (
            f"import sys, dataclasses; sys.path.insert(0, {str(ROOT)!r}); import tpukit\n"
            "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
            "class Mine(tpukit.MNIST):\n"
            "    def loss(self, model, batch, epoch):\n"
            "        return super().loss(model, batch, epoch) * 2\n"
            "def mine(task, run, *, runtime):\n"
            "    print('from core', runtime.world.rank)\n"
            "    return dict(cores=runtime.cores, **tpukit.train(task, run, runtime=runtime))\n"
            f"task = Mine(dataset_dir={str(digits)!r}, epochs=1, batch_size=8, channels=4)"
        ),
        (
            "for name in ('one', 'two'):\n    print(tpukit.launch(mine, task, tpukit.Run.open(name, task),"
            " cores=2))"
        ),
        "tpukit.launch(mine, task, tpukit.Run.open('three', task), cores=1)",
        (
            "try: tpukit.launch(mine, task, tpukit.Run.open('four', task), cores=2)\nexcept"
            " tpukit.TpukitError as e: print('REFUSED', e)"
        ),
    ]
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    output = text(execute(written, tmp_path))
    assert output.count("'cores': 2") == 2 and output.count("all 2 cores started") == 2
    assert "from core 1" not in output and "from core 1" in (tmp_path / "two/cores/rank-01.log").read_text()
    assert "REFUSED Runtime is already initialized" in output and "Restart the session" in output


@pytest.mark.slow
def test_the_migration_notebook_mends_a_script_runs_it_and_reads_ones_own(digits, tmp_path):
    pytest.importorskip("torch_xla")
    own = tmp_path / "own.py"
    own.write_text("model = model.cuda()\n")
    few = dict(DATASET_DIR=str(digits), BATCH_SIZE=8)
    notebook = run_notebook("gpu_to_tpu_migration.ipynb", tmp_path, SCRIPT=str(own), **few)
    output = text(notebook)
    _, script, found, _, own_table = outputs(notebook, "text/html")
    assert "GradScaler" in script and "errors: 7, warnings: 3; --fix can repair" in found
    for words in (
        "+    model = Net().to(torch_xla.device())",
        "epoch 4: loss",
        "on xla:0",
        "nothing found that will not work on a TPU",
    ):
        assert words in output, words
    assert "own.py: errors: 1, " in own_table and ">1:9<" in own_table
    assert (
        output.count("epoch 4: loss") == 2
        and "did not run" not in output
        and own.read_text() == "model = model.cuda()\n"
    )
    for cell_id, expected in OUTPUTS["gpu_to_tpu_migration"].items():
        assert printed(notebook, cell_id, tmp_path) == expected
    (table,) = [shown for shown in outputs(notebook, "text/html") if "images per second" in shown]
    assert "nan" not in table and "tpukit, 1 x " in table


@pytest.mark.slow
def test_the_gpu_notebook_runs_on_the_cpu_when_told_to(tmp_path, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE")
    notebook = run_notebook("colab_setup.ipynb", tmp_path, ACCELERATOR="any", **SMALL)
    assert "Nothing is compiled on this device" in text(notebook)
    assert len(outputs(notebook, "image/png")) == 6


def run_quickstart(name, folder, digits, env, **parameters):
    """Execute the quickstart with these values in the place of what `detect` finds."""
    values = ", ".join(f"{key}={value!r}" for key, value in env.items())
    imports = "import dataclasses\nfrom pathlib import Path, PosixPath\nfrom tpukit.host import environment"
    found = f"env = dataclasses.replace(tpukit.detect(), {values})\nenvironment.detect = lambda: env"
    fake = f"{imports}\n{found}"
    parameters |= dict(DATASET_DIR=str(digits), BATCH_SIZE=8, RUN_NAME="mnist")
    return run_notebook(name, folder, replace=("env = tpukit.detect()", fake), **parameters)


@pytest.mark.slow
def test_the_quickstart_trains_goes_on_and_its_chinese_copy_resumes_it_in_the_next_session(digits, tmp_path):
    first, second, drive = tmp_path / "first", tmp_path / "second", tmp_path / "drive/MyDrive"
    for folder in (first, second, drive):
        folder.mkdir(parents=True)
    colab = dict(host="colab", drive=drive, inputs=None)
    notebook = run_quickstart("mnist_quickstart.ipynb", first, digits, colab, SAVE_TO_DRIVE=True)
    output = text(notebook)
    assert "resuming at step 25 of 50" in output
    assert "cross_entropy" in outputs(notebook, "text/html")[-1]  # the code to copy
    assert len(outputs(notebook, "image/png")) == 4  # samples, curves, predictions, own
    assert output.count("100%|") == 2  # a bar for each training
    assert (drive / "tpukit/mnist/best.safetensors").exists()
    # The output of a saved version, added as an input
    shutil.copytree(first / "outputs", tmp_path / "input/my-notebook/outputs")
    kaggle = dict(host="kaggle", drive=None, inputs=tmp_path / "input")
    chinese = run_quickstart("zh-CN/mnist_quickstart.ipynb", second, digits, kaggle, EPOCHS=3)
    assert "resuming at step 50 of 75" in text(chinese)
    lines = (second / "outputs/mnist/records.jsonl").read_text().splitlines()
    evaluations = [record for record in map(json.loads, lines) if record["kind"] == "evaluation"]
    assert [record["epoch"] for record in evaluations] == [0, 1, 2]


@pytest.mark.slow
def test_the_notebook_on_conversations_answers_a_question_before_and_after_and_exports_an_adapter(tmp_path):
    pytest.importorskip("peft")
    from tests.tasks.text.small import CHAT, write_model

    model = write_model(tmp_path / "model", chat=CHAT, n_positions=128)
    small = dict(MODEL=str(model), EPOCHS=2, BATCH_SIZE=4, SEQUENCE_LENGTH=128, LORA_RANK=2, CORES=2)
    notebook = run_notebook("finetune_llm.ipynb", tmp_path, RUN_NAME="run", **small)
    output, tables = text(notebook), "".join(outputs(notebook, "text/html"))
    assert all(words in output for words in ("rows to train", "all 2 cores started", "epoch 2: loss"))
    assert "largest difference to the trained model" in output and "perplexity " in output
    assert all(f">{word}<" in tables for word in ("before", "after", "what the model writes"))
    with zipfile.ZipFile(tmp_path / "outputs/run/run.zip") as archive:
        assert "run/peft/adapter_model.safetensors" in archive.namelist()


@pytest.mark.slow
def test_the_notebook_on_ones_own_targets_names_wrong_masks_and_starts_from_weights_without_a_warm_up(
    infrared, tmp_path
):
    data = shutil.copytree(infrared, tmp_path / "mine")
    for listing in ("trainval.txt", "test.txt"):
        (data / listing).unlink()
    for number, path in enumerate(sorted((data / "masks").glob("*.png"))):
        if number < 12:  # more than are tested
            Image.open(path).point(lambda value: 255 - value).save(path)  # black on white
    earlier = Run(tmp_path / "earlier")
    earlier.path.mkdir()
    earlier.save_best(MSHNet().model().state_dict())
    small = dict(DATASET_DIR=str(data), IMAGE_SIZE=32, EPOCHS=1, BATCH_SIZE=8, CORES=1, ACCELERATOR="cpu")
    small["WEIGHTS"] = str(earlier.path / "best.safetensors")
    notebook = run_notebook("segment_your_own.ipynb", tmp_path, RUN_NAME="run", **small)
    tables = "".join(outputs(notebook, "text/html"))
    assert "are mostly white" in tables and ">IoU<" in tables
    # demo, labels, samples, curves, ROC, predictions, threshold, own
    assert len(outputs(notebook, "image/png")) == 8
    settings = json.loads((tmp_path / "outputs/run/config.json").read_text())["settings"]
    assert settings["warm_epoch"] == -1 and settings["weights"] == small["WEIGHTS"]


@pytest.mark.parametrize("name", ["your_own_loop.ipynb", "zh-CN/your_own_loop.ipynb"])
def test_the_notebook_of_ones_own_loop_is_short_and_uses_the_four_parts_and_no_task(name):
    cells = nbformat.read(ROOT / "notebooks" / name, 4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    lines = [line for line in "\n".join(code).splitlines() if line.strip()[:1] not in ("", "#")]
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert len(lines) <= 60 and sum(len(text.split()) for text in texts) <= 700
    used = set(re.findall(r"tpukit\.([a-zA-Z]\w*)", "\n".join(code)))
    parts = {"detect", "mount_drive", "find_dataset", "launch", "core", "Checkpoints", "metrics_report"}
    assert used == parts
    [others] = re.findall(r"tpukit_t\w+\.?\w*", "\n".join(code))
    assert others == "tpukit_tasks.mnist_data"  # the reader of MNIST's files


def run_own_loop(folder, digits, **parameters):
    """Execute it on digits that it finds. Returns what it says, and its last checkpoint."""
    (folder / "datasets").mkdir(parents=True)
    (folder / "datasets/mnist").symlink_to(digits)
    notebook = run_notebook("your_own_loop.ipynb", folder, BATCH_SIZE=8, **parameters)
    return text(notebook), Checkpoints(folder / "outputs/your-own-loop").restore()


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["SGD(model.parameters(), lr=0.05, momentum=0.9)", "AdamW(model.parameters())"]
)
def test_the_step_of_ones_own_loop_is_compiled_once_in_three_epochs_and_a_resume(
    optimizer, xla, digits, tmp_path, monkeypatch
):
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/mnist").symlink_to(digits)
    monkeypatch.chdir(tmp_path)
    cells = nbformat.read(ROOT / "notebooks/your_own_loop.ipynb", 4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code" and "tpukit.launch(" not in cell.source]
    code = "\n".join(code[:-1]).replace("BATCH_SIZE = 32 ", "BATCH_SIZE = 8 ")  # without the report's cell
    kept = "SGD(model.parameters(), lr=0.05, momentum=0.9)"
    assert code.count(kept) == 1
    notebook = {}
    exec(code.replace(kept, optimizer), notebook)
    with running(Core(xla)), tpukit.metrics_report() as report:
        for epochs in (2, 3):
            notebook["train"](notebook["digits"], epochs)
    assert (report.compilations, report.counters["executions"]) == (1, 75)
    assert report.problems() == []


@pytest.fixture(scope="module")
def on_one_core(digits, tmp_path_factory):
    return run_own_loop(tmp_path_factory.mktemp("one") / "run", digits, ACCELERATOR="cpu", CORES=1)


# Launches on CPU cores are those of tests/tpukit/launching/test_core.py: here they only repeat that.
REPEATED = [pytest.mark.nightly, pytest.mark.long]


@pytest.mark.slow
@pytest.mark.parametrize("kind, cores", [("xla", 2), pytest.param("cpu", 4, marks=REPEATED)])
def test_ones_own_loop_on_several_cores_stopped_resumed_and_then_on_one_learns_what_one_core_does(
    kind, cores, digits, on_one_core, tmp_path, monkeypatch
):
    if kind == "xla":
        pytest.importorskip("torch_xla")
    else:
        monkeypatch.delenv("PJRT_DEVICE")
    output, state = run_own_loop(tmp_path / "run", digits, CORES=cores, SAVE_TO_DRIVE=True)
    assert "only Colab can mount it" in output and "found in ./datasets" in output
    epochs = re.findall(r"^epoch (\d): loss \S+, cores: (\d)$", output, flags=re.M)
    assert epochs == [("1", f"{cores}"), ("2", f"{cores}"), ("3", "1")]
    assert output.count(f"all {cores} cores started") == 2
    assert ("executed: 25" in output) == (kind == "xla")
    expected = on_one_core[1]
    checkpoints = (tmp_path / "run/outputs/your-own-loop/checkpoints").glob("step-*")
    assert max(path.name for path in checkpoints) == "step-00000003.pt"
    for name, values in expected["model"].items():
        torch.testing.assert_close(state["model"][name], values, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_the_hardware_notebook_rehearses_where_it_is_told_to_and_shows_the_file_to_send(tmp_path):
    two = "import hardware\nhardware.CHECKS = dict(opens=hardware.opens, precision=hardware.precision)"
    notebook = run_notebook("hardware_check.ipynb", tmp_path, ("import hardware", two), REHEARSE=True)
    output = text(notebook)
    assert "2/2 precision: Products and convolutions" in output and "was seen on hardware" in output
    report = (tmp_path / "outputs/hardware.json").read_text()
    assert report.strip() in output and '"rehearsal": true' in report and str(tmp_path) not in report
    assert output.count("    PASS in ") == 2
