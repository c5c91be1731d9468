"""What runs in a session: asks for the accelerator, ends the session before its limit does, and writes how it
ended, in session.json beside the outputs."""

import json
import os
import signal
import threading
from typing import Any

from tpukit.host import environment, files
from tpukit.host.errors import TpukitError, first_line

REQUIRED = dict(tpu="tpu", gpu="cuda", none="cpu")
MARGIN_S = 600.0  # at most: for the session's start, the last checkpoint, and the upload of the outputs
TERMINATED = 128 + signal.SIGTERM  # a training's exit code, after this signal
PASSING = (ConnectionError, TimeoutError)


def watch(shell: Any, *, accelerator: str, hours: float) -> None:
    """The first cell of a session. Raises TpukitError where the accelerator is not here.

    shell: IPython's. hours: the session's limit; some minutes before it, the training is told to stop."""
    stopping = threading.Event()
    show_traceback = shell.showtraceback

    def stop():
        stopping.set()
        os.kill(os.getpid(), signal.SIGTERM)  # on which a training saves

    def skip_rest():  # Colab's command runs the cells after one that failed, too
        shell.input_transformers_cleanup.append(lambda lines: [])

    def ends_cell(result):
        error = result.error_before_exec or result.error_in_exec
        if error is not None and (stopping.is_set() or getattr(error, "code", None) == TERMINATED):
            write(ending="stopped")
            # The session ends well, without the cells that are left.
            result.error_before_exec = result.error_in_exec = None
            skip_rest()
        elif error is not None:
            reason = first_line(error)
            if not isinstance(error, TpukitError):
                reason = f"{type(error).__name__}: {reason}"
            write(ending="failed", error=reason, repeats=not isinstance(error, PASSING))
            skip_rest()

    os.environ.pop("FORCE_COLOR", None)  # a kernel has it, and its escapes would be in the log
    try:
        print(environment.detect().require(REQUIRED[accelerator]))
    except TpukitError as error:
        write(ending="no accelerator", error=first_line(error))
        skip_rest()
        raise
    shell.events.register("post_run_cell", ends_cell)
    shell.showtraceback = lambda *a, **k: None if stopping.is_set() else show_traceback(*a, **k)
    signal.signal(signal.SIGTERM, _leave)  # what nothing else handles
    limit_s = 3600 * hours
    timer = threading.Timer(limit_s - min(MARGIN_S, limit_s / 2), stop)
    timer.daemon = True
    timer.start()


def _leave(number, frame):
    raise SystemExit(TERMINATED)


def finish() -> None:
    """The last cell of a session."""
    write(ending="done")


def write(*, ending: str, error: str = "", repeats: bool = False) -> None:
    """Write how the session ended."""
    path = environment.detect().outputs.parent / "session.json"
    files.write_atomic(path, json.dumps(dict(ending=ending, error=error[:500], repeats=repeats)))


def train_task(*, task: str, settings: dict[str, Any], name: str, resumes: bool) -> None:
    """Train a task, or resume its run `name` from the input. Raises TpukitError where `resumes` is true and
    the input has no such run: training from the start would use up the session and help nobody.

    settings: as `runs.run.settings_dict` gives them; what is missing keeps its default."""
    import dataclasses
    import functools

    from tpukit import tasks
    from tpukit.launching.launcher import launch
    from tpukit.runs.backup import find_run
    from tpukit.runs.run import Run
    from tpukit.tasks.datasets import find_dataset
    from tpukit.training.loop import train
    from tpukit.training.task import from_settings

    env = environment.detect()
    chosen = from_settings(tasks.find(task), settings)
    data = find_dataset(
        env,
        chosen.dataset,
        chosen.dataset_dir,
        fallback=getattr(chosen, "fallback", None),
        demo=not chosen.needs_own_data,
    )
    chosen = dataclasses.replace(chosen, dataset_dir=data)
    path, earlier = env.outputs / name, find_run(env, name)
    if resumes and earlier is None and not (path / "config.json").is_file():
        raise TpukitError(f"the run {name}, which this session is to resume, is not among its inputs")
    run = Run.open(path, chosen, earlier=earlier)
    launch(functools.partial(train, progress=False), chosen, run)


def check_hardware(*, rehearse: bool) -> None:
    """`tpukit doctor --hardware`, with its report in the outputs. rehearse: there is no accelerator."""
    from tpukit.tools.doctor import hardware

    env = environment.detect()
    report = hardware.check_hardware(env, path=env.outputs / hardware.REPORT, rehearse=rehearse)
    print(hardware.table(report))
