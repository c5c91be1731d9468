"""On several emulated chips each task trains as on one; what several have trained is used as on one."""

import pytest
import torch
from PIL import Image

from tests.conftest import best_weights
from tests.tools.emulate.conftest import PROGRAMS
from tests.tpukit.launching.public_loops import LOOPS
from tests.tpukit.launching.test_public_loops import BOUNDS, STEPS
from tpukit import Run
from tpukit_tasks import mnist_data

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, chips, data",
    [
        ("mnist", 8, "digits"),
        ("text", 8, "texts"),
        ("mshnet", 8, "infrared"),
        ("cdeit", 8, "tank"),
        ("images", 8, "shapes"),
    ],
)
def test_each_task_trains_on_several_chips_as_on_one(kind, chips, data, emulator, tmp_path, request):
    """With clipping, micro-batches, averaged weights and a changing learning rate."""
    runs = {}
    for count in (1, chips):
        run = tmp_path / f"{count}"
        dataset = request.getfixturevalue(data)
        emulator.run(count, PROGRAMS, "train_task", kind, run, dataset, "{}", timeout_s=1500)
        runs[count] = Run(run)
    one, several = runs[1].records("train"), runs[chips].records("train")
    assert len(one) == len(several) >= 20
    assert max(record["grad_norm"] for record in several) > runs[chips].config["settings"]["clip_norm"]
    assert len({record["lr"] for record in several}) >= 20
    losses = [[record["loss"] for record in records] for records in (several, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    started = runs[chips].records("start")[0]
    assert (started["cores"], started["accelerator"]) == (chips, "tpu")
    # Averaged weights
    ours, theirs = (best_weights(runs[count]) for count in (chips, 1))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert [r["what"] for r in runs[chips].records("compile")].count("step") == 1


def test_what_two_chips_have_trained_is_tested_predicted_and_exported_as_on_one(emulator, digits, tmp_path):
    """A batch of 15, which two chips do not share evenly, is rounded up for the test."""
    run, image = tmp_path / "run", tmp_path / "digit.png"
    emulator.run(2, PROGRAMS, "train_task", "mnist", run, digits, "{}")
    Image.fromarray(mnist_data.read_split(digits, "test").images[0]).save(image)
    scores, predicted = [], []
    for chips in (1, 2):
        text = emulator.run(chips, "-m", "tpukit", "test", run, "--batch-size", 15)
        scores.append([line for line in text.splitlines() if "accuracy" in line])
        emulator.run(chips, "-m", "tpukit", "predict", run, image, "--out", tmp_path / f"{chips}")
        predicted.append((tmp_path / f"{chips}" / "predictions.csv").read_text().splitlines())
    assert scores[0] == scores[1] != []
    assert len(predicted[0]) == len(predicted[1]) == 2
    emulator.run(2, "-m", "tpukit", "export", run, "--out", tmp_path / "net.onnx")
    assert (tmp_path / "net.onnx").stat().st_size


@pytest.mark.long
def test_loops_in_the_shape_of_public_ones_train_on_two_chips_what_they_train_on_one(emulator, tmp_path):
    emulator.run(2, PROGRAMS, "public_loops", tmp_path / "ended.pt")
    ended = torch.load(tmp_path / "ended.pt", weights_only=True)
    for name in LOOPS:
        two, one = ended["two"][name], ended["one"][name]
        assert two["ranks"][0] == two["ranks"][1]
        assert two["ranks"][0] == pytest.approx(one["ranks"][0], abs=BOUNDS[name], rel=0)
        assert two["losses"] == pytest.approx(one["losses"], abs=BOUNDS[name], rel=0)
        assert one["moved"] > 500 * BOUNDS[name] and two["steps"] == one["steps"] == STEPS[name]
