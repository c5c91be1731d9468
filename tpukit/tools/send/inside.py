"""What runs in a session: asks for the accelerator, ends the session before its limit does, and writes how it
ended, in session.json among the outputs."""

import functools
import json
import os
import signal
import threading
from typing import Any

from tpukit.host import environment, files
from tpukit.host.errors import TpukitError, first_line
from tpukit.tools.send import Ending

REQUIRED = dict(tpu="tpu", gpu="cuda", none="cpu")
MARGIN_S = 600.0  # at most: for the session's start, the last checkpoint, and the upload of the outputs
TERMINATED = 128 + signal.SIGTERM  # a training's exit code, after this signal


class NoAccelerator(TpukitError):
    """The session did not get what it needs."""


def watch(shell: Any, *, accelerator: str, hours: float) -> None:
    """The first cell of a session. Raises NoAccelerator where the accelerator is not here.

    shell: IPython's. hours: the session's limit; some minutes before it, the training is told to stop."""
    stopping = threading.Event()
    show_traceback = shell.showtraceback

    def stop():
        stopping.set()
        os.kill(os.getpid(), signal.SIGTERM)  # on which a training saves

    def ends_cell(result):
        error = result.error_before_exec or result.error_in_exec
        if error is None:
            return
        # Without the cells that are left: Colab's command runs those after one that failed, too.
        shell.input_transformers_cleanup.append(lambda lines: [])
        if stopping.is_set() or getattr(error, "code", None) == TERMINATED:
            result.error_before_exec = result.error_in_exec = None  # the session ends well
            write("stopped")
        else:
            write(_ending(error), f"{type(error).__name__}: {first_line(error)}")

    os.environ.pop("FORCE_COLOR", None)  # a kernel has it, and its escapes would be in the log
    shell.events.register("post_run_cell", ends_cell)
    shell.showtraceback = lambda *a, **k: None if stopping.is_set() else show_traceback(*a, **k)
    signal.signal(signal.SIGTERM, _leave)  # what nothing else handles
    try:
        print(environment.detect().require(REQUIRED[accelerator]))
    except TpukitError as error:
        raise NoAccelerator(str(error)) from error
    limit_s = 3600 * hours
    timer = threading.Timer(limit_s - min(MARGIN_S, limit_s / 2), stop)
    timer.daemon = True
    timer.start()


def _leave(number, frame):
    raise SystemExit(TERMINATED)


def _ending(error: BaseException) -> Ending:
    if isinstance(error, NoAccelerator):
        return "no accelerator"
    return "lost" if isinstance(error, (ConnectionError, TimeoutError)) else "failed"


def write(ending: Ending, error: str = "") -> None:
    """Write how the session ended."""
    outputs = environment.detect().outputs
    outputs.mkdir(parents=True, exist_ok=True)
    files.write_atomic(outputs / "session.json", json.dumps(dict(ending=ending, error=error[:500])))


def train_task(*, task: str, settings: dict[str, Any], name: str, resumes: bool) -> None:
    """Train a task, or resume its run `name` from the input. Raises TpukitError where `resumes` is true and
    the input has no such run: training from the start would use up the session and help nobody.

    settings: as `runs.run.settings_dict` gives them; what is missing keeps its default."""
    import tpukit
    from tpukit import tasks
    from tpukit.tasks.datasets import with_dataset
    from tpukit.training.task import from_settings

    env = environment.detect()
    chosen = with_dataset(from_settings(tasks.find(task), settings), env)
    path, earlier = env.outputs / name, tpukit.find_run(env, name)
    if resumes and earlier is None and not (path / "config.json").is_file():
        raise TpukitError(f"the run {name}, which this session is to resume, is not among its inputs")
    run = tpukit.Run.open(path, chosen, earlier=earlier)
    tpukit.launch(functools.partial(tpukit.train, progress=False), chosen, run)
