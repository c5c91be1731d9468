"""What a run's report says of the accelerator."""

import re

import pytest

from tests.tpukit.reporting.hostile import SPEED, evaluated
from tpukit import MNIST, Run
from tpukit.host import language
from tpukit.reporting import findings, run_report


def started(**more):
    return dict(kind="start", step=0, device="2 x tpu", batch_size=4, max_graphs=1, steps_per_epoch=1) | more


def trained_at(step, **more):
    return dict(kind="train", step=step, loss=0.5, grad_norm=None, speed=SPEED | more)


def compiled_at(step, what="step", seconds=30.0, why=(), programs=1):
    about = dict(kind="compile", refused=False, why=list(why))
    return about | dict(step=step, what=what, seconds=seconds, programs=programs)


def test_intervals_divide_their_own_times_by_their_steps():
    # Counters run since the process began: they have sent the whole dataset, too.
    counters = dict(to_device_s=99.0, from_device_s=99.0, fallbacks={})

    def reading(step, seconds, sent):
        speed = dict(seconds=seconds, images_per_s=20 / seconds, wait_s=seconds / 10, counters=counters)
        return trained_at(step, **speed, to_device_s=sent, from_device_s=sent / 2)

    first, second = run_report.intervals([started(), reading(5, 1.0, 0.05), reading(10, 2.0, 0.15)])
    assert (first["from"], first["to"], second["from"], second["to"]) == (1, 5, 6, 10)
    times = [pytest.approx([200, 20, 10, 5]), pytest.approx([400, 40, 30, 15])]
    assert [[span[name] for name in run_report.TIMES] for span in (first, second)] == times


CAPTURED = compiled_at(4, seconds=0.5)


@pytest.mark.parametrize(
    "choice, events, words",
    [
        ("no", [], "Nothing is compiled"),
        ("yes", [], "torch.compile compiled the loss"),
        ("auto", [CAPTURED], "captured as a CUDA graph at step 4 (0.5 s)"),
        ("auto", [CAPTURED | dict(programs=0, why=["in fp16 so"])], "because in fp16 so."),
    ],
)
def test_a_step_of_a_gpu_is_reported_as_compiled_as_captured_or_with_the_reason(choice, events, words):
    records = [started(compile=choice), *events, trained_at(8)]
    sentences = " ".join(run_report.describe(records))
    assert words in sentences and "CPU" not in sentences
    assert ("Nothing is compiled" in sentences) == (words == "Nothing is compiled")


def test_memory_stands_in_the_report_device_by_device_and_compilations_with_their_causes():
    why = "lr went from 0.1 to 0.0"
    compiled = [compiled_at(1), compiled_at(9, "predict", 4.0), compiled_at(12, seconds=20.0, why=[why])]
    memory = [[12 * 2**30, 16 * 2**30], [8 * 2**30, 16 * 2**30]]
    counters = dict(fallbacks={"aten::nonzero": 7})
    records = [started(), *compiled, trained_at(12, memory=memory, counters=counters)]
    tables = {table.title: table for table in run_report.accelerator_tables(records)}
    assert tables["Memory"].rows == [("0", "12.00", "16.00", "75%"), ("1", "8.00", "16.00", "50%")]
    assert tables["Compilations"].rows == [
        ("1", "step()", "30.0", "the first time"),
        ("9", "predict()", "4.0", "the first time"),
        ("12", "step()", "20.0", why),
    ]
    sentences = " ".join(run_report.describe(records))
    assert f"Step 12 compiled again (20.0 s) because {why}." in sentences
    assert "aten::nonzero (7 times)" in sentences
    assert "Waiting for data took 25.0% of the training time: if threads make" in sentences


def test_after_a_resume_the_report_says_how_long_all_sessions_took_and_which_one_it_is_about():
    one = [started(), trained_at(4, seconds=60.0), evaluated(4, 0, {})]
    other = [started(device="cpu"), trained_at(8, seconds=30.0), evaluated(8, 1, {}), trained_at(12)]
    sentences = run_report.describe(one)
    assert "It ran on 2 x tpu." in sentences and "Training took 60 s, evaluation 1 s." in sentences
    sentences = run_report.describe([*one, *other, started()])  # the last one found nothing left to do
    assert "The last of 2 sessions ran on cpu." in sentences
    assert sentences[-1] == "Training took 92 s, evaluation 2 s in 2 sessions."


def test_in_a_chinese_notebook_every_sentence_of_a_report_is_chinese_and_names_its_steps(monkeypatch):
    monkeypatch.setenv("TPUKIT_LANGUAGE", "zh")
    again = compiled_at(9, why=["lr went from 0.1 to 0.0"])
    on_xla = trained_at(12, counters=dict(fallbacks={"aten::nonzero": 7}))
    reports = (
        [started(), compiled_at(1), again, dict(again, why=[], refused=True), on_xla],
        [started(compile="yes"), CAPTURED | dict(programs=0, why=["in fp16 so"]), trained_at(8)],
        [started(accelerator="tpu"), trained_at(8)],
    )
    sentences = [language.translate(text) for report in reports for text in run_report.describe(report)]
    assert not [sentence for sentence in sentences if not re.search(r"[\u4e00-\u9fff]", sentence)]
    assert "第 9 步又编译了一次（30.0 s），因为 lr 从 0.1 变为 0.0。" in sentences


# What a task says of its scores, and a run that is still training


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 1e308, "0.5", True, [], 10**400])
def test_a_score_that_is_no_number_to_be_drawn_has_no_point(value):
    scored = [evaluated(6, 0, dict(iou=0.25, pd=value)), evaluated(12, 1, dict(iou=value))]
    records = [started(steps_per_epoch=6), *scored]
    assert findings.curves(records) == dict(iou=([1.0], [0.25]))


def test_the_headline_names_the_device_and_the_compilations_of_the_session_that_runs_now():
    compiled, predict = compiled_at(1, seconds=90.0), compiled_at(1, "predict", seconds=60.0)
    records = [started(), compiled, dict(compiled, refused=True), predict, trained_at(20)]
    assert findings.headline(records) == "2 x tpu · 2 compilations, 2.5 min"
    assert findings.headline([*records, started(device="cpu")]) == "cpu"
    assert findings.headline([]).startswith("Training starts")


@pytest.mark.parametrize(
    "accuracies, words",
    [
        ([0.5, 0.6, 0.7, 0.8], "The last epoch is the best one"),
        ([0.5, 0.9, 0.7, 0.8], ""),
        ([0.5, 0.6, 0.7], ""),  # too few to tell
        ([], ""),
    ],
)
def test_what_holds_for_any_task_is_that_the_last_epoch_is_the_best(accuracies, words):
    verdict = findings.verdict(scored(*(dict(accuracy=accuracy) for accuracy in accuracies)))
    assert bool(verdict) == bool(words) and words in verdict


def scored(*scores):
    """The records of an evaluation after each epoch, of which the best accuracy is kept."""
    best = max((score["accuracy"] for score in scores), default=0)
    kept = [score["accuracy"] == best for score in scores]
    return [evaluated(n + 1, n, score, kept=kept[n]) for n, score in enumerate(scores)]


def test_what_a_task_says_of_the_kept_and_the_last_scores_comes_first_and_it_may_say_nothing():
    first, second = dict(accuracy=0.9, mine="kept"), dict(accuracy=0.1, mine="last")
    judged = findings.verdict(scored(first, second), lambda scores, last: f"{scores['mine']}, {last['mine']}")
    assert judged == "kept, last"
    rising = scored(*(dict(accuracy=n / 10) for n in range(5)))
    assert findings.verdict(rising, lambda scores, last: "Mine.") == "Mine."
    for nothing in ("", None):
        assert findings.verdict(rising, lambda scores, last: nothing).startswith("The last epoch is the best")
    assert findings.verdict([trained_at(3)], lambda scores, last: "Mine.") == ""


def test_no_scores_of_a_users_own_task_get_another_tasks_sentence_for_their_names():
    anisotropy, dice = dict(fa=0.45, accuracy=0.9), dict(pd=0.0, accuracy=0.8)
    guessed = dict(accuracy=0.5, confusion=dict(classes=["a", "b"], counts=[[1, 1], [1, 1]]))
    for scores in (anisotropy, dice, guessed):
        assert findings.verdict(scored(scores)) == ""


def test_a_run_has_the_scores_of_its_task_even_of_a_users_own(tmp_path):
    class Mine(MNIST):
        name = "mine"
        score_names = dict(accuracy="share that is right")

    run = Run.open(tmp_path / "run", Mine(epochs=7))
    labels = findings.labels_of(run.config)
    assert labels == findings.Labels("accuracy", dict(accuracy="share that is right"))
    assert findings.labels_of(dict(settings={})) == findings.NO_LABELS
    wrong = dict(score=["iou"], score_names=dict(iou=3), settings={})
    assert findings.labels_of(wrong) == findings.NO_LABELS


def test_a_table_of_scores_has_the_names_of_the_charts_and_no_number_twice():
    scores = dict(log_likelihood=-2.5, test_loss=2.5, perplexity=12.2, tokens=7, zero=0.0, none=-0.0)
    names = dict(test_loss="cross entropy", perplexity="perplexity of the test set", none="nothing")
    rows = findings.scores_table(scores, names).rows
    assert rows == [
        ("cross entropy", "2.5000"),
        ("perplexity of the test set", "12.2000"),
        ("tokens", "7"),
        ("zero", "0.0000"),
        ("nothing", "-0.0000"),
    ]
    assert [name for name, _ in findings.scores_table(scores, {}).rows][:2] == ["log likelihood", "test loss"]
