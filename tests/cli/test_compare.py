"""`tpukit compare` on the command line, and its notebook."""

from pathlib import Path

import pytest

from tests.tools.test_measure import measured
from tpukit import cli
from tpukit.tools import measure


@pytest.mark.slow
def test_the_command_measures_here_and_compares_files(digits, capsys):
    command = f"compare mnist --dataset-dir {digits} --channels 4 --batch-sizes 8 --steps 2 --epochs 7"
    assert cli.main(command.split()) == 0
    assert "7 epochs of 200 samples" in capsys.readouterr().out
    [file] = Path("outputs/comparison").glob("*.json")
    measure.write(Path("t4.json"), [measured()])
    assert cli.main(["compare", str(file), "t4.json", "--epochs", "9"]) == 0
    printed = capsys.readouterr().out
    assert "mnist, image 1x28x28" in printed and "mshnet, image 1x256x256" in printed


@pytest.mark.slow
def test_the_notebook_measures_here_and_compares_files(tmp_path, infrared):
    from tests.test_notebooks import outputs, run_notebook, text

    folder = tmp_path / "outputs/comparison"
    measure.write(folder / "t4.json", [measured(sample="image 1x32x32", cores=2)])
    measure.write(folder / "a100.json", [measured(hardware="A100")])
    small = dict(DATASET_DIR=str(infrared), IMAGE_SIZE=32, BATCH_SIZES="4", STEPS=2)
    notebook = run_notebook("hardware_comparison.ipynb", tmp_path, **small)
    assert "batch 4: " in text(notebook)
    shown = "".join(outputs(notebook, "text/html"))
    for words in ("Tesla T4 x 2, fp16, kaggle", "mshnet, image 1x32x32", "1x256x256", "200 epochs"):
        assert words in shown, words
