"""Timing steps, each batch size in a process of its own, until one fails."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from tests.tools.measure.samples import measurement
from tpukit import MNIST, Run, TpukitError
from tpukit.host.environment import detect
from tpukit.runs.run import setting
from tpukit.tools.measure import timing


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
    """A network that runs out of memory above a batch of 16, or is killed."""

    is_killed: bool = setting(False, free=True)
    notes: Path | None = Path("notes")

    def loss(self, model, batch, epoch):
        assert isinstance(self.notes, Path), "a path arrived as text"
        if len(batch["label"]) > 16:
            if self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
        return super().loss(model, batch, epoch)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


def opened(path, task):
    run = Run.open(path, task)
    run.echo = False
    return run


def test_a_step_time_holds_the_step_and_the_wait_for_its_batch(digits, cpu, tmp_path):
    task = Slow(dataset_dir=digits, batch_size=64, channels=4, num_workers=0)
    run = opened(tmp_path / "run", task)
    found = timing.Measurement(**timing.time_steps(task, run, runtime=cpu, steps=7))
    assert found.wait_ms >= 30 and 50 <= found.step_ms_low <= found.step_ms <= found.step_ms_high
    assert found.timed_steps == 10 and found.memory_bytes == 0  # which a CPU does not tell
    assert found.samples == 200 and found.start_s > found.first_step_s > 0.05
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
    timing.time_steps(task, opened(tmp_path / now, task), runtime=cpu, steps=10)
    assert len(seen["train"]) == 12 and len(seen["measure"]) == 1 + timing.WARM_UP + 10
    # The same batches on the same weights, in the order of an epoch; only the phase is the last.
    assert [s[::2] for s in seen["measure"][:12]] == [s[::2] for s in seen["train"]]
    assert {epoch for _, epoch, _ in seen["measure"]} == {task.epochs}


def test_one_graph_is_compiled_and_none_after_the_first_steps(digits, xla, tmp_path):
    # A batch of 7, because a graph that another test has compiled in this process is not compiled again.
    task = MNIST(dataset_dir=digits, batch_size=7, channels=4)
    run = opened(tmp_path / "run", task)
    found = timing.time_steps(task, run, runtime=xla, steps=5)
    assert found["compiled_late"] == 0 and len(run.records("compile")) == 1


@pytest.mark.slow
def test_sizes_double_in_processes_of_their_own_until_a_step_does_not_fit(digits, tmp_path, on_cpu):
    messages = []
    task = Greedy(dataset_dir=digits, batch_size=16, channels=4)
    [found] = timing.measure_here(task, steps=2, folder=tmp_path, log=messages.append)
    file = tmp_path / "mnist-cpu-local.json"
    assert timing.read(file) == [found] and str(digits) not in file.read_text()
    assert (found.batch_size, found.timed_steps, found.samples) == (16, 5, 200)
    assert (found.hardware, found.place, found.task, found.precision) == ("CPU", "local", "mnist", "fp32")
    assert found.engine == dict(torch_compile="no", channels_last="auto", cuda_graph=True, data_on="auto")
    assert not {"batch_size", "dataset_dir", "is_killed"} & found.recipe.keys() and found.versions["torch"]
    assert "batch 32" in messages[-1] and "RESOURCE_EXHAUSTED" in messages[-1]
    killed = dataclasses.replace(task, batch_size=32, is_killed=True)
    with pytest.raises(TpukitError, match="mnist at batch 32 .*the process was killed"):
        timing.measure_here(killed, steps=1, log=messages.append)


@pytest.mark.parametrize(
    "accelerator, batch_size, tried",
    [
        ("cpu", 8, [8, 16]),  # which gains little from a large batch
        ("cpu", 9, [10, 20]),  # which the two cores can share
        ("cuda", 8, [8, 16, 32, 64, 128, 256, 512, 1024]),
    ],
)
def test_sizes_double_on_a_cpu_once_and_elsewhere_seven_times(
    accelerator, batch_size, tried, digits, monkeypatch
):
    asked = []

    def run_process(task, steps, cores, parallel):
        asked.append((task.batch_size, cores))
        return dict(batch_size=task.batch_size, step_ms=1.0)

    monkeypatch.setattr(timing, "_run_process", run_process)
    env = dataclasses.replace(detect({}), accelerator=accelerator, cores=2)
    monkeypatch.setattr(timing.environment, "detect", lambda: env)
    found = timing.measure_here(MNIST(dataset_dir=digits, batch_size=batch_size), log=len)
    assert [m.batch_size for m in found] == tried
    assert asked == [(size, 2) for size in tried]  # on both, however small their shares are


def test_a_measurement_replaces_an_earlier_one_and_no_other_file(digits, tmp_path, monkeypatch, on_cpu):
    answers = [dict(step_ms=1.0), dict(why="measured")]
    monkeypatch.setattr(timing, "_run_process", lambda *_: answers.pop(0))
    task = MNIST(dataset_dir=digits)
    file = tmp_path / "mnist-cpu-local.json"
    timing.write(file, [measurement()])
    timing.measure_here(task, folder=tmp_path, log=len)
    assert "Kaggle" not in file.read_text()
    file.write_text('{"format": "my own"}')
    with pytest.raises(TpukitError, match=str(file)):
        timing.measure_here(task, folder=tmp_path, log=len)
    assert file.read_text() == '{"format": "my own"}'


@pytest.mark.slow
def test_several_cores_are_measured_as_one_and_a_size_that_they_cannot_share_ends_it(digits, on_cpu):
    messages = []
    task = MNIST(dataset_dir=digits, batch_size=8, channels=4)
    [found] = timing.measure_here(task, batch_sizes=[8, 9], steps=2, cores=2, log=messages.append)
    assert (found.cores, found.chips, found.label) == (2, 1, "CPU x 2")
    assert "batch_size=9" in messages[-1] and "8 or 10" in messages[-1]
