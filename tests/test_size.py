"""A library that calls itself thin stays so: the ends of release/size.py."""

from release import size


def test_no_part_is_larger_than_its_end():
    grown = {part: now for part, now in size.measure().items() if now > size.ENDS[part]}
    assert not grown


def test_lines_are_counted_as_wc_counts_them_and_the_notebook_imports_the_loop(tmp_path):
    (tmp_path / "small.py").write_text('"""Text."""\n\n\ndef one():\n    return 1\n')
    assert size.lines_of(tmp_path.glob("*.py")) == 5
    assert size.measure()["the imports of the MNIST notebook"] > 3_000
