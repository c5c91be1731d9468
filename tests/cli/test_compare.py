"""`tpukit compare` on the command line, and its notebook."""

from pathlib import Path

import pytest

from tests.tools.measure.samples import measurement
from tpukit import cli
from tpukit.tools.measure import PRICES, Measurement


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


@pytest.mark.slow
def test_the_command_measures_merges_and_chooses(digits, tmp_path, monkeypatch, capsys, on_cpu):
    monkeypatch.chdir(tmp_path)
    command = f"compare mnist --dataset-dir {digits} --channels 4 --batch-sizes 8 --steps 2"
    assert cli.main(command.split()) == 0
    assert "mnist on CPU, fp32: measured" in capsys.readouterr().out
    Path("mine.csv").write_text(PRICES.read_text() + "CPU,local,0.1,,,,2026-11,my own\n")
    options = "--epochs 7 --prices mine.csv".split()
    capsys.readouterr()
    assert cli.main(["compare", "outputs/comparison/mnist-cpu.json", *options]) == 0
    assert "CPU at batch 8, local: 7 epochs take" in capsys.readouterr().out
    assert Path("outputs/comparison/comparison.png").stat().st_size > 10_000
    assert cli.main(["compare"]) == 0
    # as in the guide
    assert "T4, Kaggle: 400 epochs take 20.0 h in 2 sessions, free." in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, named",
    [
        (["nothing"], "'nothing' is neither a task (mnist, mshnet, cdeit, images) nor a file"),
        (["pyproject.toml"], "pyproject.toml"),
        (["mnist", "--steps", "0"], "steps=0"),
        (["mnist", "--batch-sizes", "0"], "batch sizes 0"),
        (["--epochs", "0"], "epochs=0"),
        (["--deadline-h", "72"], "the column calendar"),
        (["--budget-usd", "10"], "the column cost"),
        (["--plan", "v5e-8"], "tpukit plan TASK"),
        (["--prices", "none.csv"], "none.csv"),
        (["mnist", "--dataset-dir", "none", "--out", "pyproject.toml/a.json"], "pyproject.toml"),
    ],
)
def test_wrong_usage_is_explained(argv, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]")
    assert cli.main(["compare", *argv]) == 1
    assert named in capsys.readouterr().err


def test_a_measurement_replaces_an_earlier_one_and_no_other_file(
    digits, tmp_path, monkeypatch, capsys, on_cpu
):
    mine, old = tmp_path / "mine.json", tmp_path / "old.json"
    mine.write_text('{"format": "my own"}')
    measurement().write(old)
    monkeypatch.setattr(
        "tpukit.tools.measure._run_process", lambda *_: dict(row=dict(fits=False, why="measured"))
    )
    for out, named in ((mine, str(mine)), (old, "measured")):
        assert cli.main(["compare", "mnist", "--dataset-dir", str(digits), "--out", str(out)]) == 1
        assert named in capsys.readouterr().err
    assert mine.read_text() == '{"format": "my own"}'


@pytest.mark.slow
def test_the_notebook_measures_merges_and_chooses(tmp_path, infrared):
    pytest.importorskip("torch_xla")
    from tests.test_notebooks import outputs, run_notebook, text

    folder = tmp_path / "outputs/comparison"
    recipe = dict(clip_norm=None, ema_decay=None, batch_norm="per-core", lr=0.05, base_size=32, crop_size=32)
    recipe |= dict(warm_epoch=5, final_init="mask0", skip_bad=False)
    measurement(recipe=recipe, chips=2, cores=2).write(folder / "mshnet-t4-x2.json")
    small = dict(DATASET_DIR=str(infrared), IMAGE_SIZE=32, BATCH_SIZES="4", STEPS=2)
    notebook = run_notebook("hardware_comparison.ipynb", tmp_path, **small)
    printed = text(notebook)
    for words in (
        "batch 4: ",
        "CPU XLA device (local",
        "T4 x 2 (Kaggle, 2026-11-22): batch 32",
        "T4 x 2 at batch 32, Kaggle",
        "256x256",  # the published figures, which are of that size
        "200 epochs take",
    ):
        assert words in printed, words
    assert len(outputs(notebook, "image/png")) == 2 and (folder / "comparison.png").exists()
    shown = "".join(outputs(notebook, "text/html"))
    assert "Prices of one chip or card" in shown and "CPU XLA device at batch 4, local" in shown
    here = Measurement.read(folder / "mshnet-cpu-xla.json")
    assert [r["batch_size"] for r in here.fitting] == [4] and all(r["compiled_late"] == 0 for r in here.rows)
