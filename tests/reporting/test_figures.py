"""What is shown, in a notebook and in a shell: nothing that a file holds is obeyed."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.reporting.hostile import EVIL, strange_measurement, strange_run
from tpukit import MSHNet, cli
from tpukit.host.tables import Sentences, printable
from tpukit.reporting import display, figures, findings


class Page(HTMLParser):
    """A page of HTML. elements: the names of its elements. attributes: (element, name, value). words: its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.words = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.words += data


def test_the_report_says_words_first_then_numbers_then_a_picture(trained, capsys):
    _, run = trained
    assert cli.main(["report", str(run.path)]) == 0
    output = capsys.readouterr().out
    order = [output.index(part) for part in ("It ran on cpu", "Where a step's time went", "report.png")]
    assert order == sorted(order)
    assert (run.path / "pictures" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_sentences_are_the_same_in_a_notebook_as_in_a_shell_whatever_signs_they_hold():
    shown = Sentences(["<lambda> took 2*3*4 ms, `a*b*c` and `<lambda>`: snake_case_name", "between $1 and $2", "one ` alone"])
    assert repr(shown).splitlines() == [f"- {sentence}" for sentence in shown]
    page = Page(shown._repr_html_())
    assert page.words == "".join(shown).replace("`a*b*c`", "a*b*c").replace("`<lambda>`", "<lambda>")
    assert page.elements == ["ul", "li", "code", "code", "li", "li"]


def test_settings_at_their_defaults_are_folded_and_those_that_differ_are_seen(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(display, "present", shown.append)
    display.show_task(MSHNet(dataset_dir="here", epochs=3, clip_norm=None, skip_bad=True))
    (table,) = shown
    assert dict(table.rows) == dict(dataset_dir="here", epochs="3", skip_bad="True")
    assert ("lr", "0.05") in table.folded and ("clip_norm", "") in table.folded
    assert table.summary == f"{len(table.folded)} settings at their defaults"


@pytest.mark.slow
def test_in_a_saved_notebook_nothing_that_a_file_holds_is_markup(tmp_path, monkeypatch):
    import nbformat
    from IPython.core.formatters import DisplayFormatter
    from nbconvert import HTMLExporter

    from tpukit.tools import compare, prices

    def page(word, folder):
        folder.mkdir()
        shown = []
        monkeypatch.setattr(display, "in_notebook", lambda: True)
        monkeypatch.setattr("IPython.display.display", shown.append)
        run = strange_run(folder / "run", word)
        display.show(run)
        display.show_report(run)
        measurement = compare.Measurement.read(strange_measurement(folder / "m.json", word))
        display.show_comparison(compare.compare([measurement], prices=prices.read()))
        display.present(measurement.table())
        display.present(findings.settings_table(run.config))
        display.present(findings.settings_table(run.config, run.config["settings"]))  # folded
        display.present_figure(figures.panels_figure([[(word, np.eye(4)), (word, np.eye(4))]], word))
        display.present(findings.live_table(word, run.records(), run.read_progress(), run.checkpoints(), 1.0))
        formatter = DisplayFormatter()
        formatter.active_types = formatter.format_types
        cell = nbformat.v4.new_code_cell("show()", id="shown")
        for thing in shown:
            data, metadata = formatter.format(thing)
            data.pop("image/png", None)  # hundreds of kilobytes that hold no words
            cell.outputs.append(nbformat.v4.new_output("display_data", data=data, metadata=metadata))
        assert len(shown) >= 13
        whole, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
        return Page(whole)

    harmless, evil = page("x" * len(EVIL), tmp_path / "a"), page(EVIL, tmp_path / "b")
    assert [e for e in evil.elements if e != "code"] == [e for e in harmless.elements if e != "code"]
    assert evil.attributes == harmless.attributes
    assert evil.words.count("<script>alert(1)</script>") >= 20  # it was all there, as words


@pytest.mark.parametrize("command", [["show", "run"], ["report", "run"], ["watch", "run"], ["compare", "m.json"]], ids=str)
def test_a_terminal_gets_no_control_character_from_a_file(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    strange_run(tmp_path / "run", EVIL)
    strange_measurement(tmp_path / "m.json", EVIL)
    assert cli.main(command) == 0
    output = "".join(capsys.readouterr())
    assert output.isascii() or not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", output)
    assert r"\x1b[2J" in "".join(output.split()) and "<script>" in "".join(output.split())


def test_an_error_shows_a_control_character_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "\x1b[2J").mkdir()
    (tmp_path / "\x1b[2J/config.json").write_text("{}")
    assert cli.main(["show", "."]) == 1
    assert r"runs below it: \x1b[2J" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"9" * 10_000, b"null"], ids=range(5))
def test_a_comparison_file_that_is_no_json_to_be_read_is_named(data, tmp_path, capsys):
    (tmp_path / "m.json").write_bytes(data)
    assert cli.main(["compare", str(tmp_path / "m.json")]) == 1
    assert "m.json" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["hardware,place\0\n", 'hardware,"' + "x" * 200_000])
def test_a_table_of_prices_that_is_no_csv_is_named(text, tmp_path, capsys):
    (tmp_path / "prices.csv").write_text(text)
    assert cli.main(["compare", "--prices", str(tmp_path / "prices.csv")]) == 1
    assert "prices.csv" in capsys.readouterr().err


def test_what_a_terminal_shows_anyway_stays_as_it_is():
    assert printable("né 行 \t a\r\n~") == "né 行 \t a\r\n~"


def test_a_mask_is_drawn_by_what_it_could_hold_so_that_all_true_is_white_and_all_false_black():
    full, half = np.ones((4, 4), bool), np.full((4, 4), 51, np.uint8)
    figure = figures.panels_figure([[("all", full), ("none", ~full), ("grey", half)]], "masks")
    drawn = [axis.images[0].to_rgba(axis.images[0].get_array())[0, 0, 0] for axis in figure.axes]
    assert np.allclose(drawn, [1.0, 0.0, 0.2], atol=0.01)
