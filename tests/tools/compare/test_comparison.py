"""Merging what machines measured with published figures and full-rate times; the tables, sentences and plots
of it."""

import pytest

from tests.tools.compare.samples import measurement, price, row
from tpukit import TpukitError
from tpukit.tools import compare, prices
from tpukit.tools.compare.choosing import FULL_RATE, MEASURED, PUBLISHED
from tpukit.tools.plan import Plan


def of_basis(found, basis):
    return [one for one in found.estimates if one.basis == basis]


def test_an_epoch_is_its_steps_and_the_fastest_batch_counts_unless_one_is_given():
    rows = [row(30, 100.0), row(60, 150.0), dict(batch_size=120, fits=False, why="too large")]
    found = compare.compare([measurement(rows=rows)])
    (t4,) = of_basis(found, MEASURED)
    assert (
        found.images == 800 and t4.batch_size == 60 and t4.epoch_s == pytest.approx(13 * 0.15)
    )  # 800 // 60 steps
    assert t4.hours(400) == pytest.approx(400 * 1.95 / 3600)
    (t4,) = of_basis(compare.compare([measurement(rows=rows)], batch_size=30), MEASURED)
    assert t4.epoch_s == pytest.approx(26 * 0.1)
    left_out = compare.compare([measurement(rows=rows)], batch_size=7)
    assert not of_basis(left_out, MEASURED) and any(
        "T4" in note and "batch 7" in note for note in left_out.notes
    )


def test_published_figures_are_for_their_images_alone_and_never_pass_for_measured():
    found = compare.compare([measurement()], epochs=400)
    published = {one.label: one.epoch_s for one in of_basis(found, PUBLISHED)}
    assert published == {"TPU v2-8": 30, "A100": 60, "V100": 120, "T4": 180, "CPU": 600}
    assert {one.label: one.epoch_s for one in compare.compare([], images=400).estimates}["A100"] == 30
    assert ("T4", PUBLISHED) in [line[:2] for line in found.estimates_table().rows]
    assert any(sentence.startswith(PUBLISHED.capitalize()) for sentence in found.sentences())
    small = compare.compare([measurement(recipe=dict(base_size=64, crop_size=64))])
    assert not of_basis(small, PUBLISHED) and any("256x256" in note for note in small.notes)
    assert not of_basis(compare.compare([measurement(task="mnist", recipe={})]), PUBLISHED)


def test_a_full_rate_time_of_the_compiler_is_marked_everywhere_and_is_the_longer_of_the_two():
    seconds = ((32, 0.064, 0.01), (64, 0.01, 0.2))
    rows = [dict(batch_size=b, fits=True, flop_s=f, hbm_s=h, peak_bytes=2**30) for b, f, h in seconds]
    plan = Plan("mshnet", "train", "v5e-8", [*rows, dict(batch_size=512, fits=False, why="")])
    found = compare.compare([measurement()], plans=[plan], epochs=100)
    (one,) = of_basis(found, FULL_RATE)
    assert (one.hardware, one.chips, one.batch_size) == ("TPU v5e", 8, 32) and one.epoch_s == pytest.approx(
        25 * 0.064
    )
    (line,) = [r for r in found.estimates_table().rows if r[1] == FULL_RATE]
    assert line[0] == "TPU v5e x 8" and line[3] == "1.6" and "not measured" in line[1]
    offers = [c for c in found.candidates if c.estimate is one]
    assert {c.place for c in offers} == {"Kaggle", "Google Cloud"} and {c.finishes for c in offers} == {None}
    assert any(s.startswith(FULL_RATE.capitalize()) and "would take" in s for s in found.sentences())


def test_a_full_rate_time_at_an_unknown_cost_is_not_what_could_finish_within_a_budget():
    plan = Plan(
        "mshnet", "train", "v6e-1", [dict(batch_size=32, fits=True, flop_s=0.064, hbm_s=0, peak_bytes=2**30)]
    )
    table = [price("TPU v6e", "Colab", None), price("TPU v6e", usd=2.7)]

    def sentence(table):
        found = compare.compare([], plans=[plan], prices=table, budget_usd=10)
        return next(s for s in found.sentences() if s.startswith("Full rate"))

    assert "cheapest" in sentence(
        table
    ) and "within 10.00 USD: TPU v6e at batch 32, Google Cloud" in sentence(table)
    assert "cheapest" not in sentence(table[:1]) and "TPU v6e at batch 32, Colab" in sentence(table[:1])


def test_synthetic_images_count_as_an_epoch_of_the_published_set_and_that_is_noted():
    found = compare.compare([measurement(synthetic=True, samples=512)])
    assert found.images == 800 and any("synthetic" in note and "800" in note for note in found.notes)
    both = [measurement(synthetic=True, samples=512), measurement(samples=300, hardware="L4")]
    assert compare.compare(both).images == 300
    assert compare.compare([measurement(task="mnist", recipe={}, synthetic=True, samples=512)]).images == 512


def test_different_recipes_and_tasks_are_refused_naming_them():
    other = measurement(hardware="L4", recipe=dict(base_size=256, crop_size=192, lr=0.05))
    with pytest.raises(TpukitError, match="\n  crop_size: 256 in T4, 192 in L4\n"):
        compare.compare([measurement(), other])
    with pytest.raises(TpukitError, match="T4 measured mshnet, L4 mnist"):
        compare.compare([measurement(), measurement(hardware="L4", task="mnist")])


@pytest.mark.parametrize(
    "limit", [dict(epochs=0), dict(images=0), dict(deadline_h=float("nan")), dict(budget_usd=-1.0)]
)
def test_an_impossible_question_is_refused_naming_its_argument(limit):
    with pytest.raises(TpukitError, match=f"{[*limit][0]}={[*limit.values()][0]}"):
        compare.compare([], **limit)


def test_the_choice_in_words_names_sessions_cost_and_where_it_was_measured():
    slow = measurement(rows=[row(32, 2592.0, start_s=0.0)])  # 25 steps of an epoch: 64.8 s; 400 epochs: 7.2 h
    table = [price("T4", "Kaggle", 0.0, session_h=4), price("T4", "Google Cloud", 0.35)]
    cheapest, fastest, *_ = compare.compare([slow], prices=table, deadline_h=24).sentences()
    for datum in (
        "Measured",
        "within 24.0 h: T4 at batch 32, Kaggle: 400 epochs",
        "7.2 h in 2 sessions",
        "free",
    ):
        assert datum in cheapest
    for datum in ("T4 at batch 32, Google Cloud (measured at Kaggle)", "7.2 h in 1 session,", "2.52 USD"):
        assert datum in fastest
    assert "within 24.0 h" in fastest  # one that is too late or too expensive may be faster
    nothing, *_ = compare.compare([slow], prices=table, deadline_h=1).sentences()
    assert (
        "within 60.0 min" in nothing
        and "T4 at batch 32, Google Cloud" in nothing
        and "cheapest" not in nothing
    )
    unlisted, *_ = compare.compare([measurement(hardware="P100")], prices=table).sentences()
    assert (
        "cheapest" not in unlisted
        and "P100 at batch 32, Kaggle" in unlisted
        and "unknown number of sessions" in unlisted
    )


def test_what_has_no_place_has_no_candidate_but_stands_in_the_table_of_estimates():
    found = compare.compare([], prices=prices.read())
    assert not [c for c in found.candidates if c.estimate.hardware == "CPU"]
    assert "CPU" in [r[0] for r in found.estimates_table().rows]
    assert "Kaggle" in str(found.candidates_table()) and any(
        "not known" in r[5] for r in found.candidates_table().rows
    )


def test_a_price_without_its_host_machine_is_noted():
    def notes(table):
        return [
            note for note in compare.compare([measurement()], prices=table).notes if "host machine" in note
        ]

    assert notes([price("T4", "Kaggle", 0.0), price("A100", source="with its host")]) == []
    (note,) = notes(prices.read())
    assert "T4 at Google Cloud, V100 at Google Cloud" in note and "A100" not in note


def test_two_engines_on_one_card_have_labels_of_their_own():
    engine = dict(torch_compile="reduce-overhead", channels_last="yes", data_on="host")
    found = compare.compare([measurement(), measurement(engine=engine, rows=[row(32, 50.0)])])
    plain, fast = [one.label for one in of_basis(found, MEASURED)]
    assert plain == "T4" and fast == "T4, torch_compile=reduce-overhead, channels_last=yes, data_on=host"


def test_the_plots_name_their_units_and_what_was_not_measured():
    from tpukit.reporting import figures

    figure = figures.comparison_figure(compare.compare([measurement(), measurement(hardware="L4")]))
    labels = {axis.get_xlabel() for axis in figure.axes} | {axis.get_ylabel() for axis in figure.axes}
    assert {
        "global batch size",
        "images per second",
        "peak memory, GiB",
        "hours of 400 epochs",
        "USD of 400 epochs",
    } <= labels
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [MEASURED, PUBLISHED]
    styles = {(patch.get_facecolor(), patch.get_hatch()) for patch in legend.get_patches()}
    assert len(styles) == 2 and figure.get_size_inches()[0] < 10
    figures.comparison_figure(compare.compare([]))  # nothing measured: still a picture


def test_plans_are_made_of_the_batch_sizes_that_were_measured(monkeypatch):
    from tpukit.tools import plan as planner

    asked = []

    def plan(task, *, chip, batch_sizes, log):
        asked.append((task, chip, batch_sizes))
        return Plan("mshnet", "train", chip, [])

    monkeypatch.setattr(planner, "plan", plan)
    rows = [row(4), row(12), dict(batch_size=24, fits=False, why="")]
    one = measurement(recipe=dict(base_size=64, crop_size=64), rows=rows)
    compare.plan_recipe([one], ["v5e-1", "v5e-8"])
    assert [(chip, sizes) for _, chip, sizes in asked] == [("v5e-1", [4, 12]), ("v5e-8", [8, 16])]
    assert asked[0][0].crop_size == 64 and asked[0][0].dataset_dir is None
    del asked[:]
    with pytest.raises(TpukitError, match="batch_size=30 .*8 cores of v5e-8.* 24 or 32"):
        compare.plan_recipe([one], ["v5e-1", "v5e-8"], batch_size=30)
    with pytest.raises(TpukitError, match="batch_size=0"):
        compare.plan_recipe([one], ["v5e-1"], batch_size=0)
    with pytest.raises(TpukitError, match="'v3-8'.* v5e-1, v5e-8, v6e-1"):
        compare.plan_recipe([one], ["v5e-1", "v3-8"])
    assert not asked  # before any of them is compiled
    with pytest.raises(TpukitError, match="another version.*wings"):
        compare.plan_recipe([measurement(recipe=dict(wings=2))], ["v5e-1"])
