"""`tpukit doctor`: checks for what would prevent a training run on this machine, each with its fix. Opens
no TPU; on a GPU it computes one number."""

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpukit.host import environment
from tpukit.host.environment import Environment, release
from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import KNOWN_ERRORS, KnownError, fix_for, match
from tpukit.host.tables import Table
from tpukit.host.text import GIB
from tpukit_tools.subprocess_call import last_line, run_python

LEVELS = BLOCKS, WARNING, NOTE, OK = "BLOCKS", "warning", "note", "ok"  # the worst first
# Package -> level if it is missing, and the part of tpukit that needs it.
NEEDED = dict.fromkeys(("numpy", "safetensors", "tqdm", "rich"), (BLOCKS, "everything")) | {
    "pillow": (WARNING, "images"),
    "scipy": (WARNING, "the scores of mshnet and cdeit, and `tpukit simulate eit`"),
    "matplotlib": (NOTE, "figures"),
    "tyro": (NOTE, "the options of the command line"),
}
IMAGES = ("colab", "kaggle")  # hosts whose torch, torch_xla and libtpu must stay as they are
FRESH = "start a fresh session and install nothing over the image's versions"
TRY_TIMEOUT_S = 120
ON_EACH_GPU = """
import torch
try:
    for number in range(max(1, torch.cuda.device_count())):
        torch.ones(1, device=f"cuda:{number}")
except Exception as error:
    raise SystemExit(str(error).partition("\\n")[0])
"""
# Where Kaggle's disks say that they have terabytes: the most that a session can write, in GiB
KAGGLE_DISKS = {"kaggle/working": 19.5, "": 68}
OLD_VARIABLES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")  # from old guides, and still read


@dataclasses.dataclass(frozen=True)
class Check:
    """One result: what was checked, its level (ok, note, warning, BLOCKS), what was found, and the fix."""

    what: str
    level: str
    found: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The inputs of the checks."""

    env: Environment
    environ: Mapping[str, str]
    root: Path
    errors: dict[str, str]
    """Errors of torch, torch_xla and gpu, if they were tried; "" is none."""

    def version(self, package: str) -> str | None:
        return self.env.versions.get(package)

    @property
    def backend_of_a_tpu(self) -> str:
        """The package by which torch would reach a TPU, even if there is none here."""
        return dataclasses.replace(self.env, accelerator="tpu").backend

    def repair(self, fix: str) -> str:
        """Return a fix that changes torch, torch_xla, libtpu or a driver, on hosts where that is allowed."""
        return FRESH if self.env.host in IMAGES else fix


def examine(
    env: Environment | None = None, *, environ: Mapping[str, str] | None = None, root: str | Path = "/"
) -> list[Check]:
    """Check everything that can be seen without opening a TPU.

    env, environ, root: as for `environment.detect`, for tests.
    """
    environ = os.environ if environ is None else environ
    env = env or environment.detect(environ, root)
    errors = {}
    if "torch" in env.versions:
        errors["torch"] = error_of("import torch")
    if errors.get("torch") == "" and "torch_xla" in env.versions:
        errors["torch_xla"] = error_of("import torch_xla")
    if errors.get("torch") == "" and env.accelerator == "cuda":
        errors["gpu"] = error_of(ON_EACH_GPU)
    machine = Machine(env, environ, Path(root), errors)
    found = []
    for what, check in CHECKS.items():
        found += [Check(what, *row) for applies, *row in check(machine) if applies][:1]
    return found


def table(checks: Iterable[Check]) -> Table:
    """Return the checks as a `Table`, worst first."""
    rows = [(c.what, c.level, c.found, c.fix) for c in sorted(checks, key=lambda c: LEVELS.index(c.level))]
    return Table("Checks", ("what", "level", "found", "fix"), rows)


def blocked(checks: Iterable[Check]) -> bool:
    """Return whether something prevents training altogether."""
    return any(check.level == BLOCKS for check in checks)


def error_of(code: str) -> str:
    """Run code in a process of its own, with the variables that a training run would have. Return the last
    line of its error; "" without one."""
    try:
        # Libraries may crash when they are closed.
        ran = run_python("-c", f"{code}\nimport os\nos._exit(0)", timeout_s=TRY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"it did not end within {TRY_TIMEOUT_S} s"
    return last_line(ran) if ran.returncode else ""


# The checks return rows: whether the row applies, its level, what was found, and the fix. The first row that
# applies is the result.
Rows = list[tuple[object, str, str, str]]


def _python(machine: Machine) -> Rows:
    version = machine.env.python
    is_tested = (3, 11) <= release(version) <= (3, 13)
    return [(is_tested, OK, version, ""), (True, WARNING, version, "tpukit is tested on Python 3.11 to 3.13")]


def _packages(machine: Machine) -> Rows:
    missing = [name for name in NEEDED if environment.version_of(name) is None]
    level = min((NEEDED[name][0] for name in missing), key=LEVELS.index, default=OK)
    names = ", ".join(f"{name} (for {NEEDED[name][1]})" for name in missing)
    install = f"pip install {' '.join(missing)}"
    return [(missing, level, f"missing: {names}", install), (True, OK, "all installed", "")]


def _torch(machine: Machine) -> Rows:
    version, error = machine.version("torch") or "", machine.errors.get("torch", "")
    old = f"{version}: its torch.load runs code from checkpoints even with weights_only (CVE-2025-32434)"
    again = fix_for(error) or machine.repair("pip install --force-reinstall torch")
    return [
        (not version, BLOCKS, "not installed", machine.repair("pip install torch")),
        (error, BLOCKS, f"{version} cannot be imported: {error}", again),
        (release(version) < (2, 6), BLOCKS, old, machine.repair("pip install 'torch>=2.8'")),
        (release(version) < (2, 8), WARNING, version, "tpukit is tested with torch 2.8 and newer"),
        (True, OK, version, ""),
    ]


def _gpu(machine: Machine) -> Rows:
    """Check that torch computes on the GPUs; if not, say why."""
    error = machine.errors.get("gpu", "")
    cannot = f"torch {machine.version('torch')} cannot use {machine.env.device_name}: {error}"
    install = machine.repair("install a CUDA build of torch (pytorch.org/get-started/locally)")
    update = machine.repair("update NVIDIA's driver (nvidia-smi), or install a torch for an older CUDA")
    return [
        ("not compiled with CUDA" in error, BLOCKS, cannot, install),
        (error, BLOCKS, cannot, fix_for(error) or update),
    ]


def _torch_xla(machine: Machine) -> Rows:
    version, torch = machine.version("torch_xla"), machine.version("torch")
    if version is None:
        return []
    unused = f"{version} is not used: torch_tpu fits torch {torch}, and torch_xla does not"
    fitting = machine.repair(f"pip install 'torch~={'.'.join(map(str, release(version)))}.0'")
    if release(version) < (2, 8):
        fitting = machine.repair("pip install 'torch~=2.9.0' 'torch_xla[tpu]~=2.9.0'")
    error = machine.errors.get("torch_xla", "")
    return [
        (machine.backend_of_a_tpu != "torch_xla", NOTE, unused, ""),
        (torch and machine.env.misfit, BLOCKS, machine.env.misfit, fitting),
        (error, BLOCKS, f"{version} cannot be imported: {error}", fix_for(error) or FRESH),
        (True, OK, version, ""),
    ]


def _libtpu(machine: Machine) -> Rows:
    """Check that libtpu is the one that the installed torch_xla names in its `tpu` extra."""
    if machine.version("torch_xla") is None or machine.backend_of_a_tpu != "torch_xla":
        return []
    version, requirements = machine.version("libtpu"), []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        requirements = importlib.metadata.requires("torch_xla") or []
    named = [match[1] for line in requirements if (match := re.match(r"libtpu\s*==\s*([\d.]+)", line))]
    wanted = named[0] if named else version or ""
    fix = machine.repair(f"pip install libtpu=={wanted}" if named else "pip install 'torch_xla[tpu]'")
    missing = version is None and environment.chips_here(machine.environ, machine.root)
    differs = version and release(wanted, 3) != release(version, 3)  # images ship 0.0.21.1 for 0.0.21
    found = f"{version}, but torch_xla {machine.version('torch_xla')} was built for {wanted}"
    return [(missing, BLOCKS, "not installed", fix), (differs, WARNING, found, fix)]


def _torch_tpu(machine: Machine) -> Rows:
    version, torch, libtpu = map(machine.version, ("torch_tpu", "torch", "libtpu"))
    if version is None:
        return []
    found = f"{version} with torch {torch} and libtpu {libtpu}"
    unused = f"{found} is not used: torch_xla fits this torch"
    uninstall = "`import torch` may fail: pip uninstall torch_tpu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    return [(machine.backend_of_a_tpu == "torch_xla", NOTE, unused, uninstall), (True, OK, found, "")]


def _tensorflow(machine: Machine) -> Rows:
    versions = machine.env.versions
    takes_it = {"torch_xla", "tensorflow"} <= versions.keys() and "tensorflow-cpu" not in versions
    fix = "it takes the TPU when imported: pip uninstall -y tensorflow && pip install tensorflow-cpu"
    return [(takes_it, WARNING, f"{versions.get('tensorflow')} next to torch_xla", fix)]


def _accelerator(machine: Machine) -> Rows:
    env, environ = machine.env, machine.environ
    menu = environment.TPU_MENU[env.host]
    chips = environment.chips_here(environ, machine.root)
    pjrt = environ.get("PJRT_DEVICE", "").upper()
    is_batch = environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower() == "batch"
    here, seen = f"{env.accelerator}: {env.device_name}", f"{chips} TPU chips found"
    of_xla = "torch_xla supports TPU and CPU; for a GPU unset PJRT_DEVICE"
    no_chip = "PJRT_DEVICE=TPU, but no TPU chip is on the PCI bus or in /dev"
    no_package = f"{seen}, but neither torch_xla nor torch_tpu is installed"
    install = machine.repair("pip install 'torch_xla[tpu]'")
    slowly = "training works, but slowly; Colab and Kaggle offer free accelerators"
    return [
        (pjrt not in ("", "CPU", "TPU"), BLOCKS, f"PJRT_DEVICE={pjrt}", of_xla),
        (pjrt == "TPU" and not chips, BLOCKS, no_chip, f"unset PJRT_DEVICE. {menu}"),
        (pjrt == "CPU" and chips, WARNING, f"{seen}, but PJRT_DEVICE=CPU hides them", "unset PJRT_DEVICE"),
        (chips and env.accelerator != "tpu", BLOCKS, no_package, install),
        (env.accelerator != "cpu", OK, here, ""),
        (is_batch, BLOCKS, "this Kaggle batch run got no accelerator", menu),
        (env.host == "local", NOTE, here, slowly),
        (True, WARNING, f"{here}: no accelerator is switched on", menu),
    ]


def _chip(machine: Machine) -> Rows:
    """Name the processes, other than this one, that hold a TPU chip open."""
    holders = {}
    for process in sorted(machine.root.glob("proc/[0-9]*"), key=lambda path: int(path.name)):
        files = []
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            files = [os.readlink(link) for link in (process / "fd").iterdir()]
        held = sorted({name for name in files if re.match(r"/dev/(vfio/\d+|accel\d*)", name)})
        command = " ".join(_read(process / "cmdline").split("\0")[:2])  # more of it can hold a token
        if held and int(process.name) != os.getpid():
            holders[process.name] = f"process {process.name} ({command}) holds {', '.join(held)}"
    fix = f"run `kill {' '.join(holders)}`, or restart the session of the notebook that holds it"
    return [(holders, BLOCKS, "; ".join(holders.values()), fix)]


def _variable(machine: Machine) -> Rows:
    missing = environment.failed_lookups(machine.environ, machine.root)
    names = ", ".join(f"{name}={value}" for name, value in missing.items())
    are_set = [f"{name}={machine.environ[name]}" for name in OLD_VARIABLES if machine.environ.get(name)]
    found = f"{', '.join(are_set)}: torch_xla silently turns float32 tensors into bf16, loss and weights too"
    autocast = "torch.autocast('xla', dtype=torch.bfloat16), which tpukit uses itself (precision='auto')"
    return [
        (are_set, WARNING, found, f"unset it. Instead: {autocast}"),
        (
            missing,
            NOTE,
            f"this shell lacks {names}",
            "tpukit sets them itself; export them for other programs",
        ),
    ]


def _disk(machine: Machine) -> Rows:
    outputs = machine.env.outputs
    folder = next(path for path in (outputs, *outputs.parents) if path.exists())
    free, found = shutil.disk_usage(folder).free / GIB, ""
    if machine.env.host == "kaggle":
        disk = next(name for name in KAGGLE_DISKS if folder.is_relative_to(machine.root / name))
        most = KAGGLE_DISKS[disk]
        if disk:  # small enough to be counted
            most = max(0.0, most - _size(machine.root / disk) / GIB)
        free, found = min(free, most), f", of {KAGGLE_DISKS[disk]} that Kaggle allows there"
    found, other = f"{free:.1f} GiB free at {folder}{found}", "choose another output folder (--run)"
    return [
        (not os.access(folder, os.W_OK), BLOCKS, f"{folder} is read-only", other),
        (free >= 3, OK, found, ""),
        (True, BLOCKS if free < 0.5 else WARNING, found, f"delete old runs, or {other}"),
    ]


def _memory(machine: Machine) -> Rows:
    known = re.search(r"MemAvailable:\s+(\d+) kB", _read(machine.root / "proc/meminfo"))
    free = 1024 * int(known[1]) / GIB if known else 0.0
    fix = "shut down other notebooks; the decoded IRSTD-1k takes 0.3 GiB, torch about 1 GiB"
    found = f"{free:.1f} GiB available"
    return [(free >= 2, OK, found, ""), (known, WARNING, found, fix)]


def _drive(machine: Machine) -> Rows:
    drive = machine.env.drive
    fix = "results are lost with this session; tpukit.mount_drive() keeps a copy on Drive"
    return [(machine.env.has_drive, OK, f"mounted at {drive}", ""), (drive, NOTE, "not mounted", fix)]


def _size(folder):
    """Return the bytes of a folder's files."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was deleted meanwhile
            size += path.lstat().st_size
    return size


def _read(path):
    try:
        return path.read_text(errors="replace")  # a command line may hold any bytes
    except OSError:
        return ""


_OF_PACKAGES = (_python, _packages, _torch, _gpu, _torch_xla, _libtpu, _torch_tpu, _tensorflow)
_OF_MACHINE = (_accelerator, _chip, _variable, _disk, _memory, _drive)
CHECKS = {check.__name__.removeprefix("_"): check for check in (*_OF_PACKAGES, *_OF_MACHINE)}


def find_known_error(text: str) -> KnownError | None:
    """Find the known error, or symptom, of what a user saw or wrote. Raises TpukitError for no text."""
    # The ends of a long log, without colors; a notebook's file escapes these and its lines.
    text = re.sub(r"(\x1b|\\u001b)\[[\d;]*m", "", text[:100_000] + text[100_000:][-200_000:])
    # A notebook's traceback quotes messages of other errors, in numbered lines of source code.
    text = re.sub(r"^(-+>| ) *\d+ .*", "", text.replace(r"\n", "\n"), flags=re.MULTILINE)
    if known := match(text):
        return known
    text = text.lower()
    # A long text, such as a traceback, has many words that are not about the error.
    is_described = len(text) < 100 and "error:" not in text
    for known in KNOWN_ERRORS.values():
        is_named = is_described and known.phrases and re.search(known.phrases, text)
        if is_named or known.title.lower() in text:
            return known
    # A word alone is a mistyped name; what is no text was read as replacement characters.
    if len(text.split()) < 2 or text.count("\ufffd") + text.count("\0") > len(text) / 9:
        raise TpukitError("neither an error's text nor a text file: give the message, or a text file with it")
    return None
