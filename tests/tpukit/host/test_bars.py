"""The progress bar in a notebook and in a shell."""

from types import SimpleNamespace

import pytest

from tpukit.host import bars


@pytest.fixture
def outputs(monkeypatch):
    """The outputs of a notebook's cell: of each, the texts that it has shown."""
    shown = []

    def display(data, *, raw, display_id):
        assert raw and display_id
        shown.append([data["text/plain"]])
        return SimpleNamespace(update=lambda data, *, raw: shown[len(shown) - 1].append(data["text/plain"]))

    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel="a kernel"))
    monkeypatch.setattr("IPython.display.display", display)
    return shown


def test_in_a_notebook_a_bar_is_one_line_of_text_that_ends_with_where_it_stood(outputs, capsys):
    with bars.tqdm(total=4, initial=1, desc="mnist", unit="step", mininterval=0) as bar:
        bar.set_postfix(dict(loss=0.5), refresh=False)
        bar.update(2)
        bars.tqdm.write("epoch 1: loss 0.5")
    [texts] = outputs
    assert texts[0].startswith("mnist:  25%") and "3/4" in texts[-1] and "loss=0.5" in texts[-1]
    assert max(map(len, texts)) <= 90
    assert capsys.readouterr().out == "epoch 1: loss 0.5\n"


def test_a_bar_that_is_not_to_stay_leaves_an_empty_line_and_one_that_is_off_shows_nothing(outputs, capsys):
    assert list(bars.tqdm(range(3), leave=False)) == list(bars.tqdm(range(3), disable=True)) == [0, 1, 2]
    assert [texts[-1] for texts in outputs] == [""] and capsys.readouterr() == ("", "")
