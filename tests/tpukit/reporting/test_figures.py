"""Figures, and what a notebook and a shell show: nothing that a file holds is obeyed."""

import io
import re
import tomllib
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from tests.tpukit.reporting.hostile import EVIL, SPEED, evaluated, strange_measurement, strange_run
from tpukit import MNIST, ImageClassifier, MSHNet
from tpukit.host import environment, language
from tpukit.host.tables import Sentences
from tpukit.host.text import printable
from tpukit.reporting import display, figures, findings, presenting
from tpukit.reporting.figures import RIGHT, WRONG
from tpukit_tools import cli


class Page(HTMLParser):
    """A page of HTML. elements: the names of its elements. attributes: (element, name, value). words: its
    text."""

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


def test_sentences_are_the_same_in_a_notebook_as_in_a_shell_whatever_signs_they_hold():
    first = "<lambda> took 2*3*4 ms, `a*b*c` and `<lambda>`: snake_case_name"
    shown = Sentences([first, "between $1 and $2", "one ` alone"])
    assert repr(shown).splitlines() == [f"- {sentence}" for sentence in shown]
    page = Page(shown._repr_html_())
    assert page.words == "".join(shown).replace("`a*b*c`", "a*b*c").replace("`<lambda>`", "<lambda>")
    assert page.elements == ["ul", "li", "code", "code", "li", "li"]
    assert printable("né 行 \t a\r\n~") == "né 行 \t a\r\n~"


@pytest.mark.slow
def test_in_a_saved_notebook_nothing_that_a_file_holds_is_markup(tmp_path, shown):
    import nbformat
    from IPython.core.formatters import DisplayFormatter
    from nbconvert import HTMLExporter

    from tpukit_tools import measure

    def page(word, folder):
        folder.mkdir()
        shown.clear()
        run = strange_run(folder / "run", word)
        display.show(run)
        display.show_report(run)
        [table] = measure.compare(measure.read(strange_measurement(folder / "m.json", word)))
        display.present(table)
        display.show(MNIST(dataset_dir=word, weights=word))
        presenting.present_figure(figures.panels_figure([[(word, np.eye(4)), (word, np.eye(4))]], word))
        formatter = DisplayFormatter()
        formatter.active_types = formatter.format_types
        cell = nbformat.v4.new_code_cell("show()", id="shown")
        for thing in shown:
            data, metadata = formatter.format(thing)
            data.pop("image/png", None)  # hundreds of kilobytes that hold no words
            cell.outputs.append(nbformat.v4.new_output("display_data", data=data, metadata=metadata))
        assert len(shown) >= 9
        whole, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
        return Page(whole)

    harmless, evil = page("x" * len(EVIL), tmp_path / "a"), page(EVIL, tmp_path / "b")
    assert [e for e in evil.elements if e != "code"] == [e for e in harmless.elements if e != "code"]
    assert evil.attributes == harmless.attributes
    assert evil.words.count("<script>alert(1)</script>") >= 20  # it was all there, as words


def test_a_terminal_gets_no_control_character_from_a_file_or_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    strange_run(tmp_path / "run", EVIL)
    strange_measurement(tmp_path / "m.json", EVIL)
    for command in ("show run", "report run", "compare m.json"):
        assert cli.main(command.split()) == 0
        output = "".join(capsys.readouterr())
        assert output.isascii() or not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", output)
        assert r"\x1b[2J" in "".join(output.split()) and "<script>" in "".join(output.split())
        assert ("run/pictures/curves.png" in output) == (command == "show run")
    (tmp_path / "a/\x1b[2J").mkdir(parents=True)
    (tmp_path / "a/\x1b[2J/config.json").write_text("{}")
    assert cli.main(["report", "a"]) == 1
    assert r"runs below it: a/\x1b[2J" in capsys.readouterr().err


def test_a_mask_is_drawn_by_what_it_could_hold_so_that_all_true_is_white_and_all_false_black():
    full, half = np.ones((4, 4), bool), np.full((4, 4), 51, np.uint8)
    figure = figures.panels_figure([[("all", full), ("none", ~full), ("grey", half)]], "masks")
    drawn = [axis.images[0].to_rgba(axis.images[0].get_array())[0, 0, 0] for axis in figure.axes]
    assert np.allclose(drawn, [1.0, 0.0, 0.2], atol=0.01)


def test_a_text_is_drawn_as_it_is_in_lines_that_fit():
    text = "a $formula$\n\x1b[2J" + "word " * 20 + "\n" * 99
    axis = figures.panels_figure([[("title", text)]], "texts").axes[0]
    [drawn] = axis.texts
    lines = drawn.get_text().split("\n")
    assert lines[0] == "a $formula$" and not drawn.get_parse_math() and "\x1b" not in drawn.get_text()
    assert len(lines) <= figures.TEXT_LINES and max(map(len, lines)) < 40 and lines[1].startswith("\\x1b[2J")


def test_a_figure_has_no_background_and_no_black_words_so_that_a_dark_page_shows_it():
    figure = figures.curves_figure(records_of([0.5, 0.75]), LABELS)
    drawn = np.asarray(Image.open(io.BytesIO(presenting.as_png(figure))))
    assert not drawn[[0, 0, -1, -1], [0, -1, 0, -1], 3].any() and np.mean(drawn[..., 3] == 0) > 0.5
    words = [text for text in figure.findobj(Text) if text.get_text()]
    assert words and not [text for text in words if to_rgb(text.get_color()) == (0, 0, 0)]


def test_a_right_prediction_has_a_green_frame_a_wrong_one_a_red_one_and_each_the_name_of_its_file():
    rows = [[(title, np.eye(4)), ("mask", np.eye(4))] for title in (f"{RIGHT} a", f"{WRONG} b", "c")]
    names = ["a.png", f"{'folder/' * 20}last.png", "c\n\x1b$x$"]
    figure = figures.panels_figure(rows, "files", names)
    figure.savefig(io.BytesIO())
    axes = [axis for axis in figure.axes if axis.get_title().partition("\n")[2]]
    frames = [axis.spines["top"].get_edgecolor()[:3] for axis in axes]
    assert frames == [to_rgb(colour) for colour in (figures.GREEN, figures.RED, figures.GREY)]
    shown = [axis.get_title().split("\n") for axis in axes]
    assert [title for title, _ in shown] == [f"{RIGHT} a", f"{WRONG} b", "c"]
    assert shown[0][1] == "a.png" and shown[2][1] == r"c \x1b\$x\$"
    assert shown[1][1].startswith("…") and shown[1][1].endswith("/last.png") and len(shown[1][1]) == 36
    assert rows[0][0][0] == f"{RIGHT} a"  # what was given is not changed


# Curves, from a run of three epochs of four steps

LABELS = findings.Labels("iou", dict(iou="IoU", fa="Fa"))


def records_of(ious, **start):
    records = [
        dict(kind="start", step=0, device="cpu", batch_size=4, max_graphs=1, steps_per_epoch=4) | start
    ]
    records.append(dict(kind="compile", step=1, seconds=9.0, what="step", why=[], refused=False, programs=1))
    for epoch, iou in enumerate(ious):
        step = 4 * epoch + 4
        records.append(dict(kind="train", step=step, loss=1.0 / step, grad_norm=2.0, speed=SPEED))
        records.append(evaluated(step, epoch, dict(iou=iou, fa=0.5, hidden=0.25, images=4)))
    return records


def axes_of(figure):
    figure.draw_without_rendering()  # all of it can be drawn
    return {axis.get_title("left"): axis for axis in figure.axes if axis.get_title("left")}


def words(axis):
    return [text.get_text().strip() for text in axis.texts]


def lines(axis):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]


def test_curves_stand_over_epochs_with_the_best_mark():
    axes = axes_of(figures.curves_figure(records_of([0.25, 0.75, 0.5]), LABELS))
    scores = ["IoU (best 0.75)", "Fa"]  # those that have a name
    assert list(axes) == ["loss", "gradient norm", *scores]
    iou, fa = (axes[name] for name in scores)
    curve, star = lines(iou)
    assert curve == ([1, 2, 3], [0.25, 0.75, 0.5]) and star == ([2], [0.75])
    low, high = iou.get_ylim()
    assert 0 < low < 0.25 and high > 0.75 and iou.get_xlabel() == "epoch"
    assert len(lines(fa)) == 1
    unknown = axes_of(figures.curves_figure(records_of([0.5])))  # of a task without labels
    assert list(unknown) == ["loss", "gradient norm", "iou", "fa", "hidden"]
    assert figures.curves_figure([]) is None


def test_a_live_chart_shows_loss_the_deciding_score_and_speed_from_the_first_moment_on():
    for given in ([], records_of([])[:1]):
        axes = axes_of(figures.live_figure(given, LABELS))
        assert list(axes) == ["loss", "IoU", "samples per second"]
        assert all(words(axis) == ["nothing yet"] for axis in axes.values())
    figure = figures.live_figure(records_of([0.25, 0.75]), LABELS)
    axes = axes_of(figure)
    assert lines(axes["loss"])[0] == ([1, 2], [0.25, 0.125])
    assert lines(axes["IoU (best 0.75)"])[0][1] == [0.25, 0.75]
    [speed] = lines(axes["samples per second"])
    assert speed == ([1, 2], [8.0, 8.0])
    # How far it is, the bar says: a chart is redrawn less often, and would be behind it.
    assert figure.get_suptitle() == "cpu · 1 compilation, 9 s"
    unknown = axes_of(figures.live_figure(records_of([0.5]), findings.NO_LABELS))
    assert list(unknown) == ["loss", "iou", "samples per second"]
    for planned, end in ((20, 20.4), (1, 2.04)):
        axes = axes_of(figures.live_figure(records_of([0.25, 0.75], epochs=planned), LABELS))
        assert {axis.get_xlim() for axis in axes.values()} == {(0, end)}
    still = [record | {"loss": 1 - 1e-7 * n} for n, record in enumerate(records_of([0.25, 0.75]))]
    flat = figures.live_figure(still, LABELS)
    flat.draw_without_rendering()  # a loss that hardly moves: its numbers, not what to add to them
    assert axes_of(flat)["loss"].yaxis.get_offset_text().get_text() == ""


def test_a_live_chart_names_its_score_as_the_tables_do_where_the_deciding_one_has_no_name():
    records = records_of([0.25, 0.75])
    axes = axes_of(figures.live_figure(records, findings.Labels("iou", dict(fa="Fa"))))
    assert list(axes) == ["loss", "Fa", "samples per second"]
    assert lines(axes["Fa"])[0] == lines(axes_of(figures.curves_figure(records, LABELS))["Fa"])[0]


def test_an_axis_of_scores_tells_97_from_99_percent_and_leaves_room_above_the_best():
    rising = [0.1, 0.5, 0.8, 0.9, 0.97, 0.98, 0.985, 0.99]
    axis = axes_of(figures.curves_figure(records_of(rising), LABELS))["IoU (best 0.99)"]
    low, high = axis.get_ylim()
    assert (0.99 - 0.97) / (high - low) > 0.15 and high > 0.99 and low > 0.8
    for flat in ([0.0] * 4, [1.0] * 4):
        axis = axes_of(figures.curves_figure(records_of(flat)))["iou"]
        low, high = axis.get_ylim()
        assert low < flat[0] < high and high - low > 0.05


def test_every_figure_is_as_wide_as_the_page_and_no_word_in_it_is_small():
    records, picture = records_of([0.25, 0.5]), ("title", np.eye(4))
    rates = dict(tpr=[1.0, 0.0], fpr=[1.0, 0.0], precision=[0.5, 1.0])
    confusion = dict(classes=["a", "b"], counts=[[3.0, 0.0], [1.0, 2.0]])
    for drawn in (
        figures.curves_figure(records, LABELS),
        figures.live_figure(records, LABELS),
        MSHNet.figures(dict(roc=rates))["roc"],
        ImageClassifier.figures(dict(confusion=confusion))["confusion"],
        figures.runs_figure({"a": dict(iou=([1.0], [0.5]))}, "mshnet", ["a"], "iou"),
        figures.panels_figure([[picture]], "one", ["a.png"]),
        figures.panels_figure([[picture] * 3] * 2, "rows"),
    ):
        drawn.savefig(io.BytesIO())
        assert drawn.get_figwidth() == figures.WIDTH
        # 860 pixels are what a page of 1,000 leaves: 9 pixels a letter there.
        sizes = [text.get_fontsize() for text in drawn.findobj(Text) if text.get_text()]
        assert sizes and min(sizes) / 72 * 860 / figures.WIDTH >= 9


def test_samples_of_three_pictures_have_a_line_each():
    rows = [[(f"{n} targets", np.eye(4)), ("window", np.eye(4)), ("pixels", np.eye(4))] for n in (2, 2, 1)]
    axes = figures.panels_figure(rows, "samples").axes
    assert [axis.get_title() for axis in axes] == [title for row in rows for title, _ in row]
    assert [axis.get_subplotspec().rowspan.start for axis in axes] == [0] * 3 + [1] * 3 + [2] * 3


def test_a_long_title_of_a_chart_has_several_lines_and_none_is_cut():
    labels = LABELS._replace(names=dict(iou="accuracy, share of test images with their class on top"))
    figure = figures.curves_figure(records_of([0.25, 0.5]), labels)
    figure.savefig(io.BytesIO())
    assert "\n" in figure.axes[2].get_title("left")
    titles = axes_titles(figure)
    drawn = [text.get_window_extent() for text in figure.findobj(Text) if text.get_text() in titles - {""}]
    assert len(drawn) == 3 and max(extent.x1 for extent in drawn) <= figure.bbox.x1


def test_words_of_a_chinese_page_are_chinese_and_those_of_a_chart_if_a_font_has_the_signs(monkeypatch):
    monkeypatch.setenv("TPUKIT_LANGUAGE", "zh")
    for fonts, loss, best in (([], "loss", "IoU (best 0.5)"), (["Some"], "损失", "IoU（最好 0.5）")):
        monkeypatch.setattr(presenting, "chinese_fonts", lambda: fonts)
        figure = figures.curves_figure(records_of([0.25, 0.5]), LABELS)
        assert {loss, best} <= axes_titles(figure)
    assert language.translate("cpu · 2 compilations, 9 s") == "cpu · 编译 2 次，9 s"
    ran = language.translate("It ran on cpu (host processor), fp32.")
    assert ran == "它在 cpu（主机处理器），fp32 上运行。"
    assert ("主机", "local") in environment.detect({}, "/no").table().rows
    monkeypatch.delenv("TPUKIT_LANGUAGE")
    assert language.translate("loss") == "loss"


def test_of_the_weights_of_a_chinese_font_the_regular_one_is_taken(monkeypatch):
    from matplotlib import font_manager

    taken = []
    folder = "/usr/share/fonts/opentype/noto"
    found = [f"{folder}/NotoSansCJK-{weight}.ttc" for weight in ("Bold", "Light", "Regular", "Black")]
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [*found, "/usr/share/fonts/A-Regular.ttf"])
    monkeypatch.setattr(font_manager.fontManager, "addfont", taken.append)
    monkeypatch.setattr(font_manager.FontProperties, "get_name", lambda self: "Noto Sans CJK JP")
    presenting.chinese_fonts.cache_clear()
    try:
        assert presenting.chinese_fonts() == ["Noto Sans CJK JP"]
        assert taken == [f"{folder}/NotoSansCJK-Regular.ttc"]
    finally:
        presenting.chinese_fonts.cache_clear()


def axes_titles(figure):
    return {axis.get_title("left") for axis in figure.axes}


def test_every_english_text_has_a_chinese_one_with_its_gaps_and_is_not_taken_for_a_shorter_one(monkeypatch):
    monkeypatch.setenv("TPUKIT_LANGUAGE", "zh")
    for english, chinese in tomllib.loads(language.WORDS.read_text()).items():
        texts = ["T"] * english.count("{}")
        assert chinese.format(*texts).count("T") - chinese.count("T") <= len(texts), english
        translated = language.translate(english.replace("{}", "7"))
        assert re.search(r"[\u4e00-\u9fff]", translated), english
        without_code = re.sub("`.+?`", "", translated)
        assert not re.search("[a-z]{3} [a-z]{2}", without_code), translated


def test_no_text_of_a_file_is_a_formula_or_breaks_a_figure():
    records = records_of([0.25, 0.5], device=EVIL)
    for record in records[3::2]:
        record["scores"] |= {EVIL: 0.5, "$\\frac{": 0.5, "_": -0.5}
    axes = axes_of(figures.curves_figure(records))
    axes |= axes_of(figures.live_figure(records, findings.NO_LABELS))
    axes |= axes_of(figures.panels_figure([[(EVIL, np.eye(4))]], EVIL))
    axes |= axes_of(figures.runs_figure({EVIL: {EVIL: ([1.0], [0.5])}}, EVIL, [EVIL], EVIL))
    formula_or_control = r"(?<!\\)\$|[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800]"  # but for lines
    assert len(axes) >= 8 and not [title for title in axes if re.search(formula_or_control, title)]
