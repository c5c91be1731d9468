"""A library that calls itself thin stays so: the budgets of release/size.py."""

import pytest

from release import size


@pytest.fixture(scope="module")
def counted():
    return size.measure()


@pytest.mark.parametrize("name", size.BUDGETS)
def test_nothing_is_larger_than_its_budget_or_than_it_was_where_that_is_not_reached_yet(name, counted):
    assert counted[name] <= max(size.BUDGETS[name], size.REACHED.get(name, 0))


def test_a_budget_that_is_reached_is_no_longer_listed_as_exceeded(counted):
    reached = [name for name, now in counted.items() if now <= size.BUDGETS[name]]
    assert not size.REACHED.keys() & reached


def test_docstrings_are_no_statements_and_what_the_notebook_imports_holds_the_loop(monkeypatch, tmp_path):
    (tmp_path / "small.py").write_text('"""Text."""\n\n\ndef one():\n    """Text."""\n    return 1\n')
    monkeypatch.setattr(size, "ROOT", tmp_path)
    assert size.statements(".") == 2 and sum(map(size.lines, size.python_files("."))) == 6
    monkeypatch.undo()
    assert {"loop.py", "run.py", "mnist.py", "launcher.py"} <= {path.name for path in size.imported_files()}
