"""Prices, sessions, costs and the choice, with numbers computed by hand; its table, sentences and bars."""

import shutil
import tomllib

import pytest

from tests.conftest import ROOT
from tests.tools.measure.samples import estimate, measurement, price, row
from tpukit import TpukitError
from tpukit.tools.measure import (
    BASES,
    PRICES,
    PUBLISHED_EPOCHS,
    compare,
    offers,
    prices_table,
    read_prices,
    sessions_needed,
)

MEASURED, PUBLISHED = BASES
COLUMNS = "hardware,place,usd_per_hour,spot_usd_per_hour,session_h,week_h,as_of,source"


def find(table, hardware, place):
    (row,) = [row for row in table if (row.hardware, row.place) == (hardware, place)]
    return row


def of_basis(comparison, basis):
    """label -> its estimate"""
    return {o.estimate.label: o.estimate for o in comparison.offers if o.estimate.basis == basis}


# Prices


def test_the_shipped_prices_name_the_source_of_every_figure_and_are_shipped():
    table = read_prices()
    assert all(p.source and p.as_of <= "2026-11" for p in table)
    assert find(table, "TPU v5e", "Kaggle").week_h == 20
    assert find(table, "TPU v5e", "Google Cloud").usd_per_hour == 1.2
    for chip, units in (("TPU v5e", 3.14), ("TPU v6e", 3.71)):
        of_colab = find(table, chip, "Colab")
        assert of_colab.usd_per_hour == pytest.approx(units * 0.0999, abs=5e-4)
        assert "not checked" in of_colab.source
    assert "12 h" in find(table, "T4", "Kaggle").source and "9 h" in find(table, "T4", "Kaggle").source
    assert {hardware for hardware, *_ in PUBLISHED_EPOCHS} <= {p.hardware for p in table}
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "prices.csv" in shipped["tpukit.tools"]
    assert len(prices_table(table).rows) == len(table)
    assert prices_table([price(usd=None, session_h=9.0)]).rows == [
        ("T4", "Google Cloud", "", "", "9", "", "2026-11", "test")
    ]


def test_an_edited_copy_of_the_prices_is_read_as_a_spreadsheet_leaves_it(tmp_path):
    copy = shutil.copy(PRICES, tmp_path / "mine.csv")
    lines = [line for line in copy.read_text().splitlines() if not line.startswith("T4,Colab,")]
    lines += ["", ",,,,,,,", "T4,Colab, 0.5 ,,,,2026-12,my own"]
    copy.write_text("\ufeff" + "\r\n".join(lines))
    found = find(read_prices(copy), "T4", "Colab")
    assert (found.usd_per_hour, found.session_h, found.as_of) == (0.5, None, "2026-12")


@pytest.mark.parametrize(
    "lines, named",
    [
        (f"{COLUMNS}\nT4,Colab,cheap,,,,2026-11,x", "line 2, column usd_per_hour: 'cheap'"),
        (f"{COLUMNS}\nT4,Colab,-1,,,,2026-11,x", "line 2, column usd_per_hour: '-1'"),
        (f"{COLUMNS}\nT4,Colab,nan,,,,2026-11,x", "line 2, column usd_per_hour: 'nan'"),
        (f"{COLUMNS}\nT4,Colab,1,,inf,,2026-11,x", "line 2, column session_h: 'inf'"),
        (f"{COLUMNS}\nT4,Colab,1,,0,,2026-11,x", "line 2, column session_h: '0'"),
        (f"{COLUMNS}\nT4,Colab,1,2026-11,x", "line 2"),
        (f"{COLUMNS}\nT4,Colab,1,,,,2026-11,x,y", "line 2"),
        ("hardware,place\nT4,Colab\n", "line 1: no column usd_per_hour"),
        ("hardware,place\0\n", "line 1: no column place|cannot be read"),
        ('hardware,"' + "x" * 200_000, "cannot be read"),
        (None, ".*prices.csv"),
    ],
)
def test_a_bad_price_table_is_named_by_line_and_column(lines, named, tmp_path):
    path = tmp_path / "bad.csv"
    if lines:
        path.write_text(lines)
    with pytest.raises(TpukitError, match=f"bad.csv.* ?{named}"):
        read_prices(path)


def test_spot_is_google_clouds_and_what_is_free_or_local_costs_what_its_row_says():
    assert price(spot_usd_per_hour=0.25).per_hour(chips=4, spot=True) == 1.0
    assert price(usd=1.0).per_hour(spot=True) is None  # a spot price of Google Cloud that nobody knows
    assert price(place="Kaggle", usd=0.0).per_hour(spot=True) == 0.0
    assert price("RTX 3090", "local", 0.14).per_hour(chips=2, spot=True) == pytest.approx(0.28)
    assert price("CPU", "local", None).per_hour() is None


# Sessions and offers


@pytest.mark.parametrize(
    "train_h, limits, expected",
    [
        (10, dict(start_h=0.1), (1, 10.1, 10.1)),
        (20, dict(session_h=9), (3, 20, 20)),  # 9 + 9 + 2
        (8.5, dict(session_h=9, start_h=0.5, lost_h=0.25), (1, 9, 9)),  # fits exactly, so nothing is cut off
        # 8.25 + 8.25 are done, 0.5 + 3.5 are left
        (20, dict(session_h=9, start_h=0.5, lost_h=0.25), (3, 22, 22)),
        # 9 + 9 + 2 in the first week, 5 in the second: 168 + 5
        (25, dict(session_h=9, week_h=20), (4, 25, 173)),
        # The 2 h that the first week has left train 1.25: 17.75 are done, and 0.5 + 2.25 come in the second.
        (20, dict(session_h=9, week_h=20, start_h=0.5, lost_h=0.25), (4, 22.75, 170.75)),
        # 1 h is left in the first week, less than a start costs: it is not used.
        (9, dict(session_h=9, week_h=10, start_h=1, lost_h=0.5), (2, 11.5, 170.5)),
        (0.1, dict(session_h=1, start_h=0.8, lost_h=0.3), (1, 0.9, 0.9)),
        (5, dict(session_h=1, start_h=0.8, lost_h=0.3), None),
        (5, dict(session_h=1, start_h=0.8, lost_h=0.2 - 1e-6), None),  # it would take millions of sessions
        (9, dict(session_h=9, week_h=9), (1, 9, 9)),
        (18, dict(session_h=9, week_h=9), (2, 18, 177)),  # the second week's session
        (60, dict(week_h=20), (3, 60, 2 * 168 + 20)),
        (400, dict(week_h=200), (1, 400, 400)),  # more hours than a week has
        # Sums of tenths are not exact: three sessions fill the first week, and three do the rest.
        (50, dict(session_h=9.1, week_h=27.3), (6, 50, 168 + 22.7)),
        (5, dict(session_h=0.1, week_h=0.3), (50, 5, 16 * 168 + 0.2)),
    ],
)
def test_the_sessions_of_a_training_are_those_counted_by_hand(train_h, limits, expected):
    found = sessions_needed(train_h, **limits)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_an_offer_says_what_all_sessions_take_and_cost_at_each_place():
    estimates = [estimate(epoch_s=90.0, start_s=360.0)]  # 400 epochs: 10 h, and 0.1 h to start
    places = [
        price(usd=2.0),
        price(place="Kaggle", usd=0.0, session_h=4),
        price(place="Colab", usd=None, session_h=0.1),
    ]
    kaggle, google, colab = offers(estimates, places, epochs=400)  # the cheaper first, what never ends last
    # A session of 4 h trains 4 - 0.1 h - 60 s, the time between checkpoints: 3 h 53; two of them 7 h 46, the
    # third 2 h 14.
    assert (kaggle.place, kaggle.sessions, kaggle.usd) == ("Kaggle", 3, 0)
    assert kaggle.machine_h == pytest.approx(8 + 0.1 + 2 + 14 / 60)
    assert google.usd == pytest.approx(20.2) and google.sessions == 1
    assert (colab.sessions, colab.machine_h, colab.usd) == (None, None, None)


def test_offers_come_in_the_order_measured_cheap_fast():
    estimates = [estimate("A100", epoch_s=9), estimate("T4"), estimate("V100", basis=PUBLISHED, epoch_s=1)]
    table = [
        price("A100", usd=3),
        price("T4", usd=1),
        price("T4", "Colab", 1, week_h=2),
        price("V100", usd=0.1),
    ]
    found = [(offer.estimate.hardware, offer.place) for offer in offers(estimates, table, epochs=400)]
    google = "Google Cloud"
    assert found == [("A100", google), ("T4", google), ("T4", "Colab"), ("V100", google)]


def names(*estimates, prices):
    return {offer.name for offer in offers(list(estimates), prices, epochs=1)}


def test_hardware_is_offered_where_there_is_enough_of_it_and_where_it_was_measured():
    table = [price("T4", place, 0.1) for place in ("Colab", "Colab free", "Kaggle", "Google Cloud")]
    far = {"T4, Kaggle (measured at Colab)", "T4, Google Cloud (measured at Colab)"}
    assert names(estimate(measured_at="Colab"), prices=table) == {"T4, Colab", "T4, Colab free"} | far
    # Kaggle lends two, Colab one.
    assert names(estimate(chips=2), prices=table) == {"T4, Kaggle", "T4, Google Cloud"}
    assert names(estimate(chips=4), prices=table) == {"T4, Google Cloud"}
    # Of hardware that the table lacks, neither cost nor limits are known.
    (own,) = offers([estimate("RTX 5050", measured_at="local")], table, epochs=1)
    assert (own.place, own.usd, own.sessions) == ("local", None, 1)
    # One CPU says nothing of another.
    cpus = [price("CPU", place, 0.0) for place in ("Colab", "Kaggle", "local")]
    assert names(estimate("CPU", measured_at="Colab"), prices=cpus) == {"CPU, Colab"}
    assert not names(estimate("CPU", basis=PUBLISHED), prices=cpus)


# Merging


def test_an_epoch_is_its_steps_and_the_fastest_batch_counts():
    one = measurement(
        rows=[row(30, 100.0), row(60, 150.0), dict(batch_size=120, fits=False, why="too large")]
    )
    assert of_basis(compare([one]), MEASURED)["T4 at batch 60"].epoch_s == pytest.approx(
        13 * 0.15
    )  # 800 // 60
    both = compare([one, measurement(hardware="L4", samples=1600)])  # the larger set counts for both
    assert of_basis(both, MEASURED)["T4 at batch 60"].epoch_s == pytest.approx(26 * 0.15)
    assert of_basis(both, PUBLISHED)["A100"].epoch_s == 120 and "1600 images" in both.title


def test_published_figures_are_for_their_images_alone_and_never_pass_for_measured():
    published = of_basis(compare([measurement()]), PUBLISHED)
    epochs = {label: one.epoch_s for label, one in published.items()}
    assert epochs == {"TPU v2-8": 30, "A100": 60, "V100": 120, "T4": 180}
    assert {line[1] for line in compare([measurement()]).table().rows} == {MEASURED, PUBLISHED}
    small = compare([measurement(recipe=dict(base_size=64, crop_size=64))])
    assert not of_basis(small, PUBLISHED) and any("256x256" in note for note in small.notes)
    assert not of_basis(compare([measurement(task="mnist", recipe={})]), PUBLISHED)


def test_different_recipes_and_tasks_are_refused_naming_them():
    other = measurement(hardware="L4", recipe=dict(base_size=256, crop_size=192, lr=0.05))
    with pytest.raises(TpukitError, match=r"T4 \(Kaggle\) and L4 \(Kaggle\) .*\n  crop_size: 256 and 192\n"):
        compare([measurement(), other])
    with pytest.raises(TpukitError, match="T4 .*measured mshnet, L4 .*mnist"):
        compare([measurement(), measurement(hardware="L4", task="mnist")])
    # A file of an earlier version, which lacks a setting, was measured as by its default.
    compare([measurement(), measurement(recipe=dict(base_size=256, crop_size=256))])


def test_the_choice_in_words_names_sessions_cost_and_where_it_was_measured():
    slow = measurement(rows=[row(32, 2592.0) | dict(start_s=0.0)])  # 25 steps of an epoch: 64.8 s; 400: 7.2 h
    table = [price("T4", "Kaggle", 0.0, session_h=4), price("T4", "Google Cloud", 0.35)]
    measured, published, *_ = compare([slow], prices=table).sentences()
    assert "T4 at batch 32, Kaggle: 400 epochs take 7.2 h in 2 sessions, free." in measured
    assert published.startswith("Published, not measured, the cheapest: T4, Kaggle")
    own, *_ = compare([measurement(hardware="RTX 5050", place="local")], prices=table).sentences()
    assert "RTX 5050 at batch 32, local" in own and "cost not known" in own
    rented, *_ = compare([slow], prices=table[1:]).sentences()
    assert "Google Cloud (measured at Kaggle): 400 epochs take 7.2 h in 1 session, 2.52 USD." in rented


def test_two_engines_on_one_card_have_labels_of_their_own():
    engine = dict(torch_compile="reduce-overhead", channels_last="yes", data_on="host")
    found = compare([measurement(), measurement(engine=engine, rows=[row(32, 50.0)])])
    assert of_basis(found, MEASURED).keys() == {
        "T4 at batch 32",
        "T4, torch_compile=reduce-overhead, channels_last=yes, data_on=host at batch 32",
    }


def test_the_bars_name_their_units_and_what_was_not_measured():
    comparison = compare([measurement(), measurement(hardware="L4")])
    figure = comparison.figure()
    (axis,), (legend,) = figure.axes, figure.legends
    assert "hours" in axis.get_xlabel() and "400 epochs" in axis.get_xlabel()
    assert [text.get_text() for text in legend.get_texts()] == [MEASURED, PUBLISHED]
    hours = sorted(bar.get_width() for bar in axis.patches)
    assert hours == pytest.approx(sorted(offer.machine_h for offer in comparison.offers))
    assert len({(patch.get_facecolor(), patch.get_hatch()) for patch in legend.get_patches()}) == 2
    costs = [text.get_text() for text in axis.texts]
    assert any("free" in cost for cost in costs) and any(" USD" in cost for cost in costs)
    compare([]).figure()  # nothing measured: still a picture
