"""Draw a training run in a notebook while it trains: one chart, redrawn in place."""

import contextlib
import threading
import time
from collections.abc import Iterator

from tpukit.host import environment
from tpukit.host.errors import first_line
from tpukit.host.text import printable
from tpukit.reporting import figures, findings
from tpukit.reporting.presenting import as_image
from tpukit.runs.run import Run

MAX_SHARE_OF_TIME = 0.02  # that drawing may take: with one core it shares the process with the training run
MAX_WAIT_S = 10.0  # between two drawings, however long one takes
FIRST_WAIT_S = 1.0  # until the next look for a first loss


@contextlib.contextmanager
def live(run: Run, *, every_s: float = 5.0) -> Iterator[None]:
    """Context manager: show the training run inside as one chart, redrawn in place. The last one stays in the
    notebook.

    Loss, score, speed and compilations are read from the run's folder, for one core and for many. Without an
    open page (papermill, a shell) nothing is shown: the printed lines tell the same.

    Args:
        run: the run that trains in the block.
        every_s: least seconds between two drawings."""
    if not environment.is_interactive_notebook():
        yield
        return
    chart, done = LiveChart(run), threading.Event()
    chart.update()
    thread = threading.Thread(target=chart.follow, args=(done, every_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        chart.update()


class LiveChart:
    """Chart in the output of a cell. It reads the run's folder, writes nothing, and no error of it ends the
    training run."""

    def __init__(self, run: Run):
        self.run = run
        self._seen = self._written_at()
        self._handle = None
        self._failed = False

    def follow(self, done: threading.Event, every_s: float) -> None:
        """Redraw when the run changes, until the event `done` is set. Runs in a thread of its own."""
        wait_s = min(every_s, FIRST_WAIT_S)
        while not done.wait(wait_s):
            # Cores are forked before any of them writes. Until then this thread draws nothing, so that no
            # lock of matplotlib's is held in a fork.
            if (written_at := self._written_at()) > self._seen and self._has_curve():
                self._seen, start_s = written_at, time.thread_time()
                self.update()
                drawing_s = time.thread_time() - start_s
                wait_s = max(every_s, min(drawing_s / MAX_SHARE_OF_TIME, MAX_WAIT_S))

    def update(self) -> None:
        """Draw the run as it is now, the first time into a new output. An error is printed once."""
        from IPython.display import display

        try:
            labels = findings.labels_of(self.run.config)
            image = as_image(figures.live_figure(self.run.records(), labels))
            if self._handle is None:
                self._handle = display(image, display_id=True)
            else:
                self._handle.update(image)
        except Exception as error:  # a file of the run may hold anything
            if not self._failed:
                reason = first_line(error)
                print(printable(f"the live chart could not be drawn ({reason}); training continues"))
            self._failed = True

    def _has_curve(self):
        """Return whether there is anything to draw. An error counts: the drawing says what it is."""
        try:
            return bool(findings.curves(self.run.records()))
        except Exception:
            return True

    def _written_at(self):
        """Return the time of the last record, in ns; 0 before the first."""
        try:
            return (self.run.path / "records.jsonl").stat().st_mtime_ns
        except OSError:
            return 0
