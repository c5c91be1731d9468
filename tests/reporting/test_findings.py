"""What a run's report says of the accelerator, and TensorBoard's events."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from tpukit import cli, train
from tpukit.devices import recompiles
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.host.tables import Sentences, printable
from tpukit.reporting import figures, findings
from tpukit.runs.run import Run
from tpukit.workloads.mnist import MNIST


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


def test_what_changed_between_two_calls_is_said_by_name_with_old_and_new():
    step = ("batch", "epoch", "sums")
    image = torch.zeros(16, 3, 8, 8)
    before = recompiles.described(step, (dict(image=image, mask=image.byte()), 5, torch.zeros(5)))
    assert before["image"] == ((16, 3, 8, 8), "float32") and before["epoch"] == 5 and before["sums"] == ((5,), "float32")
    same = recompiles.described(step, (dict(image=image + 1, mask=image.byte()), 5, torch.ones(5)))
    assert recompiles.changes(before, same) == []
    after = recompiles.described(step, (dict(image=image[:7], index=image.long()), 6, torch.zeros(5).double()))
    assert recompiles.changes(before, after) == [
        "index is new: (16, 3, 8, 8) int64",
        "mask is gone",
        "image went from (16, 3, 8, 8) to (7, 3, 8, 8): the last batch is ragged",
        "epoch went from 5 to 6",
        "sums went from (5,) float32 to (5,) float64",
    ]
    rates = dict(rates=(0.9, 0.99))  # a tuple of numbers is no tensor
    assert recompiles.changes(rates, dict(rates=(0.9, 0.5))) == ["rates went from (0.9, 0.99) to (0.9, 0.5)"]
    grown = recompiles.changes(recompiles.described(step, (image[:7],)), recompiles.described(step, (image,)))
    assert grown == ["batch went from (7, 3, 8, 8) to (16, 3, 8, 8)"]


def test_the_first_new_operation_of_a_trace_is_named_with_its_line_whatever_the_numbering():
    old = [
        "%0 = f32[] xla::device_data(), location=loss@mine.py:6",
        "%1 = f32[8] aten::mul(%0), location=loss@mine.py:6, ROOT=0",
    ]
    new = [
        "%0 = f32[] xla::device_data(), location=loss@mine.py:9",
        "%1 = f32[] xla::device_data(), location=loss@mine.py:6",
        "%2 = f32[8] aten::mul(%1), scope=aten::mul.2, location=loss@mine.py:6",
        "%3 = f32[8] aten::relu(%2)",
        "%4 = f32[8] aten::exp(%3), location=loss@mine.py:9, ROOT=0",
    ]
    assert recompiles.new_operation("\n".join(old), "\n".join(new)) == "aten::exp in loss, mine.py line 9"
    assert recompiles.new_operation("\n".join(new), "\n".join(old)) is None


@pytest.fixture
def trained(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, epochs=2, batch_size=16, log_every=3)
    run = Run.open(tmp_path / "run", task)
    train(task, run, runtime=cpu, progress=False)
    return task, run


def test_memory_of_every_device_of_every_rank_is_recorded(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(Runtime, "memory", lambda self: [(self.world.rank + 1.0, 16.0), (self.world.rank + 5.0, 16.0)])

    class Two(World):
        def all_gather(self, values):  # the other rank says the same of its own devices
            other = [v + 10 if n >= 5 and n % 2 and n < len(values) - 2 else v for n, v in enumerate(values)]
            return [list(values), other]

    task = MNIST(dataset_dir=digits, epochs=1, batch_size=16, log_every=99)
    runtime = Runtime("cpu")
    runtime.world = Two(0, 1)
    run = Run.open(tmp_path, task)
    train(task, run, runtime=runtime, progress=False)
    memory = run.records("train")[-1]["speed"]["memory"]
    assert memory == [[1.0, 16.0], [5.0, 16.0], [11.0, 16.0], [15.0, 16.0]]


def test_the_report_says_words_first_then_numbers_then_a_picture(trained, capsys):
    _, run = trained
    assert cli.main(["report", str(run.path)]) == 0
    said = capsys.readouterr().out
    order = [said.index(part) for part in ("It ran on cpu", "Where a step's time went", "report.png")]
    assert order == sorted(order)
    assert (run.path / "pictures" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_that_is_started_again_is_still_reported_by_the_session_that_trained(trained, cpu):
    task, run = trained
    before = findings.findings(run.records()), [str(t) for t in findings.accelerator_tables(run.records())]
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    assert len(run.records("start")) == 2
    assert (findings.findings(run.records()), [str(t) for t in findings.accelerator_tables(run.records())]) == before


def test_sentences_are_the_same_in_a_notebook_as_in_a_shell_whatever_signs_they_hold():
    said = Sentences(["<lambda> took 2*3*4 ms, `a*b*c` and `<lambda>`: snake_case_name", "between $1 and $2", "one ` alone"])
    assert repr(said).splitlines() == [f"- {sentence}" for sentence in said]
    page = Page(said._repr_html_())
    assert page.words == "".join(said).replace("`a*b*c`", "a*b*c").replace("`<lambda>`", "<lambda>")
    assert page.elements == ["ul", "li", "code", "code", "li", "li"]


# What a file may hold that a stranger gave away: markup of notebooks, of rich, of matplotlib, and what a terminal obeys.
EVIL = (
    "$\\frac$<script>alert(1)</script><img src=x onerror=alert(1)>`<img src='https://a.example/b.png'>\n\n# x\n"
    "[x](javascript:alert(1))![x](https://a.example/b.png)|a|b|\n|-|-|\n[/b][link=https://a.example]$\\href{javascript:x}{y}$"
    "</li></ul></td></table></style><script>\x1b[2J\x1b]0;x\x07\x9b\u202e\ud800&lt;script&gt;\\"
)


def strange_run(folder, word):
    """A run whose files hold a word wherever they can."""
    counters = dict.fromkeys(("compilations", "compile_s", "executions", "execute_s", "to_device_s", "from_device_s"), 1)
    speed = dict(
        seconds=2.0, images_per_s=8.0, wait_s=0.5, memory=[[2**30, 2**34]], counters={**counters, "fallbacks": {word: 3}}
    )
    compiled = dict(kind="compile", programs=1, seconds=9.0, why=[word], refused=False)
    records = [
        dict(kind="start", step=0, device=word, accelerator=word, phases=1, batch_size=4, torch_compile=word),
        dict(compiled, step=1, what="step"),
        dict(compiled, step=2, what="step"),
        dict(compiled, step=3, what="step", refused=True),
        dict(compiled, step=4, what=word),
        dict(kind="train", step=4, epoch=0, loss=1.0, grad_norm=1.0, speed=speed),
        dict(kind="train", step=8, epoch=0, loss=0.5, grad_norm=1.0, speed=speed),
        dict(kind=word, step=8, note=word),
        dict(
            kind="evaluation",
            step=8,
            epoch=1,
            scores={word: 0.5, "iou": 0.25, "beside": {word: {word: 0.5, "iou": word}}, "published": {"iou": word}},
            speed=dict(seconds=1.0),
        ),
    ]
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(workload=word, settings={word: word})))
    (folder / "records.jsonl").write_text("".join(json.dumps(dict(record, time=0.0)) + "\n" for record in records))
    (folder / "progress.json").write_text(json.dumps(dict(step=4, total=9, unit=word, name=word, epoch=word, loss=word)))
    (folder / "checkpoints/checkpoints.json").write_text(json.dumps([dict(file=word, step=8, sha256=word)]))
    return Run.find(folder)


def strange_measurement(path, word):
    """A file of `tpukit compare` that holds a word wherever it can."""
    times = dict(first_step_s=2.0, start_s=3.0, step_ms=9.0, step_ms_low=8.0, step_ms_high=10.0, wait_ms=1.0)
    row = dict(times, batch_size=8, fits=True, timed_steps=20, compiled_late=0, memory_bytes=2**30, memory_of=word)
    kept = dict(
        format="tpukit comparison 1",
        tpukit=word,
        date=word,
        hardware=word,
        chips=1,
        accelerator="cuda",
        place=word,
        device=word,
    )
    kept |= dict(cores=1, processes=1, precision=word, python=word, versions={word: word}, workload=word, recipe={word: word})
    kept |= dict(samples=80, synthetic=True, rows=[row, dict(row, batch_size=16), dict(batch_size=32, fits=False, why=word)])
    path.write_text(json.dumps(kept))
    return path


def test_in_a_saved_notebook_nothing_that_a_file_holds_is_markup(tmp_path, monkeypatch):
    import nbformat
    from IPython.core.formatters import DisplayFormatter
    from nbconvert import HTMLExporter

    from tpukit.tools import compare, prices

    def page(word, folder):
        folder.mkdir()
        shown = []
        monkeypatch.setattr(figures, "_in_notebook", lambda: True)
        monkeypatch.setattr("IPython.display.display", shown.append)
        run = strange_run(folder / "run", word)
        figures.show(run)
        figures.show_report(run)
        measurement = compare.Measurement.read(strange_measurement(folder / "m.json", word))
        figures.show_comparison(compare.compare([measurement], prices=prices.read()))
        figures._out(measurement.table())
        figures._out(findings.settings_table(run.config))
        figures._out(figures.panels_figure([[(word, np.eye(4)), (word, np.eye(4))]], word))
        figures._out(findings.live_table(word, run.records(), run.read_progress(), run.checkpoints(), 1.0))
        formatter = DisplayFormatter()
        formatter.active_types = formatter.format_types
        cell = nbformat.v4.new_code_cell("show()", id="shown")
        for thing in shown:
            data, metadata = formatter.format(thing)
            data.pop("image/png", None)  # hundreds of kilobytes that hold no words
            cell.outputs.append(nbformat.v4.new_output("display_data", data=data, metadata=metadata))
        assert len(shown) >= 14
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
    said = "".join(capsys.readouterr())
    assert said.isascii() or not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", said)
    assert r"\x1b[2J" in "".join(said.split()) and "<script>" in "".join(said.split())


@pytest.mark.parametrize(
    "name, times", [("records.jsonl", 100), ("config.json", 10), ("progress.json", 30), ("checkpoints/checkpoints.json", 30)]
)
def test_one_flipped_bit_in_a_file_of_a_run_never_gives_a_traceback(name, times, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *a, **k: None)  # what is drawn shows when it is laid out
    run, random = strange_run(tmp_path / "run", "word"), np.random.default_rng(0)
    whole = (run.path / name).read_bytes()
    for place in random.integers(8 * len(whole), size=times):
        bits = bytearray(whole)
        bits[place // 8] ^= 1 << place % 8
        (run.path / name).write_bytes(bits)
        for command in ("report", "watch"):
            assert cli.main([command, str(run.path)]) == 0, place
    assert "Traceback" not in "".join(capsys.readouterr())


DAMAGES = [
    lambda r: r.pop("kind"),
    lambda r: r.update(step="8"),
    lambda r: r.pop("speed"),
    lambda r: r["speed"].update(seconds=None),
    lambda r: r["speed"].update(seconds=float("inf")),
    lambda r: r["speed"].update(images_per_s=10**400),
    lambda r: r["speed"].update(memory=[[1]]),
    lambda r: r["speed"]["counters"].pop("fallbacks"),
    lambda r: r["speed"]["counters"]["fallbacks"].update(a="b"),
    lambda r: r.update(loss=True),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_left_out_and_counted(damage, tmp_path):
    records = strange_run(tmp_path / "run", "word").records()
    first, second = [r for r in records if r["kind"] == "train"]
    damage(second)
    assert [i["to"] for i in findings.intervals(records)] == [4] and findings.curves(records)["loss"] == ([4], [1.0])
    assert findings.findings(records) == [
        "Left out: 1 damaged record.",
        *findings.findings([r for r in records if r is not second]),
    ]
    assert findings.whole([*records, [], None, "word"]) == [r for r in records if r is not second]


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


def test_intervals_divide_their_own_times_by_their_steps():
    def reading(step, seconds, sent):
        counters = dict.fromkeys(("compilations", "compile_s", "executions", "execute_s"), 1) | dict(fallbacks={})
        counters |= dict(to_device_s=99.0, from_device_s=99.0)  # since the process began: of the whole dataset too
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

    records = [dict(kind="start", step=0, device="tpu", phases=1, batch_size=4), reading(5, 1.0, 0.05), reading(10, 2.0, 0.15)]
    first, second = findings.intervals(records)
    assert (first["from"], first["to"], second["from"], second["to"]) == (1, 5, 6, 10)
    assert first["step_ms"] == pytest.approx(200) and second["step_ms"] == pytest.approx(400)
    assert first["wait_ms"] == pytest.approx(20) and first["to_device_ms"] == pytest.approx(10)
    assert second["to_device_ms"] == pytest.approx(30) and second["from_device_ms"] == pytest.approx(15)


def test_a_model_of_torch_compile_is_not_said_to_be_run_as_it_comes():
    speed = dict(seconds=1.0, images_per_s=8.0, wait_s=0.0, memory=[], counters={})
    trained = dict(kind="train", step=8, epoch=0, loss=1.0, grad_norm=1.0, speed=speed)
    for mode, words in (("no", "runs each operation as it comes"), ("reduce-overhead", "torch.compile made .*reduce-overhead")):
        start = dict(kind="start", step=0, device="cuda", phases=1, batch_size=1, torch_compile=mode)
        said = " ".join(findings.findings([start, trained]))
        assert re.search(words, said) and "How much of its memory was used, this device does not tell." in said


def test_memory_stands_in_the_report_device_by_device():
    counters = dict(
        compilations=1, compile_s=1.0, executions=9, execute_s=1.0, to_device_s=0.0, from_device_s=0.0, fallbacks={}
    )
    memory = [[12 * 2**30, 16 * 2**30], [8 * 2**30, 16 * 2**30]]
    speed = dict(seconds=1.0, images_per_s=8.0, wait_s=0.0, memory=memory, counters=counters)
    records = [
        dict(kind="start", step=0, device="tpu", phases=1, batch_size=8),
        dict(kind="compile", step=1, what="step", programs=1, seconds=30.0, why=[], refused=False),
        dict(kind="compile", step=9, what="predict", programs=1, seconds=4.0, why=[], refused=False),
        dict(kind="compile", step=12, what="step", programs=1, seconds=20.0, why=["lr went from 0.1 to 0.0"], refused=False),
        dict(kind="train", step=12, loss=1.0, grad_norm=1.0, speed=speed),
    ]
    tables = {t.title: t for t in findings.accelerator_tables(records)}
    assert tables["Memory"].rows == [("0", "12.00", "16.00", "75%"), ("1", "8.00", "16.00", "50%")]
    assert [row[3] for row in tables["Compilations"].rows] == ["the first time", "the first time", "lr went from 0.1 to 0.0"]
    words = findings.findings(records)
    assert "Step 12 compiled again (20.0 s) because lr went from 0.1 to 0.0." in words
    assert "Besides, predict was compiled at step 9 (4.0 s)." in words
    assert len(figures.report_figure(records).axes) == 2


def test_a_record_holds_the_transfers_of_its_own_interval(digits, tmp_path, xla):
    run = Run.open(tmp_path, MNIST(dataset_dir=digits, epochs=2, batch_size=16, log_every=2))
    before = xla.counters()
    train(MNIST(dataset_dir=digits, epochs=2, batch_size=16, log_every=2), run, runtime=xla, progress=False)
    speeds = [r["speed"] for r in run.records("train")]
    for way in ("to_device_s", "from_device_s"):
        whole = speeds[-1]["counters"][way] - before[way]
        assert len(speeds) == 12 and 0 < sum(speed[way] for speed in speeds) <= whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turning(MNIST):
    """Predicts by another program from the second epoch on."""

    def predict(self, model, batch, epoch=None):
        digit = super().predict(model, batch)
        return 9 - digit if epoch >= 1 else digit


def test_an_evaluation_that_compiles_again_names_the_epoch_that_made_it(digits, tmp_path, xla):
    task = Turning(dataset_dir=digits, epochs=3, batch_size=40)
    run = Run.open(tmp_path, task)
    train(task, run, runtime=xla, progress=False)
    predicted = [(r["step"], r["why"]) for r in run.records("compile") if r["what"] == "predict"]
    assert predicted == [(5, []), (10, ["epoch went from 0 to 1"])]
