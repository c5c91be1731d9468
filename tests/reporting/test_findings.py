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
    assert (findings.findings(run.records()), [str(t) for t in findings.accelerator_tables(run.records())]) == before


@pytest.mark.parametrize(
    "name, times",
    [
        pytest.param("records.jsonl", 100, marks=pytest.mark.slow),
        ("config.json", 10),
        ("progress.json", 30),
        ("checkpoints/checkpoints.json", 30),
    ],
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
    lambda r: r["speed"].pop("counters"),
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
    assert findings.valid_records([*records, [], None, "word"]) == [r for r in records if r is not second]


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


def test_a_model_that_torch_compile_compiles_is_not_reported_as_run_by_operation():
    speed = dict(seconds=1.0, images_per_s=8.0, wait_s=0.0, memory=[], counters={})
    trained = dict(kind="train", step=8, epoch=0, loss=1.0, grad_norm=1.0, speed=speed)
    for mode, words in (("no", "Nothing is compiled"), ("reduce-overhead", "torch.compile.*reduce-overhead")):
        start = dict(kind="start", step=0, device="cuda", phases=1, batch_size=1, torch_compile=mode)
        sentences = " ".join(findings.findings([start, trained]))
        assert re.search(words, sentences) and "does not report how much of its memory" in sentences


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
    assert tables["Compilations"].rows[1] == ("9", "predict", "4.0", "the first time")
    assert len(figures.report_figure(records).axes) == 1
