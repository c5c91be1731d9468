"""`tpukit doctor`: checks for what would prevent a training on this machine, each with its fix. Opens no
device."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tpukit.host import environment
from tpukit.host.environment import Environment, release
from tpukit.host.known_errors import fix_for
from tpukit.host.tables import GIB, Table

LEVELS = BLOCKS, WARNING, NOTE, OK = "BLOCKS", "warning", "note", "ok"  # the worst first
# Package -> level where it is missing, and the part of tpukit that needs it.
NEEDED = dict.fromkeys(("numpy", "pillow", "safetensors", "tqdm", "rich"), (BLOCKS, "everything")) | {
    "scipy": (WARNING, "the scores of mshnet and cdeit, and `tpukit simulate eit`"),
    "matplotlib": (NOTE, "figures"),
    "tyro": (NOTE, "the options of the command line"),
}
IMAGES = ("colab", "kaggle")  # hosts whose torch, torch_xla and libtpu must stay as they are
FRESH = "start a fresh session and install nothing over the image's versions"
IMPORT_TIMEOUT_S = 120


@dataclasses.dataclass(frozen=True)
class Check:
    """One result: what was checked, its level (ok, note, warning, BLOCKS), what was found, and the fix."""

    what: str
    level: str
    found: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the checks read. errors and cuda: what `import_packages` returns."""

    env: Environment
    environ: Mapping[str, str]
    root: Path
    errors: dict[str, str | None]
    cuda: dict | None

    def version(self, package: str) -> str | None:
        return self.env.versions.get(package)

    def install(self, packages: str) -> str:
        """The fix that installs one of torch, torch_xla and libtpu, on hosts where that is allowed."""
        return FRESH if self.env.host in IMAGES else f"pip install {packages}"


def examine(
    env: Environment | None = None, *, environ: Mapping[str, str] | None = None, root: str | Path = "/"
) -> list[Check]:
    """Check everything that can be seen without opening a device.

    env, environ, root: as for `environment.detect`, for tests.
    """
    environ = os.environ if environ is None else environ
    env = env or environment.detect(environ, root)
    packages = [name for name in ("torch", "torch_xla") if name in env.versions]
    errors, cuda = import_packages(packages if "torch" in packages else [], environ)
    machine = Machine(env, environ, Path(root), errors, cuda)
    return [found for check in CHECKS for found in check(machine)]


def table(checks: Iterable[Check]) -> Table:
    """The checks as a `Table`, worst first."""
    rows = [(c.what, c.level, c.found, c.fix) for c in sorted(checks, key=lambda c: LEVELS.index(c.level))]
    return Table("Checks", ("what", "level", "found", "fix"), rows)


def blocked(checks: Iterable[Check]) -> bool:
    """Whether something prevents training altogether."""
    return any(check.level == BLOCKS for check in checks)


def import_packages(
    packages: list[str], environ: Mapping[str, str]
) -> tuple[dict[str, str | None], dict | None]:
    """Import packages one after the other in one process with these variables and no others, as a training
    would.

    Returns (errors, cuda). errors: package -> the last line of its error, or None if it imports; the end of
    the process, or the time limit, is the error of the package that it happened in and of those after it.
    cuda: what `imports.describe_cuda` reports, or None."""
    # Without the current folder on its path: what lies there must not be run.
    command = [sys.executable, "-P", str(Path(__file__).with_name("imports.py")), *packages]
    try:
        ran = subprocess.run(command, env=dict(environ), capture_output=True, timeout=IMPORT_TIMEOUT_S)
        last_words = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        output, end = ran.stdout, " ".join([f"Python exited with code {ran.returncode}", *last_words])
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"the import did not finish within {IMPORT_TIMEOUT_S} s"
    reports = {}
    for line in output.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):  # packages may print, too
            reports |= json.loads(line)
    return {package: reports.get(package, end) for package in packages}, reports.get("cuda")


# Checks: each yields what it finds


def _python(machine: Machine) -> Iterator[Check]:
    version = machine.env.python
    is_tested = (3, 11) <= release(version) <= (3, 13)
    fix = "" if is_tested else "tpukit is tested on Python 3.11 to 3.13"
    yield Check("python", OK if is_tested else WARNING, version, fix)


def _packages(machine: Machine) -> Iterator[Check]:
    missing = [name for name in NEEDED if environment.version_of(name) is None]
    if not missing:
        yield Check("packages", OK, "all installed")
        return
    level = min((NEEDED[name][0] for name in missing), key=LEVELS.index)
    names = ", ".join(f"{name} (for {NEEDED[name][1]})" for name in missing)
    yield Check("packages", level, f"missing: {names}", f"pip install {' '.join(missing)}")


def _torch(machine: Machine) -> Iterator[Check]:
    version = machine.version("torch")
    if version is None:
        yield Check("torch", BLOCKS, "not installed", machine.install("torch"))
    elif error := machine.errors["torch"]:
        fix = fix_for(error) or machine.install("--force-reinstall torch")
        yield Check("torch", BLOCKS, f"{version} cannot be imported: {error}", fix)
    elif release(version) < (2, 6):
        found = f"{version}: its torch.load runs code from checkpoints, weights_only or not (CVE-2025-32434)"
        yield Check("torch", BLOCKS, found, machine.install("'torch>=2.8'"))
    elif release(version) < (2, 8):
        yield Check("torch", WARNING, version, "tpukit is tested with torch 2.8 and newer")
    else:
        yield Check("torch", OK, version)


def _gpu(machine: Machine) -> Iterator[Check]:
    """Whether torch can use the GPUs, and if not, why."""
    env, environ, cuda = machine.env, machine.environ, machine.cuda
    is_local, torch = env.host == "local", f"torch {machine.version('torch')}"
    if env.accelerator == "cpu":
        if environment.has_nvidia_card(machine.root) and not environment.nvidia_smi(environ, "-L"):
            found = "an NVIDIA card is on the PCI bus, but nvidia-smi finds no driver for it"
            fix = f"install NVIDIA's driver. {environment.GPU_MENU['local']}" if is_local else FRESH
            yield Check("gpu", WARNING, found, fix)
    elif env.accelerator != "cuda" or cuda is None:
        return
    elif cuda["built"] is None:
        found = f"{torch} was built without CUDA, but this machine has a GPU: {env.device_name}"
        fix = "install a CUDA build of torch (pytorch.org/get-started/locally)"
        yield Check("gpu", BLOCKS, found, FRESH if env.host in IMAGES else fix)
    elif not cuda["usable"]:
        reason = cuda["reason"] or "no reason given"
        fix = fix_for(reason) or "update NVIDIA's driver (nvidia-smi), or install a torch for an older CUDA"
        found = f"{torch} cannot use {env.device_name}: {reason}"
        yield Check("gpu", BLOCKS, found, FRESH if env.host in IMAGES else fix)
    else:
        fix = "install a torch that was built for it" if is_local else environment.GPU_MENU[env.host]
        for name, (major, minor) in dict(cuda["cards"]).items():
            if not environment.supports((major, minor), cuda["arch_list"]):
                found = f"{name} has compute capability {major}.{minor}; {torch} was built for "
                yield Check("gpu", BLOCKS, found + ", ".join(cuda["arch_list"]), fix)


def _torch_xla(machine: Machine) -> Iterator[Check]:
    torch, xla = machine.version("torch"), machine.version("torch_xla")
    if xla is None:
        return
    if machine.env.tpu_backend == "torch_tpu":
        found = f"{xla} is not used: torch_tpu fits torch {torch}, and torch_xla does not"
        yield Check("torch_xla", NOTE, found)
    elif torch and (reason := machine.env.misfit):
        fitting = f"'torch~={'.'.join(xla.split('.')[:2])}.0'"
        yield Check("torch_xla", BLOCKS, reason, machine.install(fitting))
    elif error := machine.errors.get("torch_xla"):
        yield Check("torch_xla", BLOCKS, f"{xla} cannot be imported: {error}", fix_for(error) or FRESH)
    else:
        yield Check("torch_xla", OK, xla)
        yield from _libtpu(machine, xla)


def _libtpu(machine: Machine, xla: str) -> Iterator[Check]:
    """Whether libtpu is the one that the installed torch_xla names in its `tpu` extra."""
    libtpu, requirements = machine.version("libtpu"), []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        requirements = importlib.metadata.requires("torch_xla") or []
    named = [match[1] for line in requirements if (match := re.match(r"libtpu\s*==\s*([\d.]+)", line))]
    fix = machine.install(f"libtpu=={named[0]}" if named else "'torch_xla[tpu]'")
    if libtpu is None and environment.chips_here(machine.environ, machine.root):
        yield Check("libtpu", BLOCKS, "not installed", fix)
    elif libtpu and named and release(named[0], 3) != release(libtpu, 3):  # images ship 0.0.21.1 for 0.0.21
        yield Check("libtpu", WARNING, f"{libtpu}, but torch_xla {xla} was built for {named[0]}", fix)


def _torch_tpu(machine: Machine) -> Iterator[Check]:
    if machine.version("torch_tpu") is None:
        return
    torch_tpu, torch, libtpu = map(machine.version, ("torch_tpu", "torch", "libtpu"))
    found = f"{torch_tpu} with torch {torch} and libtpu {libtpu}"
    numpy = environment.version_of("numpy")
    if machine.env.tpu_backend == "torch_xla":
        fix = (
            "`import torch` may fail: pip uninstall torch_tpu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before"
            " Python starts"
        )
        yield Check("torch_tpu", NOTE, f"{found} is not used: it needs {environment.TORCH_TPU_NEEDS}", fix)
    elif reason := machine.env.misfit:
        yield Check("torch_tpu", BLOCKS, reason, machine.install("'torch>=2.11,<=2.15' 'libtpu>=0.0.50'"))
    elif numpy and release(numpy) < (2,):
        found = f"{found}: it needs numpy 2, not {numpy}"
        yield Check("torch_tpu", BLOCKS, found, machine.install("'numpy>=2'"))
    else:
        yield Check("torch_tpu", OK, found)


def _tensorflow(machine: Machine) -> Iterator[Check]:
    versions = machine.env.versions
    if "torch_xla" in versions and "tensorflow" in versions and "tensorflow-cpu" not in versions:
        fix = "it takes the TPU when imported: pip uninstall -y tensorflow && pip install tensorflow-cpu"
        yield Check("tensorflow", WARNING, f"{versions['tensorflow']} next to torch_xla", fix)


def _accelerator(machine: Machine) -> Iterator[Check]:
    env, environ = machine.env, machine.environ
    menu = environment.TPU_MENU[env.host]
    chips = environment.chips_here(environ, machine.root)
    pjrt = environ.get("PJRT_DEVICE", "").upper()
    is_batch = environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower() == "batch"
    level, found, fix = OK, f"{env.accelerator}: {env.device_name}", ""
    if pjrt and pjrt not in ("CPU", "TPU"):
        level, found = BLOCKS, f"PJRT_DEVICE={pjrt}"
        fix = "torch_xla supports TPU and CPU; for a GPU unset PJRT_DEVICE"
    elif pjrt == "TPU" and not chips:
        level, found = BLOCKS, "PJRT_DEVICE=TPU, but no TPU chip is on the PCI bus or in /dev"
        fix = f"unset PJRT_DEVICE. {menu}"
    elif chips and pjrt == "CPU":
        level, found = WARNING, f"{chips} TPU chips found, but PJRT_DEVICE=CPU hides them"
        fix = "unset PJRT_DEVICE"
    elif chips and env.accelerator != "tpu":
        level, found = BLOCKS, f"{chips} TPU chips found, but neither torch_xla nor torch_tpu is installed"
        fix = machine.install("'torch_xla[tpu]'")
    elif env.accelerator == "cpu" and is_batch:
        level, found, fix = BLOCKS, "this Kaggle batch run got no accelerator", menu
    elif env.accelerator == "cpu" and env.host == "local":
        level, fix = NOTE, "training works, but slowly; Colab and Kaggle offer free accelerators"
    elif env.accelerator == "cpu":
        level, found, fix = WARNING, f"{found}: no accelerator is switched on", menu
    yield Check("accelerator", level, found, fix)


def _chip_holders(machine: Machine) -> Iterator[Check]:
    """Processes, other than this one, that hold a TPU chip open."""
    is_busy = False
    for process in sorted(machine.root.glob("proc/[0-9]*"), key=lambda path: int(path.name)):
        files = []
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            files = [os.readlink(link) for link in (process / "fd").iterdir()]
        held = sorted({name for name in files if re.match(r"/dev/(vfio/\d+|accel\d*)", name)})
        if held and int(process.name) != os.getpid():
            is_busy = True
            command = " ".join(_read(process / "cmdline").split("\0")[:2])  # more of it can hold a token
            fix = f"end it (kill {process.name}), or restart the session of its notebook"
            yield Check("chip", BLOCKS, f"process {process.name} ({command}) holds {', '.join(held)}", fix)
    lock = machine.root / "tmp/libtpu_lockfile"
    if lock.exists() and not is_busy and environment.chips_here(machine.environ, machine.root):
        yield Check("chip", WARNING, f"{lock} was left behind, though nothing holds a chip", f"rm {lock}")


def _variables(machine: Machine) -> Iterator[Check]:
    environ = machine.environ
    for name, (why, instead) in environment.OLD_VARIABLES.items():
        if environ.get(name):
            level = WARNING if name.endswith("BF16") else NOTE  # these are still read
            yield Check("variable", level, f"{name}={environ[name]}: {why}", f"unset it. Instead: {instead}")
    for name, value in environment.failed_lookups(environ, machine.root).items():
        fix = f"tpukit takes {value!r} for it; for other code set {name} before it imports torch_xla or jax"
        yield Check("variable", NOTE, f"{name} holds no value but a warning: {environ[name]}", fix)
    is_half_set = environ.get("TPU_SKIP_MDS_QUERY") and not environ.get("TPU_ACCELERATOR_TYPE")
    if is_half_set and environment.tpu_chips(machine.root):
        found = "TPU_SKIP_MDS_QUERY is set, so torch_xla reads TPU_ACCELERATOR_TYPE, which is not"
        yield Check("variable", WARNING, found, "set both or neither")
    if flags := environ.get("XLA_FLAGS"):
        yield Check("variable", NOTE, f"XLA_FLAGS={flags}", "unset it unless you know why it is set")


def _disk(machine: Machine) -> Iterator[Check]:
    outputs = machine.env.outputs
    folder = next(path for path in (outputs, *outputs.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        yield Check("disk", BLOCKS, f"{folder} is read-only", "choose another output folder (--run)")
        return
    free = shutil.disk_usage(folder).free / GIB
    level = BLOCKS if free < 0.5 else WARNING if free < 3 else OK
    fix = "delete old runs, or choose another output folder (--run); a checkpoint of MSHNet takes 0.03 GiB"
    yield Check("disk", level, f"{free:.1f} GiB free at {folder}", "" if level == OK else fix)


def _memory(machine: Machine) -> Iterator[Check]:
    if available := re.search(r"MemAvailable:\s+(\d+) kB", _read(machine.root / "proc/meminfo")):
        free = 1024 * int(available[1]) / GIB
        fix = "shut down other notebooks; the decoded IRSTD-1k takes 0.3 GiB, torch about 1 GiB"
        level, fix = (OK, "") if free >= 2 else (WARNING, fix)
        yield Check("memory", level, f"{free:.1f} GiB available", fix)


def _drive(machine: Machine) -> Iterator[Check]:
    drive = machine.env.drive
    if drive is not None and drive.is_dir():
        yield Check("drive", OK, f"mounted at {drive}")
    elif drive is not None:
        fix = "results are lost with this session; tpukit.mount_drive(env) keeps a copy on Drive"
        yield Check("drive", NOTE, "not mounted", fix)


def _read(path):
    try:
        return path.read_text(errors="replace")  # a command line may hold any bytes
    except OSError:
        return ""


CHECKS = (
    *(_python, _packages, _torch, _gpu, _torch_xla, _torch_tpu, _tensorflow),
    *(_accelerator, _chip_holders, _variables, _disk, _memory, _drive),
)
