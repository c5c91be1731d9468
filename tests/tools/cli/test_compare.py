"""`tpukit compare` on the command line, and its notebook."""

import pytest

from tests.tools.test_measure import measured
from tpukit_tools import measure


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
    for words in ("Tesla T4 x 2, fp16, kaggle", "mshnet, image 1x32x32", "1x256x256", "400 epochs"):
        assert words in shown, words
