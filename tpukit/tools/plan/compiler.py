"""The TPU's compiler without a TPU: installed, given the graphs of a step; its answers read and cached."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import fix_for
from tpukit.tools.child import ROOT, last_line, run_python
from tpukit.training.task import to_request

if TYPE_CHECKING:
    from tpukit.devices.chips import Machine
    from tpukit.training.task import Task

# libtpu as in the images with torch_xla 2.9, and the jax that belongs to it.
COMPILER = ("jax==0.7.1", "jaxlib==0.7.1", "libtpu==0.0.21")
# What each backend's environment holds. pip prefers a torch without CUDA, if an index that it searches has
# one.
COMPILERS = {
    "torch_xla": COMPILER,
    "torch_tpu": ("torch==2.13.0", "torch_tpu==0.2.0", "jax==0.10.2", "jaxlib==0.10.2", "libtpu==0.0.52"),
}
SIZES = {"torch_xla": "1 GB", "torch_tpu": "2.5 GB"}
COMPILER_SCRIPT = Path(__file__).with_name("tpu_compiler.py")
NO_FLAGS = dict(XLA_FLAGS=None, LIBTPU_INIT_ARGS=None)  # those of this process are for its own device
Log = Callable[[str], object]


def trace(
    task: Task,
    part: str,
    size: int,
    machine: Machine,
    folder: Path,
    parallel: str = "processes",
    backend: str = "torch_xla",
) -> tuple[list[dict], int]:
    """(graphs, resident bytes), traced in a fresh process, which opens torch_xla's CPU device, or loads
    torch_tpu.

    A graph is a dict as of `ExportRuntime.graphs`, with path and times (how often a batch runs it; 1 in a
    session). Resident bytes: how much more a core keeps meanwhile, which is the average of the weights, and
    the set that is not used."""
    request = to_request(task) | dict(
        part=part,
        size=size,
        cores=machine.chips,
        spmd=parallel == "spmd",
        memory_size=int(machine.chip.hbm_bytes),
        compiler=str(folder_of("torch_xla")),
        backend=backend,
    )
    variables = NO_FLAGS
    if backend == "torch_tpu":  # its torch goes before the one that is installed here
        variables = NO_FLAGS | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder_of(backend))])}
    ran = run_python("-m", "tpukit.tools.plan.trace", folder, text=json.dumps(request), variables=variables)
    if ran.returncode:
        last = last_line(ran)
        if "No module named 'torch_xla'" in last or "_XLAC" in last and "undefined symbol" in last:
            raise TpukitError(
                f"a plan needs a torch_xla that matches torch, to trace the step ({last}). In a separate"
                " environment: pip install torch==2.9.0 torch-xla==2.9.0"
            )
        raise TpukitError(f"the {part} step of {task.name} at batch {size} cannot be traced: {last}")
    traced = json.loads((folder / "traced.json").read_text())
    different = {}
    for number, graph in enumerate(traced["graphs"]):
        graph["path"] = folder / f"{number}.mlirbc"
        same = different.setdefault(graph["digest"], graph | dict(times=0))
        same["times"] = 1 if part == "session" else same["times"] + 1
    return list(different.values()), traced["resident_bytes"]


def compile_graph(graph: dict, machine: Machine, parallel: str, backend: str, flags: str, log: Log) -> dict:
    """What the compiler answers to a graph of `trace`, cached; with an `error` where it needs too much
    memory. flags: of libtpu, for this task."""
    script = files.sha256(COMPILER_SCRIPT)
    key = f"{graph['digest']} {machine.topology} {parallel} {COMPILERS[backend]} {script}{flags}"
    cached = files.cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json.gz"
    with contextlib.suppress(OSError, EOFError, ValueError):
        files.make_private(cached.parent)  # what another user put there is not trusted
        return json.loads(gzip.decompress(cached.read_bytes()))
    libraries = install_compiler(log, backend)
    kilobytes = graph["path"].stat().st_size / 1000
    log(f"compiling {kilobytes:.0f} kB of StableHLO for {machine.topology}: minutes for a large network")
    started = time.monotonic()
    variables = NO_FLAGS | {"PYTHONPATH": str(libraries), "LIBTPU_INIT_ARGS": flags or None}
    command = ("-s", COMPILER_SCRIPT, graph["path"], machine.topology, machine.chips, parallel)
    answer = read_answer(run_python(*command, variables=variables), libraries)
    answer["compile_s"] = time.monotonic() - started
    with contextlib.suppress(OSError, TpukitError):  # then it is compiled again next time
        files.make_private(cached.parent)
        files.write_atomic(cached, gzip.compress(json.dumps(answer).encode()))
    return answer


def read_answer(ran: subprocess.CompletedProcess, libraries: Path) -> dict:
    """The compiler's answer. Too little memory is one; anything else that went wrong is a TpukitError."""
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if lines:
        answer = json.loads(lines[-1])
        error = answer.get("error", "")
        if not error or "RESOURCE_EXHAUSTED" in error and "hbm" in error.lower():
            return answer
        fix = fix_for(error) or ""  # of a lock file, for example
        raise TpukitError(f"the TPU compiler refuses this graph: {' '.join(error.split())[:600]} {fix}")
    if ran.returncode == -signal.SIGKILL:
        raise TpukitError(
            "the TPU compiler was killed, most likely for lack of memory: a large network needs 8 GiB or more"
        )
    raise TpukitError(
        f"the TPU compiler does not run here: {last_line(ran)}. {fix_for(ran.stderr) or ''} It needs Linux on"
        f" x86-64; delete {libraries} to install it again"
    )


def folder_of(backend: str) -> Path:
    """The folder of the packages that a backend's graphs are compiled with."""
    tag = hashlib.sha256(" ".join(COMPILERS[backend]).encode()).hexdigest()[:10]
    return files.cache_folder() / f"tpu-compiler-{sys.version_info[0]}.{sys.version_info[1]}-{tag}"


def install_compiler(log: Log = print, backend: str = "torch_xla") -> Path:
    """Install the packages of a backend's compiler into `folder_of` it, unless they are there. Returns
    that."""
    folder, packages = folder_of(backend), COMPILERS[backend]
    try:
        files.make_private(folder.parent)
    except OSError as error:
        raise TpukitError(
            f"the TPU compiler cannot be stored in {folder.parent} ({error}): set TPUKIT_CACHE to another"
        ) from error
    with files.file_lock(folder):
        if folder.is_dir():
            return folder
        size = SIZES[backend]
        log(f"installing the TPU compiler ({', '.join(packages)}; about {size}, once) into {folder}")
        with files.atomic_folder(folder) as work:
            # A folder and not a virtual environment, because Colab's and Debian's Python cannot make one.
            options = ("--quiet", "--disable-pip-version-check", "--target", work)
            ran = run_python("-m", "pip", "install", *options, *packages)
            if ran.returncode:
                errors = [line for line in ran.stderr.splitlines() if "ERROR" in line or "No module" in line]
                reason = errors[-1].strip() if errors else last_line(ran)
                raise TpukitError(
                    f"the TPU compiler could not be installed: {reason}. It is on PyPI for Linux on x86-64;"
                    " `pip install tpukit[plan]` installs pip where it is missing"
                )
    return folder
