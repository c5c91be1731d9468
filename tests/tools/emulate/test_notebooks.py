"""The notebooks on emulated chips, with the variables of Colab and Kaggle, by papermill."""

import nbformat
import pytest

from tests.conftest import ROOT
from tests.tpukit.host.machines import COLAB_TPU, KAGGLE_TPU
from tpukit import Run

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.long]
MSHNET = dict(EPOCHS=2, WARM_EPOCH=0, IMAGE_SIZE=64, BATCH_SIZE=16)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name, chips, variables, data, parameters",
    [
        ("kaggle_tpu_v5e", 8, KAGGLE_TPU, "infrared", MSHNET),
        ("colab_tpu_setup", 1, COLAB_TPU, "infrared", MSHNET),
        ("mnist_quickstart", 1, COLAB_TPU, "digits", dict(EPOCHS=2, BATCH_SIZE=16)),
        ("finetune_images", 8, KAGGLE_TPU, "shapes", dict(MODEL="test_resnet", EPOCHS=2, BATCH_SIZE=16)),
        ("your_own_loop", 2, {}, None, {}),
    ],
)
def test_a_notebook_runs_on_the_chips_of_its_host(
    name, chips, variables, data, parameters, emulator, tmp_path, request
):
    given = dict(ACCELERATOR="tpu", RUN_NAME="run", **parameters)
    if data:
        given |= dict(OUTPUTS=tmp_path / "outputs", DATASET_DIR=request.getfixturevalue(data))
    options = [word for key, value in given.items() for word in ("-p", key, value)]
    paths = ROOT / "notebooks" / f"{name}.ipynb", tmp_path / "done.ipynb"
    emulator.run(
        chips, "-m", "papermill", *paths, "--cwd", tmp_path, "-k", "python3", *options,
        timeout_s=3000, **variables,
    )  # fmt: skip
    cells = nbformat.read(tmp_path / "done.ipynb", 4).cells
    printed = "".join(o["text"] for c in cells for o in c.get("outputs", []) if o["output_type"] == "stream")
    assert chips == 1 or f"all {chips} cores started" in printed
    if data:
        start, *_ = Run(tmp_path / "outputs" / "run").records("start")
        assert (start["accelerator"], start["cores"]) == ("tpu", chips)
