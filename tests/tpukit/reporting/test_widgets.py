"""What moves in a notebook: the live chart, and the controls to look at a finished run."""

import functools
import json
import os
import sys
import threading
import time

import pytest

from tests import warm
from tests.conftest import ROOT, refuses, wait_for
from tests.tpukit.reporting.hostile import SPEED, evaluated, write_run
from tpukit import MNIST, Run
from tpukit.host import environment
from tpukit.reporting import figures, live, presenting, widgets


@pytest.fixture
def run(tmp_path):
    found = Run.open(tmp_path / "run", MNIST())
    found.log("start", 0, device="cpu", batch_size=4, max_graphs=1, steps_per_epoch=2)
    return found


def train(run, step):
    run.log("train", step, epoch=0, loss=1.5, grad_norm=1.0, lr=0.1, speed=SPEED, memory=[])


def test_where_no_page_is_open_nothing_is_shown_and_no_thread_started(run, monkeypatch, capsys):
    monkeypatch.setattr("IPython.display.display", pytest.fail)
    before = threading.active_count()
    with live.live(run):
        assert threading.active_count() == before
    assert capsys.readouterr().out == ""


def test_the_chart_is_there_at_once_is_redrawn_when_something_was_written_and_a_last_time_at_the_end(
    run, page
):
    with pytest.raises(KeyboardInterrupt), live.live(run, every_s=0.01):
        assert len(page.shown) == 1 and page.shown[0].data.startswith(b"\x89PNG")
        time.sleep(0.2)
        assert not page.updates  # nothing was written
        records = run.path / "records.jsonl"
        os.utime(records, ns=(records.stat().st_mtime_ns + 10**9,) * 2)
        time.sleep(0.2)
        assert not page.updates  # no loss was written
        train(run, 1)
        wait_for(lambda: page.updates)
        assert page.threads[0] is not threading.main_thread()
        time.sleep(0.2)
        assert len(page.updates) == 1
        raise KeyboardInterrupt
    assert len(page.shown) == 1 and len(page.updates) == 2 and page.threads[1] is threading.main_thread()


def test_drawings_that_take_long_are_ten_seconds_apart_at_most(run, page, monkeypatch):
    """Their share of the thread's time alone would put them 26 s apart."""
    done, waits = threading.Event(), []

    def wait(seconds):
        waits.append(seconds)
        train(run, len(waits))
        os.utime(run.path / "records.jsonl", ns=(time.time_ns() + len(waits) * 10**9,) * 2)
        return len(waits) > 2

    monkeypatch.setattr(done, "wait", wait)
    monkeypatch.setattr(time, "thread_time", iter([0.0, 0.53, 1.0, 1.02]).__next__)
    live.LiveChart(run).follow(done, every_s=0.5)
    assert waits == [0.5, 10.0, pytest.approx(1.0)]


@pytest.mark.parametrize("file", ["config.json", "records.jsonl"])
def test_what_cannot_be_drawn_is_said_once_and_disturbs_no_training(file, run, page, capsys):
    (run.path / file).unlink()
    (run.path / file).mkdir()
    after = []
    with live.live(run, every_s=0.01):
        for second in (10**9, 2 * 10**9, 3 * 10**9):
            os.utime(run.path / "records.jsonl", ns=(time.time_ns() + second,) * 2)
            time.sleep(0.05)
        after.append("trained")
    assert after and not page.shown and capsys.readouterr().out.count("could not be drawn") == 1


TRAINING = """
import pathlib, tpukit
task = tpukit.MNIST(dataset_dir=pathlib.Path({data!r}), epochs=2, batch_size=16, log_every=3)
run = tpukit.Run.open({run!r}, task)
with tpukit.live(run, every_s=0.1):
    tpukit.launch(tpukit.train, task, run, cores={cores})
"""


@pytest.mark.slow
def test_in_a_kernel_one_picture_is_redrawn_in_place_on_one_core_and_on_two(digits, tmp_path):
    from jupyter_client.manager import start_new_kernel

    environ = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    environ.pop("PJRT_DEVICE", None)  # launched on CPU cores
    manager, client = start_new_kernel(300, warm.kernel(), env=environ)

    def pictures(cores):
        messages = []
        code = TRAINING.format(data=str(digits), run=str(tmp_path / f"cores-{cores}"), cores=cores)
        hook = dict(allow_stdin=True, stdin_hook=pytest.fail, output_hook=messages.append)
        reply = client.execute_interactive(code, timeout=240, **hook)
        assert reply["content"]["status"] == "ok", reply["content"]["traceback"]
        kinds = ("display_data", "update_display_data")
        found = [m for m in messages if m["msg_type"] in kinds and "image/png" in m["content"]["data"]]
        return [(m["msg_type"], m["content"]["transient"]["display_id"]) for m in found]

    try:
        for cores in (1, 2):
            (first, place), *others = pictures(cores)
            assert first == "display_data"
            assert len(others) >= 2 and set(others) == {("update_display_data", place)}
            assert Run(tmp_path / f"cores-{cores}").records("start")[0]["cores"] == cores
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


# Looking at a finished run


@pytest.mark.parametrize("why", ["no page", "no ipywidgets"])
def test_without_a_page_or_without_ipywidgets_one_picture_is_shown(why, page, monkeypatch):
    monkeypatch.setattr(presenting, "notebook_kernel", object)
    if why == "no page":
        monkeypatch.setattr(environment, "is_interactive_notebook", lambda: False)
    else:
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    draw = functools.partial(figures.runs_figure, {}, "mnist", [])
    widgets.show_with_controls(draw, score=("Dropdown", dict(value="iou", options=["iou", "loss"])))
    assert len(page.shown) == 1 and page.shown[0].data.startswith(b"\x89PNG") and not page.updates


def curved(folder, name, *more, **scores):
    """A run of two epochs with these scores, and more records."""
    records = [dict(kind="start", step=0, device="cpu", batch_size=4, max_graphs=1, steps_per_epoch=2)]
    return write_run(folder / name, [*records, evaluated(2, 0, scores), evaluated(4, 1, scores), *more]).path


def options(box):
    runs, score = box.children
    return list(runs.options), list(runs.value), list(score.options), score.value


def drawn_by(monkeypatch):
    """What is drawn of the runs of a folder: (series of each run, score, task)."""
    calls, draw = [], figures.runs_figure

    def recording(curves, task, runs, score):
        series = {run: curves[run][score] for run in runs if score in curves[run]}
        calls.append((series, score, task))
        return draw(curves, task, runs, score)

    monkeypatch.setattr(figures, "runs_figure", recording)
    return calls


def test_runs_are_compared_by_the_curve_that_is_chosen(page, tmp_path, monkeypatch, capsys):
    with refuses(tmp_path):
        widgets.show_runs(tmp_path)
    curved(tmp_path, "a", accuracy=0.5)
    widgets.show_runs(tmp_path)
    assert "one run" in capsys.readouterr().out and not page.shown  # its curve was shown before
    curved(tmp_path, "b", dict(kind="train", step=4, loss=1.0, grad_norm=1.0, speed=SPEED), iou=0.25)
    broken = curved(tmp_path, "c", iou=0.75)
    (broken / "records.jsonl").write_bytes((broken / "records.jsonl").read_bytes()[:-30])
    Run.open(tmp_path / "empty", MNIST())
    calls = drawn_by(monkeypatch)
    with pytest.warns(UserWarning, match="damaged"):
        widgets.show_runs(tmp_path)
    box = page.shown[-2]
    runs, scores = ["a", "b", "c"], ["accuracy", "gradient norm", "iou", "loss"]
    assert options(box) == (runs, runs, scores, "loss")
    assert calls[-1] == ({"b": ([2.0], [1.0])}, "loss", "mnist")
    box.children[1].value = "iou"
    assert calls[-1] == ({"b": ([1.0, 2.0], [0.25, 0.25]), "c": ([1.0], [0.75])}, "iou", "mnist")
    box.children[0].value = ("a",)
    assert calls[-1] == ({}, "iou", "mnist")  # "no run has this score"


def of_task(folder, name, task, score, **scores):
    path = curved(folder, name, **scores)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | dict(task=task, score_names=score)))


def test_runs_of_different_tasks_have_a_chart_for_each_task_and_the_names_of_its_scores(
    tmp_path, monkeypatch, capsys
):
    for name in "ab":
        of_task(tmp_path, f"mshnet-{name}", "mshnet", dict(iou="IoU"), iou=0.5)
        of_task(tmp_path, f"own-{name}", "../../my task", {}, loss=5.4)
    of_task(tmp_path, "mnist", "mnist", {}, accuracy=0.9)
    (curved(tmp_path, "damaged", iou=0.75) / "config.json").write_text("{")
    calls = drawn_by(monkeypatch)
    widgets.show_runs(tmp_path)
    assert [(sorted(series), *names) for series, *names in calls] == [
        (["mshnet-a", "mshnet-b"], "IoU", "mshnet"),
        (["own-a", "own-b"], "loss", "../../my task"),
    ]
    said = capsys.readouterr().out
    assert "Only one run of mnist so far (mnist)" in said and "an unknown task so far (damaged)" in said
    assert {path.name for path in tmp_path.glob("*.png")} == {"runs-mshnet.png", "runs-my-task.png"}


def test_a_shell_is_told_where_the_chart_of_several_runs_is(tmp_path, capsys):
    for name in "ab":
        curved(tmp_path, name, iou=0.5)
    widgets.show_runs(tmp_path)
    assert capsys.readouterr().out.strip() == f"picture: {tmp_path / 'runs.png'}"
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
