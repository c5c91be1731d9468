"""Files are read in a process of their own: one that crashes the parser, or that it never ends with, costs its own finding."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tpukit.host.errors import TpukitError, first_line
from tpukit.host.tables import GIB

LIMIT_S = 60.0  # for one file; one of 3500 lines takes about 10
MEMORY = 4 * GIB


class Unreadable(Exception):
    """Says why a file could not be read."""


class Reader:
    """The process that reads, one file after the other. It starts with the first, and anew after one that it died of; it ends
    with this process."""

    def __init__(self):
        self.process = None

    def read(self, path):
        """What `answers` gives for a path. Raises Unreadable, and TpukitError for a path that is no file to be read."""
        answer = self._asked(path)
        if "error" in answer:
            raise TpukitError(answer["error"])
        if "unreadable" in answer:
            raise Unreadable(answer["unreadable"])
        return answer

    def _asked(self, path):
        if self.process is None:
            # -P: no file of the current folder is taken for a module.
            places = [str(Path(__file__).parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
            command = [sys.executable, "-P", "-m", "tpukit.tools.migrate"]
            streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.process = subprocess.Popen(command, **streams, env=environ, start_new_session=True)
        process, late = self.process, threading.Event()
        timer = threading.Timer(LIMIT_S, lambda: (late.set(), process.kill()))
        timer.start()
        answer = ""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([os.getcwd(), os.fspath(path)]) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
        finally:
            timer.cancel()
            if not answer.endswith("\n"):  # dead, or interrupted
                self.process = None
                with contextlib.suppress(BrokenPipeError), process:
                    process.kill()
        if answer.endswith("\n"):
            return json.loads(answer)
        if late.is_set():
            return dict(unreadable=f"not read within {LIMIT_S:g} s")
        code = process.returncode
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return dict(unreadable=f"it crashes the parser ({cause})")


def answers(examine):
    """The other side: for each folder and path in it that come as a line of JSON, what `examine` says of it goes out as one."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # where a system has such limits
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        try:
            folder, path = json.loads(line)
            os.chdir(folder)
            if hasattr(signal, "alarm"):  # not on Windows
                signal.alarm(int(LIMIT_S) + 5)  # ends this process, where the other side is gone and nobody else does
            findings, fixed = examine(path)
            answer = dict(findings=findings, fixed=fixed)
        except TpukitError as error:
            answer = dict(error=str(error))
        except RecursionError:
            answer = dict(unreadable="nested too deeply")
        except MemoryError:
            answer = dict(unreadable=f"needs more than {MEMORY // GIB} GiB of memory")
        except Exception as error:  # whatever a file did to a parser: it is named, and the next one is read
            answer = dict(unreadable=f"{type(error).__name__}: {first_line(error)}")
        finally:
            if hasattr(signal, "alarm"):
                signal.alarm(0)
        print(json.dumps(answer), flush=True)
