"""Durations in words."""

import pytest

from tpukit.host.tables import format_duration


@pytest.mark.parametrize(
    "seconds, words",
    [(None, ""), (-5, "0 s"), (119, "119 s"), (150, "2.5 min"), (9000, "2.5 h"), (47 * 3600, "47.0 h"), (259200, "3.0 days")],
)
def test_a_duration_is_given_in_the_largest_unit_of_which_it_has_two(seconds, words):
    assert format_duration(seconds) == words
