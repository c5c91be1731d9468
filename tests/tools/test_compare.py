"""Measuring a recipe, merging what machines measured, and the choice, with numbers computed by hand."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tpukit import MNIST, Run, TpukitError, cli
from tpukit.host.environment import detect
from tpukit.runs.run import setting
from tpukit.tools import compare, prices
from tpukit.tools.compare import Measurement, Way, comparison, measurement, measuring
from tpukit.tools.compare.choosing import BOUND, MEASURED, PUBLISHED
from tpukit.tools.plan import Plan
from tpukit.tools.prices import Price
from tpukit.training.task import from_settings, to_request


def row(batch_size=32, step_ms=100.0, **other):
    times = dict(first_step_s=2.0, start_s=36.0, step_ms=step_ms, step_ms_low=step_ms, step_ms_high=step_ms, wait_ms=1.0)
    return (
        dict(batch_size=batch_size, fits=True, timed_steps=20, compiled_late=0, memory_bytes=2**30, memory_of="a core's device")
        | times
        | other
    )


def measured(**other):
    fields = dict(
        tpukit="0.1.0",
        date="2026-11-22",
        hardware="T4",
        chips=1,
        accelerator="cuda",
        place="Kaggle",
        device="Tesla T4",
        cores=1,
        processes=1,
        precision="fp16",
        python="3.12.0",
        versions={"torch": "2.11"},
        workload="mshnet",
        recipe=dict(base_size=256, crop_size=256, lr=0.05),
        samples=800,
        synthetic=False,
        rows=[row()],
    )
    return Measurement(**{**fields, **other})


def way(hardware="T4", chips=1, epoch_s=90.0, kind=MEASURED, **other):
    return Way(hardware, chips, hardware if chips == 1 else f"{hardware} x {chips}", kind, epoch_s, **other)


def price(hardware="T4", place="Google Cloud", usd=1.0, **other):
    fields = dict(spot_usd_per_hour=None, session_h=None, week_h=None, watts=None, as_of="2026-11", source="test")
    return Price(hardware=hardware, place=place, usd_per_hour=usd, **{**fields, **other})


# Prices


def test_the_shipped_prices_say_for_every_figure_where_it_is_from_and_are_shipped():
    table = prices.read()
    assert all(p.source and p.as_of <= "2026-11" for p in table)
    assert (
        prices.find(table, "tpu V5E", "kaggle").week_h == 20
        and prices.find(table, "TPU v5e", "Google Cloud").usd_per_hour == 1.2
    )
    for hardware, *_ in comparison.PUBLISHED_EPOCHS:
        assert any(p.hardware == hardware for p in table), hardware
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "prices.csv" in shipped["tpukit.tools"]


def test_an_edited_copy_of_the_prices_is_read_as_a_spreadsheet_leaves_it(tmp_path):
    copy = prices.copy(tmp_path / "mine.csv")
    lines = [line for line in copy.read_text().splitlines() if not line.startswith("T4,Colab,")]
    copy.write_text("\ufeff" + "\r\n".join([*lines, "", "T4,Colab, 0.5 ,,,,,2026-12,my own"]))
    found = prices.find(prices.read(copy), "T4", "Colab")
    assert (found.usd_per_hour, found.session_h, found.as_of) == (0.5, None, "2026-12")
    with pytest.raises(TpukitError, match="is there already"):
        prices.copy(copy)


@pytest.mark.parametrize(
    "line, words",
    [
        ("T4,Colab,cheap,,,,,2026-11,x", r"line 2, column usd_per_hour: 'cheap' is no number"),
        ("T4,Colab,-1,,,,,2026-11,x", r"line 2, column usd_per_hour: '-1'"),
        ("T4,Colab,nan,,,,,2026-11,x", r"line 2, column usd_per_hour: 'nan'"),
        ("T4,Colab,1,,0,,,2026-11,x", r"line 2, column session_h: no session fits into 0 hours"),
        ("T4,Mars,1,,,,,2026-11,x", r"line 2, column place: 'Mars' is none of Google Cloud"),
        ("T4,Colab,1,,,,,soon,x", r"line 2, column as_of: 'soon'"),
        (",Colab,1,,,,,2026-11,x", r"line 2, column hardware: empty"),
        ("T4,Colab,1,2026-11,x", r"line 2: 5 cells, but line 1 has 9 columns"),
        ("T4,Colab,1,,,,,2026-11,x\nT4,Colab,2,,,,,2026-11,x", r"line 3: T4 at Colab is also in line 2"),
    ],
)
def test_a_bad_table_of_prices_is_named_by_line_and_column(line, words, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(f"{','.join(prices.COLUMNS)}\n{line}\n")
    with pytest.raises(TpukitError, match=words):
        prices.read(path)


def test_prices_without_a_column_or_a_file_and_hardware_without_a_price_are_named(tmp_path):
    (tmp_path / "short.csv").write_text("hardware,place\nT4,Colab\n")
    with pytest.raises(TpukitError, match="line 1: no column usd_per_hour, spot_usd_per_hour"):
        prices.read(tmp_path / "short.csv")
    with pytest.raises(TpukitError, match="cannot be read .*--prices-out") as caught:
        prices.read(tmp_path / "none.csv")
    assert isinstance(caught.value.__cause__, OSError)
    table = [price("T4", "Colab"), price("L4", "Colab")]
    with pytest.raises(TpukitError, match="no price of 'A100' at Colab; there are: T4, L4"):
        prices.find(table, "A100", "Colab")
    with pytest.raises(TpukitError, match="no prices at 'Mars'; there are those of Colab"):
        prices.find(table, "T4", "Mars")


def test_a_local_card_costs_its_electricity():
    card = price("RTX 3090", "local", None, watts=350.0)
    assert card.per_hour(usd_per_kwh=0.4) == pytest.approx(0.14)
    assert card.per_hour(chips=2, usd_per_kwh=0.4) == pytest.approx(0.28)
    assert price("CPU", "local", None).per_hour() is None
    assert price(spot_usd_per_hour=0.25).per_hour(chips=4, spot=True) == 1.0


def test_spare_capacity_is_google_clouds_and_what_is_free_elsewhere_stays_free():
    table = [price("T4", "Kaggle", 0.0), price("T4", "Colab", 0.2), price("T4", usd=0.35, spot_usd_per_hour=0.175)]
    found = compare.compare([measured()], prices=table, budget_usd=100, spot=True)
    assert [(c.place, c.usd) for c in found.choices[:2]] == [
        ("Kaggle", 0.0),
        ("Google Cloud", pytest.approx(0.175 * found.choices[1].machine_h)),
    ]
    assert all(c.finishes for c in found.choices if c.way.kind == MEASURED)
    assert "Kaggle: 400 epochs take" in found.sentences()[0] and "free." in found.sentences()[0]
    assert price(usd=1.0).per_hour(spot=True) is None  # a spot price of Google Cloud that nobody knows


# Sessions, by hand


@pytest.mark.parametrize(
    "train_h, limits, expected",
    [
        (10, dict(start_h=0.1), (1, 10.1, 10.1)),
        (20, dict(session_h=9), (3, 20, 20)),  # 9 + 9 + 2
        (8.5, dict(session_h=9, start_h=0.5, lost_h=0.25), (1, 9, 9)),  # fits exactly, so nothing is cut off
        (20, dict(session_h=9, start_h=0.5, lost_h=0.25), (3, 22, 22)),  # 8.25 + 8.25 are done, 0.5 + 3.5 are left
        (25, dict(session_h=9, week_h=20), (4, 25, 173)),  # 9 + 9 + 2 in the first week, 5 in the second: 168 + 5
        # The 2 h that the first week has left bring 1.25; so 17.75 are done, and 0.5 + 2.25 come in the second week.
        (20, dict(session_h=9, week_h=20, start_h=0.5, lost_h=0.25), (4, 22.75, 170.75)),
        # 1 h is left in the first week, less than a start costs: it is not used.
        (9, dict(session_h=9, week_h=10, start_h=1, lost_h=0.5), (2, 11.5, 170.5)),
        (0.1, dict(session_h=1, start_h=0.8, lost_h=0.3), (1, 0.9, 0.9)),
        (5, dict(session_h=1, start_h=0.8, lost_h=0.3), None),
        (60, dict(week_h=20), (3, 60, 2 * 168 + 20)),
        (400, dict(week_h=200), (1, 400, 400)),  # more hours than a week has
        # Sums of tenths are not exact: three sessions fill the first week, and three do the rest.
        (50, dict(session_h=9.1, week_h=27.3), (6, 50, 168 + 22.7)),
        (5, dict(session_h=0.1, week_h=0.3), (50, 5, 16 * 168 + 0.2)),
    ],
)
def test_the_sessions_of_a_training_are_those_counted_by_hand(train_h, limits, expected):
    found = compare.sessions_needed(train_h, **limits)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_a_choice_keeps_the_deadline_and_the_budget_or_says_why_not():
    ways = [way(epoch_s=90.0, start_s=360.0)]  # 400 epochs: 10 h, and 0.1 h to start
    places = [price(usd=2.0), price(place="Kaggle", usd=0.0, session_h=4), price(place="Colab", usd=None)]
    by_place = {c.place: c for c in compare.choose(ways, places, epochs=400, deadline_h=11, budget_usd=20)}
    assert by_place["Google Cloud"].usd == pytest.approx(20.2) and by_place["Google Cloud"].why_not == "too expensive"
    # A session of 4 h gives 4 - 0.1 - 90 s (an epoch is shorter than the 300 s between checkpoints): 3.875; the third does
    # 2.25.
    kaggle = by_place["Kaggle"]
    assert (kaggle.sessions, kaggle.finishes) == (3, True) and kaggle.machine_h == pytest.approx(8 + 0.1 + 2.25)
    assert by_place["Colab"].finishes is None and by_place["Colab"].why_not == "cost not known"
    late = compare.choose(ways, places, epochs=400, deadline_h=10)
    assert [c.why_not for c in late] == ["too late"] * 3
    never = compare.choose([way(start_s=3600.0)], [price(session_h=1)], epochs=400)[0]
    assert (never.sessions, never.finishes, never.why_not) == (None, False, "never ends within its sessions")


def test_choices_come_in_the_order_finishing_measured_cheap():
    ways = [way("A100", epoch_s=9), way("T4"), way("V100", kind=PUBLISHED, epoch_s=1), way("TPU v5e", kind=BOUND, epoch_s=1)]
    table = [price("A100", usd=3), price("T4", usd=1), price("V100", usd=0.1), price("TPU v5e", usd=0.1)]
    found = compare.choose(ways, table, epochs=400, budget_usd=5)
    assert [c.way.hardware for c in found] == ["A100", "V100", "TPU v5e", "T4"]  # the T4's 10 h cost 10 USD


def test_what_was_measured_at_a_place_counts_there_and_what_comes_from_elsewhere_says_so():
    fast, slow = (measured(place=place, rows=[row(32, ms)]) for place, ms in (("Colab", 4.0), ("Kaggle", 12.0)))
    table = [price("T4", place, 0.1) for place in ("Colab", "Kaggle", "Google Cloud")]
    found = compare.compare([fast, slow], prices=table)
    mine = [c for c in found.choices if c.way.kind == MEASURED]
    assert {(c.place, c.way.place) for c in mine if c.place != "Google Cloud"} == {("Colab", "Colab"), ("Kaggle", "Kaggle")}
    assert [c.elsewhere for c in mine if c.place == "Google Cloud"] == ["Colab", "Kaggle"]
    assert "measured at Colab" in str(found.choices_table()) and {"T4, Colab", "T4, Kaggle"} <= {
        r[0] for r in found.ways_table().rows
    }


def test_what_cannot_be_counted_is_said_to_be_left_out():
    found = compare.compare([], prices=prices.read())
    assert any(note.startswith("CPU as published is left out of the choice") for note in found.notes)
    assert any(r[5] == "not known" for r in found.choices_table().rows)


def test_hardware_is_offered_where_there_is_so_much_of_it():
    table = [price("TPU v5e", place, 0.0) for place in ("Colab free", "Kaggle", "Google Cloud")]
    places = lambda w: [c.place for c in compare.choose([w], table, epochs=1)]  # noqa: E731
    assert places(way("TPU v5e", 8, kind=BOUND)) == ["Kaggle", "Google Cloud"]
    assert places(way("TPU v5e", 1, kind=BOUND)) == ["Colab free", "Kaggle", "Google Cloud"]
    assert places(way("TPU v5e", 16, kind=BOUND)) == ["Google Cloud"]
    # A processor that was measured at one place says nothing of those at others.
    cpus = [price("CPU", place, 0.0) for place in ("Colab", "Colab free", "Kaggle", "local")]
    assert {c.place for c in compare.choose([way("CPU", place="Colab")], cpus, epochs=1)} == {"Colab", "Colab free"}
    # A card that the table does not know is there all the same, at an unknown cost.
    (own,) = compare.choose([way("RTX 5050", place="local")], cpus, epochs=1)
    assert (own.place, own.usd, own.finishes) == ("local", None, True)
    # Nor does a published figure of somebody's processor say anything of the one that is here.
    assert compare.choose([way("CPU", kind=PUBLISHED)], cpus, epochs=1) == []


def test_a_place_whose_limits_are_not_in_the_table_is_no_place_where_a_training_is_known_to_finish():
    table = [price("T4", "Kaggle", 0.0, session_h=12)]
    long = measured(hardware="P100", rows=[row(32, 36000.0)])  # 25 steps of an epoch: 900 s; 400 epochs: 100 h
    found = compare.compare([long], prices=table)
    (kaggle,) = [c for c in found.choices if c.way.kind == MEASURED]
    assert (kaggle.place, kaggle.sessions, kaggle.finishes, kaggle.why_not) == ("Kaggle", None, None, "limits not known")
    assert found.sentences()[0].startswith("Measured: nothing is known to finish. It may be P100 at batch 32, Kaggle")
    assert "in an unknown number of sessions, at a cost" in found.sentences()[0]
    (late,) = compare.choose([way("P100", place="Kaggle")], table, epochs=400, deadline_h=1)
    assert late.finishes is False and late.why_not.startswith("too late")


def test_a_price_without_its_host_machine_is_said_to_be_that():
    notes = lambda *table: [n for n in compare.compare([measured()], prices=table).notes if "billed besides" in n]  # noqa: E731
    assert notes(price("T4", "Kaggle", 0.0), price("A100", source="with its host")) == []
    shipped = prices.read()
    (note,) = notes(*shipped)
    assert note.startswith("T4 at Google Cloud, V100 at Google Cloud: the cost is of the card alone")
    alone = {p.hardware for p in shipped if prices.HOST_BESIDES in p.source}
    assert alone == {"T4", "L4", "V100", "P100"}


# Merging


def test_an_epoch_is_its_steps_and_the_fastest_batch_counts_unless_one_is_asked_for():
    rows = [row(30, 100.0), row(60, 150.0), dict(batch_size=120, fits=False, why="too large")]
    found = compare.compare([measured(rows=rows)])
    (t4,) = [w for w in found.ways if w.kind == MEASURED]
    assert found.images == 800 and t4.batch_size == 60 and t4.epoch_s == pytest.approx(13 * 0.15)  # 800 // 60 steps
    assert t4.hours(400) == pytest.approx(400 * 1.95 / 3600)
    (t4,) = [w for w in compare.compare([measured(rows=rows)], batch_size=30).ways if w.kind == MEASURED]
    assert t4.epoch_s == pytest.approx(26 * 0.1)
    left_out = compare.compare([measured(rows=rows)], batch_size=7)
    assert not [w for w in left_out.ways if w.kind == MEASURED] and any("left out" in n for n in left_out.notes)


def test_published_figures_are_for_their_images_alone_and_never_pass_for_measured():
    found = compare.compare([measured()], epochs=400)
    published = {w.label: w.epoch_s for w in found.ways if w.kind == PUBLISHED}
    assert published == {"TPU v2-8": 30, "A100": 60, "V100": 120, "T4": 180, "CPU": 600}
    assert {w.label: w.epoch_s for w in compare.compare([], images=400).ways}["A100"] == 30
    assert ("T4", PUBLISHED) in [line[:2] for line in found.ways_table().rows]
    assert any(said.startswith("Published, not measured") for said in found.sentences())
    small = compare.compare([measured(recipe=dict(base_size=64, crop_size=64))])
    assert not [w for w in small.ways if w.kind == PUBLISHED]
    assert any("left out" in note and "A100 60 s" in note for note in small.notes)
    assert not [w for w in compare.compare([measured(workload="mnist", recipe={})]).ways if w.kind == PUBLISHED]


def test_a_bound_of_the_compiler_is_marked_everywhere():
    rows = [dict(batch_size=b, fits=True, bound_s=s, peak_bytes=2**30) for b, s in ((32, 0.064), (64, 0.2))]
    plan = Plan("mshnet", "train", "v5e-8", [*rows, dict(batch_size=512, fits=False, why="")])
    found = compare.compare([measured()], plans=[plan], epochs=100)
    (bound,) = [w for w in found.ways if w.kind == BOUND]
    assert (bound.hardware, bound.chips, bound.batch_size) == ("TPU v5e", 8, 32) and bound.epoch_s == pytest.approx(25 * 0.064)
    (line,) = [r for r in found.ways_table().rows if r[1] == BOUND]
    assert line[0] == "TPU v5e x 8" and line[3] == ">= 1.6" and "not measured" in line[1]
    offers = [c for c in found.choices if c.way is bound]
    assert {c.place for c in offers} == {"Kaggle", "Google Cloud"} and all(
        (c.finishes, c.why_not) == (None, "at best") for c in offers
    )
    assert any(s.startswith("Bound, by the compiler; not measured") and "take at least" in s for s in found.sentences())


def test_a_bound_at_an_unknown_cost_is_not_what_could_finish_within_a_budget():
    plan = Plan("mshnet", "train", "v6e-1", [dict(batch_size=32, fits=True, bound_s=0.064, peak_bytes=2**30)])
    table = [price("TPU v6e", "Colab", None), price("TPU v6e", usd=2.7)]
    said = lambda *table: next(  # noqa: E731
        s for s in compare.compare([], plans=[plan], prices=table, budget_usd=10).sentences() if s.startswith("Bound")
    )
    assert "the cheapest that could finish within 10.00 USD: TPU v6e at batch 32, Google Cloud" in said(*table)
    assert "nothing is known to finish within 10.00 USD. It may be TPU v6e at batch 32, Colab" in said(table[0])


def test_made_up_images_count_as_an_epoch_of_the_published_set_and_that_is_said():
    found = compare.compare([measured(synthetic=True, samples=512)])
    assert found.images == 800 and any("made up" in note for note in found.notes)
    assert compare.compare([measured(synthetic=True, samples=512), measured(samples=700, hardware="L4")]).images == 700


def test_different_recipes_and_workloads_are_refused_naming_them():
    other = measured(hardware="L4", recipe=dict(base_size=256, crop_size=192, lr=0.05))
    with pytest.raises(TpukitError, match="different recipes:\n  crop_size: 256 in T4, 192 in L4"):
        compare.compare([measured(), other])
    with pytest.raises(TpukitError, match="T4 measured mshnet, L4 mnist"):
        compare.compare([measured(), measured(hardware="L4", workload="mnist")])


def test_two_engines_on_one_card_are_told_apart_in_tables_and_in_the_names_of_their_files(tmp_path, digits):
    fast = dict(torch_compile="reduce-overhead", channels_last=True, data_on="host")
    found = compare.compare([measured(), measured(engine=fast, rows=[row(32, 50.0)])])
    labels = [way.label for way in found.ways if way.kind == MEASURED]
    assert labels == ["T4", "T4, reduce-overhead, channels last, data on host"]
    env = dataclasses.replace(detect({}), host="local", accelerator="cpu")
    task = MNIST(dataset_dir=digits, **fast)
    assert compare.file_for(tmp_path, task, env).name == "mnist-cpu-reduce-overhead-channels-last-data-on-host.json"
    assert compare.file_for(tmp_path, MNIST(), env).name == "mnist-cpu.json"


def test_a_file_from_before_engines_were_kept_is_read_as_one_of_an_unknown_engine(tmp_path):
    measured().write(tmp_path / "old.json")
    old = json.loads((tmp_path / "old.json").read_text())
    del old["engine"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Measurement.read(tmp_path / "old.json") == measured()


def test_the_choice_in_words_names_sessions_cost_and_what_was_not_measured():
    slow = measured(rows=[row(32, 2592.0, start_s=0.0)])  # 25 steps of an epoch: 64.8 s; 400 epochs: 7.2 h
    table = [price("T4", "Kaggle", 0.0, session_h=4), price("T4", "Google Cloud", 0.35)]
    said = compare.compare([slow], prices=table, deadline_h=24).sentences()
    assert said[0] == (
        "Measured, the cheapest that finishes within 24.0 h: T4 at batch 32, Kaggle: 400 epochs take 7.2 h in 2 sessions, free."
    )
    assert "Google Cloud (measured at Kaggle): 400 epochs take 7.2 h in 1 session, for 2.52 USD." in said[1]
    (nothing, *_) = compare.compare([slow], prices=table, deadline_h=1).sentences()
    assert nothing.startswith(
        "Measured: nothing is known to finish within 60.0 min. The soonest is T4 at batch 32, Google Cloud"
    )


def test_the_plots_name_their_units_and_what_was_not_measured():
    from tpukit.reporting import figures

    figure = figures.comparison_figure(compare.compare([measured(), measured(hardware="L4")]))
    labels = {axis.get_xlabel() for axis in figure.axes} | {axis.get_ylabel() for axis in figure.axes}
    assert {"global batch size", "images a second", "peak memory, GiB", "hours of 400 epochs", "USD of 400 epochs"} <= labels
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [MEASURED, PUBLISHED]
    looks = {(patch.get_facecolor(), patch.get_hatch()) for patch in legend.get_patches()}
    assert len(looks) == 2 and figure.get_size_inches()[0] < 10
    figures.comparison_figure(compare.compare([]))  # nothing measured: still a picture


# Files


def test_a_file_comes_back_as_it_was_written_and_is_small(tmp_path):
    one = measured(rows=[row(32), dict(batch_size=64, fits=False, why="out of memory")])
    one.write(tmp_path / "deep/one.json")
    assert Measurement.read(tmp_path / "deep/one.json") == one
    assert (tmp_path / "deep/one.json").stat().st_size < 4000
    assert one.table().rows[1][2:4] == ("does not fit", "out of memory") and "memory: a core's device" in one.table().title


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda f: f.pop("format"), "no measurement of `tpukit compare`"),
        (lambda f: f.pop("chips"), "it has no chips"),
        (lambda f: f.update(chips="8"), "chips is '8'"),
        (lambda f: f.update(cores=0), "cores is 0"),
        (lambda f: f.update(samples=10**400), r"samples is 10{50,70}$"),
        (lambda f: f["rows"][0].update(wait_ms=10**400), r"wait_ms is 10{50,70}$"),
        (lambda f: f.update(rows={}), "rows is {}"),
        (lambda f: f.update(rows=[3]), r"rows\[0\] is no object"),
        (lambda f: f["rows"][0].pop("step_ms"), r"rows\[0\] is damaged: it has no step_ms"),
        (lambda f: f["rows"][0].update(step_ms=float("nan")), "step_ms is 'NaN'"),
        (lambda f: f["rows"][0].update(step_ms=0), "step_ms is 0"),
        (lambda f: f["rows"][0].update(step_ms=-1), "step_ms is -1"),
        (lambda f: f["rows"][0].update(fits="yes"), "fits is 'yes'"),
        (lambda f: f["rows"][0].update(fits=False), "has no why"),
        (lambda f: f["rows"][0].update(batch_size=True), "batch_size is True"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(change, words, tmp_path):
    path = tmp_path / "one.json"
    measured().write(path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(TpukitError, match=words) as error:
        Measurement.read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "content, words", [("{", "damaged, or no JSON"), ("[]", "no measurement"), ("\xff", "no JSON|no measurement")]
)
def test_a_foreign_file_is_named(content, words, tmp_path):
    (tmp_path / "one.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(TpukitError, match=words):
        Measurement.read(tmp_path / "one.json")
    with pytest.raises(TpukitError, match="cannot be read"):
        Measurement.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    "accelerator, device, expected",
    [
        ("tpu", "v5litepod-8", "TPU v5e"),
        ("tpu", "v5e-1", "TPU v5e"),
        ("tpu", "v6e-1", "TPU v6e"),
        ("tpu", "v5p-8", "TPU v5p"),
        ("tpu", "v4-8", "TPU v4"),
        ("tpu", "TPU", "TPU"),
        ("cuda", "Tesla T4", "T4"),
        ("cuda", "Tesla P100-PCIE-16GB", "P100"),
        ("cuda", "Tesla V100-SXM2-16GB", "V100"),
        ("cuda", "NVIDIA A100-SXM4-40GB", "A100"),
        ("cuda", "NVIDIA L4", "L4"),
        ("cuda", "NVIDIA H100 80GB HBM3", "H100"),
        ("cuda", "NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("cuda", "NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
        ("cuda", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("cuda", "NVIDIA GeForce GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti"),
        ("xla", "CPU XLA device", "CPU"),
        ("cpu", "x86_64, 2 cores", "CPU"),
    ],
)
def test_hardware_has_the_name_that_the_price_table_uses(accelerator, device, expected):
    env = dataclasses.replace(detect({}), accelerator=accelerator, device_name=device)
    assert compare.hardware_of(env) == expected


@pytest.mark.parametrize(
    "host, accelerator, device, cores, expected",
    [
        ("kaggle", "cuda", "Tesla T4", 2, ("mnist-t4-x2-kaggle.json", "Kaggle", 2)),
        ("colab", "cuda", "Tesla T4", 1, ("mnist-t4-colab.json", "Colab", 1)),
        ("local", "cuda", "Tesla T4", 1, ("mnist-t4.json", "local", 1)),
        ("local", "cpu", "x86_64, 2 cores", 2, ("mnist-cpu.json", "local", 1)),
        ("tpu-vm", "tpu", "v5litepod-8", 8, ("mnist-tpu-v5e-x8-google-cloud.json", "Google Cloud", 8)),
        ("tpu-vm", "tpu", "v3-8", 8, ("mnist-tpu-v3-x8-google-cloud.json", "Google Cloud", 4)),  # two cores a chip
        ("tpu-vm", "tpu", "v2-8", 8, ("mnist-tpu-v2-x8-google-cloud.json", "Google Cloud", 4)),
        ("local", "tpu", "TPU", 4, ("mnist-tpu-x4-google-cloud.json", "Google Cloud", 4)),  # a TPU VM that does not say so
    ],
)
def test_a_file_names_the_place_and_counts_the_chips_as_the_price_table_does(
    host, accelerator, device, cores, expected, digits, tmp_path
):
    env = dataclasses.replace(detect({}), host=host, accelerator=accelerator, device_name=device, cores=cores)
    task = MNIST(dataset_dir=digits)
    about = dict(cores=cores, processes=cores, precision="fp32", samples=200)
    found = measurement.measurement_of(task, env, about, [row()])
    assert (compare.file_for(tmp_path, task, env).name, found.place, found.chips) == expected


def test_a_set_is_made_up_where_its_note_says_so_and_real_where_its_note_is_in_any_other_writing(digits, tmp_path):
    about = dict(cores=1, processes=1, precision="fp32", samples=200)
    (tmp_path / "README.txt").write_bytes("Zahlen für Übungen".encode("latin-1"))
    for folder, made_up in ((str(digits), True), (tmp_path, False), (tmp_path / "none", False)):
        found = measurement.measurement_of(MNIST(dataset_dir=folder), detect({}), about, [row()])
        assert found.synthetic == made_up, folder


# Measuring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(MNIST):
    """A network whose loss takes 20 ms at least, and whose batches take 30 ms more to make."""

    def loss(self, model, batch, epoch):
        time.sleep(0.02)
        return super().loss(model, batch, epoch)

    def datasets(self):
        train, test = super().datasets()

        class Sleepy(type(train)):
            def batch(self, indices, numbers=None):
                time.sleep(0.03)
                return super().batch(indices, numbers)

        return Sleepy(train.images, train.labels), test


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(MNIST):
    """A network that runs out of memory above a batch of 16, or is killed, or fails in another way."""

    way: str = setting("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm", free=True)
    notes: Path | None = Path("notes")
    places: tuple[Path, ...] = (Path("a"), Path("b"))
    sizes: tuple[int, ...] | None = (3, 4)

    def loss(self, model, batch, epoch):
        assert isinstance(self.notes, Path), "a path came back as text"
        if len(batch["label"]) > 16:
            if self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(self.way)
        return super().loss(model, batch, epoch)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


def test_a_step_time_holds_the_step_and_the_wait_for_its_batch(digits, cpu, tmp_path):
    task = Slow(dataset_dir=digits, batch_size=64, channels=4, num_workers=0)
    run = Run.open(tmp_path / "run", task)
    run.echo = False
    found = compare.measure(task, run, runtime=cpu, steps=7)
    r = found["row"]
    assert r["wait_ms"] >= 30 and r["step_ms_low"] >= 50 and r["step_ms_low"] <= r["step_ms"] <= r["step_ms_high"]
    assert r["timed_steps"] == 8 and r["memory_of"] == "resident set of the processes" and r["memory_bytes"] > 50e6
    assert found["samples"] == 200 and r["start_s"] > r["first_step_s"] > 0.05
    assert not run.records("train") and not run.checkpoints()  # neither evaluations nor checkpoints are timed


def test_what_is_timed_are_the_steps_of_a_training(digits, cpu, tmp_path, monkeypatch):
    from tpukit import train
    from tpukit.training import loop

    seen = {"train": [], "measure": []}
    plain = loop.training_step

    def recorded(task, model, optimizer, runtime, batch, epoch, sums):
        seen[now].append((batch["label"].tolist(), epoch, float(next(model.parameters()).detach().sum())))
        return plain(task, model, optimizer, runtime, batch, epoch, sums)

    monkeypatch.setattr(loop, "training_step", recorded)
    task = MNIST(dataset_dir=digits, batch_size=16, channels=4, epochs=1)
    for now in ("train", "measure"):
        run = Run.open(tmp_path / now, task)
        run.echo = False
        train(task, run, runtime=cpu, progress=False) if now == "train" else compare.measure(task, run, runtime=cpu, steps=10)
    assert len(seen["train"]) == 12 and len(seen["measure"]) == 1 + measuring.WARM_UP + 10
    # The same batches on the same weights, in the order of an epoch; only the phase is the last.
    assert [s[::2] for s in seen["measure"][:12]] == [s[::2] for s in seen["train"]]
    assert {epoch for _, epoch, _ in seen["measure"]} == {task.epochs}


def test_one_program_is_compiled_and_none_after_the_first_steps(digits, xla, tmp_path):
    task = MNIST(dataset_dir=digits, batch_size=8, channels=4)
    run = Run.open(tmp_path / "run", task)
    run.echo = False
    found = compare.measure(task, run, runtime=xla, steps=5)
    assert found["row"]["compiled_late"] == 0 and len(run.records("compile")) == 1


def test_sizes_double_in_processes_of_their_own_until_a_step_does_not_fit(digits, tmp_path, on_cpu):
    said, out = [], tmp_path / "found.json"
    task = Greedy(dataset_dir=digits, batch_size=8, channels=4)
    found = compare.measure_here(task, steps=2, max_batch=64, out=out, say=said.append)
    assert [(r["batch_size"], r["fits"]) for r in found.rows] == [(8, True), (16, True), (32, False)]
    assert "RESOURCE_EXHAUSTED" in found.rows[-1]["why"] and Measurement.read(out) == found
    assert (found.hardware, found.place, found.workload, found.samples, found.synthetic) == ("CPU", "local", "mnist", 200, True)
    assert found.engine == dict(torch_compile="no", channels_last=False, data_on="auto")
    assert "batch_size" not in found.recipe and "dataset_dir" not in found.recipe and str(digits) not in out.read_text()
    assert said[-2].startswith("batch 32: does not fit") and found.versions["torch"] and found.fitting[0]["timed_steps"] == 2


@pytest.mark.parametrize("batch_size, tried", [(8, [8, 16]), (9, [10, 20])])
def test_on_a_cpu_sizes_double_once_from_the_first_that_the_cores_can_share(batch_size, tried, digits, on_cpu, monkeypatch):
    found = []

    def in_a_process(task, steps, cores, parallel):
        found.append(task.batch_size)
        return dict(row=row(task.batch_size, memory_bytes=1), cores=cores, processes=cores, precision="fp32", samples=200)

    monkeypatch.setattr(measuring, "_in_a_process", in_a_process)
    compare.measure_here(MNIST(dataset_dir=digits, batch_size=batch_size), cores=2, say=lambda text: None)
    assert found == tried


def test_a_task_comes_out_of_another_process_as_it_went_in(digits):
    task = Greedy(dataset_dir=digits, weights="w.pth", batch_size=4, places=(Path("c"),), sizes=None)
    request = json.loads(json.dumps(to_request(task)[0]))
    assert from_settings(Greedy, request["settings"] | dict(of_an_older_version=1)) == dataclasses.replace(
        task, weights=Path("w.pth")
    )
    assert from_settings(Greedy, {}) == Greedy()


def test_a_killed_process_is_a_batch_that_does_not_fit_and_another_error_is_said(digits, tmp_path, on_cpu):
    task = Greedy(dataset_dir=digits, batch_size=8, channels=4, way="killed")
    found = compare.measure_here(task, batch_sizes=[8, 32], steps=1, say=lambda text: None)
    assert found.rows[1]["why"].startswith("the process was killed, most likely because this machine's memory was full")
    broken = dataclasses.replace(task, way="a bug of mine", batch_size=32)
    with pytest.raises(TpukitError, match="batch 32 of mnist could not be measured: RuntimeError: a bug of mine"):
        compare.measure_here(broken, steps=1, say=lambda text: None)
    with pytest.raises(TpukitError, match="no batch size fits: the process was killed"):
        compare.measure_here(task, batch_sizes=[32], steps=1, say=lambda text: None)


def test_doubling_ends_at_the_training_set_and_at_the_limit(digits, on_cpu):
    said = []
    task = MNIST(dataset_dir=digits, batch_size=128, channels=4)
    assert [r["batch_size"] for r in compare.measure_here(task, steps=1, say=said.append).rows] == [128]
    assert said[-1] == "batch 256: not tried, because it is more than the 200 samples of the training set"
    compare.measure_here(task, steps=1, max_batch=130, say=said.append)
    assert said[-1] == "batch 256: not tried, because it is more than 130, the set limit"


def test_several_cores_are_measured_as_one(digits, on_cpu):
    task = MNIST(dataset_dir=digits, batch_size=8, channels=4)
    found = compare.measure_here(task, batch_sizes=[8], steps=2, cores=2, say=lambda text: None)
    assert (found.cores, found.processes, found.chips, found.label) == (2, 2, 1, "CPU x 2")
    assert found.rows[0]["memory_bytes"] > 2 * 50e6
    with pytest.raises(TpukitError, match="batch_size=9 is the global batch, and 2 cores cannot share it evenly: use 8 or 10"):
        compare.measure_here(task, batch_sizes=[9], steps=2, cores=2, say=lambda text: None)


def test_a_class_of_a_notebook_cell_is_refused_with_the_way_out(digits, monkeypatch):
    monkeypatch.setattr(Greedy, "__module__", "__main__")
    with pytest.raises(TpukitError, match="Greedy lives in a notebook cell.*put it in a module"):
        compare.measure_here(Greedy(dataset_dir=digits), batch_sizes=[8], say=lambda text: None)


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(digits, tmp_path):
    (tmp_path / "file").touch()
    for out, words in ((tmp_path / "file/a.json", "file/a.json cannot be written"), (tmp_path, "is a folder")):
        with pytest.raises(TpukitError, match=words):
            compare.measure_here(MNIST(dataset_dir=digits), out=out, say=lambda text: pytest.fail(f"measured: {text}"))


def test_a_batch_that_would_crowd_the_host_is_not_tried(tmp_path):
    rows = [row(4, memory_bytes=2 * 2**30), row(8, memory_bytes=3 * 2**30)]  # a quarter of a GiB for each image more
    assert measuring._would_crowd(rows, 16, 10 * 2**30) is None  # 5 of 10 GiB
    assert measuring._would_crowd(rows, 32, 10 * 2**30) == "would take about 9.0 GiB of host memory, of which 10.0 GiB are free"
    assert measuring._would_crowd([], 32, 1) is None and measuring._would_crowd(rows, 32, None) is None
    (tmp_path / "proc").mkdir(), (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4000 kB\n")
    assert measuring._free_bytes(tmp_path) == 4096000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("3000000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1000000\n")
    assert measuring._free_bytes(tmp_path) == 2000000
    assert measuring._free_bytes(tmp_path / "nowhere") is None


def test_the_peak_of_memory_is_this_process_own():
    program = (
        "import numpy as np; from tpukit.tools.compare import measuring; peaks = [measuring.resident_bytes()];"
        "block = np.ones(2**27, np.uint8); peaks.append(measuring.resident_bytes());"  # 128 MiB
        "del block; print(*peaks, measuring.resident_bytes())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, full, after = map(int, ran.stdout.split())  # and not of the process that started it, which is larger
    assert 100e6 < full - before < 300e6 and after > full - 2e6 and before < 500e6


# The command


def test_the_command_measures_merges_and_chooses(digits, tmp_path, monkeypatch, capsys, on_cpu):
    monkeypatch.chdir(tmp_path)
    command = ["compare", "mnist", "--dataset-dir", str(digits), "--channels", "4", "--batch-sizes", "8", "--steps", "2"]
    assert cli.main(command) == 0
    assert "mnist on CPU, fp32: measured" in capsys.readouterr().out
    assert cli.main(["compare", "--prices-out", "mine.csv"]) == 0
    mine = Path("mine.csv")
    mine.write_text(mine.read_text().replace("CPU,local,,,,,,", "CPU,local,,,,,100,"))
    options = "--epochs 7 --deadline-h 5 --budget-usd 5 --usd-per-kwh 1 --prices mine.csv".split()
    capsys.readouterr()
    assert cli.main(["compare", "outputs/comparison/mnist-cpu.json", *options]) == 0
    out = capsys.readouterr().out
    assert "Measured, the cheapest that finishes within 5.0 h and 5.00 USD: CPU at batch 8, here: 7 epochs take" in out
    assert Path("outputs/comparison/comparison.png").stat().st_size > 10_000
    assert cli.main("compare --deadline-h 24 --budget-usd 10".split()) == 0
    assert "T4, Kaggle: 400 epochs take 20.1 h in 2 sessions, free." in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["nothing"], "'nothing' is neither a workload (mnist, mshnet, cdeit) nor a file"),
        (["pyproject.toml"], "pyproject.toml is damaged, or no JSON"),
        (["mnist", "--steps", "0"], "steps=0: time at least 1"),
        (["mnist", "--batch-sizes", "0"], "batch sizes 0: each is at least 1"),
        (["--epochs", "0"], "epochs=0"),
        (["--deadline-h", "nan"], "deadline_h=nan"),
        (["--budget-usd", "-1"], "budget_usd=-1.0"),
        (["--plan", "v3-8"], "no chip 'v3-8'; there are: v5e-1"),
        (["--prices", "none.csv"], "prices none.csv: cannot be read"),
        (["--picture", "a.xyz"], "--picture a.xyz: the plots are a PNG file, whose name ends in .png"),
        (["--picture", "."], "--picture .: the plots are a PNG file"),
        (["--picture", "pyproject.toml/a.png"], "pyproject.toml/a.png cannot be written"),
        (["--prices-out", "pyproject.toml/mine.csv"], "pyproject.toml/mine.csv cannot be written"),
        (["mnist", "--dataset-dir", "none", "--out", "pyproject.toml/a.json"], "pyproject.toml/a.json cannot be written"),
    ],
)
def test_wrong_usage_is_explained(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]")
    assert cli.main(["compare", *argv]) == 1
    assert words in capsys.readouterr().err


def test_the_picture_of_files_that_lie_where_nothing_can_be_written_goes_to_the_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measured().write(tmp_path / "inputs/one.json")
    (tmp_path / "inputs/comparison.png").mkdir()  # stands for a read-only folder, in which the superuser of a test may write
    assert cli.main(["compare", "inputs/one.json"]) == 0
    assert (tmp_path / "outputs/comparison/comparison.png").stat().st_size > 10_000


def test_plans_are_asked_for_the_batch_sizes_that_were_measured(monkeypatch):
    from tpukit.tools import plan as planner

    asked = []
    monkeypatch.setattr(
        planner, "plan", lambda task, **how: asked.append((task, how)) or Plan("mshnet", "train", how["chip"], [])
    )
    one = measured(recipe=dict(base_size=64, crop_size=64), rows=[row(4), row(12), dict(batch_size=24, fits=False, why="")])
    compare.plan_recipe([one], ["v5e-1", "v5e-8"], say=lambda text: None)
    assert [(how["chip"], how["batch_sizes"]) for _, how in asked] == [("v5e-1", [4, 12]), ("v5e-8", [8, 16])]
    assert asked[0][0].crop_size == 64 and asked[0][0].dataset_dir is None
    del asked[:]
    with pytest.raises(TpukitError, match="batch_size=30 is the global batch.*8 cores of v5e-8.*: use 24 or 32$"):
        compare.plan_recipe([one], ["v5e-1", "v5e-8"], batch_size=30)
    with pytest.raises(TpukitError, match=": use 8, or another multiple of it$"):
        compare.plan_recipe([one], ["v5e-8"], batch_size=4)
    assert not asked  # before any of them is compiled
    with pytest.raises(TpukitError, match="of another version of tpukit"):
        compare.plan_recipe([measured(recipe=dict(wings=2))], ["v5e-1"])


# The notebook


def test_the_notebook_measures_merges_and_chooses(tmp_path):
    pytest.importorskip("torch_xla")
    from tests.test_notebooks import outputs, run_notebook, text

    folder = tmp_path / "outputs/comparison"
    recipe = dict(clip_norm=None, ema_decay=None, batch_norm="per-core", lr=0.05, base_size=32, crop_size=32)
    recipe |= dict(warm_epoch=5, final_init="mask0", skip_bad=False)
    measured(recipe=recipe, chips=2, cores=2, synthetic=True).write(folder / "mshnet-t4-x2.json")
    notebook = run_notebook("hardware_comparison.ipynb", tmp_path, IMAGE_SIZE=32, BATCH_SIZES="4", STEPS=2)
    said = text(notebook)
    for words in (
        "batch 4: ",
        "CPU XLA device (local",
        "T4 x 2 (Kaggle, 2026-11-22): batch 32",
        "Measured, the cheapest that finishes within 3.0 days and 10.00 USD: T4 x 2 at batch 32, Kaggle",
        "The published figures are left out",
        "200 epochs take",
    ):
        assert words in said, words
    assert len(outputs(notebook, "image/png")) == 2 and (folder / "comparison.png").exists()
    shown = "".join(outputs(notebook, "text/html"))
    assert "Prices of one chip or card" in shown and "CPU XLA device, local" in shown
    here = Measurement.read(folder / "mshnet-cpu-xla.json")
    assert [r["batch_size"] for r in here.fitting] == [4] and all(r["compiled_late"] == 0 for r in here.rows)
