"""Present tables, sentences and figures in a notebook or a shell."""

import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.host import language
from tpukit.host.errors import TpukitError, first_line
from tpukit.host.text import notebook_kernel, printable

if TYPE_CHECKING:
    from IPython.display import Image
    from matplotlib.figure import Figure

# How the files of fonts with Chinese signs begin, on Linux, macOS and Windows; matplotlib brings none.
CHINESE_FONTS = (
    *("NotoSansCJK", "NotoSansSC", "SourceHanSans", "wqy-microhei", "wqy-zenhei", "DroidSansFallback"),
    *("PingFang", "Hiragino Sans GB", "msyh", "simhei"),
)


def present(thing: Any) -> None:
    """Display a table, sentences or an image in a notebook, print it in a shell."""
    if notebook_kernel() is not None:
        from IPython.display import display

        display(thing)
    else:
        print(f"\n{thing}")


def present_figure(figure: "Figure | None", path: Path | None = None) -> None:
    """Display a figure, if there is one, in a notebook; save it at `path`, and name that in a shell."""
    if figure is None:
        return
    png = as_png(figure)
    if path is not None:
        from tpukit.host import files  # here: `metrics_report` needs none

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, png)
        except (OSError, TpukitError) as error:  # Kaggle's inputs are read-only: it is shown all the same
            print(printable(f"picture not saved at {path}: {first_line(error)}"))
            path = None
    if notebook_kernel() is not None:
        from IPython.display import Image

        present(Image(png))
    elif path is not None:
        print(printable(f"\npicture: {path}"))


def as_png(figure: "Figure") -> bytes:
    """Return a figure as the bytes of a PNG file, without a background."""
    from matplotlib.text import Text

    png = io.BytesIO()
    for text in figure.findobj(Text) if language.is_chinese() else ():
        text.set_fontfamily([*text.get_fontfamily(), *chinese_fonts()])
    figure.savefig(png, dpi=110, format="png", transparent=True)
    return png.getvalue()


@functools.cache
def chinese_fonts() -> list[str]:
    """Return the family of an installed font with Chinese signs, which matplotlib then knows; or nothing."""
    from matplotlib import font_manager

    # Of a family that has several weights, the regular one
    for path in sorted(font_manager.findSystemFonts(), key=lambda path: ("Regular" not in path, path)):
        if Path(path).name.startswith(CHINESE_FONTS):
            font_manager.fontManager.addfont(path)
            return [font_manager.FontProperties(fname=path).get_name()]
    return []


def translate_drawn(text: str) -> str:
    """Return a text of a figure in the language of the page, if there is a font for it."""
    return language.translate(text) if language.is_chinese() and chinese_fonts() else text


def as_image(figure: "Figure") -> "Image":
    """Return a figure as a PNG image that a notebook shows."""
    from IPython.display import Image

    return Image(as_png(figure))
