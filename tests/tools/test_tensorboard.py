"""`tpukit report RUN --tensorboard FOLDER`: the numbers of a run as TensorBoard's own package reads them."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT, refuses
from tpukit_tools.tensorboard import write_events

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder):
    """name -> [(step, value)]"""
    reader = accumulator.EventAccumulator(str(folder)).Reload()
    return {name: [(e.step, e.value) for e in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def test_tensorboard_reads_what_the_records_say_and_nothing_twice(trained, tmp_path):
    _, run = trained
    strange = dict(accuracy=0.5, huge=1e300, missing=None, table=[1.0])
    run.log("evaluation", 300, epoch=2, scores=strange, kept=False, speed=dict(seconds=1.0))
    (path,) = {write_events(run, tmp_path / "events") for _ in range(2)}
    assert list((tmp_path / "events").iterdir()) == [path]
    found = scalars(tmp_path / "events")
    losses = [(r["step"], pytest.approx(r["loss"])) for r in run.records("train")]
    assert len(losses) > 5 and found["loss"] == losses
    accuracy = [(r["step"], pytest.approx(r["scores"]["accuracy"])) for r in run.records("evaluation")]
    assert len(accuracy) == 3 and found["scores/accuracy"] == accuracy
    others = {name for name in found if not name.startswith("scores/")}
    assert others == {"loss", "gradient norm", "learning rate", "speed/samples per second"}
    assert not {"scores/huge", "scores/missing", "scores/table"} & found.keys()


def test_without_tensorboard_what_to_install_is_said(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with refuses("pip install tensorboard"):
        write_events(trained[1], tmp_path)


def test_writing_events_imports_no_tensorflow_which_would_take_a_tpu(trained, tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('imported')")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; from tpukit_tools.cli import main; "
    )
    code += (
        f"sys.exit(main(['report', {str(trained[1].path)!r}, '--tensorboard', {str(tmp_path / 'events')!r}]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and str(tmp_path / "events") in ran.stdout, ran.stdout + ran.stderr
