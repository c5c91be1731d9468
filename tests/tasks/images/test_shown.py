"""What a run of the image classifier shows of its scores: a sentence, the confusion matrix, a table."""

import re

import pytest

from tpukit import ImageClassifier
from tpukit.host import language
from tpukit_tasks.images import shown

CONFUSION = dict(classes=["a", "b"], counts=[[1, 1], [1, 1]])


def test_the_table_of_classes_has_precision_and_recall_by_hand_and_nothing_for_a_class_that_is_never_called():
    counts = [[8, 2, 0], [1, 4, 0], [3, 0, 0]]
    assert shown.per_class_table(dict(classes=["a", "b", "c"], counts=counts)).rows == [
        ("a", "10", "0.6667", "0.8000"),
        ("b", "5", "0.6667", "0.8000"),
        ("c", "3", "", "0.0000"),
    ]


@pytest.mark.parametrize(
    "scores, words",
    [
        (dict(accuracy=0.55, confusion=CONFUSION), "guessing one of 2 classes"),
        (dict(accuracy=0.9, confusion=CONFUSION), ""),
        (dict(accuracy=0.05), ""),  # of how many classes, nobody says
        (dict(accuracy=0.05, confusion=dict(classes=[], counts=[])), ""),
        (dict(accuracy="0.05", confusion=CONFUSION), ""),
        ({}, ""),
    ],
)
def test_a_sentence_says_that_the_best_weights_only_guess(scores, words, monkeypatch):
    monkeypatch.setenv("TPUKIT_LANGUAGE", "zh")
    verdict = ImageClassifier.verdict(scores, scores)  # by the class: a saved run has no object
    assert bool(verdict) == bool(words) and words in verdict
    assert not words or re.search(r"[\u4e00-\u9fff]", language.translate(verdict))


def test_the_confusion_matrix_is_a_figure_and_a_table_and_what_a_file_has_wrong_is_neither():
    figures = ImageClassifier.figures(dict(accuracy=0.5, confusion=CONFUSION))
    assert list(figures) == ["confusion", "classes"] and len(figures["classes"].rows) == 2
    [axis] = figures["confusion"].axes
    assert [text.get_text() for text in axis.texts] == ["1"] * 4
    assert ImageClassifier.figures(dict(accuracy=0.5)) == {}
    for counts in (None, 7, {}, [[1, 1]], [[1], [1]], [["x", 1], [1, 1]], [[-1, 1], [1, 1]]):
        assert ImageClassifier.figures(dict(confusion=dict(CONFUSION, counts=counts))) == {}
    for classes in (None, 7, "ab", ["a"]):
        assert ImageClassifier.figures(dict(confusion=dict(CONFUSION, classes=classes))) == {}
    assert ImageClassifier.figures(dict(confusion=[])) == {}
