"""What a user sees of an error that is meant for them."""

import errno
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.conftest import refuses
from tpukit import TpukitError
from tpukit.host.errors import Damaged, Unreadable, reading
from tpukit.host.files import explain_unwritable


def test_a_notebook_shows_one_sentence_in_place_of_a_traceback(capsys):
    InteractiveShell().run_cell("from tpukit import TpukitError\nraise TpukitError('needs 8 cores, found 1')")
    assert capsys.readouterr().out.strip() == "TpukitError: needs 8 cores, found 1"


def test_an_error_shows_control_characters_and_does_not_send_them():
    error = TpukitError("class folder \x1b]0;title\x07\nline 2")  # a notebook prints an error as it is
    assert str(error) == "class folder \\x1b]0;title\\x07\nline 2"


SAYS = {  # what reading raises -> whether that says something about the content, and what to do
    OSError(errno.EIO, "Input/output error"): (False, "mount its disk again"),
    OSError(errno.ENOTCONN, "Transport endpoint is not connected"): (False, "mount its disk again"),
    PermissionError(errno.EACCES, "Permission denied"): (False, "permission"),
    OSError(errno.EMFILE, "Too many open files"): (False, "files open"),
    MemoryError(): (False, "memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . can't allocate memory: you tried"): (False, "memory"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"): (True, "wrong: "),
    IsADirectoryError(errno.EISDIR, "Is a directory"): (True, "wrong: "),
    OSError("image file is truncated (3 bytes not processed)"): (True, "wrong: "),  # Pillow's
    ValueError("not JSON"): (True, "wrong: "),
}


@pytest.mark.parametrize("error", SAYS, ids=repr)
def test_an_error_of_the_disk_or_of_memory_is_not_taken_for_one_of_the_content(error, tmp_path):
    of_content, words = SAYS[error]
    with pytest.raises(TpukitError, match=words) as raised, reading(tmp_path / "file", "wrong"):
        raise error
    assert type(raised.value) is (Damaged if of_content else Unreadable)
    assert of_content or str(tmp_path / "file") in str(raised.value)


def test_on_colabs_drive_the_call_that_mounts_it_again_is_named():
    path = Path("/content/drive/MyDrive/run/best.safetensors")
    with refuses(path, "errno 107", "force_remount=True"), reading(path, "wrong"):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    with refuses(path, "force_remount=True", "another folder"), explain_unwritable(path):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(path))
