"""Put a figure where the reader is: into a notebook, or into a file that a shell names."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.host import files
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import printable
from tpukit.reporting import figures, presenting

if TYPE_CHECKING:
    from IPython.display import Image
    from matplotlib.figure import Figure


def present_figure(figure: "Figure | None", path: Path | None = None) -> None:
    """Display a figure, if there is one, in a notebook; save it at `path`, and name that in a shell."""
    if figure is None:
        return
    png = figures.as_png(figure)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, png)
        except (OSError, TpukitError) as error:  # Kaggle's inputs are read-only: it is shown all the same
            print(printable(f"picture not saved at {path}: {first_line(error)}"))
            path = None
    if presenting.in_notebook():
        from IPython.display import Image

        presenting.present(Image(png))
    elif path is not None:
        print(printable(f"\npicture: {path}"))


def as_image(figure: "Figure") -> "Image":
    """Return a figure as a PNG image that a notebook shows."""
    from IPython.display import Image

    return Image(figures.as_png(figure))


def offer_download(path: Path) -> None:
    """Let the page download a file: Colab by itself, others by a link."""
    try:
        from google.colab import files as colab
    except ImportError:
        from IPython.display import FileLink, display

        display(FileLink(os.path.relpath(path)))  # which the page resolves from the notebook's folder
        return
    try:
        colab.download(str(path))
    except Exception as error:  # the browser refused, or the page was closed
        reason = first_line(error)
        print(printable(f"the download did not start ({reason}): find it in the folder view at the left"))
