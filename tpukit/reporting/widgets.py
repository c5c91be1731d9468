"""Draw what moves in a notebook: a chart of a running training, and controls to look at a finished one.

Where a page cannot move (papermill, an exported notebook, no ipywidgets), a picture takes the place of the
controls."""

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpukit.host import environment
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import Sentences, printable
from tpukit.reporting import figures, findings
from tpukit.reporting.output import as_image, present_figure
from tpukit.runs.run import Run

# JupyterLab writes "model not found" where a notebook that is reopened had a control: the style hides places
# without one.
NO_CONTROL = "<style>.jp-OutputArea-output.jupyter-widgets:not(:has(*)) {display: none}</style>"
MAX_SHARE_OF_TIME = 0.02  # that drawing may take: with one core it shares the process with the training


@contextlib.contextmanager
def live(run: Run, *, every_s: float = 5.0) -> Iterator[None]:
    """Context manager: show a training that runs inside as one chart, redrawn in place; the last one stays in
    the notebook.

    Loss, score, speed and compilations are read from the run directory, for one core and for many.
    Where nobody looks at the page (papermill, a shell) nothing is shown: the printed lines tell the same."""
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
    """Chart in the output of a cell. It reads the run directory and writes nothing, and no error of it ends
    a training."""

    def __init__(self, run: Run):
        self.run = run
        self._seen = self._written_at()
        self._handle = None
        self._failed = False

    def follow(self, done: threading.Event, every_s: float) -> None:
        """Redraw what changed until the event `done` is set. Runs in a thread of its own."""
        wait_s = every_s
        while not done.wait(wait_s):
            # Cores are forked before any of them writes. Until then this thread draws nothing, so that no
            # lock of matplotlib's is held in a fork.
            if (written_at := self._written_at()) > self._seen:
                self._seen, start = written_at, time.monotonic()
                self.update()
                wait_s = max(every_s, (time.monotonic() - start) / MAX_SHARE_OF_TIME)

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
                print(printable(f"the live chart could not be drawn ({reason}); the training continues"))
            self._failed = True

    def _written_at(self):
        """Return the time of the last record, in ns; 0 before the first."""
        try:
            return (self.run.path / "records.jsonl").stat().st_mtime_ns
        except OSError:
            return 0


def show_runs(folder: str | Path) -> None:
    """Show the curves of the runs in a folder, with a list to choose from: which runs, and which score.

    folder: of run directories, such as `env.outputs`. Raises TpukitError where no run has a curve."""
    curves = {}
    for config in sorted(Path(folder).glob("*/config.json")):
        if series := findings.curves(Run(config.parent).records()):
            name = printable(config.parent.name)
            curves[name] = {printable(score): points for score, points in series.items()}
    if not curves:
        advice = "train first, or name the folder that holds the run folders"
        raise TpukitError(f"no run below {folder} has a curve yet: {advice}")
    if len(curves) == 1:
        print(
            f"Only one run so far ({next(iter(curves))}). Train again with another name to compare both here."
        )
        return
    names = sorted({score for series in curves.values() for score in series})

    def draw(runs, score):
        return figures.runs_figure({run: curves[run][score] for run in runs if score in curves[run]}, score)

    show_with_controls(
        draw,
        runs=("SelectMultiple", dict(options=tuple(curves), value=tuple(curves)[-4:])),
        score=("Dropdown", dict(options=names, value="loss" if "loss" in names else names[0])),
    )


def show_with_controls(draw: Callable, **controls: tuple[str, dict]) -> None:
    """Show the figure `draw(**values)`, and above it a control for each value. The picture stays in a saved
    notebook. Without an open page, or without ipywidgets, it is shown alone.

    controls: name of a value -> (class of ipywidgets, its options), of which `value` is the first. A
    TpukitError that `draw` raises later takes the place of the picture."""
    figure = draw(**{name: options.get("value") for name, (_, options) in controls.items()})
    if not (environment.is_interactive_notebook() and importlib.util.find_spec("ipywidgets")):
        present_figure(figure)
        return
    import ipywidgets
    from IPython.display import HTML, display

    widgets = {}
    for name, (kind, options) in controls.items():
        widgets[name] = getattr(ipywidgets, kind)(description=name, **options)
    display(HTML(NO_CONTROL))
    display(ipywidgets.HBox(list(widgets.values())))
    # What is displayed later, when a control calls, belongs to no cell in JupyterLab.
    handle: Any = display(as_image(figure), display_id=True)

    def redraw(_):
        try:
            handle.update(as_image(draw(**{name: widget.value for name, widget in widgets.items()})))
        except TpukitError as error:
            handle.update(Sentences([str(error)]))

    for widget in widgets.values():
        widget.observe(redraw, names="value")
