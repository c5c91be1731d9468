"""This machine as if it were a service: a session is a process with a folder of its own. To try a chain
without an account, as the notebook many_sessions does."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tpukit.host import environment
from tpukit.tools import child
from tpukit.tools.send import Session, State
from tpukit.tools.send import chain as chains

# Whose folders are not a session's own.
ELSEWHERE = {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE"}
ON_CPU = {environment.CHOSEN: "cpu"}  # a TPU is another process's
EPOCH = re.compile(r"epoch \d+: ")  # of a line that a training prints
# Runs the cells of a notebook up to the first error.
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
"""


class Local:
    """This machine as `tpukit.tools.send.Service` has it. folder: where the sessions work. epochs: after so
    many, a session is told to end, as if its time were over."""

    attached = True

    def __init__(self, folder: Path, epochs: int | None = None):
        self.folder, self.epochs = Path(folder), epochs
        self._running: dict[str, subprocess.Popen] = {}
        self._lines: dict[str, list[str]] = {}

    def kernel(self, slug: str) -> str:
        return slug

    def url(self, kernel: str) -> str:
        return str(self.folder / kernel)

    def quota(self, accelerator: str) -> None:
        """None: there is no limit."""

    def push(self, folder: Path, session: Session) -> None:
        work = self.folder / session.kernel
        work.mkdir(parents=True)
        for name, run in chains.runs(folder.parent, session).items():
            shutil.copytree(run, work / "outputs" / name)
        self._running[session.kernel] = child.start(
            [sys.executable, "-P", "-c", RUN, (folder / "session.ipynb").absolute()],
            cwd=work,
            env={name: value for name, value in os.environ.items() if name not in ELSEWHERE} | ON_CPU,
        )

    def state(self, kernel: str) -> State:
        process = self._running.get(kernel)
        if process is None:
            return State("complete" if (self.folder / kernel).exists() else "unknown")
        ended = process.poll()
        return State("running" if ended is None else "error" if ended else "complete")

    def log(self, kernel: str, follow: bool) -> Iterator[str]:
        lines, process = self._lines.setdefault(kernel, []), self._running.get(kernel)
        known = len(lines)
        for number, line in enumerate(child.lines_of(process if follow else None, lines)):
            is_new = number >= known and EPOCH.match(line)
            if process and is_new and sum(map(bool, map(EPOCH.match, lines))) == self.epochs:
                process.terminate()  # on which a training saves
            yield line

    def fetch(self, kernel: str, folder: Path) -> None:
        work = self.folder / kernel
        shutil.copytree(work, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("datasets"))
        shutil.rmtree(work)
