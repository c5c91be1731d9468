"""Put a figure where the reader is: into a notebook, or into a file that a shell names."""

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
    """A figure as a PNG image that a notebook shows."""
    from IPython.display import Image

    return Image(figures.as_png(figure))
