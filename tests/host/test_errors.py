"""What a user sees of an error that is meant for them."""

from IPython.core.interactiveshell import InteractiveShell

from tpukit import TpukitError


def test_a_notebook_shows_one_sentence_in_place_of_a_traceback(capsys):
    InteractiveShell().run_cell("from tpukit import TpukitError\nraise TpukitError('needs 8 cores, found 1')")
    assert capsys.readouterr().out.strip() == "TpukitError: needs 8 cores, found 1"


def test_an_error_shows_control_characters_and_does_not_send_them():
    error = TpukitError("class folder \x1b]0;title\x07\nline 2")  # a notebook prints an error as it is
    assert str(error) == "class folder \\x1b]0;title\\x07\nline 2"
