"""Prices, sessions, costs and the choice, with numbers computed by hand; its table and bars."""

import shutil
import tomllib

import pytest

from tests.conftest import ROOT
from tests.tools.measure.samples import RECIPE, measurement, price
from tpukit import TpukitError
from tpukit.tools.measure.choice import (
    PRICES,
    PUBLISHED,
    compare,
    prices_table,
    read_prices,
    sessions_needed,
)

COLUMNS = "hardware,place,usd_per_hour,spot_usd_per_hour,session_h,week_h,as_of,source"


def find(table, hardware, place):
    (row,) = [row for row in table if (row.hardware, row.place) == (hardware, place)]
    return row


def epochs_of(comparison, basis):
    """name of an offer -> seconds per epoch"""
    return {offer.name: offer.epoch_s for offer in comparison.offers if offer.basis.startswith(basis)}


def test_the_shipped_prices_name_the_source_of_every_figure_and_are_shipped():
    table = read_prices()
    assert all(p.source and p.as_of <= "2026-11" for p in table)
    assert find(table, "TPU v5e", "Kaggle").week_h == 20
    assert find(table, "TPU v5e", "Google Cloud").usd_per_hour == 1.2
    for chip, units in (("TPU v5e", 3.14), ("TPU v6e", 3.71)):
        of_colab = find(table, chip, "Colab")
        assert of_colab.usd_per_hour == pytest.approx(units * 0.0999, abs=5e-4)
        assert "not checked" in of_colab.source
    assert {m.hardware for m in PUBLISHED} <= {p.hardware for p in table}
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "prices.csv" in shipped["tpukit.tools.measure"]
    assert prices_table([price(usd=None, session_h=9.0)]).rows == [
        ("T4", "Google Cloud", "", "", "9.0", "", "", "")
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
        (f"{COLUMNS}\nT4,Colab,cheap,,,,2026-11,x", "row 2: .*'cheap'"),
        (f"{COLUMNS}\nT4,Colab,-1,,,,2026-11,x", "row 2: usd_per_hour is -1"),
        (f"{COLUMNS}\nT4,Colab,1,,nan,,2026-11,x", "row 2: session_h is nan"),
        (f"{COLUMNS}\nT4,Colab,1,2026-11,x", "row 2"),
        (f"{COLUMNS}\nT4,Colab,0,5,,,,2026-11,x", "row 2.*quote a comma"),
        ("hardware,place\nT4,Colab\n", "row 2"),
        ('hardware,"' + "x" * 200_000, "field larger"),
        (None, "prices.csv"),
    ],
)
def test_a_bad_price_table_is_named_with_its_row(lines, named, tmp_path):
    path = tmp_path / "bad.csv"
    if lines:
        path.write_text(lines)
    with pytest.raises(TpukitError, match=f"bad.csv, .*{named}"):
        read_prices(path)


def test_spot_costs_what_its_column_says_and_as_on_demand_where_it_is_not_sold():
    assert price(spot_usd_per_hour=0.25).per_hour(chips=4, spot=True) == 1.0
    assert price(place="Kaggle", usd=0.0).per_hour(spot=True) == 0.0
    assert price(usd=None).per_hour() is None


@pytest.mark.parametrize(
    "train_h, limits, lost, expected",
    [
        (10, {}, dict(start_h=0.1), (1, 10.1, 10.1)),
        (20, dict(session_h=9), {}, (3, 20, 20)),  # 9 + 9 + 2
        (8.5, dict(session_h=9), dict(start_h=0.5, lost_h=0.25), (1, 9, 9)),  # fits, so nothing is cut off
        (20, dict(session_h=9), dict(start_h=0.5, lost_h=0.25), (3, 22, 22)),  # 8.25 + 8.25, 0.5 + 3.5
        # 9 + 9 + 2 in the first week, 5 in the second: 168 + 5
        (25, dict(session_h=9, week_h=20), {}, (4, 25, 173)),
        # The 2 h that the first week has left train 1.25: 17.75 are done, and 0.5 + 2.25 come in the second.
        (20, dict(session_h=9, week_h=20), dict(start_h=0.5, lost_h=0.25), (4, 22.75, 170.75)),
        # 1 h is left in the first week, less than a start costs: it is not used.
        (9, dict(session_h=9, week_h=10), dict(start_h=1, lost_h=0.5), (2, 11.5, 170.5)),
        (0.1, dict(session_h=1), dict(start_h=0.8, lost_h=0.3), (1, 0.9, 0.9)),
        (5, dict(session_h=0), {}, None),
        (5, dict(session_h=1), dict(start_h=0.8, lost_h=0.3), None),
        (5, dict(session_h=1), dict(start_h=0.8, lost_h=0.2 - 1e-6), None),  # it would take millions
        (18, dict(session_h=9, week_h=9), {}, (2, 18, 177)),  # the second week's session
        (60, dict(week_h=20), {}, (3, 60, 2 * 168 + 20)),
        # Sums of tenths are not exact: three sessions fill the first week, and three do the rest.
        (50, dict(session_h=9.1, week_h=27.3), {}, (6, 50, 168 + 22.7)),
    ],
)
def test_the_sessions_of_a_training_are_those_counted_by_hand(train_h, limits, lost, expected):
    found = sessions_needed(train_h, price(**limits), **lost)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_an_offer_says_what_all_sessions_take_and_cost_at_each_place():
    one = measurement(step_ms=3600.0, start_s=360.0)  # 25 steps of an epoch are 90 s, 400 epochs 10 h
    places = [price(usd=2.0), price(place="Kaggle", usd=0.0, session_h=4)]
    places.append(price(place="Colab", usd=None, session_h=0.1))
    comparison = compare([one], prices=places)
    kaggle, google = comparison.offers[:2]  # the cheaper first; what never ends is no offer
    # A session of 4 h trains 4 - 0.1 h - 60 s, the time between checkpoints: 3 h 53; two of them 7 h 46, the
    # third 2 h 14.
    assert (kaggle.name, kaggle.sessions, kaggle.usd) == ("T4 at batch 32, Kaggle", 3, 0)
    assert kaggle.machine_h == pytest.approx(8 + 0.1 + 2 + 14 / 60)
    assert google.usd == pytest.approx(20.2) and google.sessions == 1
    first, second = [row for row in comparison.table().rows if row[1] == "measured"]
    assert first[2:] == ("90", "3", "10.3 h", "10.3 h", "free")
    assert second[0].endswith("Google Cloud (measured at Kaggle)") and second[-1] == "20.20 USD"


def test_offers_come_in_the_order_measured_cheap_fast():
    table = [price("A100", usd=3), price("T4", usd=1), price("T4", "Kaggle", 1, week_h=2)]
    measured = [measurement(hardware="A100", step_ms=10.0), measurement(step_ms=3600.0)]
    found = [offer.name for offer in compare(measured, prices=table).offers]
    assert found == [
        "A100 at batch 32, Google Cloud (measured at Kaggle)",
        "T4 at batch 32, Google Cloud (measured at Kaggle)",
        "T4 at batch 32, Kaggle",  # in more weeks
        "A100 at batch 32, Kaggle",  # at a cost that is not known
        *("A100, Google Cloud", "T4, Google Cloud", "T4, Kaggle"),
    ]


def test_hardware_is_offered_where_there_is_enough_of_it_and_where_it_was_measured():
    def places(*prices, **fields):
        one = measurement(task="mnist", **fields)
        names = [offer.name for offer in compare([one], prices=prices).offers]
        return {name.removeprefix(f"{one.label} at batch 32, ") for name in names}

    t4 = [price("T4", place, 0.1) for place in ("Colab", "Colab free", "Kaggle", "Google Cloud")]
    far = {"Kaggle (measured at Colab)", "Google Cloud (measured at Colab)"}
    assert places(*t4, place="Colab") == {"Colab", "Colab free"} | far
    # Kaggle lends two, Colab one.
    assert places(*t4, chips=2, cores=2) == {"Kaggle", "Google Cloud (measured at Kaggle)"}
    assert places(*t4, chips=4, cores=4, place="Google Cloud") == {"Google Cloud"}
    # Of hardware that the table lacks, neither cost nor limits are known.
    (own,) = compare([measurement(task="mnist", hardware="RTX 5050", place="local")], prices=t4).offers
    assert (own.name, own.usd, own.sessions) == ("RTX 5050 at batch 32, local", None, 1)
    assert own.words()[-1] == "cost not known"
    # One CPU says nothing of another.
    cpus = [price("CPU", place, 0.0) for place in ("Colab", "Kaggle", "local")]
    assert places(*cpus, hardware="CPU", place="Colab") == {"Colab"}


def test_an_epoch_is_its_steps_and_the_fastest_batch_counts():
    one = [measurement(batch_size=30), measurement(batch_size=60, step_ms=150.0)]
    kaggle = "T4 at batch 60, Kaggle"
    assert epochs_of(compare(one), "measured")[kaggle] == pytest.approx(13 * 0.15)  # 800 // 60
    both = compare([*one, measurement(hardware="L4", samples=1600)])  # the larger set counts for both
    assert epochs_of(both, "measured")[kaggle] == pytest.approx(26 * 0.15)
    assert epochs_of(both, "published")["A100, Colab"] == 120 and "1600 images" in both.title


def test_published_figures_are_for_their_images_alone_and_never_pass_for_measured():
    published = epochs_of(compare([measurement()]), "published, not measured")
    assert "T4, Google Cloud (card without its host)" in published and "A100, Google Cloud" in published
    assert {name.partition(",")[0]: epoch_s for name, epoch_s in published.items()} == pytest.approx(
        {"TPU v2 x 8": 30, "A100": 60, "V100": 120, "T4": 180}
    )
    small = measurement(recipe=dict(base_size=64, crop_size=64))
    for other in (small, measurement(task="mnist", recipe={})):
        assert not epochs_of(compare([other]), "published")


def test_different_recipes_and_tasks_are_refused_naming_them():
    other = measurement(hardware="L4", recipe=RECIPE | dict(crop_size=192))
    with pytest.raises(TpukitError, match=r"T4 \(Kaggle\) and L4 \(Kaggle\) .*\n  crop_size: 256 and 192$"):
        compare([measurement(), other])
    with pytest.raises(TpukitError, match="\n  task: 'mshnet' and 'mnist'$"):
        compare([measurement(), measurement(hardware="L4", task="mnist")])
    # A file of an earlier version lacks a setting that was new later.
    compare([measurement(), measurement(recipe=dict(base_size=256, crop_size=256))])


def test_two_engines_on_one_card_have_names_of_their_own():
    compiled = measurement(engine=dict(torch_compile="default", cuda_graph=True), step_ms=50.0)
    names = epochs_of(compare([measurement(), compiled]), "measured").keys()
    assert names >= {"T4 at batch 32, Kaggle", "T4, torch_compile=default at batch 32, Kaggle"}
    assert compiled.file_name == "mshnet-t4-torch-compile-default-kaggle.json"


def test_the_bars_name_their_units_and_what_was_not_measured():
    comparison = compare([measurement(), measurement(hardware="L4")])
    (axis,) = comparison.figure().axes
    assert "hours" in axis.get_xlabel() and "400 epochs" in axis.get_title("left")
    hours = sorted(bar.get_width() for bar in axis.patches)
    assert hours == pytest.approx(sorted(offer.machine_h for offer in comparison.offers))
    texts = [text.get_text() for text in axis.texts]
    colours = {(text.endswith("not measured"), bar.get_facecolor()) for text, bar in zip(texts, axis.patches)}
    assert len(colours) == 2
    assert any("free" in text for text in texts) and any(" USD" in text for text in texts)
    compare([]).figure()  # nothing measured: still a picture
