"""A run's numbers as TensorBoard events."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tpukit import MNIST, Run, train


def scalars(run):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    ).EventAccumulator(str(run.path / "tensorboard"))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_events_import_no_tensorflow_though_it_is_there(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").write_text("raise SystemExit('took the TPU')")
    code = (
        "import pathlib; from tpukit.runs.tensorboard import EventFile\nfile = EventFile(pathlib.Path('e'))\n"
        "file.write(dict(kind='evaluation', step=1, time=0.0, scores=dict(a=1.0))); assert file.path.exists()"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ)
    assert ran.returncode == 0 and len(list((tmp_path / "e").iterdir())) == 1


def test_tensorboard_reads_what_the_records_say(trained):
    _, run = trained
    found = scalars(run)
    logged = run.records("train")
    assert [step for step, _ in found["loss"]] == [r["step"] for r in logged] and len(logged) > 10
    assert [value for _, value in found["loss"]] == pytest.approx([r["loss"] for r in logged], rel=1e-6)
    accuracy = [(r["step"], r["scores"]["accuracy"]) for r in run.records("evaluation")]
    assert [s for s, _ in found["scores/accuracy"]] == [s for s, _ in accuracy] == [25, 50]
    assert [v for _, v in found["scores/accuracy"]] == pytest.approx([v for _, v in accuracy], rel=1e-6)
    assert {"gradient norm", "speed/samples per second", "speed/waiting for data"} < found.keys()


def test_tensorboard_shows_of_a_resumed_run_what_its_records_say_and_nothing_twice(trained, cpu):
    task, run = trained
    straight = scalars(run)
    kept = run.checkpoints()
    newest = run.path / "checkpoints" / kept[0]["file"]
    newest.write_bytes(b"damaged")  # so that the second epoch is trained again
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    again = scalars(run)
    assert again.keys() == straight.keys() and len(list((run.path / "tensorboard").iterdir())) == 1
    for tag, points in straight.items():
        assert [s for s, _ in again[tag]] == [s for s, _ in points], tag
        if not tag.startswith("speed"):
            assert [v for _, v in again[tag]] == pytest.approx([v for _, v in points], rel=1e-6)


@pytest.mark.parametrize("broken", ["absent", "at odds"])
def test_a_run_does_without_tensorboard_where_it_is_absent_or_broken(broken, tmp_path, monkeypatch):
    if broken == "absent":
        monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    else:
        monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", object())
    run = Run.open(tmp_path, MNIST())
    run.log("start", 1)
    run.log("evaluation", 1, scores=dict(a=1.0))
    assert run.records("evaluation") and not (run.path / "tensorboard").exists()
