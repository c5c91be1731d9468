"""Run this interpreter as a subprocess, and say how one failed."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # the folder that tpukit is imported from


def run_python(*arguments, text="", variables=None, timeout_s=None):
    """Run this Python, with the same tpukit as here. Returns the finished process, with its output.

    variables: changes of the environment; None removes one. timeout_s: after it subprocess.TimeoutExpired is
    raised. However it ends, what it has started ends with it: it leads a process group of its own. -P: files
    in the current folder cannot shadow installed packages."""
    # An empty one is the current folder.
    paths = filter(None, [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})}
    environ = {name: value for name, value in environ.items() if value is not None}
    command = [sys.executable, "-P", *map(str, arguments)]
    pipes: dict = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        command, env=environ, text=True, errors="replace", start_new_session=True, **pipes
    ) as process:
        try:
            stdout, stderr = process.communicate(text, timeout=timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def last_line(ran):
    """The last line that a finished process wrote to stderr; where it wrote nothing, its exit code."""
    lines = ran.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {ran.returncode}, without a message"
