"""The training loop: what it learns, and what a stopped, killed or resumed run keeps."""

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import SMALL, best_weights, checkpoint, exact, same
from tests.workloads.mshnet.small import Narrow
from tpukit import CDEIT, MNIST, MSHNet, Run, TpukitError, Workload, train
from tpukit.runs.run import setting


@pytest.mark.parametrize("name", ["mnist", "mshnet", "cdeit"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_every_workload_moves_its_weights_scores_and_shows(name, device, digits, infrared, tank, tmp_path, request, capsys):
    from tpukit import show
    from tpukit.reporting import display

    runtime = request.getfixturevalue(device)
    task = {
        "mnist": lambda: MNIST(dataset_dir=digits, epochs=2, **SMALL),
        "mshnet": lambda: (MSHNet if device == "cpu" else Narrow)(
            dataset_dir=infrared, epochs=2, warm_epoch=0, base_size=32, crop_size=32, **SMALL
        ),
        "cdeit": lambda: CDEIT(dataset_dir=tank, epochs=2, patch=16, width=16, heads=2, window=4, levels=1, lr=1e-3, **SMALL),
    }[name]()
    run = Run.open(tmp_path / "run", task)
    torch.manual_seed(task.seed)
    before = task.model().state_dict()
    scores = train(task, run, runtime=runtime, progress=False)
    after = checkpoint(run)["model"]
    assert all(not torch.equal(before[n], after[n]) for n in before if n.endswith("weight")), "a weight did not move"
    assert -1 <= scores[task.score] <= 1
    assert all(v.device.type == "cpu" for v in after.values())
    assert run.records("train")[-1]["grad_norm"] > 0
    (
        display.show_task(task),
        display.show_samples(task),
        show(run),
        display.show_report(run),
        display.show_predictions(run, task),
    )
    assert (run.path / "pictures/curves.png").stat().st_size > 5000
    assert (run.path / "pictures/predictions.png").stat().st_size > 3000
    assert f"It ran on {runtime}" in capsys.readouterr().out


@pytest.mark.slow
def test_mnist_learns_made_up_digits(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, epochs=16, lr=0.03, **SMALL)
    assert train(task, Run.open(tmp_path, task), runtime=cpu, progress=False)["accuracy"] > 0.7  # 0.1 by guessing


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_two_and_two_epochs_equal_four(device, digits, tmp_path, request):
    runtime = request.getfixturevalue(device)
    task = MNIST(dataset_dir=digits, epochs=4, **SMALL)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=runtime, progress=False)
    for epochs in (2, 4):
        part = dataclasses.replace(task, epochs=epochs)
        parted = Run.open(tmp_path / "parted", part)
        train(part, parted, runtime=runtime, progress=False)
    assert exact(parted) == exact(straight) and len(exact(straight)) > 30
    assert same(best_weights(parted), best_weights(straight))


@pytest.mark.slow
def test_mshnet_resumes_exactly_across_its_phases_with_augmentation(infrared, tmp_path, cpu):
    task = MSHNet(dataset_dir=infrared, epochs=4, warm_epoch=1, base_size=32, crop_size=32, batch_size=4, log_every=3)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=cpu, progress=False)
    for epochs in (1, 3, 4):
        part = dataclasses.replace(task, epochs=epochs)
        train(part, Run.open(tmp_path / "parted", part), runtime=cpu, progress=False)
    assert exact(Run.find(tmp_path / "parted")) == exact(straight)


KILLED = """
import os, sys
from pathlib import Path
from tpukit import MNIST, Run, train
from tpukit.training.loop import Trainer
from tpukit.devices.runtime import Runtime

folder, data, kill_at, save_every_s = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
task = MNIST(dataset_dir=data, epochs=3, batch_size=8, log_every=3, save_every_s=save_every_s, seed=5)
steps = 0
whole_step = Trainer.take_step

def step(self, *args):
    global steps
    steps += 1
    if steps == kill_at:
        os.kill(os.getpid(), 9)
    whole_step(self, *args)

Trainer.take_step = step
train(task, Run.open(folder, task), runtime=Runtime("cpu"), progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("save_every_s, kills", [(0.0, (5, 23, 24)), (300.0, (11, 44, 18))])
def test_killing_the_process_again_and_again_changes_nothing_that_is_logged(save_every_s, kills, digits, tmp_path, cpu):
    """Each kill comes before that step of its session: with a checkpoint after every step, and with epochs' ends only."""
    task = MNIST(dataset_dir=digits, epochs=3, batch_size=8, log_every=3, seed=5)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=cpu, progress=False)
    codes = []
    for kill_at in (*kills, 999):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(digits), str(kill_at), str(save_every_s)]
        codes.append(subprocess.run(command, capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}).returncode)
    assert codes == [-9, -9, -9, 0]
    assert exact(Run.find(tmp_path / "killed")) == exact(straight)


STOPPED = """
import sys
from pathlib import Path
from tpukit import MNIST, Run, train
from tpukit.devices.runtime import Runtime

# No evaluation: the stop has to come between two steps.
task = MNIST(dataset_dir=Path(sys.argv[2]), epochs=5000, batch_size=8, log_every=3, eval_every=5000)
train(task, Run.open(sys.argv[1], task), runtime=Runtime("cpu"), progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number, code, word", [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, None, "interrupted")])
def test_sigterm_and_interrupt_save_before_leaving(number, code, word, digits, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path / "run"), str(digits)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        records = tmp_path / "run/records.jsonl"
        while not (records.exists() and records.read_text().count("train") > 5):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    if code:
        assert process.returncode == code
    else:
        assert "KeyboardInterrupt" in err
    run = Run.find(tmp_path / "run")
    saved = checkpoint(run)["state"]["step"]
    assert f"saved at step {saved}" in out and word in out
    assert saved >= run.records("train")[-1]["step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remembered(MNIST):
    """MNIST whose models can be asked for afterwards, and which may want more memory than there is."""

    models: list = dataclasses.field(default_factory=list)
    full_at: int = 99

    def model(self):
        model = super().model().insert(1, torch.nn.BatchNorm2d(32))
        self.models.append(weakref.ref(model))
        return model

    def loss(self, model, batch, epoch):
        if epoch >= self.full_at:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(model, batch, epoch)


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [dict(ema_decay=0.9), dict(batch_norm="frozen")], ids=str)
def test_the_model_of_a_training_is_freed_as_soon_as_it_ends(device, settings, digits, tmp_path, request):
    task = Remembered(dataset_dir=digits, epochs=1, **SMALL, **settings)
    run = Run.open(tmp_path, task)
    gc.collect()
    gc.disable()
    try:
        train(task, run, runtime=request.getfixturevalue(device), progress=False)
        assert task.models[0]() is None
    finally:
        gc.enable()


def test_the_model_of_a_training_that_ran_out_of_memory_is_freed_though_its_error_is_kept(digits, tmp_path, cpu):
    task = Remembered(dataset_dir=digits, epochs=2, full_at=1, **SMALL)
    run = Run.open(tmp_path, task)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(TpukitError, match="smaller batch_size") as kept:
            train(task, run, runtime=cpu, progress=False)
        assert kept.value.__cause__ is not None and task.models[0]() is None
    finally:
        gc.enable()


def test_the_readme_way_of_writing_a_workload_trains(tmp_path, cpu):
    class Line:
        num_draws = 0

        def __init__(self, n):
            self.x = np.linspace(-1, 1, n, dtype=np.float32)[:, None]

        def __len__(self):
            return len(self.x)

        def batch(self, indices, numbers=None):
            return dict(x=self.x[indices], y=3 * self.x[indices] + 1)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Fit(Workload):
        name, dataset, score = "fit", "none", "fit"
        epochs: int = setting(20, free=True)
        lr: float = 0.1

        def datasets(self):
            return Line(64), Line(10)

        def model(self):
            return torch.nn.Linear(1, 1)

        def optimizer(self, model):
            return torch.optim.AdamW(model.parameters(), lr=self.lr)

        def loss(self, model, batch, epoch):
            return (model(batch["x"]) - batch["y"]).square().mean()

        def predict(self, model, batch, epoch=None):
            return model(batch["x"])

        def evaluate(self, predictions):
            errors = torch.cat([(p - b["y"]).abs()[b["valid"]] for p, b in predictions])
            assert len(errors) == 10
            return dict(fit=1 - float(errors.mean()))

    task = Fit(dataset_dir=Path("."))
    assert train(task, Run.open(tmp_path, task), runtime=cpu, progress=False)["fit"] > 0.9
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["lr"] == 0.1
