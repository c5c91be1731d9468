"""The notebooks on emulated chips, with the variables of Colab and Kaggle, by papermill."""

import nbformat
import pytest

from tests.conftest import ROOT
from tests.tpukit.host.machines import COLAB_TPU, KAGGLE_TPU
from tpukit import Run

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.long]
MSHNET = dict(EPOCHS=2, WARM_EPOCH=0, IMAGE_SIZE=64, BATCH_SIZE=16)


RUN = "outputs/run"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name, chips, variables, data, parameters",
    [
        ("kaggle_tpu_v5e", 8, KAGGLE_TPU, "infrared", MSHNET),
        ("kaggle_cdeit_tpu", 8, KAGGLE_TPU, None, dict(SAMPLES=32, EPOCHS=2, BATCH_SIZE=16)),
        ("colab_tpu_setup", 1, COLAB_TPU, "infrared", MSHNET),
        ("segment_your_own", 1, COLAB_TPU, "infrared", dict(EPOCHS=1, IMAGE_SIZE=64, BATCH_SIZE=8)),
        ("mnist_quickstart", 1, COLAB_TPU, "digits", dict(EPOCHS=2, BATCH_SIZE=16)),
        ("finetune_images", 8, KAGGLE_TPU, "shapes", dict(MODEL="test_resnet", EPOCHS=2, BATCH_SIZE=16)),
        ("finetune_llm", 1, COLAB_TPU, "texts", dict(EPOCHS=2, BATCH_SIZE=4, LORA_RANK=2)),
        ("gpu_to_tpu_migration", 1, COLAB_TPU, "digits", dict(BATCH_SIZE=8)),
        ("hardware_comparison", 1, COLAB_TPU, "infrared", dict(IMAGE_SIZE=64, BATCH_SIZES="4", STEPS=3)),
        ("hardware_check", 1, COLAB_TPU, None, {}),
        ("your_own_loop", 2, {}, None, {}),
    ],
)
def test_a_notebook_runs_on_the_chips_of_its_host(
    name, chips, variables, data, parameters, emulator, tmp_path, request
):
    given = dict(ACCELERATOR="tpu", OUTPUTS=tmp_path / "outputs", RUN_NAME="run", **parameters)
    if data == "texts":
        folder = request.getfixturevalue(data)
        given |= dict(MODEL=folder / "model", DATASET_DIR=folder / "chats.jsonl")
    elif data:
        given |= dict(DATASET_DIR=request.getfixturevalue(data))
    options = [word for key, value in given.items() for word in ("-p", key, value)]
    paths = ROOT / "notebooks" / f"{name}.ipynb", tmp_path / "done.ipynb"
    emulator.run(
        chips, "-m", "papermill", *paths, "--cwd", tmp_path, "-k", "python3", *options,
        timeout_s=3000, **variables,
    )  # fmt: skip
    cells = nbformat.read(tmp_path / "done.ipynb", 4).cells
    printed = "".join(o["text"] for c in cells for o in c.get("outputs", []) if o["output_type"] == "stream")
    assert chips == 1 or f"all {chips} cores started" in printed
    assert "emulated" in printed or name != "hardware_check"
    if (tmp_path / RUN / "records.jsonl").exists():
        start, *_ = Run(tmp_path / RUN).records("start")
        assert (start["accelerator"], start["cores"]) == ("tpu", chips)
    else:
        assert name in ("gpu_to_tpu_migration", "hardware_comparison", "hardware_check", "your_own_loop")
