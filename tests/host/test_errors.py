"""What a user sees of an error that is meant for them."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

RAISES = "from tpukit import TpukitError\nraise TpukitError('needs 8 cores, found 1')"


@pytest.mark.parametrize("wants_traceback", [False, True])
def test_a_notebook_shows_one_sentence_unless_a_traceback_is_asked_for(wants_traceback, monkeypatch, capsys):
    if wants_traceback:
        monkeypatch.setenv("TPUKIT_TRACEBACK", "1")
    InteractiveShell().run_cell(RAISES)
    shown = capsys.readouterr().out.strip()
    assert shown.endswith("TpukitError: needs 8 cores, found 1")
    assert ("Traceback" in shown) == wants_traceback and (len(shown.splitlines()) == 1) != wants_traceback
