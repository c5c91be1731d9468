"""Files are checked in a process of their own, with limits of time and memory: a file that crashes the parser, or that it never
finishes, costs its own finding and nothing else."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import GIB

TIME_LIMIT_S = 60  # for one file; one of 3500 lines takes about 10
MEMORY_LIMIT = 4 * GIB


class Worker:
    """The process that checks files, one after the other. It starts with the first file and ends with this process; after one
    that killed it, the next file starts another."""

    def __init__(self):
        self.process = None

    def check(self, path):
        """The worker's answer about a file: dict(findings, fixed), or dict(unreadable) with the reason.

        Raises TpukitError for a path that cannot be opened, or is not a script or notebook.
        """
        self.process = self.process or _start()
        process, answer = self.process, ""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([os.getcwd(), os.fspath(path), TIME_LIMIT_S]) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
        finally:
            if not answer.endswith("\n"):  # it died, or this process was interrupted
                self.process = None
                with contextlib.suppress(BrokenPipeError), process:
                    process.kill()
        if not answer.endswith("\n"):
            return dict(unreadable=_cause_of_death(process.returncode))
        answer = json.loads(answer)
        if "error" in answer:
            raise TpukitError(answer["error"])
        return answer


def _start():
    # -P keeps modules of the current folder from being imported.
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-P", "-m", "tpukit.tools.migrate"]
    streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return subprocess.Popen(command, **streams, env=environ, start_new_session=True)


def _cause_of_death(code):
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if cause == "SIGALRM":
        return f"not read within {TIME_LIMIT_S} s"
    return f"it crashes the parser ({cause})"


def serve(check):
    """The worker's loop: for each line [folder, path, seconds] of JSON on stdin, a line of JSON on stdout."""
    has_limits = hasattr(signal, "alarm")  # not on Windows
    if has_limits:
        import resource

        with contextlib.suppress(OSError, ValueError):  # where a stricter limit holds already
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    for line in sys.stdin:
        folder, path, seconds = json.loads(line)
        if has_limits:
            signal.alarm(seconds)  # ends this process, also where the one that asked is gone
        try:
            os.chdir(folder)
            findings, fixed = check(path)
            answer = dict(findings=findings, fixed=fixed)
        except TpukitError as error:
            answer = dict(error=str(error))
        except RecursionError:
            answer = dict(unreadable="nested too deeply")
        except MemoryError:
            answer = dict(unreadable=f"needs more than {MEMORY_LIMIT // GIB} GiB of memory")
        except Exception as error:  # whatever a file did to a parser: it is named, and the next one is read
            answer = dict(unreadable=f"{type(error).__name__}: {first_line(error)}")
        if has_limits:
            signal.alarm(0)
        print(json.dumps(answer), flush=True)
