"""The TPU's compiler without a TPU: installed, given the graph of a step; its answer read."""

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tpukit.devices.chips import V5E, V6E, Chip
from tpukit.host import cache, files
from tpukit.host.environment import Environment, detect
from tpukit.host.errors import TpukitError
from tpukit.host.folders import atomic_folder
from tpukit.host.known_errors import fix_for
from tpukit_tools.subprocess_call import last_line, run_python

# libtpu as in the images with torch_xla 2.9, and the jax that belongs to it.
COMPILER = ("jax==0.7.1", "jaxlib==0.7.1", "libtpu==0.0.21")
SCRIPT = Path(__file__).with_name("tpu_compiler.py")
Log = Callable[[str], object]


class Machine(NamedTuple):
    """A TPU machine for which libtpu's compiler compiles a step, whether or not the machine is present."""

    chip: Chip
    chips: int
    topology: str
    """Its name in the compiler (`jax.experimental.topologies`)."""

    def environment(self) -> Environment:
        """Return what `detect()` would find there, as far as a task asks."""
        name = f"{self.chip.cloud_type}-{self.chips}"
        return dataclasses.replace(detect(), accelerator="tpu", cores=self.chips, device_name=name)


MACHINES = {
    "v5e-1": Machine(V5E, 1, "v5e:1x1"),
    "v5e-8": Machine(V5E, 8, "v5e:2x4"),
    "v6e-1": Machine(V6E, 1, "v6e:1x1"),
}


def folder_of(packages: tuple[str, ...] = COMPILER) -> Path:
    """Return the folder in which packages are installed, next to those of other versions."""
    tag = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:10]
    return files.cache_folder() / f"tpu-compiler-{sys.version_info[0]}.{sys.version_info[1]}-{tag}"


def install_compiler(log: Log = print, packages: tuple[str, ...] = COMPILER) -> Path:
    """Install the compiler's packages into `folder_of` them, unless they are there. Return that folder."""
    folder = cache.checked(folder_of(packages))
    with files.file_lock(folder):
        if folder.is_dir():
            return folder
        log(f"installing the TPU compiler ({', '.join(packages)}; about 1 GB, once) into {folder}")
        with atomic_folder(folder) as work:
            work.chmod(0o755)  # with a umask of 0, too
            # A folder and not a virtual environment, because Colab's and Debian's Python cannot make one.
            options = ("--quiet", "--disable-pip-version-check", "--target", work)
            ran = run_python("-m", "pip", "install", *options, *packages)
            if ran.returncode:
                raise TpukitError(
                    f"the TPU compiler could not be installed: {last_line(ran)}. It is on PyPI for Linux on"
                    " x86-64; install pip if it is missing"
                )
    return folder


def compile_graph(graph: dict, machine: Machine, log: Log) -> dict[str, Any]:
    """Return the compiler's figures of a graph: peak_bytes, flops, compile_s, and hlo, the compiled
    graph's text; or an `error` if it needs too much memory.

    Args:
        graph: of `trace_step`.
        machine: each of its chips runs a replica.
        log: is told before a compilation."""
    libraries = install_compiler(log)
    kilobytes = Path(graph["path"]).stat().st_size / 1000
    log(f"compiling {kilobytes:.0f} kB of StableHLO for {machine.topology}: minutes for a large network")
    started = time.monotonic()
    answer = read_answer(run_compiler(graph["path"], machine, libraries), libraries)
    answer["compile_s"] = time.monotonic() - started
    return answer


def run_compiler(path: Path, machine: Machine, libraries: Path) -> subprocess.CompletedProcess[str]:
    """Run `SCRIPT` on a graph, with the packages in `libraries`."""
    # The flags of this process are for its own device.
    variables = dict(PYTHONPATH=str(libraries), XLA_FLAGS=None, LIBTPU_INIT_ARGS=None)
    return run_python("-s", SCRIPT, path, machine.topology, machine.chips, variables=variables)


def read_answer(ran: subprocess.CompletedProcess[str], libraries: Path) -> dict[str, Any]:
    """Return what `SCRIPT` printed. Too little memory is an answer; anything else that went wrong raises
    TpukitError."""
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if lines:
        answer = json.loads(lines[-1])
        error = answer.get("error", "")
        if not error or "RESOURCE_EXHAUSTED" in error and "hbm" in error.lower():
            return answer
        fix = fix_for(error) or ""  # an error about a lock file has one, for example
        raise TpukitError(f"the TPU compiler refuses this graph: {' '.join(error.split())[:600]} {fix}")
    if ran.returncode == -signal.SIGKILL:
        raise TpukitError(
            "the TPU compiler was killed, most likely for lack of memory: a large network needs 8 GiB or more"
        )
    raise TpukitError(
        f"the TPU compiler does not run here: {last_line(ran)}. {fix_for(ran.stderr) or ''} It needs Linux on"
        f" x86-64; delete {libraries} to install it again"
    )
