"""Timing steps, each batch size in a process of its own, until one does not fit."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from tests.tools.measure.samples import row
from tpukit import MNIST, Run, TpukitError
from tpukit.host.environment import detect
from tpukit.runs.run import setting
from tpukit.tools import measure
from tpukit.tools.measure import Measurement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(MNIST):
    """A network whose loss takes 20 ms at least, and whose batches take 30 ms more to make."""

    def loss(self, model, batch, epoch):
        time.sleep(0.02)
        return super().loss(model, batch, epoch)

    def datasets(self):
        train, test = super().datasets()

        class Sleepy(type(train)):
            def batch(self, indices, numbers=None):
                time.sleep(0.03)
                return super().batch(indices, numbers)

        return Sleepy(train.images, train.labels), test


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(MNIST):
    """A network that runs out of memory above a batch of 16, or is killed, or fails with another error."""

    failure: str = setting("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm", free=True)
    notes: Path | None = Path("notes")

    def loss(self, model, batch, epoch):
        assert isinstance(self.notes, Path), "a path arrived as text"
        if len(batch["label"]) > 16:
            if self.failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(self.failure)
        return super().loss(model, batch, epoch)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


def quiet(text):
    pass


def opened(path, task):
    run = Run.open(path, task)
    run.echo = False
    return run


def test_a_step_time_holds_the_step_and_the_wait_for_its_batch(digits, cpu, tmp_path):
    task = Slow(dataset_dir=digits, batch_size=64, channels=4, num_workers=0)
    run = opened(tmp_path / "run", task)
    found = measure.time_steps(task, run, runtime=cpu, steps=7)
    r = found["row"]
    assert (
        r["wait_ms"] >= 30
        and r["step_ms_low"] >= 50
        and r["step_ms_low"] <= r["step_ms"] <= r["step_ms_high"]
    )
    assert r["timed_steps"] == 8 and r["memory_bytes"] == 0  # which a CPU does not tell
    assert found["samples"] == 200 and r["start_s"] > r["first_step_s"] > 0.05
    assert not run.records("train") and not run.checkpoints()  # neither evaluations nor checkpoints are timed


def test_what_is_timed_are_the_steps_of_a_training(digits, cpu, tmp_path, monkeypatch):
    from tpukit import train
    from tpukit.training import step

    seen = {"train": [], "measure": []}
    plain = step.train_step

    def recorded(task, model, optimizer, runtime, compose, batch, epoch, sums, lr_factor):
        seen[now].append((batch["label"].tolist(), epoch, float(next(model.parameters()).detach().sum())))
        return plain(task, model, optimizer, runtime, compose, batch, epoch, sums, lr_factor)

    monkeypatch.setattr(step, "train_step", recorded)
    task = MNIST(dataset_dir=digits, batch_size=16, channels=4, epochs=1)
    now = "train"
    train(task, opened(tmp_path / now, task), runtime=cpu, progress=False)
    now = "measure"
    measure.time_steps(task, opened(tmp_path / now, task), runtime=cpu, steps=10)
    assert len(seen["train"]) == 12 and len(seen["measure"]) == 1 + measure.WARM_UP + 10
    # The same batches on the same weights, in the order of an epoch; only the phase is the last.
    assert [s[::2] for s in seen["measure"][:12]] == [s[::2] for s in seen["train"]]
    assert {epoch for _, epoch, _ in seen["measure"]} == {task.epochs}


def test_one_graph_is_compiled_and_none_after_the_first_steps(digits, xla, tmp_path):
    # A batch of 7, because a graph that another test has compiled in this process is not compiled again.
    task = MNIST(dataset_dir=digits, batch_size=7, channels=4)
    run = opened(tmp_path / "run", task)
    found = measure.time_steps(task, run, runtime=xla, steps=5)
    assert found["row"]["compiled_late"] == 0 and len(run.records("compile")) == 1


@pytest.mark.slow
def test_sizes_double_in_processes_of_their_own_until_a_step_does_not_fit(digits, tmp_path, on_cpu):
    messages, out = [], tmp_path / "found.json"
    task = Greedy(dataset_dir=digits, batch_size=16, channels=4)
    found = measure.measure_here(task, steps=2, out=out, log=messages.append)
    assert [(r["batch_size"], r["fits"]) for r in found.rows] == [(16, True), (32, False)]
    assert "RESOURCE_EXHAUSTED" in found.rows[-1]["why"] and Measurement.read(out) == found
    assert (found.hardware, found.place, found.task, found.samples) == ("CPU", "local", "mnist", 200)
    assert found.engine == dict(torch_compile="no", channels_last="auto", cuda_graph=True, data_on="auto")
    assert (
        "batch_size" not in found.recipe
        and "dataset_dir" not in found.recipe
        and str(digits) not in out.read_text()
    )
    assert "failure" not in found.recipe and found.versions["torch"] and found.fitting[0]["timed_steps"] == 2
    assert "batch 32" in messages[-2] and "RESOURCE_EXHAUSTED" in messages[-2] and str(out) in messages[-1]


@pytest.mark.parametrize(
    "accelerator, batch_size, tried",
    [
        ("cpu", 8, [8, 16]),  # which gains little from a large batch
        ("cpu", 9, [10, 20]),  # which the two cores can share
        ("cuda", 8, [8, 16, 32, 64, 128]),  # the training set has 200 samples
    ],
)
def test_sizes_double_on_a_cpu_once_and_elsewhere_up_to_the_training_set(
    accelerator, batch_size, tried, digits, monkeypatch
):
    found, messages = [], []

    def run_process(task, steps, cores, parallel):
        found.append(task.batch_size)
        return dict(row=row(task.batch_size), cores=cores, precision="fp32", samples=200)

    monkeypatch.setattr(measure, "_run_process", run_process)
    env = dataclasses.replace(detect({}), accelerator=accelerator)
    monkeypatch.setattr(measure.environment, "detect", lambda: env)
    task = MNIST(dataset_dir=digits, batch_size=batch_size)
    measure.measure_here(task, cores=2, log=messages.append)
    assert found == tried and f"batch {2 * tried[-1]}: not tried" in messages[-1]


@pytest.mark.slow
def test_a_killed_process_is_a_batch_that_does_not_fit_and_another_error_is_named(digits, on_cpu):
    task = Greedy(dataset_dir=digits, batch_size=8, channels=4, failure="killed")
    with pytest.raises(TpukitError, match="no batch size fits: the process was killed"):
        measure.measure_here(task, batch_sizes=[32], steps=1, log=quiet)
    broken = dataclasses.replace(task, failure="a bug of mine", batch_size=32)
    with pytest.raises(TpukitError, match="batch 32 of mnist.* RuntimeError: a bug of mine"):
        measure.measure_here(broken, steps=1, log=quiet)


@pytest.mark.slow
def test_several_cores_are_measured_as_one(digits, on_cpu):
    task = MNIST(dataset_dir=digits, batch_size=8, channels=4)
    found = measure.measure_here(task, batch_sizes=[8], steps=2, cores=2, log=quiet)
    assert (found.cores, found.chips, found.label) == (2, 1, "CPU x 2")
    with pytest.raises(TpukitError, match="batch_size=9 .*2 cores.* 8 or 10"):
        measure.measure_here(task, batch_sizes=[9], steps=2, cores=2, log=quiet)
