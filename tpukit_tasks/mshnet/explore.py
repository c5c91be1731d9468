"""`explore`: MSHNet's scores and predictions over the threshold, with sliders in a notebook."""

from typing import TYPE_CHECKING

from tpukit.host.errors import TpukitError
from tpukit.reporting import figures
from tpukit.reporting.widgets import show_with_controls
from tpukit.runs.run import Run
from tpukit.training import prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tpukit.training.task import Task

THRESHOLDS = tuple(step / 20 for step in range(1, 20))
DRAWN = ("iou", "pd", "fa")  # one below each panel


def explore(run: Run, task: "Task", *, count: int = 32) -> None:
    """Show scores and predictions of test images at a threshold, with sliders for the threshold and the
    image. Without an open page, or without ipywidgets, the picture is that of threshold 0.5.

    Args:
        run: a run with best weights, which predict here, on the CPU.
        task: the task of the run, an `MSHNet`.
        count: number of test images, which the scores are of.

    Raises:
        TpukitError: if the task is not MSHNet, whose predictions alone have a threshold."""
    from tpukit_tasks.mshnet import MSHNet

    if not isinstance(task, MSHNet):
        raise TpukitError(f"{task.name} has no threshold to explore: use show_predictions")
    batch, predicted = prediction.predict_test_images(run, task, count)
    scores = {value: task.evaluate([(predicted, batch)], threshold=value) for value in THRESHOLDS}

    def draw(threshold, image):
        one = {name: values[image - 1 : image].numpy() for name, values in batch.items()}
        (panels,) = task.panels(one, predicted[image - 1 : image], threshold=threshold)
        return threshold_figure(scores, {name: task.score_names[name] for name in DRAWN}, threshold, panels)

    show_with_controls(
        draw,
        threshold=("SelectionSlider", dict(options=THRESHOLDS, value=0.5)),
        image=("IntSlider", dict(min=1, max=len(predicted), value=1)),
    )


def threshold_figure(
    scores: dict, score_names: dict, threshold: float, panels: list[figures.Panel]
) -> "Figure":
    """Draw the panels of an image, and below them the scores over the threshold, with a line at the one that
    the panels show. scores: dict threshold -> dict of scores. score_names: of those to draw."""
    columns = max(len(panels), len(score_names))
    figure, axes = figures.subplots(2, columns, 5.6, height_ratios=(3.4, 2.2))
    figures.write_above(figure, "Test images, recomputed on the CPU")
    figures.draw_panels(axes[0], panels)
    figures.hide(axes[1, len(score_names) :])
    for axis, (name, title) in zip(axes[1], score_names.items()):
        figures.plot(axis, list(scores), [row[name] for row in scores.values()], figures.BLUE)
        axis.axvline(threshold, color=figures.RED, lw=1.2)
        figures.fit_scores(axis, sorted(row[name] for row in scores.values()))
        figures.finish(axis, f"{title}: {scores[threshold][name]:.3g}", "threshold")
    return figure
