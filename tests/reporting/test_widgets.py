"""What moves in a notebook: the live chart, and the controls to look at a finished run."""

import os
import sys
import threading
import time

import numpy as np
import pytest

from tests.conftest import ROOT, refuses
from tests.reporting.hostile import EVIL, SPEED, evaluated, strange_run, write_run
from tests.tasks.mshnet.small import Narrow
from tpukit import MNIST, Run
from tpukit.host import environment
from tpukit.reporting import figures, output, widgets
from tpukit.training import prediction


@pytest.fixture
def run(tmp_path):
    found = Run.open(tmp_path / "run", MNIST())
    found.log("start", 0, device="cpu", batch_size=4, max_graphs=1, steps_per_epoch=2)
    return found


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_where_no_page_is_open_nothing_is_shown_and_no_thread_started(run, monkeypatch, capsys):
    monkeypatch.setattr("IPython.display.display", pytest.fail)
    before = threading.active_count()
    with widgets.live(run):
        assert threading.active_count() == before
    assert capsys.readouterr().out == ""


def test_the_chart_is_there_at_once_is_redrawn_when_something_was_written_and_a_last_time_at_the_end(
    run, page
):
    with pytest.raises(KeyboardInterrupt), widgets.live(run, every_s=0.01):
        assert len(page.shown) == 1 and page.shown[0].data.startswith(b"\x89PNG")
        time.sleep(0.2)
        assert not page.updates  # nothing was written
        records = run.path / "records.jsonl"
        os.utime(records, ns=(records.stat().st_mtime_ns + 10**9,) * 2)  # as a training that writes
        wait_for(lambda: page.updates)
        assert page.threads[0] is not threading.main_thread()
        time.sleep(0.2)
        assert len(page.updates) == 1
        raise KeyboardInterrupt
    assert len(page.shown) == 1 and len(page.updates) == 2 and page.threads[1] is threading.main_thread()


def test_the_thread_draws_nothing_when_a_launch_deletes_the_progress_of_an_earlier_one_before_it_forks(
    run, page
):
    run.write_progress(step=1, total=1, unit="step")
    with widgets.live(run, every_s=0.01):
        (run.path / "progress.json").unlink()
        time.sleep(0.3)
        assert not page.updates


@pytest.mark.parametrize("file", ["config.json", "records.jsonl"])
def test_what_cannot_be_drawn_is_said_once_and_disturbs_no_training(file, run, page, capsys):
    (run.path / file).unlink()
    (run.path / file).mkdir()
    after = []
    with widgets.live(run, every_s=0.01):
        for second in (10**9, 2 * 10**9, 3 * 10**9):
            os.utime(run.path / "records.jsonl", ns=(time.time_ns() + second,) * 2)
            time.sleep(0.05)
        after.append("trained")
    assert after and not page.shown and capsys.readouterr().out.count("could not be drawn") == 1


def test_drawing_takes_at_most_two_hundredths_of_the_time_and_no_more_often_than_asked(run, monkeypatch):
    clock, draws, waits = [0.0], [], []
    chart = widgets.LiveChart(run)
    seconds = iter([0.01, 0.05, 0.4, 3.0, 0.02])

    class Done:
        def wait(self, wait_s):
            waits.append(wait_s)
            clock[0] += wait_s
            return len(draws) == 5

    def update():
        draws.append(next(seconds))
        clock[0] += draws[-1]

    monkeypatch.setattr(widgets.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(chart, "update", update)
    monkeypatch.setattr(chart, "_written_at", iter(range(1, 10)).__next__)
    chart._seen = 0
    chart.follow(Done(), 5.0)
    assert waits[0] == 5.0 and min(waits) >= 5.0
    for drawn, waited in zip(draws, waits[1:]):
        assert drawn <= 0.02 * (drawn + waited)
    assert waits[1] == 5.0  # a quick one waits no longer than asked


TRAINING = """
import pathlib, tpukit
task = tpukit.MNIST(dataset_dir=pathlib.Path({data!r}), epochs=2, batch_size=16, log_every=3)
run = tpukit.Run.open({run!r}, task)
with tpukit.live(run, every_s=0.1):
    tpukit.launch(tpukit.train, task, run, cores={cores})
"""


@pytest.mark.slow
def test_in_a_kernel_one_picture_is_redrawn_in_place_on_one_core_and_on_two_and_none_where_nobody_looks(
    digits, tmp_path
):
    from jupyter_client.manager import start_new_kernel

    environ = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    environ.pop("PJRT_DEVICE", None)  # launched on CPU cores
    manager, client = start_new_kernel(env=environ)

    def pictures(cores, looks, name):
        messages = []
        code = TRAINING.format(data=str(digits), run=str(tmp_path / name), cores=cores)
        hook = dict(allow_stdin=looks, stdin_hook=pytest.fail, output_hook=messages.append)
        reply = client.execute_interactive(code, timeout=240, **hook)
        assert reply["content"]["status"] == "ok", reply["content"]["traceback"]
        kinds = ("display_data", "update_display_data")
        found = [m for m in messages if m["msg_type"] in kinds and "image/png" in m["content"]["data"]]
        return [(m["msg_type"], m["content"]["transient"]["display_id"]) for m in found]

    try:
        for cores in (1, 2):
            (first, place), *others = pictures(cores, True, f"cores-{cores}")
            assert first == "display_data"
            assert len(others) >= 2 and set(others) == {("update_display_data", place)}
            assert Run(tmp_path / f"cores-{cores}").records("start")[0]["cores"] == cores
        assert pictures(1, False, "unseen") == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


# Looking at a finished run


def logits_of(probability):
    return np.log(probability / (1 - np.asarray(probability)))


@pytest.fixture
def drawn(monkeypatch):
    """Two images of 32 x 32 with a target of 2 x 2 each: the first is predicted with 0.8 and beside it, far
    away, a false region of 3 pixels with 0.4; of the second, two pixels with 0.6. Returns (task, run, what
    `threshold_figure` got)."""
    import torch

    label, probability = np.zeros((2, 1, 32, 32), np.uint8), np.full((2, 1, 32, 32), 0.01)
    label[0, 0, 4:6, 4:6] = label[1, 0, 10:12, 4:6] = 255
    probability[0, 0, 4:6, 4:6] = 0.8
    probability[0, 0, 20, 20:23] = 0.4
    probability[1, 0, 10, 4:6] = 0.6
    image = torch.zeros((2, 1, 32, 32), dtype=torch.uint8)
    batch = dict(image=image, mask=torch.as_tensor(label), valid=torch.ones(2, dtype=torch.bool))
    predicted = batch, torch.as_tensor(logits_of(probability), dtype=torch.float32)
    monkeypatch.setattr(prediction, "predict_test_images", lambda *_: predicted)
    calls, draw = [], figures.threshold_figure
    monkeypatch.setattr(figures, "threshold_figure", lambda *given: calls.append(given) or draw(*given))
    return Narrow(), predicted, calls


def test_the_scores_at_a_threshold_are_those_of_the_pixels_above_it(drawn, tmp_path):
    task, (batch, predicted), calls = drawn
    widgets.explore(Run(tmp_path), task)
    [(scores, _, threshold, panels)] = calls
    assert threshold == 0.5 and scores[0.5] == task.evaluate([(predicted, batch)])
    found = {at: [round(scores[at][name], 9) for name in ("iou", "pd", "fa")] for at in (0.3, 0.5, 0.7, 0.9)}
    pixels = 2 * 32 * 32
    assert found[0.3] == [round(6 / 11, 9), 1.0, round(3 / pixels, 9)]  # 4 + 2 found, 3 false, 8 labelled
    assert found[0.5] == [6 / 8, 1.0, 0.0]
    assert found[0.7] == [4 / 8, 0.5, 0.0]
    assert found[0.9] == [0.0, 0.0, 0.0]
    assert panels[0][0] == "IoU 1.00: 1 of 1 hit, 0 false"
    with refuses("mnist"):  # it has no threshold
        widgets.explore(Run(tmp_path), MNIST())


def test_a_slider_that_is_moved_redraws_the_picture_in_place(drawn, page, tmp_path):
    task, _, calls = drawn
    widgets.explore(Run(tmp_path), task)
    box, _ = page.shown
    threshold, image = box.children
    threshold.value = 0.3
    assert calls[-1][2] == 0.3 and calls[-1][3][0][0] == "IoU 0.57: 1 of 1 hit, 1 false"
    image.value = 2
    assert calls[-1][2] == 0.3 and calls[-1][3][0][0] == "IoU 0.50: 1 of 1 hit, 0 false"
    assert len(page.shown) == 2 and len(page.updates) == 2 and image.max == 2


@pytest.mark.parametrize("why", ["no page", "no ipywidgets"])
def test_without_a_page_or_without_ipywidgets_one_picture_is_shown(why, drawn, page, monkeypatch, tmp_path):
    task, _, _ = drawn
    monkeypatch.setattr(output, "in_notebook", lambda: True)
    if why == "no page":
        monkeypatch.setattr(environment, "is_interactive_notebook", lambda: False)
    else:
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    widgets.explore(Run(tmp_path), task)
    assert len(page.shown) == 1 and page.shown[0].data.startswith(b"\x89PNG") and not page.updates


def curved(folder, name, *more, **scores):
    """A run of two epochs with these scores, and more records."""
    records = [dict(kind="start", step=0, device="cpu", batch_size=4, max_graphs=1, steps_per_epoch=2)]
    return write_run(folder / name, [*records, evaluated(2, 0, scores), evaluated(4, 1, scores), *more]).path


def options(box):
    runs, score = box.children
    return list(runs.options), list(runs.value), list(score.options), score.value


def test_runs_are_compared_by_the_curve_that_is_chosen(page, tmp_path, monkeypatch, capsys):
    with refuses(tmp_path):
        widgets.show_runs(tmp_path)
    curved(tmp_path, "a", accuracy=0.5)
    widgets.show_runs(tmp_path)
    # Of one run there is nothing to compare: its numbers, and no second picture of its curve.
    assert "a: accuracy 0.5." in capsys.readouterr().out and not page.shown
    curved(tmp_path, "b", dict(kind="train", step=4, loss=1.0, grad_norm=1.0, speed=SPEED), iou=0.25)
    broken = curved(tmp_path, "c", iou=0.75)
    (broken / "records.jsonl").write_bytes((broken / "records.jsonl").read_bytes()[:-30])
    (broken / "config.json").write_text("{")
    Run.open(tmp_path / "empty", MNIST())
    calls, draw = [], figures.runs_figure
    monkeypatch.setattr(figures, "runs_figure", lambda *given: calls.append(given) or draw(*given))
    with pytest.warns(UserWarning, match="damaged"):
        widgets.show_runs(tmp_path)
    box = page.shown[-2]
    runs, scores = ["a", "b", "c"], ["accuracy", "gradient norm", "iou", "loss"]
    assert options(box) == (runs, runs, scores, "loss")
    assert calls[-1] == ({"b": ([2.0], [1.0])}, "loss")
    box.children[1].value = "iou"
    assert calls[-1] == ({"b": ([1.0, 2.0], [0.25, 0.25]), "c": ([1.0], [0.75])}, "iou")
    box.children[0].value = ("a",)
    assert calls[-1] == ({}, "iou")  # "no run has this score"


def test_names_of_runs_and_scores_are_shown_and_not_obeyed(page, tmp_path):
    names = ["$\\frac$", "\x1b[2J", "_hidden", "<b>x", "\udcff"]
    for name in names:
        curved(tmp_path, name, **{EVIL: 0.5, "$\\frac{": 0.5})
    strange_run(tmp_path / "strange", EVIL)
    widgets.show_runs(tmp_path)
    runs, _, scores, _ = options(page.shown[-2])
    for shown in [*runs, *scores]:
        shown.encode()  # a surrogate could not be sent to the page
        assert "\x1b" not in shown
    box = page.shown[-2]
    for score in scores:
        box.children[0].value, box.children[1].value = runs, score  # draws: a formula would raise
    assert len(page.updates) >= len(scores)
