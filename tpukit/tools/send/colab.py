"""Colab, by Google's own command `colab` (google-colab-cli 0.6): a machine for each session, one at a time.

The command logs in by itself and keeps its token in its own files. A session needs the command that started
it: `push` starts `colab exec`, which sends the notebook cell by cell, and `log` prints what comes. Without it
the cell that runs goes on, those after it do not run, and `fetch` brings what there is. Of a machine that
Colab takes away, nothing is left."""

import inspect
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tpukit.host import archives
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tools import child
from tpukit.tools.send import Session, State, Unreachable
from tpukit.tools.send import chain as chains
from tpukit.tools.send.kaggle import PASSES

HARDWARE = dict(tpu=("--tpu", "v5e1"), gpu=("--gpu", "T4"), none=())
ARCHIVE = "/content/tpukit.zip"
KEPT = {"outputs": "/content/outputs", "session.json": "/content/session.json"}
LIMIT_S = 900  # for a machine to start, or for a file to be copied
LATE_S = 900  # a session ends itself before its limit; its notebook is cut off so much after it
# It asks for a login, or Google refuses the one that it has.
ASKS = re.compile(r"accounts\.google\.com|DefaultCredentialsError|RefreshError|invalid_grant|EOFError")
NO_COMMAND = (
    "Google's command `colab` is missing: pip install google-colab-cli (Linux and macOS), then run"
    " `colab sessions` once, which logs in"
)
NO_LOGIN = "Colab does not know who you are: run `colab sessions` in a terminal, which logs in"


class Colab:
    """Colab as `tpukit.tools.send.Service` has it."""

    attached = True  # `send` follows at once: the session needs it

    def __init__(self, command: str = "colab"):
        found = shutil.which(command)
        if found is None:
            raise TpukitError(NO_COMMAND)
        self.command = found
        self._running: dict[str, subprocess.Popen] = {}  # kernel -> the `colab exec` that prints it
        self._lines: dict[str, list[str]] = {}

    def kernel(self, slug: str) -> str:
        return slug

    def url(self, kernel: str) -> str:
        return f"machine {kernel} of `colab sessions`"

    def quota(self, accelerator: str) -> None:
        """None: Colab does not say what is left."""

    def push(self, folder: Path, session: Session) -> None:
        """Raises TpukitError with Colab's reason. The machine is given back then."""
        chain = chains.read(folder.parent)
        kernel = session.kernel
        self._run("new", "-s", kernel, *HARDWARE[chain.accelerator])
        try:
            if runs := chains.runs(folder.parent, session):
                self._bring(kernel, runs)
            limit = ("--timeout", round(session.hours * 3600 + LATE_S))
            notebook = folder / "session.ipynb"
            self._running[kernel] = child.start([self.command, "exec", "-s", kernel, "-f", notebook, *limit])
        except BaseException:
            self.stop(kernel)
            raise

    def state(self, kernel: str) -> State:
        """Of a session that another command started: "complete" once its machine runs nothing. "unknown" also
        for a machine that Colab has taken away."""
        process = self._running.get(kernel)
        if process and process.poll() in (None, 0):
            return State("running" if process.returncode is None else "complete")
        if f"[{kernel}] " not in self._run("status", "-s", kernel):
            return State("unknown")
        try:
            self._run("exec", "-s", kernel, text="pass")
        except Unreachable:  # it waits ten seconds for what runs there
            return State("running")
        return State("complete")

    def log(self, kernel: str, follow: bool) -> Iterator[str]:
        """What the notebook printed while this command was connected. Colab keeps no log."""
        process = self._running.get(kernel) if follow else None
        return child.lines_of(process, self._lines.setdefault(kernel, []))

    def fetch(self, kernel: str, folder: Path) -> None:
        """Bring /content/outputs, but for datasets, and give the machine back."""
        self._run("restart-kernel", "-s", kernel)  # in which state the notebook left it, nobody knows
        self._exec(kernel, f"pack({ARCHIVE!r}, {KEPT!r})")
        with tempfile.TemporaryDirectory() as work:
            archive = Path(work, "tpukit.zip")
            self._run("download", "-s", kernel, ARCHIVE, archive)
            archives.unpack(archive, folder, parts=KEPT)
        try:
            self.stop(kernel)
        except TpukitError as error:  # what it left is here: no reason to begin again
            self._lines.setdefault(kernel, []).append(f"{error}; `colab stop -s {kernel}` gives it back")

    def stop(self, kernel: str) -> None:
        """Give a machine back. What was not brought is lost."""
        self._running.pop(kernel, None)
        self._run("stop", "-s", kernel)

    def _bring(self, kernel: str, runs: dict[str, Path]) -> None:
        with tempfile.TemporaryDirectory() as work:
            archive = Path(work, "tpukit.zip")
            pack(archive, runs)
            self._run("upload", "-s", kernel, archive, ARCHIVE)
        self._exec(kernel, f"zipfile.ZipFile({ARCHIVE!r}).extractall('/content/outputs')")

    def _exec(self, kernel: str, line: str) -> None:
        """Run a line of Python on the machine. The command's exit code is 0 even where it fails."""
        code = f"import zipfile\n{PACK}\n{line}\nprint('the line', 'is done')"
        said = self._run("exec", "-s", kernel, "--timeout", str(LIMIT_S), text=code)
        if "the line is done" not in said:
            raise TpukitError(f"Colab's machine {kernel} failed at {line}: {_last(said)}")

    def _run(self, *words: object, text: str = "") -> str:
        """What Google's command prints. Raises TpukitError with its last line where it fails."""
        try:
            ran = subprocess.run(
                [self.command, *map(str, words)],
                input=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=LIMIT_S + 60,
            )
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"`colab {words[0]}` gave no answer in {LIMIT_S + 60} s") from error
        if ran.returncode == 0:
            return ran.stdout
        if ASKS.search(ran.stdout):
            raise TpukitError(NO_LOGIN)
        kind = Unreachable if PASSES.search(ran.stdout) else TpukitError
        raise kind(f"`colab {words[0]}` failed: {_last(ran.stdout)}")


def pack(archive, folders):
    """Write a .zip of folders, name in it -> path, without links and datasets. Runs there, too."""
    import pathlib
    import zipfile

    with zipfile.ZipFile(archive, "w", strict_timestamps=False) as packed:
        for name, start in folders.items():
            for path in [pathlib.Path(start), *sorted(pathlib.Path(start).rglob("*"))]:
                if path.is_file() and not path.is_symlink() and "/outputs/datasets/" not in str(path):
                    packed.write(path, pathlib.PurePosixPath(name, path.relative_to(start).as_posix()))


PACK = inspect.getsource(pack)  # read now: another version of this file may be installed while a session runs


def _last(said: str) -> str:
    return printable((said.strip().splitlines() or ["it printed nothing"])[-1])
