"""Colab, by Google's own command `colab` (google-colab-cli 0.6): a machine for each session, one at a time.

A session needs the command that started it: `push` starts `colab exec`, which sends the notebook cell by
cell, and `log` prints what comes. Without it the cell that runs goes on, those after it do not run, and
`fetch` brings what there is. Of a machine that Colab takes away, nothing is left."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tpukit.host import archives
from tpukit.host.errors import TpukitError
from tpukit.tools import child
from tpukit.tools.send import Session, State, Unreachable
from tpukit.tools.send.service import Service, reason

HARDWARE = dict(TpuV5E8=("--tpu", "v5e1"), NvidiaTeslaT4=("--gpu", "T4"))
LIMIT_S = 900  # for a machine to start, or for a file to be copied
LATE_S = 900  # a session ends itself before its limit; its notebook is cut off so much after it
# It asks for a login, or Google refuses the one that it has.
ASKS = r"accounts\.google\.com|DefaultCredentialsError|RefreshError|invalid_grant|EOFError"
NO_COMMAND = (
    "Google's command `colab` is missing: pip install google-colab-cli (Linux and macOS), then run"
    " `colab sessions` once, which logs in"
)
NO_LOGIN = "Colab does not know who you are: run `colab sessions` in a terminal, which logs in"
# Lines that run on the machine. The command's exit code is 0 even where they fail.
UNPACK = "import shutil; shutil.unpack_archive('/content/runs.zip', '/content/outputs')"
PACK = """import os, shutil
os.makedirs('/content/outputs', exist_ok=True)
shutil.rmtree('/content/outputs/datasets', ignore_errors=True)
shutil.make_archive('/content/left', 'zip', '/content', 'outputs')"""


class Colab(Service):
    name = "Colab"
    login = NO_LOGIN
    asks = ASKS
    timeout_s = LIMIT_S + 60
    attached = True  # `send` follows at once: the session needs it

    def __init__(self, command: str = "colab"):
        found = shutil.which(command)
        if found is None:
            raise TpukitError(NO_COMMAND)
        self.command = [found]
        self._running: dict[str, subprocess.Popen] = {}  # kernel -> the `colab exec` that prints it

    def url(self, kernel: str) -> str:
        return f"`colab stop -s {kernel}` gives the machine back, and what it holds is lost"

    def quota(self, accelerator: str) -> None:
        """None: Colab does not say what is left."""

    def push(self, folder: Path, session: Session, runs: Path) -> None:
        """Raises TpukitError with Colab's reason. The machine is given back then."""
        kernel, shape = session.kernel, json.loads((folder / "kernel-metadata.json").read_text())
        self.ask("new", "-s", kernel, *HARDWARE.get(shape["machine_shape"], ()))
        try:
            if runs.exists():
                with tempfile.TemporaryDirectory() as work:
                    archive = shutil.make_archive(f"{work}/runs", "zip", runs)
                    self.ask("upload", "-s", kernel, archive, "/content/runs.zip")
                self._exec(kernel, UNPACK)
            limit = ("--timeout", round(session.hours * 3600 + LATE_S))
            notebook = folder / "session.ipynb"
            self._running[kernel] = child.start([*self.command, "exec", "-s", kernel, "-f", notebook, *limit])
        except BaseException:
            self.ask("stop", "-s", kernel)
            raise

    def state(self, kernel: str) -> State:
        """Of a session that another command started: "complete" once its machine runs nothing. "unknown" also
        for a machine that Colab has taken away."""
        process = self._running.get(kernel)
        if process and process.poll() in (None, 0):
            return State("running" if process.returncode is None else "complete")
        if f"[{kernel}] " not in self.ask("status", "-s", kernel):
            return State("unknown")
        try:
            self.ask("exec", "-s", kernel, text="pass")
        except Unreachable:  # it waits ten seconds for what runs there
            return State("running")
        return State("complete")

    def log(self, kernel: str) -> Iterator[str]:
        """What the notebook prints while this command is connected, once: Colab keeps no log."""
        process = self._running.get(kernel)
        return child.lines_of(process) if process else iter(())

    def fetch(self, kernel: str, folder: Path) -> None:
        """Bring /content/outputs, but for datasets, and give the machine back."""
        self.ask("restart-kernel", "-s", kernel)  # in which state the notebook left it, nobody knows
        self._exec(kernel, PACK)
        with tempfile.TemporaryDirectory() as work:
            archive = Path(work, "left.zip")
            self.ask("download", "-s", kernel, "/content/left.zip", archive)
            archives.unpack(archive, folder, parts={"outputs"})
        try:
            self.ask("stop", "-s", kernel)
        except TpukitError as error:  # what it left is here: no reason to begin again
            print(f"{error}; `colab stop -s {kernel}` gives it back", file=sys.stderr)

    def _exec(self, kernel: str, lines: str) -> None:
        said = self.ask("exec", "-s", kernel, "--timeout", LIMIT_S, text=f"{lines}\nprint('all', 'done')")
        if "all done" not in said:
            raise TpukitError(f"Colab's machine {kernel} failed: {reason(said)}")
