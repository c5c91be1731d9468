"""What a run of MSHNet shows of its scores: a sentence, and the ROC."""

import re

import pytest

from tpukit import MSHNet
from tpukit.host import language
from tpukit_tasks.mshnet import shown

GOOD = dict(iou=0.5, pd=0.9, fa=1e-5)


@pytest.mark.parametrize(
    "scores, last, words",
    [
        (dict(iou=0.001, pd=1.0, fa=0.99), GOOD, "marks far too many pixels"),
        (dict(iou=0.0, pd=0.0, fa=0.0), GOOD, "finds no target yet"),
        (GOOD, dict(GOOD, pd=0.0), "no target any more"),
        (GOOD, GOOD, ""),
        (dict(iou="?", pd=None, fa=[]), GOOD, ""),
        (GOOD, dict(pd="0"), ""),
        ({}, {}, ""),
    ],
)
def test_a_sentence_says_what_is_wrong_with_the_best_weights_or_with_the_last_epoch(
    scores, last, words, monkeypatch
):
    monkeypatch.setenv("TPUKIT_LANGUAGE", "zh")
    for task in (MSHNet, MSHNet()):  # a saved run has no object, only the class
        verdict = task.verdict(scores, last)
        assert bool(verdict) == bool(words) and words in verdict
        assert not words or re.search(r"[\u4e00-\u9fff]", language.translate(verdict))


RATES = dict(tpr=[1.0, 0.5, 0.0], fpr=[1.0, 0.1, 0.0], precision=[0.1, 0.9, 0.0])


def test_the_roc_is_recall_over_false_pixels_and_beside_it_precision_over_recall_where_something_is_found():
    [(name, figure)] = MSHNet.figures(dict(GOOD, roc=RATES)).items()
    assert name == "roc"
    left, right = (axis.get_lines()[0] for axis in figure.axes)
    assert list(left.get_xdata()) == [1.0, 0.1, 0.05] and list(left.get_ydata()) == [1.0, 0.5, 0.0]
    assert list(right.get_xdata()) == [1.0, 0.5] and list(right.get_ydata()) == [0.1, 0.9]
    assert MSHNet.figures(GOOD) == {}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("other", [None, [], [0.5], ["x"] * 3, [-1.0] * 3, 7, {}])
def test_an_roc_that_a_file_has_wrong_is_not_drawn(name, other):
    assert shown.is_roc(RATES) and not shown.is_roc({**RATES, name: other})
    assert MSHNet.figures(dict(roc={**RATES, name: other})) == MSHNet.figures(dict(roc=other)) == {}
