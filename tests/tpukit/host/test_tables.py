"""Tables; durations in words."""

import csv
import io

from tpukit.host import text
from tpukit.host.spreadsheets import as_csv
from tpukit.host.tables import Table
from tpukit.host.text import format_duration


def test_nothing_in_a_table_is_markup_or_a_control_character():
    evil = "<script>\x1b[2J$x$"
    table = Table(evil, (evil,), [(evil,)])
    page = table._repr_html_()
    assert page.count("&lt;script&gt;\\x1b[2J$x$") == 3
    assert "<script>" not in page and "\x1b" not in page + repr(table)


def test_a_spreadsheet_finds_no_formula_in_a_csv_and_a_terminal_no_control_character():
    formulas = ["=1+1", "+1+1", "-cmd|x", "@SUM(A1)", "\t=1", "\r\n=1"]
    other = [-0.5, -7, None, "a=1", "", "caf\udce9\x1b[31m\r"]
    written = as_csv(formulas, [formulas, other])
    heads, texts, rest = csv.reader(io.StringIO(written, newline=""))
    assert heads == texts == [f"'{formula}" for formula in formulas]
    assert rest == ["-0.5", "-7", "", "a=1", "", r"caf\udce9\x1b[31m\r"]
    assert "\x1b" not in written and written.encode()


def test_a_duration_is_given_in_the_largest_unit_of_which_it_has_two():
    words = {119: "119 s", 150: "2.5 min", 9000: "2.5 h", 47 * 3600: "47.0 h", 259200: "3.0 days"}
    assert {seconds: format_duration(seconds) for seconds in words} == words


def test_a_long_line_is_wrapped_at_words_in_a_notebook_and_stays_one_in_a_shell(monkeypatch, capsys):
    line = f"{'found in ./data-sets, ' * 6}/a/{'b' * 120}"
    text.say(line)
    assert capsys.readouterr().out == f"{line}\n"
    monkeypatch.setattr(text, "notebook_kernel", object)
    text.say(f"{line}\n\nshort")
    *lines, path, empty, short = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= text.PAGE_COLUMNS and " ".join([*lines, path]) == line
    assert (empty, short) == ("", "short")
