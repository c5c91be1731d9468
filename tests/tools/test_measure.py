"""`tpukit compare`: timing a step, the file that keeps it, and the files of several machines side by side."""

import dataclasses
import json
import time

import pytest

from tpukit import MNIST, MSHNet, Run, TpukitError
from tpukit.host.environment import detect
from tpukit_tools import measure
from tpukit_tools.measure import WARM_UP, Measurement


def measured(**other):
    """What a T4 on Kaggle measured of MSHNet at 256 pixels."""
    fields = dict(task="mshnet", sample="image 1x256x256", parameters=4_065_513, samples=800)
    fields |= dict(hardware="Tesla T4", cores=1, host="kaggle", precision="fp16")
    fields |= dict(versions=dict(torch="2.9.0"), batch_size=32, steps=20, step_ms=100.0, first_step_s=9.0)
    return Measurement(**fields | other)


# Timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(MNIST):
    """A network whose loss takes 50 ms at least."""

    def loss(self, model, batch, epoch):
        time.sleep(0.05)
        return super().loss(model, batch, epoch)


def test_a_measurement_holds_the_time_of_a_step_and_what_was_measured(digits, cpu, tmp_path):
    task = Slow(dataset_dir=digits, batch_size=64, channels=4)
    run = Run.open(tmp_path / "run", task)
    one = Measurement(**measure.time_steps(task, run, runtime=cpu, steps=7))
    assert one.step_ms >= 50 and one.first_step_s >= 0.05
    assert (one.sample, one.samples, one.steps, one.memory_bytes) == ("image 1x28x28", 200, 10, None)
    assert one.parameters == sum(p.numel() for p in task.model().parameters())
    assert one.versions.keys() >= {"torch", "tpukit", "python"}
    assert not run.records("train") and not run.checkpoints()  # neither evaluations nor checkpoints are timed


def test_what_is_timed_are_the_steps_of_a_training(digits, cpu, tmp_path, monkeypatch):
    from tpukit import train
    from tpukit.training import step

    seen = {"train": [], "measure": []}
    plain = step.train_step

    def recorded(task, loss, model, optimizer, runtime, compose, batch, epoch, sums, lr_factor):
        seen[now].append((batch["label"].tolist(), epoch, float(next(model.parameters()).detach().sum())))
        return plain(task, loss, model, optimizer, runtime, compose, batch, epoch, sums, lr_factor)

    monkeypatch.setattr(step, "train_step", recorded)
    task = MNIST(dataset_dir=digits, batch_size=16, channels=4, epochs=1)
    now = "train"
    train(task, Run.open(tmp_path / now, task), runtime=cpu, progress=False)
    now = "measure"
    measure.time_steps(task, Run.open(tmp_path / now, task), runtime=cpu, steps=10)
    assert len(seen["train"]) == 12 and len(seen["measure"]) == 1 + WARM_UP + 10
    # The same batches on the same weights, in the order of an epoch; only the phase is the last.
    assert [s[::2] for s in seen["measure"][:12]] == [s[::2] for s in seen["train"]]
    assert {epoch for _, epoch, _ in seen["measure"]} == {task.epochs}


def test_one_graph_is_compiled_on_xla(digits, xla, tmp_path):
    # A batch of 7, because a graph that another test has compiled in this process is not compiled again.
    task = MNIST(dataset_dir=digits, batch_size=7, channels=4)
    run = Run.open(tmp_path / "run", task)
    measure.time_steps(task, run, runtime=xla, steps=5)
    assert len(run.records("compile")) == 1


@pytest.mark.parametrize("accelerator, tried", [("cpu", [10, 20]), ("cuda", [10 * 2**n for n in range(8)])])
def test_sizes_double_from_one_that_the_cores_can_share(accelerator, tried, digits, tmp_path, monkeypatch):
    env = dataclasses.replace(detect({}), accelerator=accelerator, cores=2)
    monkeypatch.setattr(measure.environment, "detect", lambda: env)
    monkeypatch.setattr(measure, "_measure", lambda task, *_: measured(batch_size=task.batch_size))
    task = MNIST(dataset_dir=digits, batch_size=9)
    several = measure.measure_here(task, folder=tmp_path, log=len)
    assert [one.batch_size for one in several] == tried
    assert measure.read(next(tmp_path.glob("mshnet-image-1x256x256-*tesla-t4*kaggle.json"))) == several


def test_where_the_first_size_fails_the_reason_is_raised(digits, monkeypatch):
    def fail(*_):
        raise TpukitError("no memory")

    monkeypatch.setattr(measure, "_measure", fail)
    with pytest.raises(TpukitError, match="mnist at batch 4 .*no memory"):
        measure.measure_here(MNIST(dataset_dir=digits), batch_sizes=[4], log=len)
    with pytest.raises(TpukitError, match="steps=0"):
        measure.measure_here(MNIST(dataset_dir=digits), steps=0)


# Files


def test_a_foreign_or_damaged_file_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "one.json"
    row = dataclasses.asdict(measured())
    rows = [row | dict(x=1), {"sample": row["sample"]}, 3]
    contents = [json.dumps(dict(format=measure.FORMAT, rows=[one])) for one in rows]
    contents += [json.dumps(dict(format="tpukit comparison 0", rows=[row])), "{", "[]", "\xff", "[" * 100_000]
    for content in contents:
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(TpukitError, match="one.json is not a file of `tpukit compare TASK`"):
            measure.read(path)
    with pytest.raises(TpukitError, match="none.json"):
        measure.read(tmp_path / "none.json")


# Comparing


def test_what_differs_in_task_size_or_model_is_never_in_one_table_and_each_title_names_it(infrared):
    small = measured(sample="image 1x64x64", hardware="x86_64, 2 cores", step_ms=1.0)
    others = [small, measured(task="mnist", sample="image 1x28x28"), measured(parameters=9_000_000)]
    tables = measure.compare([measured(), *others])
    assert sorted(one.subject for one in [measured(), *others]) == [t.title.partition(":")[0] for t in tables]
    for side in (256, 32):
        data, _ = MSHNet(dataset_dir=infrared, crop_size=side).datasets()
        assert measure.sample_size(data) == f"image 1x{side}x{side}"


def test_the_table_has_all_sizes_of_each_machine_the_fastest_first():
    several = [measured(memory_bytes=2**30), measured(batch_size=64, step_ms=150.0), measured(host="colab")]
    [table] = measure.compare([*several, measured(samples=1600, hardware="L4", step_ms=10.0)], epochs=1440)
    rows = table.rows
    assert len(rows) == 4 and "1440 epochs of 1600 samples" in table.title
    assert rows[0][0] == "L4, fp16, kaggle"
    # 50 steps of an epoch at 100 ms are 5 s, 1440 epochs two hours.
    assert ("Tesla T4, fp16, kaggle", "2.9.0", "32", "9.0", "100", "320", "1.00", "2.0 h") in rows
    with pytest.raises(TpukitError, match="epochs=0"):
        measure.compare(several, epochs=0)
