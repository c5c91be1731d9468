"""Show a figure with controls to change it, in a notebook, and offer a file for download.

Where a page cannot move (papermill, an exported notebook, no ipywidgets), a picture takes the place of the
controls."""

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpukit.host import environment
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.language import translate
from tpukit.host.tables import Sentences
from tpukit.host.text import printable
from tpukit.reporting import figures, findings
from tpukit.reporting.presenting import as_image, present_figure
from tpukit.runs.run import Run

# JupyterLab writes "model not found" where a notebook that is reopened had a control: the style hides places
# without one.
NO_CONTROL = "<style>.jp-OutputArea-output.jupyter-widgets:not(:has(*)) {display: none}</style>"


def show_runs(folder: str | Path) -> None:
    """Show the curves of the runs in a folder, those of each task in a chart of their own, with a list to
    choose from: which runs, and which score.

    folder: of run folders, such as `env.outputs`; without an open page the pictures are saved in it. Raises
    TpukitError if no run has a curve."""
    tasks: dict[str, dict[str, dict]] = {}
    for config in sorted(Path(folder).glob("*/config.json")):
        run = Run(config.parent)
        if series := findings.curves(run.records()):
            task, names = "an unknown task", {}
            with contextlib.suppress(TpukitError):  # config.json is damaged
                task, names = printable(run.config["task"]), findings.labels_of(run.config).names
            named = {printable(names.get(score, score)): points for score, points in series.items()}
            tasks.setdefault(task, {})[printable(run.path.name)] = named
    if not tasks:
        advice = "train first, or name the folder that holds the run folders"
        raise TpukitError(f"no run below {folder} has a curve yet: {advice}")
    for task, curves in tasks.items():
        if len(curves) == 1:
            print(f"Only one run of {task} so far ({[*curves][0]}): train another one to compare both here.")
            continue
        names = sorted({score for series in curves.values() for score in series})
        picture = re.sub(r"\W+", "-", f"runs-{task}") if len(tasks) > 1 else "runs"
        show_with_controls(
            functools.partial(figures.runs_figure, curves, task),
            Path(folder) / f"{picture}.png",
            runs=("SelectMultiple", dict(options=tuple(curves), value=tuple(curves)[-4:])),
            score=("Dropdown", dict(options=names, value="loss" if "loss" in names else names[0])),
        )


def show_with_controls(draw: Callable, path: Path | None = None, **controls: tuple[str, dict]) -> None:
    """Show the figure `draw(**values)`, and above it a control for each value. The picture stays in a saved
    notebook. Without an open page, or without ipywidgets, it is shown alone, and saved at `path`.

    controls: name of a value -> (class of ipywidgets, its options), of which `value` is the first. A
    TpukitError that `draw` raises later takes the place of the picture."""
    figure = draw(**{name: options.get("value") for name, (_, options) in controls.items()})
    if not (environment.is_interactive_notebook() and importlib.util.find_spec("ipywidgets")):
        present_figure(figure, path)
        return
    import ipywidgets
    from IPython.display import HTML, display

    widgets = {}
    for name, (kind, options) in controls.items():
        widgets[name] = getattr(ipywidgets, kind)(description=translate(name), **options)
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


def offer_download(path: Path) -> None:
    """Let the page download a file: Colab by itself, others by a link."""
    try:
        from google.colab import files as colab
    except ImportError:
        from IPython.display import FileLink, display

        display(FileLink(os.path.relpath(path)))  # the page resolves it from the notebook's folder
        return
    try:
        colab.download(str(path))
    except Exception as error:  # the browser refused, or the page was closed
        reason = first_line(error)
        print(printable(f"the download did not start ({reason}): find it in the folder view at the left"))
