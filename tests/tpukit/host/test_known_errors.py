"""Known errors: recognized by their own text, by what users posted, and by how users describe them."""

import tomllib

import pytest

from tests.conftest import ROOT
from tpukit import TpukitError
from tpukit.host import known_errors
from tpukit.host.known_errors import KNOWN_ERRORS
from tpukit_tools import cli
from tpukit_tools.doctor import find_known_error

SEEN = tomllib.loads((ROOT / "tests/tpukit/host/posted_errors.toml").read_text())

POSTED = [(posted["text"], posted["code"]) for posted in SEEN["posted"]]
ON_PAGE = [(error.title, code) for code, error in KNOWN_ERRORS.items() if error.pattern]


@pytest.mark.parametrize("text, code", POSTED + [(f"Error\n{title}\n at 3", code) for title, code in ON_PAGE])
def test_doctor_prints_the_fix_of_a_text_that_users_posted_or_that_is_on_the_page(text, code, capsys):
    assert find_known_error(text) is KNOWN_ERRORS[code]
    assert (text, code) in POSTED or known_errors.fix_for(text) == KNOWN_ERRORS[code].fix
    assert cli.main(["doctor", "--error", text]) == 0
    assert capsys.readouterr().out.strip() == KNOWN_ERRORS[code].fix


OF_A_DISK = (
    "OSError: [Errno 5] Input/output error{}",
    "OSError: [Errno 107] Transport endpoint is not connected{}",
    "TpukitError: cannot write {} (transport endpoint is not connected): choose another folder",
    "cp: error reading {}: Input/output error",
)


@pytest.mark.parametrize("text", OF_A_DISK)
@pytest.mark.parametrize(
    "path, is_drive",
    [
        ("/content/drive/MyDrive/a b/x.npz", True),
        ("/dev/shm/x.npz", False),
        ("/kaggle/input/x", False),
        ("/mnt/content/x", False),
        ("data/x.npz", False),
    ],
)
def test_only_an_error_of_drive_asks_for_drive_to_be_mounted_again(text, path, is_drive):
    path = path if "{} " in text or "{}:" in text else f": {path!r}"
    log = f'  File "/usr/lib/python3/shutil.py", line 3, in f\n{text.format(path)}\n  at /usr/lib/x.so\n'
    found = known_errors.match(log) is KNOWN_ERRORS["drive"]
    assert found == (is_drive or path == "data/x.npz")  # such a path without quotes is not seen as one


def test_a_file_whose_name_only_ends_as_the_statistics_of_cdeit_is_not_taken_for_them():
    for name, known in {"./data/mean.pth": True, "std.pth": True, "runs/ema_mean.pth": False}.items():
        message = f"FileNotFoundError: [Errno 2] No such file or directory: '{name}'"
        assert (known_errors.match(message) is KNOWN_ERRORS["cdeit-statistics"]) == known


def test_a_symptom_is_found_by_its_text_but_is_no_cause_of_an_error():
    message = "E1121 Could not set metric server port: 8431"
    long_log = "undefined symbol: a\n" * 250_000
    assert find_known_error(message) is find_known_error(long_log + message) is KNOWN_ERRORS["metric-port"]
    assert known_errors.fix_for(message) is None  # whatever raised it has another cause


def test_every_known_error_can_be_recognized_and_names_its_source():
    unrecognizable = [code for code, error in KNOWN_ERRORS.items() if not error.pattern and not error.phrases]
    assert unrecognizable == ["metric-port"] and all(error.source for error in KNOWN_ERRORS.values())


@pytest.mark.parametrize("text", SEEN["described"])
def test_a_users_own_description_gets_its_entry(text):
    assert find_known_error(text) is KNOWN_ERRORS[SEEN["described"][text]]


@pytest.mark.parametrize("text", SEEN["unrelated"])
def test_an_unrelated_text_is_not_guessed_at_but_sent_to_the_page(text, capsys):
    assert find_known_error(text) is None and known_errors.fix_for(text) is None
    assert cli.main(["doctor", "--error", text]) == 1 and "Troubleshooting" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b" \n", bytes(range(256)) * 9])
def test_what_is_no_text_is_named_as_such(content, tmp_path, capsys):
    (tmp_path / "log.txt").write_bytes(content)
    for file in ("log.txt", "missing.txt"):
        assert cli.main(["doctor", "--error", str(tmp_path / file)]) == 1
        assert "text file" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be"])
def test_a_log_that_windows_wrote_is_read(encoding, tmp_path, capsys):
    (tmp_path / "log.txt").write_bytes("\ufeffa\r\nUnsupported nprocs (8)\r\n".encode(encoding))
    assert cli.main(["doctor", "--error", str(tmp_path / "log.txt")]) == 0
    assert "nprocs" in capsys.readouterr().out


def test_an_error_of_the_runtime_is_raised_with_its_first_lines_and_its_fix():
    error = RuntimeError("CUDA out of memory.\n\nTried to allocate 2.00 GiB\nat a\nat b")
    with pytest.raises(TpukitError) as raised, known_errors.explain_known_errors():
        raise error
    *lines, fix = str(raised.value).splitlines()
    assert lines == ["CUDA out of memory.", "Tried to allocate 2.00 GiB", "at a"]
    assert fix == KNOWN_ERRORS["device-memory"].fix


def test_an_error_without_a_known_fix_stays_what_it_was():
    with pytest.raises(KeyError), known_errors.explain_known_errors():
        raise KeyError("x")
