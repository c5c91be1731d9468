"""A warm process (tests/warm.py) is to its starter what a cold one is."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import warm
from tests.tpukit.launching.conftest import are_gone

TELLS = """
import json, os, sys, tempfile
mine = dict(argv=sys.argv, path=sys.path, folder=os.getcwd(), name=__name__, temporary=tempfile.gettempdir())
mine |= dict(variables=dict(os.environ), read=sys.stdin.read(), main=sys.modules["__main__"].TELLS)
print(json.dumps(mine))
"""


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """[cold, warm]: the starts of the two commands."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/first{os.pathsep}{tmp_path}/second")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if (starts := [[sys.executable], warm.python()])[0] == starts[1]:
        pytest.skip("TPUKIT_TEST_COLD is set")
    return starts


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "CPU"])
@pytest.mark.parametrize(
    "words", [["-c", "TELLS = 1" + TELLS], ["-m", "tells"], ["-P", "tells.py"], ["tells.py"]]
)
def test_it_has_the_arguments_variables_folder_and_streams_of_its_client(words, device, starts, tmp_path):
    (tmp_path / "tells.py").write_text("TELLS = 1" + TELLS)
    environ = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "XLA_FLAGS")}
    environ |= dict(PJRT_DEVICE=device) if device else {}
    pipes = dict(cwd=tmp_path, env=environ, input="typed", capture_output=True, text=True, timeout=300)
    cold, forked = (json.loads(subprocess.run([*start, *words, "a b"], **pipes).stdout) for start in starts)
    assert forked["variables"].items() >= cold["variables"].items()
    added = {"XLA_FLAGS", "PJRT_DYNAMIC_PLUGINS", "LC_CTYPE"} if device else {"LC_CTYPE"}
    assert forked["variables"].keys() - cold["variables"].keys() <= added
    assert {**forked, "variables": 0} == {**cold, "variables": 0}


ENDS = {
    "raise": "def f():\n    raise ValueError('why')\nf()",
    "exit": "import sys; print('out'); sys.exit(3)",
    "message": "import sys; sys.exit('why')",
    "atexit": "import atexit, sys; atexit.register(lambda: print('last', file=sys.stderr)); print('first')",
    "thread": "import threading; threading.Timer(0.2, lambda: print('late')).start()",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_it_ends_as_a_cold_one(program, starts):
    cold, forked = (
        subprocess.run([*start, "-c", program], capture_output=True, text=True, timeout=300)
        for start in starts
    )
    assert (forked.returncode, forked.stdout) == (cold.returncode, cold.stdout)
    assert forked.stderr == cold.stderr


WAITS = """
import os, time
try:
    print(os.getpid(), flush=True)  # upon which the signal comes
    time.sleep(600)
except KeyboardInterrupt:
    os._exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_a_signal_to_the_client_is_one_to_it_and_it_does_not_outlive_its_client(number, code, starts):
    command = [*starts[1], "-c", WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
    assert process.returncode == code
    assert are_gone([pid])


@pytest.mark.slow
def test_it_has_torch_and_only_where_an_xla_device_is_asked_for_torch_xla(starts, monkeypatch):
    pytest.importorskip("torch_xla")
    program = "import sys; print('torch' in sys.modules, 'torch_xla' in sys.modules, 'tpukit' in sys.modules)"
    for device, loaded in (("CPU", "True True False\n"), ("TPU", "True False False\n")):
        monkeypatch.setenv("PJRT_DEVICE", device)
        assert subprocess.check_output([*starts[1], "-c", program], text=True) == loaded


@pytest.mark.slow
@pytest.mark.parametrize("change", [("OMP_NUM_THREADS", "3"), ("PYTHONFAULTHANDLER", "1")])
def test_where_a_variable_is_read_at_the_start_it_is_cold(change, starts, monkeypatch):
    monkeypatch.setenv(*change)
    program = "import sys; print('torch' in sys.modules)"
    assert subprocess.check_output([*starts[1], "-c", program], text=True) == "False\n"
