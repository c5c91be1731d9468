"""A library that calls itself thin stays so: the ends of release/size.py."""

from release import size


def test_no_part_is_larger_than_its_end():
    measured = size.measure()
    assert min(measured.values()) > 5_000
    grown = {part: now for part, now in measured.items() if now > size.ENDS[part]}
    assert not grown
