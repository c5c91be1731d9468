"""A signal stops a training where its state is complete; a second one stops it at once."""

import os
import signal
import threading

import pytest

from tpukit.host.signals import StopSignal

SIGNALS = [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 128 + signal.SIGTERM)]
SIGNALS += [(signal.SIGHUP, SystemExit, 128 + signal.SIGHUP)]


@pytest.mark.parametrize("number, error, code", SIGNALS)
def test_the_first_signal_waits_for_the_check_and_the_handlers_are_given_back(number, error, code):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.signal == number and not stop.at_step
        with pytest.raises(error) as raised:
            stop.check()
        assert stop.at_step and (code is None or raised.value.code == code)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number, error, code", SIGNALS)
def test_the_second_signal_does_not_wait(number, error, code):
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(error):
            os.kill(os.getpid(), number)
        assert not stop.at_step


def test_a_signal_that_is_ignored_stays_so_as_nohup_wants_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_gets_no_signals_and_changes_no_handler():
    before, found = signal.getsignal(signal.SIGINT), []

    def enter():
        with StopSignal() as stop:
            stop.check()
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(timeout=60)
    assert found == [before]
