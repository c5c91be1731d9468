"""A process that hangs says where; one that does its steps is left alone, however long they take in all."""

import faulthandler
import time
import types

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
            dog = watchdog.Watchdog(0.5, stacks, kills_process=False)
            for step in range(1, 101):
                time.sleep(0.01)
                dog.heartbeat(step)
            assert path.read_text() == ""
            time.sleep(0.8)
            assert "test_watchdog.py" in path.read_text()
        finally:
            faulthandler.cancel_dump_traceback_later()
