"""Stopping a training at a point where its state is complete."""

import signal
import threading


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a stop between two steps; a second one stops at once.

    Only the main thread can receive signals; elsewhere this does nothing.
    """

    def __init__(self):
        self.signal = None
        self.at_step = False

    def __enter__(self):
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        if self.signal is not None:
            _raise(number)
        self.signal = number
        print("stopping after this step, with a checkpoint; a second signal stops at once, without saving")

    def check(self):
        """Raise KeyboardInterrupt or SystemExit if a signal came. Called only where the state is complete."""
        if self.signal is not None:
            self.at_step = True
            _raise(self.signal)


def _raise(number):
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
