"""What moves in a notebook: a chart redrawn while a training runs, and controls to look at a finished one.

Where a page cannot move (papermill, an exported notebook, no ipywidgets), a picture takes the place of the controls.
"""

import contextlib
import threading
import time

from tpukit.host import environment
from tpukit.reporting import figures, findings
from tpukit.reporting.display import as_image

MOST_OF_THE_TIME = 0.02  # that drawing may take: with one core it shares the process with the training


@contextlib.contextmanager
def live(run, *, every_s=5.0):
    """Context manager: show a training that runs inside as one chart, redrawn in place; the last one stays in the notebook.

    Loss, score, speed, compilations and time left are read from the run directory, for one core and for many. Where nobody
    looks at the page (papermill, a shell) nothing is shown: the printed lines tell the same. run: a `Run`.
    """
    if not environment.has_open_page():
        yield
        return
    chart = LiveChart(run)
    done = threading.Event()
    thread = threading.Thread(target=chart.follow, args=(done, every_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        chart.update()


class LiveChart:
    """The chart in the output of a cell. It reads the run directory and writes nothing."""

    def __init__(self, run):
        from IPython.display import display

        self.run = run
        self._seen = self._state()
        self._labels = findings.labels_of(run.config)
        self._handle = display(self._draw(), display_id=True)

    def follow(self, done, every_s):
        """Redraw what changed until the event `done` is set. Runs in a thread of its own."""
        wait_s = every_s
        while not done.wait(wait_s):
            # Cores are forked before any of them writes. Until then this thread draws nothing, so that no lock of
            # matplotlib's is held in a fork.
            if self._state() != self._seen:
                self._seen, start = self._state(), time.monotonic()
                self.update()
                wait_s = max(every_s, (time.monotonic() - start) / MOST_OF_THE_TIME)

    def update(self):
        """Draw the run as it is now."""
        self._handle.update(self._draw())

    def _draw(self):
        return as_image(figures.live_figure(self.run.records(), self.run.read_progress(), self._labels))

    def _state(self):
        """What changes whenever the training has written something."""
        paths = [self.run.path / name for name in ("records.jsonl", "progress.json")]
        stats = [path.stat() for path in paths if path.exists()]
        return [(stat.st_mtime_ns, stat.st_size) for stat in stats]
