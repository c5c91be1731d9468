"""Processes that the tools start: their variables, and what is said of one that failed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpukit.host.errors import TpukitError
from tpukit_tools import subprocess_call
from tpukit_tools.subprocess_call import last_line, run_python


def test_the_last_line_of_a_failed_process_is_its_error_or_its_exit_code():
    assert last_line(run_python("-c", "import sys; sys.exit('first\\nlast')")) == "last"
    assert "exit code 7" in last_line(run_python("-c", "raise SystemExit(7)"))
    assert run_python("-c", "print(input())", text="in\n").stdout == "in\n"


def answer(request):
    """What the called process does, by the request's first word."""
    word = request["word"]
    if word == "sentence":
        raise TpukitError("no such thing: take another")
    if word == "bug":
        raise ZeroDivisionError("a bug")
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60) # {request['mark']}"])
        time.sleep(60)
    print("a library's own words")
    return dict(request, pid=os.getpid(), variables=[os.environ.get("ONE"), os.environ.get("TWO")])


def test_a_function_is_called_in_a_fresh_process_whose_output_is_not_its_answer(monkeypatch):
    monkeypatch.setenv("TWO", "2")
    answered = subprocess_call.call(answer, dict(word="echo", number=1.5), variables=dict(ONE="1", TWO=None))
    assert answered["number"] == 1.5 and answered["pid"] != os.getpid()
    assert answered["variables"] == ["1", None]


@pytest.mark.parametrize(
    "word, said", [("sentence", "no such thing: take another"), ("bug", "a bug"), ("killed", "was killed")]
)
def test_how_a_called_function_failed_is_an_error_of_one_line(word, said):
    with pytest.raises(TpukitError, match=said) as caught:
        subprocess_call.call(answer, dict(word=word))
    assert "\n" not in str(caught.value)


def test_a_call_that_takes_too_long_is_ended_with_what_it_started():
    mark = f"mark-{os.getpid()}-{time.time_ns()}"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess_call.call(answer, dict(word="hang", mark=mark), timeout_s=4)
    # Where both cores are busy, a killed process needs a moment to go.
    assert any(not time.sleep(0.1) and not is_running(mark) for _ in range(100))


def is_running(mark):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                return True
    return False
