"""Sessions, costs and the choice, with numbers computed by hand and a slow reference."""

import pytest

from tests.tools.compare.samples import estimate, price
from tpukit.tools import compare
from tpukit.tools.compare.choosing import FULL_RATE, MEASURED, PUBLISHED


@pytest.mark.parametrize(
    "train_h, limits, expected",
    [
        (10, dict(start_h=0.1), (1, 10.1, 10.1)),
        (20, dict(session_h=9), (3, 20, 20)),  # 9 + 9 + 2
        (8.5, dict(session_h=9, start_h=0.5, lost_h=0.25), (1, 9, 9)),  # fits exactly, so nothing is cut off
        (
            20,
            dict(session_h=9, start_h=0.5, lost_h=0.25),
            (3, 22, 22),
        ),  # 8.25 + 8.25 are done, 0.5 + 3.5 are left
        (
            25,
            dict(session_h=9, week_h=20),
            (4, 25, 173),
        ),  # 9 + 9 + 2 in the first week, 5 in the second: 168 + 5
        # The 2 h that the first week has left train 1.25; so 17.75 are done, and 0.5 + 2.25 come in the
        # second week.
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
    found = compare.sessions_needed(train_h, **limits)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_a_candidate_keeps_the_deadline_and_the_budget_or_says_why_not():
    estimates = [estimate(epoch_s=90.0, start_s=360.0)]  # 400 epochs: 10 h, and 0.1 h to start
    places = [price(usd=2.0), price(place="Kaggle", usd=0.0, session_h=4), price(place="Colab", usd=None)]
    by_place = {
        c.place: c for c in compare.choose(estimates, places, epochs=400, deadline_h=11, budget_usd=20)
    }
    assert (
        by_place["Google Cloud"].usd == pytest.approx(20.2)
        and by_place["Google Cloud"].why == "too expensive"
    )
    # A session of 4 h trains 4 - 0.1 h - 60 s, the time between checkpoints: 3 h 53; two of them 7 h 46, the
    # third 2 h 14.
    kaggle = by_place["Kaggle"]
    assert (kaggle.sessions, kaggle.finishes) == (3, True) and kaggle.machine_h == pytest.approx(
        8 + 0.1 + 2 + 14 / 60
    )
    assert by_place["Colab"].finishes is None and by_place["Colab"].why == "cost not known"
    late = compare.choose(estimates, places, epochs=400, deadline_h=10)
    assert [c.why for c in late] == ["too late"] * 3
    never = compare.choose([estimate(start_s=3600.0)], [price(session_h=1)], epochs=400)[0]
    assert (never.sessions, never.calendar_h, never.finishes) == (None, None, False)


def test_candidates_come_in_the_order_finishing_measured_cheap():
    published, full_rate = (
        estimate("V100", basis=PUBLISHED, epoch_s=1),
        estimate("TPU v5e", basis=FULL_RATE, epoch_s=1),
    )
    estimates = [estimate("A100", epoch_s=9), estimate("T4"), published, full_rate]
    table = [price("A100", usd=3), price("T4", usd=1), price("V100", usd=0.1), price("TPU v5e", usd=0.1)]
    found = compare.choose(estimates, table, epochs=400, budget_usd=5)
    assert [c.estimate.hardware for c in found] == [
        "A100",
        "V100",
        "TPU v5e",
        "T4",
    ]  # the T4's 10 h cost 10 USD
    assert [c.finishes for c in found] == [True, True, None, False]  # at full rate nobody knows


def test_what_was_measured_at_a_place_counts_there_and_what_comes_from_elsewhere_is_marked():
    estimates = [estimate(place="Colab", epoch_s=10), estimate(place="Kaggle", epoch_s=30)]
    table = [price("T4", place, 0.1) for place in ("Colab", "Colab free", "Kaggle", "Google Cloud")]
    found = compare.choose(estimates, table, epochs=1)
    places = {(c.place, c.estimate.place, c.measured_elsewhere) for c in found}
    at_home = {("Colab", "Colab", ""), ("Colab free", "Colab", ""), ("Kaggle", "Kaggle", "")}
    assert places == at_home | {("Google Cloud", "Colab", "Colab"), ("Google Cloud", "Kaggle", "Kaggle")}


def test_hardware_is_offered_where_there_is_enough_of_it():
    table = [price("TPU v5e", place, 0.0) for place in ("Colab free", "Kaggle", "Google Cloud")]

    def places(chips):
        return [
            c.place for c in compare.choose([estimate("TPU v5e", chips, basis=FULL_RATE)], table, epochs=1)
        ]

    assert places(8) == ["Kaggle", "Google Cloud"]
    assert places(1) == ["Colab free", "Kaggle", "Google Cloud"]
    assert places(16) == ["Google Cloud"]


def test_a_measured_cpu_counts_where_it_was_measured_and_a_published_one_nowhere():
    cpus = [price("CPU", place, 0.0) for place in ("Colab", "Colab free", "Kaggle", "local")]
    assert {c.place for c in compare.choose([estimate("CPU", place="Colab")], cpus, epochs=1)} == {
        "Colab",
        "Colab free",
    }
    assert compare.choose([estimate("CPU", basis=PUBLISHED)], cpus, epochs=1) == []


def test_hardware_that_the_price_table_lacks_is_a_candidate_where_it_was_measured_without_cost_or_limits():
    table = [price("T4", "Kaggle", 0.0, session_h=12)]
    (own,) = compare.choose([estimate("RTX 5050", place="local")], table, epochs=1)
    assert (own.place, own.usd, own.sessions, own.finishes) == ("local", None, 1, True)
    (kaggle,) = compare.choose([estimate("P100", place="Kaggle")], table, epochs=400)
    assert (kaggle.place, kaggle.sessions, kaggle.finishes, kaggle.why) == (
        "Kaggle",
        None,
        None,
        "limits not known",
    )
    (late,) = compare.choose([estimate("P100", place="Kaggle")], table, epochs=400, deadline_h=1)
    assert late.finishes is False and "too late" in late.why


def test_a_free_place_stays_free_where_spot_is_asked_for():
    table = [price("T4", "Kaggle", 0.0), price("T4", usd=0.35, spot_usd_per_hour=0.175)]
    found = compare.choose([estimate(basis=MEASURED)], table, epochs=400, budget_usd=100, spot=True)
    assert [(c.place, c.usd, c.finishes) for c in found] == [
        ("Kaggle", 0.0, True),
        ("Google Cloud", 1.75, True),
    ]  # 10 h
