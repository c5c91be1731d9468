"""What a run's report says of the accelerator."""

import re

import numpy as np
import pytest

from tests.reporting.hostile import strange_run
from tpukit import cli, train
from tpukit.reporting import figures, findings
from tpukit.runs.run import Run


def test_a_finished_run_that_is_started_again_is_still_reported_by_the_session_that_trained(trained, cpu):
    task, run = trained
    before = findings.findings(run.records()), [str(t) for t in findings.accelerator_tables(run.records())]
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    assert len(run.records("start")) == 2
    assert (
        findings.findings(run.records()),
        [str(t) for t in findings.accelerator_tables(run.records())],
    ) == before


@pytest.mark.parametrize(
    "name, times",
    [
        pytest.param("records.jsonl", 100, marks=pytest.mark.slow),
        ("config.json", 10),
        ("progress.json", 30),
        ("checkpoints/checkpoints.json", 30),
    ],
)
def test_one_flipped_bit_in_a_file_of_a_run_never_gives_a_traceback(
    name, times, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda *a, **k: None
    )  # what is drawn shows when it is laid out
    run, random = strange_run(tmp_path / "run", "word"), np.random.default_rng(0)
    whole = (run.path / name).read_bytes()
    for place in random.integers(8 * len(whole), size=times):
        bits = bytearray(whole)
        bits[place // 8] ^= 1 << place % 8
        (run.path / name).write_bytes(bits)
        assert cli.main(["report", str(run.path)]) == 0, place
        findings.is_finished(run.read_progress(), run.checkpoints())
        findings.headline(run.records(), run.read_progress())
    assert "Traceback" not in "".join(capsys.readouterr())


DAMAGES = [
    lambda r: r.pop("kind"),
    lambda r: r.update(step="8"),
    lambda r: r.pop("speed"),
    lambda r: r["speed"].update(seconds=None),
    lambda r: r["speed"].update(seconds=float("inf")),
    lambda r: r["speed"].update(images_per_s=10**400),
    lambda r: r["speed"].update(memory=[[1]]),
    lambda r: r["speed"].pop("counters"),
    lambda r: r["speed"]["counters"]["fallbacks"].update(a="b"),
    lambda r: r.update(loss=True),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_left_out_and_counted(damage, tmp_path):
    records = strange_run(tmp_path / "run", "word").records()
    first, second = [r for r in records if r["kind"] == "train"]
    damage(second)
    assert [i["to"] for i in findings.intervals(records)] == [4] and findings.curves(records)["loss"] == (
        [4],
        [1.0],
    )
    assert findings.findings(records) == [
        "Left out: 1 damaged record.",
        *findings.findings([r for r in records if r is not second]),
    ]
    assert findings.valid_records([*records, [], None, "word"]) == [r for r in records if r is not second]


def test_intervals_divide_their_own_times_by_their_steps():
    def reading(step, seconds, sent):
        counters = dict.fromkeys(("compilations", "compile_s", "executions", "execute_s"), 1) | dict(
            fallbacks={}
        )
        counters |= dict(
            to_device_s=99.0, from_device_s=99.0
        )  # since the process began: of the whole dataset too
        speed = dict(
            to_device_s=sent,
            from_device_s=sent / 2,
            seconds=seconds,
            images_per_s=(5 * 4) / seconds,
            wait_s=seconds / 10,
            counters=counters,
            memory=[[2**30, 2**34]],
        )
        return dict(kind="train", step=step, speed=speed)

    records = [
        dict(kind="start", step=0, device="tpu", batch_size=4),
        reading(5, 1.0, 0.05),
        reading(10, 2.0, 0.15),
    ]
    first, second = findings.intervals(records)
    assert (first["from"], first["to"], second["from"], second["to"]) == (1, 5, 6, 10)
    assert first["step_ms"] == pytest.approx(200) and second["step_ms"] == pytest.approx(400)
    assert first["wait_ms"] == pytest.approx(20) and first["to_device_ms"] == pytest.approx(10)
    assert second["to_device_ms"] == pytest.approx(30) and second["from_device_ms"] == pytest.approx(15)


def test_a_model_that_torch_compile_compiles_is_not_reported_as_run_by_operation():
    speed = dict(seconds=1.0, images_per_s=8.0, wait_s=0.0, memory=[], counters={})
    trained = dict(kind="train", step=8, epoch=0, loss=1.0, grad_norm=1.0, speed=speed)
    for mode, words in (("no", "Nothing is compiled"), ("reduce-overhead", "torch.compile.*reduce-overhead")):
        start = dict(kind="start", step=0, device="cuda", batch_size=1, torch_compile=mode)
        sentences = " ".join(findings.findings([start, trained]))
        assert re.search(words, sentences) and "does not report how much of its memory" in sentences


def test_a_step_that_was_captured_on_a_gpu_is_reported_and_one_that_could_not_be_with_the_reason():
    speed = dict(seconds=1.0, images_per_s=8.0, wait_s=0.0, memory=[], counters={})
    trained = dict(kind="train", step=8, epoch=0, loss=1.0, grad_norm=1.0, speed=speed)
    start = dict(kind="start", step=0, device="cuda", batch_size=1, torch_compile="no")
    event = dict(kind="compile", step=4, what="step", seconds=0.5, refused=False)
    for programs, why, words, marked in (
        (1, [], "at step 4 (0.5 s)", [4]),
        (0, ["in fp16 so"], "because in fp16 so.", []),
    ):
        records = [start, event | dict(programs=programs, why=why), trained]
        sentences = " ".join(findings.findings(records))
        assert words in sentences and "Nothing is compiled" not in sentences
        assert findings.compiled_steps(records) == marked


def test_memory_stands_in_the_report_device_by_device():
    counters = dict(
        compilations=1,
        compile_s=1.0,
        executions=9,
        execute_s=1.0,
        to_device_s=0.0,
        from_device_s=0.0,
        fallbacks={},
    )
    memory = [[12 * 2**30, 16 * 2**30], [8 * 2**30, 16 * 2**30]]
    speed = dict(seconds=1.0, images_per_s=8.0, wait_s=0.0, memory=memory, counters=counters)
    records = [
        dict(kind="start", step=0, device="tpu", batch_size=8),
        dict(kind="compile", step=1, what="step", programs=1, seconds=30.0, why=[], refused=False),
        dict(kind="compile", step=9, what="predict", programs=1, seconds=4.0, why=[], refused=False),
        dict(
            kind="compile",
            step=12,
            what="step",
            programs=1,
            seconds=20.0,
            why=["lr went from 0.1 to 0.0"],
            refused=False,
        ),
        dict(kind="train", step=12, loss=1.0, grad_norm=1.0, speed=speed),
    ]
    tables = {t.title: t for t in findings.accelerator_tables(records)}
    assert tables["Memory"].rows == [("0", "12.00", "16.00", "75%"), ("1", "8.00", "16.00", "50%")]
    assert [row[3] for row in tables["Compilations"].rows] == [
        "the first time",
        "the first time",
        "lr went from 0.1 to 0.0",
    ]
    words = findings.findings(records)
    assert "Step 12 compiled again (20.0 s) because lr went from 0.1 to 0.0." in words
    assert tables["Compilations"].rows[1] == ("9", "predict", "4.0", "the first time")
    assert len(figures.report_figure(records).axes) == 1


# What a task says of its scores, and a run that is still training


def test_the_paper_is_named_beside_its_own_dataset_alone():
    settings = dict(warm_epoch=5)
    for folder, published in (
        ("/kaggle/input/irstd-1k", True),
        ("datasets/IRSTD-1k", True),
        ("/drive/IRSTD-1k/unpacked", True),
        ("outputs/datasets/IRSTD-1k-synthetic-40", False),
        ("datasets/NUDT-SIRST", False),
        (None, False),
    ):
        labels = findings.labels_of(dict(task="mshnet", settings=dict(settings, dataset_dir=folder)))
        assert labels.published == (dict(iou=0.6716, pd=0.9388, fa=15.03e-6) if published else {}), folder
        assert (
            labels.score == "iou"
            and list(labels.names) == ["iou", "pd", "fa"]
            and labels.milestones == {6: "warm-up ends"}
        )
    assert labels.hides("niou") and not labels.hides("loss") and not labels.hides("iou")


@pytest.mark.parametrize("task", ["word", "", None, 3, [], {}, ["mshnet"]])
def test_a_task_that_is_unknown_or_no_name_has_no_labels(task):
    labels = findings.labels_of(dict(task=task, settings={}))
    assert labels == findings.NO_LABELS and not labels.hides("anything")


@pytest.mark.parametrize("settings", [{}, dict(warm_epoch="5"), dict(warm_epoch=None, dataset_dir=[1])])
def test_settings_that_are_missing_or_damaged_leave_the_names_of_the_scores(settings):
    labels = findings.labels_of(dict(task="mshnet", settings=settings))
    assert (labels.published, labels.milestones) == ({}, {}) and labels.score == "iou"


SPEED = dict(seconds=2.0, images_per_s=8.0, wait_s=0.5, memory=[], counters={})


def started(**more):
    return dict(kind="start", step=0, device="2 x tpu", batch_size=4) | more


def trained_at(step, **more):
    return dict(kind="train", step=step, loss=0.5, grad_norm=None, speed=SPEED) | more


def evaluated_at(step, epoch, **scores):
    return dict(kind="evaluation", step=step, epoch=epoch, scores=scores, speed=dict(seconds=1.0))


def test_curves_over_epochs_count_the_steps_of_one_also_in_a_run_of_an_earlier_version():
    rest = [trained_at(6), evaluated_at(12, 1, iou=0.5, images=3), trained_at(15)]
    for records, per_epoch in (
        ([started(steps_per_epoch=6), *rest], 6),
        ([started(), *rest], 6),  # an earlier version: by the evaluation, at the end of its second epoch
        ([started(), *rest[::2]], 1),
        ([started(steps_per_epoch=3), started(steps_per_epoch=6), *rest[::2]], 6),
        ([started(steps_per_epoch=0), *rest[::2]], 1),
        ([started(steps_per_epoch="6"), evaluated_at(12, -1), *rest[::2]], 12),
        ([], 1),
    ):
        assert findings.steps_per_epoch(records) == per_epoch
        curves = findings.epoch_curves(records)
        if records:
            assert (
                curves["loss"] == ([6 / per_epoch, 15 / per_epoch], [0.5, 0.5])
                and "gradient norm" not in curves
            )
    assert findings.epoch_curves([started(), *rest])["iou"] == ([2.0], [0.5]) and "images" not in curves


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 1e308, -1e308, "0.5", True, [], 10**400])
def test_a_score_that_is_no_number_to_be_drawn_has_no_point(value):
    records = [started(), evaluated_at(6, 0, iou=0.25, pd=value), evaluated_at(12, 1, iou=value)]
    assert findings.curves(records) == dict(iou=([6], [0.25]))


ROC = dict(tpr=[1.0, 0.5, 0.0], fpr=[1.0, 0.1, 0.0], precision=[0.1, 0.9, 1.0])


def test_an_roc_is_that_of_the_last_evaluation_that_has_one_with_its_thresholds():
    records = [
        evaluated_at(6, 0, roc=dict(ROC, tpr=[0.0] * 3)),
        evaluated_at(12, 1, roc=ROC),
        evaluated_at(18, 2),
        trained_at(20),
    ]
    assert findings.roc(records) == dict(ROC, threshold=[0.0, 0.5, 1.0])
    assert findings.roc(records[2:]) is None and findings.roc([]) is None


@pytest.mark.parametrize(
    "damage",
    [
        dict(tpr=None),
        dict(fpr=[1.0]),
        dict(precision=[1, 2, "3"]),
        dict(tpr=[0.5, float("nan"), 1.0]),
        dict(tpr=3),
    ],
)
def test_a_damaged_roc_is_passed_over(damage):
    records = [evaluated_at(6, 0, roc=ROC), evaluated_at(12, 1, roc=ROC | damage)]
    assert findings.roc(records)["tpr"] == ROC["tpr"] and findings.roc(records[1:]) is None
    alone = {name: [0.5] for name in ROC}
    assert findings.roc([evaluated_at(6, 0, roc=alone)]) is None  # one point is no curve


def test_the_headline_says_where_a_training_is_and_what_is_left():
    compiled = dict(kind="compile", step=1, seconds=90.0, what="step")
    progress = dict(step=20, total=100, unit="step", epoch="1 of 5")
    records = [
        started(),
        compiled,
        dict(compiled, refused=True),
        dict(compiled, what="predict", seconds=60.0),
        trained_at(20),
    ]
    where = "2 x tpu · step 20 of 100 · epoch 1 of 5"
    assert findings.headline(records, progress) == f"{where} · about 40 s left · 2 compilations, 2.5 min"
    assert findings.headline(records[:2], progress) == f"{where} · 1 compilation, 90 s"
    assert findings.headline([started(), trained_at(100)], progress | dict(step=100)) == where.replace(
        "20 of", "100 of"
    )
    batches = dict(step=3, total=9, unit="batch")
    assert (
        findings.headline([started(), trained_at(20)], batches) == "2 x tpu · batch 3 of 9"
    )  # of an evaluation
    # Of the session that runs now, not of the one before.
    assert (
        findings.headline([*records, started(device="cpu")], progress)
        == "cpu · step 20 of 100 · epoch 1 of 5"
    )


@pytest.mark.parametrize(
    "records, progress",
    [
        ([], {}),
        ([started()], {}),
        ([], dict(step=1, total=2, unit="step")),
        ([started()], dict(step="1", total=2, unit="step")),
    ],
)
def test_before_the_first_step_and_after_damage_the_headline_says_that_it_starts(records, progress):
    assert findings.headline(records, progress).startswith("The training starts")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_changes_no_chart(damage, tmp_path):
    records = strange_run(tmp_path / "run", "word").records()
    second = [r for r in records if r["kind"] == "train"][1]
    damage(second)
    rest = [r for r in records if r is not second]
    progress = dict(step=4, total=9, unit="step")
    assert findings.headline(records, progress) == findings.headline(rest, progress)
    assert findings.epoch_curves(records) == findings.epoch_curves(rest) and findings.roc(records) is None
    figures.live_figure(records, progress, findings.NO_LABELS).draw_without_rendering()


def test_the_table_of_classes_has_precision_and_recall_by_hand_and_nothing_for_a_class_that_is_never_called():
    counts = [[8, 2, 0], [1, 4, 0], [3, 0, 0]]
    table = findings.per_class_table(dict(classes=["a", "b", "c"], counts=counts))
    assert table.rows == [
        ("a", "10", "0.6667", "0.8000"),
        ("b", "5", "0.6667", "0.8000"),
        ("c", "3", "", "0.0000"),
    ]
