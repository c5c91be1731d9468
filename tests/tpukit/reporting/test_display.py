"""Showing a task or a run in a notebook or a shell: what is shown, where it is saved, what is predicted."""

import contextlib
import dataclasses
import importlib.util
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tests.tpukit.reporting.hostile import SPEED, evaluated, write_run
from tpukit import MNIST, Checkpoints, MSHNet, Run, TpukitError, leaves
from tpukit.host.tables import Table
from tpukit.inference.trained import find_trained
from tpukit.reporting import display, figures
from tpukit.training.prediction import predict_test_images


def test_one_table_has_the_last_scores_and_beside_them_those_of_the_kept_weights_and_of_other_methods(
    tmp_path, shown
):
    scores = enumerate((0.25, 0.75, 0.75, 0.5))
    records = [evaluated(2 * n + 2, n, dict(accuracy=score), kept=n < 2) for n, score in scores]
    records[-1]["scores"]["beside"] = {"guessing": dict(accuracy=0.1)}
    write_run(tmp_path / "run", records)
    display.show(str(tmp_path / "run"))
    table, curves = shown
    assert (tmp_path / "run/pictures/curves.png").read_bytes() == curves.data
    assert table.title == "Scores after epoch 4 (last) and epoch 2 (kept)"
    assert table.columns == ("score", "last", "kept", "guessing")
    assert table.rows == [("accuracy", "0.5000", "0.7500", "0.1000")]
    display.show(write_run(tmp_path / "other", records[:2]))
    assert shown[2].columns == ("score", "last, kept") and shown[2].rows == [("accuracy", "0.7500")]


def test_a_sentence_below_the_scores_says_what_is_wrong_with_them(tmp_path, shown):
    records = [evaluated(2, 0, dict(iou=0.01, pd=1.0, fa=0.9), kept=True)]
    display.show(write_run(tmp_path / "run", records, task="mshnet"))
    assert shown[1] == ["The network marks far too many pixels: train longer."]


class Fibres(MNIST):
    """A task of a user's own, in whose scores names mean something else."""

    name = "fibres"

    def verdict(self, scores, last):
        return f"{self.channels} channels: fractional anisotropy {scores['fa']}, at last {last['fa']}."

    def figures(self, scores):
        drawn = figures.panels_figure([[("fibres", np.eye(4))]], f"of {scores['fa']}")
        return dict(fibres=drawn, table=Table("Fibres", ("fa",), [(scores["fa"],)]))


def test_a_users_own_task_says_and_draws_what_it_thinks_of_its_scores_and_without_it_nobody_does(
    tmp_path, shown
):
    run = Run.open(tmp_path / "run", Fibres(channels=8))
    about = dict(speed=dict(seconds=1.0))
    roc, confusion = dict(roc=ROC), dict(confusion=CONFUSION)  # which this task does not draw
    run.log("evaluation", 2, epoch=0, scores=dict(fa=0.45, pd=0, accuracy=0.1) | roc, kept=True, **about)
    run.log("evaluation", 4, epoch=1, scores=dict(fa=0.5, accuracy=0.1) | confusion, kept=False, **about)
    display.show(run)
    scores, verdict, _, _, table = shown
    assert verdict == ["8 channels: fractional anisotropy 0.45, at last 0.5."]
    assert table.rows == [("0.45",)]  # of the kept weights
    assert {path.name for path in (run.path / "pictures").iterdir()} == {"curves.png", "fibres.png"}
    shown.clear()
    for found in (run.path, Run.find(run.path)):  # without the class
        display.show(found)
        assert shown[0].title == scores.title and len(shown) == 2  # the scores, and the curves
        shown.clear()


@pytest.mark.parametrize(
    "task",
    ["os.system", "os", "antigravity", "../../tmp/evil", ".mshnet", "mshnet.model", "MSHNet", "", "\0"],
)
def test_a_name_that_a_file_gives_as_a_task_is_imported_only_if_it_is_one_of_tpukits(
    task, tmp_path, shown, monkeypatch
):
    asked = []
    monkeypatch.setattr(leaves, "importlib", SimpleNamespace(import_module=asked.append, util=importlib.util))
    records = [evaluated(2, 0, dict(fa=0.9, pd=0.0, roc=ROC, confusion=CONFUSION), kept=True)]
    display.show(write_run(tmp_path / "run", records, task=task))
    assert not asked and len(shown) == 2  # the scores, and the curves


@pytest.mark.parametrize("task", [{"mshnet": 1}, ["mshnet"], 7, None])
def test_a_task_that_is_no_text_is_a_damaged_file(task, tmp_path):
    with refuses("config.json is damaged"):
        display.show(write_run(tmp_path / "run", [evaluated(2, 0, dict(fa=0.9), kept=True)], task=task))


def test_a_run_of_a_task_that_was_cut_off_shows_what_holds_for_any(tmp_path, shown, monkeypatch):
    monkeypatch.setattr(leaves, "tasks", dict)
    display.show(
        write_run(tmp_path / "run", [evaluated(2, 0, dict(fa=0.9, roc=ROC), kept=True)], task="mshnet")
    )
    assert len(shown) == 2


def test_a_chinese_notebook_has_chinese_tables_and_sentences_and_a_name_that_is_no_word_stays(
    tmp_path, shown, monkeypatch
):
    monkeypatch.setenv("TPUKIT_LANGUAGE", "zh")
    scores = enumerate((0.25, 0.75, 0.5))
    records = [evaluated(2 * n + 2, n, dict(accuracy=score, mine=1.0), kept=n < 2) for n, score in scores]
    display.show(write_run(tmp_path / "run", records))
    assert shown[0].title == "第 3 轮（最后）和第 2 轮（保留）之后的分数"
    assert shown[0].columns == ("分数", "最后一轮", "保留的")
    assert [row[0] for row in shown[0].rows] == ["正确率", "mine"]
    display.show(MNIST(precision="fp32"))
    assert re.fullmatch(r"MNIST 的设置 · \d+ 个取默认值", shown[-1].title)
    assert shown[-1].rows == [("precision", "fp32")]  # a name of code, not the score of that name
    display.show_report(Run.open(tmp_path / "new", MNIST()))
    assert str(shown[-1]) == "- 这次训练还没有开始。"


def test_a_run_shows_its_roc_and_one_without_an_interval_says_so(tmp_path, shown):
    run = Run.open(tmp_path / "run", MSHNet())
    display.show(run)
    run.log("start", 0, device="cpu", batch_size=4, max_graphs=1, steps_per_epoch=2)
    display.show(run)
    assert shown == [["No interval of training was recorded yet."]] * 2
    assert not (run.path / "pictures").exists()
    shown.clear()
    roc = dict(tpr=[1.0, 0.5], fpr=[1.0, 0.1], precision=[0.1, 0.9])
    scores = dict(pixel_recall=0.9, roc=roc)
    run.log("evaluation", 2, epoch=0, scores=scores, kept=True, speed=dict(seconds=1.0))
    display.show(run)
    assert shown[0].rows == [("pixel recall", "0.9000")] and shown[1].data.startswith(b"\x89PNG")
    assert [path.name for path in (run.path / "pictures").iterdir()] == ["roc.png"]


def test_the_settings_that_differ_are_shown_and_the_others_are_counted(shown):
    display.show(MSHNet(dataset_dir="here", epochs=3, clip_norm=None, skip_bad=True))
    (table,) = shown
    assert dict(table.rows) == dict(dataset_dir="here", epochs="3", skip_bad="True")
    count = len(dataclasses.fields(MSHNet))
    assert table.title == f"Settings of MSHNet · {count - 3} at their defaults"


def test_one_show_for_a_run_a_folder_of_runs_and_a_task_and_nothing_else(shown, tmp_path, capsys):
    write_run(tmp_path / "runs/a", [evaluated(2, 0, dict(accuracy=0.5))])
    display.show(tmp_path / "runs/a")
    assert "0.5000" in str(shown[0].rows)
    display.show(str(tmp_path / "runs"))
    assert "one run" in capsys.readouterr().out
    display.show(MNIST(lr=0.125))
    assert ("lr", "0.125") in shown[-1].rows
    with pytest.raises(TpukitError, match="no config.json"):
        display.show(tmp_path)
    for other in (None, 3, Image.new("L", (2, 2))):
        with pytest.raises(TpukitError, match=type(other).__name__):
            display.show(other)


@pytest.mark.parametrize("show", [display.show_samples, display.show_labels])
def test_a_task_without_a_dataset_shows_no_samples_and_names_how_to_find_one(show):
    with refuses("needs a dataset_dir", "find_dataset('mnist')"):
        show(MNIST())


def test_test_images_are_predicted_by_the_best_weights_evenly_over_the_set(trained):
    import torch

    from tpukit.runs import weights

    task, run = trained
    batch, predicted = predict_test_images(run, task, 20)
    whole = task.test_set().batch(np.linspace(0, 39, 20).astype(int))
    np.testing.assert_array_equal(batch["image"], whole["image"])
    assert batch["valid"].all() and len(batch["valid"]) == 20
    model = task.model().eval()
    weights.load(model, run.path / "best.safetensors")
    with torch.no_grad():
        expected = model(torch.as_tensor(whole["image"]).float() / 255).argmax(1)
    assert torch.equal(predicted, expected)


def test_a_run_without_best_weights_predicts_nothing(tmp_path):
    with refuses(tmp_path, "no best weights"):
        display.show_predictions(Run(tmp_path), MNIST())


SPEEDS = dict(SPEED, counters=dict(fallbacks={"a": 3}), memory=[[2**30, 2**34]], to_device_s=0.1)
CONFUSION = dict(classes=["a", "b"], counts=[[1, 0], [1, 2]])
ROC = dict(tpr=[1.0, 0.5], fpr=[1.0, 0.5], precision=[0.1, 0.5])
RECORDS = "records.jsonl"
WHOLE = {
    "config.json": dict(id="1", task="mnist", settings=dict(epochs=2, batch_size=4, freeze=[], weights=None)),
    "progress.json": dict(step=4, total=9),
    "checkpoints/checkpoints.json": {"checkpoints/step-00000008.pt": ["00"], "best.safetensors": ["00"]},
    RECORDS: [
        dict(kind="start", step=0, device="cpu", batch_size=4, max_graphs=1, steps_per_epoch=4),
        dict(kind="compile", step=1, what="step", programs=1, seconds=9.0, why=["a"], refused=False),
        dict(kind="train", step=4, loss=1.0, grad_norm=1.0, speed=SPEEDS),
        evaluated(8, 1, dict(accuracy=0.5, beside={"x": {}}, confusion=CONFUSION, roc=ROC)),
    ],
}
HUGE, DEEP = "a huge number", "a deep list"
OTHER = (None, True, 7, -1, HUGE, "x", [], {}, DEEP)


def replaced(values):
    """All documents that differ from this one in one value, or are another altogether."""
    yield from OTHER
    items = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    )
    for key, value in items:
        for other in replaced(value):
            changed = values.copy()
            changed[key] = other
            yield changed


@pytest.mark.filterwarnings("ignore:.*damaged and left out")
@pytest.mark.parametrize(
    "name, task",
    [*((name, "mnist") for name in WHOLE if name != RECORDS), (RECORDS, "mshnet"), (RECORDS, "images")],
)
def test_no_file_of_a_run_whatever_it_holds_ends_in_anything_but_a_sentence(
    name, task, tmp_path, monkeypatch
):
    def look(act):
        with contextlib.suppress(TpukitError):
            act()

    run = write_run(tmp_path / "run", WHOLE[RECORDS], **WHOLE["config.json"] | dict(task=task))
    (run.path / "checkpoints/step-00000008.pt").write_bytes(b"a checkpoint")
    (run.path / "best.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(display, "present_figure", lambda *_: None)  # drawn, and not made a file
    reads = [run.records, run.read_progress, run.checkpoints, run.stop_requested, lambda: run.config]
    acts = [*reads, lambda: display.show_report(run), lambda: display.show(run.path)]
    if name != RECORDS:
        acts += [lambda: find_trained(run.path), lambda: Checkpoints(run.path).restore()]
        acts += [lambda: Run.open(run.path, MNIST(epochs=2, batch_size=4))]
    every = 8 if name == RECORDS else 1  # records are drawn: all of them take a minute
    for document in [*replaced(WHOLE[name])][::every]:
        lines = document if isinstance(document, list) and name == RECORDS else [document]
        text = "\n".join(json.dumps(dict(line, time=0) if isinstance(line, dict) else line) for line in lines)
        text = text.replace(f'"{HUGE}"', "1e999").replace(f'"{DEEP}"', "[" * 9000 + "]" * 9000)
        for act in acts:
            (run.path / name).write_text(text)
            look(act)
