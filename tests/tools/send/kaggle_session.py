"""A session of the loopback server (kaggle_server.py): papermill runs what was pushed, in a process with
Kaggle's folders and variables, in namespaces of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT, XLA_FLAGS

if TYPE_CHECKING:
    from tests.tools.send.kaggle_server import Server

SHAPES = {None: None, "": None, "TpuV5E8": "TPU", "NvidiaTeslaT4": "GPU"}
IMAGE = tomllib.loads((ROOT / "release/images.toml").read_text())["Kaggle TPU"]
ON_CPU = dict(PJRT_DEVICE="CPU", XLA_FLAGS=XLA_FLAGS)
# One thread: what is compared bit for bit must not depend on how many cores are free.
BARE = dict(KAGGLE_KERNEL_RUN_TYPE="Batch", KAGGLE_URL_BASE="https://www.kaggle.com", OMP_NUM_THREADS="1")
# A root folder with this machine's folders and Kaggle's. This tree's tpukit is hidden: a session has what its
# notebook brings. Of the network there is the loopback, which a Jupyter kernel needs.
SANDBOX = """\
set -e
root=$1 session=$2 hidden=$3; shift 3
[ ! -e "$session/offline" ] || ip link set lo up
mount -t tmpfs none "$root"
for path in /*; do
    if [ -L "$path" ]; then cp -a "$path" "$root/"
    elif [ -d "$path" ]; then mkdir "$root$path"; mount --rbind "$path" "$root$path"; fi
done
mkdir -p "$root/kaggle/working" "$root/kaggle/input" "$root/kaggle/src"
mount --bind "$session/working" "$root/kaggle/working"
mount --bind "$session/input" "$root/kaggle/input"
mount -o remount,bind,ro "$root/kaggle/input"
mount --bind "$session/src" "$root/kaggle/src"
mount -t tmpfs none "$root$hidden"
chroot=$(PATH="$PATH:/usr/sbin:/sbin" command -v chroot)
exec "$chroot" "$root" env -C /kaggle/working "$@"
"""


def unshare(*, offline: bool) -> list[str]:
    """The command by which a session runs in namespaces of its own; all its processes die with it."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["--net"] if offline else []
    return [*command, "--map-root-user"] if os.getuid() else command


@functools.cache
def can_run() -> bool:
    """Whether sessions can run here: it takes namespaces of Linux."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return not subprocess.run([*unshare(offline=True), "true"], capture_output=True).returncode


needs_sessions = pytest.mark.skipif(
    not can_run(), reason="no namespaces can be made here, to run sessions in"
)


class Session:
    """One version of a kernel: it is queued, it runs, it has ended."""

    def __init__(self, server: Server, owner: str, slug: str, request: dict):
        self.server, self.owner, self.slug, self.request = server, owner, slug, request
        self.number = len(server.sessions) + 1
        self.folder = server.folder / f"session-{self.number}"
        self.status, self.message = "QUEUED", ""
        self.log: list[dict] = []
        self.process: subprocess.Popen | None = None
        self.ended = threading.Event()
        self.hostile: dict[str, bytes] = {}  # name as the list of files has it -> content

    @property
    def shape(self) -> str | None:
        return self.request.get("machineShape")

    @property
    def working(self) -> Path:
        return self.folder / "working"

    def files(self) -> dict[str, Path | bytes]:
        """What the session has put out, by the names that the API lists; nothing while it runs."""
        if not self.ended.is_set():
            return {}
        found: dict[str, Path | bytes] = {
            path.relative_to(self.working).as_posix(): path
            for path in sorted(self.working.rglob("*"))
            if path.is_file() and not path.is_symlink() and not path.name.startswith("__")
        }
        return found | self.hostile

    def say(self, text: str, stream: str = "stdout") -> None:
        self.log.append(dict(stream_name=stream, time=time.monotonic(), data=text))

    def run(self) -> None:
        """The life of a session, in a thread."""
        try:
            for part in ("working", "input", "src", "home", "root"):
                (self.folder / part).mkdir(parents=True)
            time.sleep(self.server.queue_s)
            self.status = "RUNNING"
            (self.server.script or Session.run_notebook)(self)
        except Exception as error:  # of a script of a test
            self.status, self.message = "ERROR", repr(error)
            raise
        finally:
            if self.status == "RUNNING":
                self.status = "COMPLETE"
            self.ended.set()

    def run_notebook(self) -> None:
        """Run the pushed notebook as Kaggle does: by papermill, in /kaggle/working, with its inputs."""
        (self.folder / "src/notebook.ipynb").write_text(self.request["text"])
        offline = not self.request.get("enableInternet", True)
        if offline:
            (self.folder / "offline").touch()
        for source in self.request.get("kernelDataSources", []):
            shutil.copytree(
                self.server.kernels[source][-1].working,
                self.folder / "input/notebooks" / source,
                symlinks=True,
            )
        for source in self.request.get("datasetDataSources", []):
            shutil.copytree(self.server.datasets[source], self.folder / "input/datasets" / source)
        command = [*unshare(offline=offline), "bash", "-c", SANDBOX, "bash"]
        command += [self.folder / "root", self.folder, ROOT / "tpukit"]
        command += [sys.executable, "-m", "papermill", "/kaggle/src/notebook.ipynb", "__notebook__.ipynb"]
        command += ["--stdout-file", "/dev/stdout", "--stderr-file", "/dev/stderr"]
        command += ["--no-progress-bar", "--log-level", "ERROR"]
        accelerator = SHAPES[self.shape] if self.server.has_accelerator else None
        environ = dict(HOME=str(self.folder / "home"), LANG="C.UTF-8", PATH=os.environ["PATH"], **BARE)
        environ |= {"KAGGLE_USER_SECRETS_TOKEN": self.server.secret}
        if accelerator == "TPU":
            environ |= IMAGE["environ"] | ON_CPU  # its processor stands in for the chips
        environ |= self.server.environ
        with subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as self.process:
            pipes = dict(stdout=self.process.stdout, stderr=self.process.stderr)
            readers = [threading.Thread(target=self._read, args=pair) for pair in pipes.items()]
            for reader in readers:
                reader.start()
            self._watch(self.process)
            for reader in readers:
                reader.join()
        if self.process.returncode and self.status == "RUNNING":
            self.status, self.message = "ERROR", self.server.words_of_error

    def _read(self, name, pipe):
        for line in pipe:
            self.say(line, name)

    def _watch(self, process):
        """Wait for the process; end it at the time limit, or when its life is over."""
        start = None
        limit_s = self.request.get("sessionTimeoutSeconds", 43200)
        is_over = next(self.server.lives, None)
        while process.poll() is None:
            if start is None and any(self.working.glob(self.server.alive_from)):
                start = time.monotonic()
            passed_s = 0.0 if start is None else time.monotonic() - start
            if passed_s > limit_s:
                return self.kill(*self.server.end_of_timeout)
            if is_over and start is not None and is_over(self, passed_s):
                return self.kill(*self.server.end_of_killed)
            time.sleep(0.02)

    def kill(self, status: str = "ERROR", message: str = "") -> None:
        """End all processes of the session, at once; what is in its working folder stays."""
        self.status, self.message = status, message
        if self.process and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
