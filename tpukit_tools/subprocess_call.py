"""Run this interpreter as a subprocess, call a function in a fresh one, and say how one failed."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.runs.settings import Described, from_settings, settings_dict

ROOT = Path(__file__).parents[1]  # the folder that tpukit and its guests are imported from
PYTHON = [sys.executable, "-P"]  # -P: no file of the current folder shadows a package


def run_python(*arguments, text="", variables=None, timeout_s=None):
    """Run this Python, with the same tpukit as here. Return the finished process, with its output.

    variables: changes of the environment; None removes one. timeout_s: after it subprocess.TimeoutExpired is
    raised, and what the process has started ends too."""
    # An empty one is the current folder.
    paths = filter(None, [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})}
    environ = {name: value for name, value in environ.items() if value is not None}
    command = [*PYTHON, *map(str, arguments)]
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
    """Return the last line that a finished process wrote to stderr, or its exit code if it wrote nothing."""
    lines = ran.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {ran.returncode}, without a message"


def call(
    function: Callable[[Any], Any],
    request: Any,
    *,
    timeout_s: float | None = None,
    variables: dict[str, str | None] | None = None,
) -> Any:
    """Call a module's function in a fresh process, because a device, its memory and its flags belong to a
    whole process. Request and answer pass as JSON; timeout_s and variables are those of `run_python`.

    Raise TpukitError with the function's own sentence if it raised one, or with how the process ended."""
    name = f"{function.__module__}:{function.__name__}"
    program = "from tpukit_tools.subprocess_call import answer_call; answer_call()"
    with tempfile.TemporaryDirectory(prefix="tpukit-call-") as folder:
        path = Path(folder) / "answer.json"
        arguments = ("-c", program, name, path)
        ran = run_python(*arguments, text=json.dumps(request), variables=variables, timeout_s=timeout_s)
        answer = json.loads(path.read_text()) if path.exists() else {}
    if "value" in answer:  # whatever the exit code is: some devices crash when they are closed
        return answer["value"]
    if ran.returncode == -signal.SIGKILL:
        raise TpukitError("the process was killed, most likely because this machine's memory was full")
    raise TpukitError(answer.get("error") or last_line(ran))


def answer_call() -> None:
    """In the fresh process: call the function with the request from stdin, write its answer as a file, and
    exit without closing the device, in which some libraries crash and an unfinished graph would run."""
    from tpukit.host.signals import end_with_parent

    end_with_parent(os.getppid())  # a chip that is left open is lost for the session
    name, path = sys.argv[1:]
    module, _, function = name.partition(":")
    try:
        request = json.loads(sys.stdin.read())
        answer = dict(value=getattr(importlib.import_module(module), function)(request))
    except TpukitError as error:
        answer = dict(error=str(error))
    files.write_atomic(Path(path), json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# A task on its way to another process


def to_request(task: Described) -> dict:
    """Return what a fresh process needs to import the class of a task and give it the same settings, for
    JSON: read by `from_request`.

    Raises TpukitError for the class of a notebook cell."""
    kind = type(task)
    if kind.__module__ == "__main__":
        raise TpukitError(
            f"{kind.__name__} is defined in a notebook cell, from which another process cannot import it:"
            " move it to a module"
        )
    module = sys.modules[kind.__module__]
    depth = module.__name__.count(".") + hasattr(module, "__path__")
    folder = str(Path(str(module.__file__)).resolve().parents[depth])
    return dict(module=module.__name__, folder=folder, kind=kind.__qualname__, settings=settings_dict(task))


def from_request(request: dict) -> Any:
    """In the fresh process: return the task of a request of `to_request`."""
    # last, so that files next to the class cannot shadow installed packages
    sys.path.append(request["folder"])
    kind = getattr(importlib.import_module(request["module"]), request["kind"])
    return from_settings(kind, request["settings"])
