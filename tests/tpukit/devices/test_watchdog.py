"""A process that hangs says where; one that does its steps is left alone, however long they take in all."""

import faulthandler
import time
import types

from tests.conftest import wait_for
from tpukit.devices import watchdog

FASTER = 20  # the clock of the watchdog here: it arms again after a twentieth of a second


def test_a_process_whose_heart_beats_is_left_alone_beyond_the_timeout_and_one_that_hangs_says_where(
    tmp_path, monkeypatch
):
    clock = types.SimpleNamespace(monotonic=lambda: FASTER * time.monotonic())
    monkeypatch.setattr(watchdog, "time", clock)
    path = tmp_path / "stacks.txt"
    with open(path, "w") as stacks:
        try:
            dog = watchdog.Watchdog(2, stacks, kills_process=False)
            for step in range(1, 101):
                time.sleep(0.03)
                dog.heartbeat(step)
            assert path.read_text() == ""
            wait_for(lambda: "test_watchdog.py" in path.read_text())
        finally:
            faulthandler.cancel_dump_traceback_later()


def test_a_compilation_that_runs_is_no_hang_and_what_hangs_after_it_is(tmp_path):
    path, is_compiling = tmp_path / "stacks.txt", True
    with open(path, "w") as stacks:
        dog = watchdog.Watchdog(1.5, stacks, kills_process=False, is_compiling=lambda: is_compiling)
        try:
            time.sleep(2.5)
            assert path.read_text() == ""
            is_compiling = False
            wait_for(lambda: "test_watchdog.py" in path.read_text())
        finally:
            dog.close()


def test_what_is_watched_from_its_first_step_on_may_compile_before(tmp_path):
    with open(tmp_path / "stacks.txt", "w") as stacks:
        dog = watchdog.Watchdog(0.1, stacks, kills_process=False, from_start=False, is_compiling=lambda: True)
        time.sleep(0.4)
        dog.close()
    assert (tmp_path / "stacks.txt").read_text() == ""
