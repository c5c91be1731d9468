"""A notebook, for what is displayed there: in a kernel, or on an open page."""

import threading

import pytest

from tpukit.host import environment
from tpukit.reporting import presenting


@pytest.fixture
def shown(monkeypatch):
    """What a notebook shows."""
    things = []
    monkeypatch.setattr(presenting, "notebook_kernel", object)
    monkeypatch.setattr("IPython.display.display", things.append)
    return things


class Page:
    """An open page: `shown` is what was displayed anew, `updates` what took the place of a picture, each by
    which thread."""

    def __init__(self):
        self.shown, self.updates, self.threads = [], [], []

    def display(self, thing, display_id=None, **_):
        self.shown.append(thing)
        return self if display_id else None

    def update(self, thing):
        self.updates.append(thing)
        self.threads.append(threading.current_thread())


@pytest.fixture
def page(monkeypatch):
    opened = Page()
    monkeypatch.setattr(environment, "is_interactive_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", opened.display)
    return opened
