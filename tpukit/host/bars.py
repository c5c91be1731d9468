"""tqdm's progress bar. In a notebook it is a line of text, redrawn in place, which a saved notebook still
shows; tqdm's own widget would leave "model not found" there."""

import sys
from typing import Any

from tqdm.std import tqdm as shell_bar

from tpukit.host.text import notebook_kernel


class tqdm(shell_bar):  # pyright: ignore[reportMissingTypeArgument] (only its stub takes one)
    """A progress bar, see `tqdm.tqdm`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._in_notebook = notebook_kernel() is not None
        self._output: Any = None  # IPython's handle of what is displayed
        if self._in_notebook:
            options |= dict(ncols=90, gui=True)  # gui: tqdm itself prints nothing
        elif not options.get("disable"):
            options["disable"] = None  # a log in a file, or of a pipe, gets no line for each step
        super().__init__(*args, **options)  # pyright: ignore[reportUnknownMemberType] (a stub without types)
        if self._in_notebook and not self.disable:
            self.display()

    def display(self, *args: Any, **options: Any) -> None:
        if self._in_notebook:
            self._show(str(self))
        else:
            super().display(*args, **options)

    def _show(self, text: str) -> None:
        if self._output is None:
            display = sys.modules["IPython.display"].display  # every kernel has it loaded
            self._output = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._output.update({"text/plain": text}, raw=True)

    def clear(self, *args: Any, **options: Any) -> None:
        if not self._in_notebook:  # there, what is printed comes below it
            super().clear(*args, **options)

    def close(self) -> None:
        if self._in_notebook and not self.disable:
            self._show(str(self) if self.leave else "")
        super().close()
