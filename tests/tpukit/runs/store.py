"""What tests of runs share: comparisons, and a process that is killed."""

import itertools
import os
import signal

import torch

from tpukit import Checkpoints
from tpukit.runs import manifest


def filled(value):
    """A state of one tensor."""
    return dict(a=torch.full((4,), float(value)))


def value_of(state):
    return float(state["a"][0])


def again(saved, name="again"):
    """As a new session opens them, by default on a machine that has the backup alone."""
    return Checkpoints(saved.folder.parent / name, backup=saved.backup.path)


def content(folder):
    """Name -> bytes of every file below a folder but the lock."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def steps_in(folder):
    """The steps of the listed checkpoints, newest first."""
    return [*manifest.steps(manifest.read(folder)).values()]


def alike(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[n], b[n]) for n in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def kill_before(number):
    """Let this process be killed before its n-th call, from now on, of what names or removes files."""
    left = itertools.count(number, -1)
    for name in ("replace", "unlink", "mkdir"):  # a kill before fsync leaves what one before these leaves

        def call(*arguments, _function=getattr(os, name), **options):
            if next(left) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return _function(*arguments, **options)

        setattr(os, name, call)


def forked(*functions):
    """The exit codes of processes that call a function each, all at once."""
    pids = []
    for function in functions:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # a fork may wait for a thread that it has not
            try:
                function()
            except BaseException:
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def kill_everywhere(prepare, act, check):
    """Kill `act` before its first, second, ... change of a file until it comes to its end; prepare before and
    check after each."""
    for number in itertools.count(1):
        prepare()
        [code] = forked(lambda number=number: (kill_before(number), act()))
        check()
        if code != -signal.SIGKILL:
            break
    assert code == 0 and number > 10
