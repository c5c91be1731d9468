"""`tpukit compare` on the command line, and its notebook."""

from pathlib import Path

import pytest

from tests.tools.measure.samples import measurement
from tpukit import cli
from tpukit.tools import measure
from tpukit.tools.measure import timing


@pytest.mark.slow
def test_the_command_measures_merges_and_chooses(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.chdir(tmp_path)
    command = f"compare mnist --dataset-dir {digits} --channels 4 --batch-sizes 8 --steps 2"
    assert cli.main(command.split()) == 0
    assert "mnist, n = 5 steps" in capsys.readouterr().out
    Path("mine.csv").write_text(measure.PRICES.read_text() + "CPU,local,0.1,,,,2026-11,my own\n")
    options = "--epochs 7 --prices mine.csv".split()
    assert cli.main(["compare", "outputs/comparison/mnist-cpu-local.json", *options]) == 0
    printed = capsys.readouterr().out
    assert "mnist, 7 epochs of 200 images" in printed and "CPU at batch 8, local" in printed
    assert Path("outputs/comparison/comparison.png").stat().st_size > 10_000
    assert cli.main(["compare"]) == 0
    best = capsys.readouterr().out.splitlines()[5].split()  # as in the guide
    assert best[:2] + best[-6:] == ["T4,", "Kaggle", "2", "20.0", "h", "20.0", "h", "free"]


@pytest.mark.parametrize(
    "argv, named",
    [
        (["nothing"], "'nothing' is neither a task (mnist, mshnet, cdeit, images, text) nor a file"),
        (["pyproject.toml"], "pyproject.toml"),
        (["mnist", "--steps", "0"], "steps=0"),
        (["mnist", "--batch-sizes", "0"], "batch sizes (0,)"),
        (["--epochs", "0"], "epochs=0"),
        (["--prices", "none.csv"], "none.csv"),
    ],
)
def test_wrong_usage_is_explained(argv, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]")
    assert cli.main(["compare", *argv]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.slow
def test_the_notebook_measures_merges_and_chooses(tmp_path, infrared):
    pytest.importorskip("torch_xla")
    from tests.test_notebooks import outputs, run_notebook, text

    folder = tmp_path / "outputs/comparison"
    recipe = dict(base_size=32, crop_size=32, warm_epoch=5)
    timing.write(folder / "t4.json", [measurement(recipe=recipe, chips=2, cores=2)])
    small = dict(DATASET_DIR=str(infrared), IMAGE_SIZE=32, BATCH_SIZES="4", STEPS=2)
    notebook = run_notebook("hardware_comparison.ipynb", tmp_path, **small)
    printed = text(notebook)
    for words in ("batch 4: ", "T4 x 2 at batch 32, Kaggle", "200 epochs"):
        assert words in printed, words
    assert len(outputs(notebook, "image/png")) == 2 and (folder / "comparison.png").exists()
    shown = "".join(outputs(notebook, "text/html"))
    for words in ("T4 x 2, fp16", "Prices of one chip or card", "CPU XLA device at batch 4, local"):
        assert words in shown, words
    [here] = measure.read(folder / "mshnet-cpu-xla-device-local.json")
    assert (here.batch_size, here.compiled_late) == (4, 0)
