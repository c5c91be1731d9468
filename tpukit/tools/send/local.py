"""This machine as if it were a service: a session is a process with a folder of its own. To try a chain
without an account, as the notebook many_sessions does."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tpukit.host.tables import printable
from tpukit.tools.send import Session, State
from tpukit.tools.send import chain as chains

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
        here = {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE"}  # whose folders are not its
        self._running[session.kernel] = subprocess.Popen(
            [sys.executable, "-P", "-c", RUN, (folder / "session.ipynb").absolute()],
            cwd=work,
            env={name: value for name, value in os.environ.items() if name not in here},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def state(self, kernel: str) -> State:
        process = self._running.get(kernel)
        if process is None:
            return State("complete" if (self.folder / kernel).exists() else "unknown")
        ended = process.poll()
        return State("running" if ended is None else "error" if ended else "complete")

    def log(self, kernel: str, follow: bool) -> Iterator[str]:
        lines, process = self._lines.setdefault(kernel, []), self._running.get(kernel)
        yield from lines
        if follow and process and process.stdout:
            for line in process.stdout:
                lines.append(printable(line.rstrip("\n")))
                yield lines[-1]
                ended = [line for line in lines if EPOCH.match(line)]
                if EPOCH.match(lines[-1]) and len(ended) == self.epochs:
                    process.terminate()  # on which a training saves
            process.wait()

    def fetch(self, kernel: str, folder: Path) -> None:
        work = self.folder / kernel
        shutil.copytree(work, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("datasets"))
        shutil.rmtree(work)
