"""Which host this is, and which accelerator it has, from environment variables, PCI folders and package
metadata.

Touches no device and imports no torch, so that it works even where torch is broken.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table

PACKAGES = ("torch", "torchvision", "torch_xla", "torch_tpu", "libtpu", "tensorflow", "tensorflow-cpu", "jax")
CHOSEN = "TPUKIT_ACCELERATOR"  # "cpu" where `require("cpu")` chose the processor over what is here
ONE_HOST = "tpukit trains on one host: use a machine that has all its chips or GPUs itself, as a v5litepod-8"
NAMES = {"tpu": "TPU", "cuda": "GPU", "xla": "CPU XLA device", "cpu": "CPU"}
GOOGLE_PCI_VENDOR, NVIDIA_PCI_VENDOR = "0x1ae0", "0x10de"
DRIVER_CARDS = Path("/proc/driver/nvidia/gpus")  # a folder for each card
PCI_DISPLAY = "0x03"  # how the class of a graphics processor begins
# The PCI devices that are TPU chips, as torch_xla 2.9 lists them; Google's network cards have other ids. All
# other facts of chips are in devices/chips.py, a layer above, which this file cannot import.
TPU_PCI_DEVICES = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076")
TPU_MENU = {
    "colab": "Colab menu: Runtime > Change runtime type > Hardware accelerator > v5e-1 TPU (or v6e-1)",
    "kaggle": "Kaggle: Settings (or Session options, before Save Version) > Accelerator > TPU v5e-8",
    "tpu-vm": "on this TPU VM: pip install 'torch_xla[tpu]', or torch_tpu from torch 2.11 on, to match torch",
    "local": "there is no TPU to switch on here: open the notebook on Colab or Kaggle, or rent a TPU VM",
}
GPU_MENU = {
    "colab": "Colab menu: Runtime > Change runtime type > Hardware accelerator > T4 GPU (or L4, A100)",
    "kaggle": "Kaggle: Settings (or Session options) > Accelerator > GPU T4 x2",
    "tpu-vm": "a TPU VM has no GPU",
    "local": "nvidia-smi finds no NVIDIA GPU: check the driver, or open the notebook on Colab or Kaggle",
}
AUTOCAST = "torch.autocast('xla', dtype=torch.bfloat16), which tpukit uses itself (precision='auto')"
# Variable that an old guide may have set -> (what it does today, what to do instead).
OLD_VARIABLES = {
    "COLAB_TPU_ADDR": (
        "it belonged to Colab's TPU Node runtime, which is gone",
        "tpukit.detect() shows what is here",
    ),
    "XRT_TPU_CONFIG": (
        "it configured torch_xla's XRT runtime, which is gone",
        "leave it out, nothing replaces it",
    ),
    "XLA_USE_BF16": ("it silently turns every float32 tensor into bf16, loss and weights too", AUTOCAST),
    "XLA_DOWNCAST_BF16": ("it silently turns float32 tensors into bf16 and float64 into float32", AUTOCAST),
}
# The versions that torch_tpu 0.2 asks for in its metadata; before 2.11 and after 2.15 it has no code for
# torch.
TORCH_TPU_NEEDS = "torch 2.11 to 2.15 and libtpu 0.0.50 or newer"
ACCELERATOR_TYPES = {"0x0063": "v5litepod", "0x006f": "v6e"}  # by PCI device
# Only these are kept: a host's other variables can hold secrets (Colab's COLAB_JUPYTER_TOKEN).
KEPT_VARIABLES = ("TPU_ACCELERATOR_TYPE", "COLAB_TPU_1VM", *OLD_VARIABLES)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Environment:
    """What `detect()` found. Printing it is a table."""

    host: str  # colab, kaggle, tpu-vm or local
    accelerator: str  # tpu, cuda, xla (the CPU XLA device, chosen by PJRT_DEVICE=CPU) or cpu
    cores: int  # TPU chips or GPUs; 1 for the CPU
    device_name: str  # for instance v5litepod-8, or Tesla T4
    python: str
    versions: dict[str, str]  # package -> version, of those in PACKAGES that are installed
    outputs: Path  # where results go
    drive: Path | None  # MyDrive on Colab, mounted or not; None elsewhere
    inputs: Path | None  # Kaggle's read-only inputs; None elsewhere
    variables: dict[str, str]  # KEPT_VARIABLES that are set

    @property
    def tpu_backend(self) -> str | None:
        """ "torch_xla" or "torch_tpu", what torch reaches a TPU by here; None where neither is installed."""
        fits = _torch_tpu_fits(self.versions)
        if "torch_tpu" in self.versions and ("torch_xla" not in self.versions or fits):  # one, at most, fits
            return "torch_tpu"
        return "torch_xla" if "torch_xla" in self.versions else None

    @property
    def uses_torch_tpu(self) -> bool:
        """Whether this machine has a TPU and torch reaches it by torch_tpu."""
        return self.accelerator == "tpu" and self.tpu_backend == "torch_tpu"

    @property
    def misfit(self) -> str:
        """Why `tpu_backend` does not work with the versions that are installed, or "" where it does."""
        torch, libtpu = self.versions.get("torch"), self.versions.get("libtpu")
        if self.tpu_backend == "torch_tpu" and not _torch_tpu_fits(self.versions):
            has = f"torch_tpu {self.versions['torch_tpu']} with torch {torch} and libtpu {libtpu}"
            return f"{has}: it needs {TORCH_TPU_NEEDS}"
        if self.tpu_backend == "torch_xla" and release(self.versions["torch_xla"]) != release(torch or ""):
            return f"torch_xla {self.versions['torch_xla']} does not match torch {torch}"
        return ""

    def run_folder(self, name: str, outputs: str | Path = "") -> Path:
        """Return the folder of a run in `outputs`, by default this machine's. Raises TpukitError for a name
        that leads elsewhere."""
        parent = Path(outputs or self.outputs)
        if Path(name).name != name or not name.strip("."):
            raise TpukitError(f"RUN_NAME={name!r}: give the name of a folder, to be made in {parent}")
        return parent / name

    def table(self) -> Table:
        """The environment as a `Table`."""
        cores = f"{self.cores} x " if self.accelerator in ("tpu", "cuda") else ""
        backend = f" through {self.tpu_backend}" if self.accelerator == "tpu" else ""
        rows = [
            ("host", self.host),
            ("accelerator", f"{self.accelerator}: {cores}{self.device_name}{backend}"),
            ("python", self.python),
            *self.versions.items(),
            ("outputs", self.outputs),
        ]
        if self.drive is not None:
            rows.append(("drive", f"{self.drive} ({'mounted' if self.drive.is_dir() else 'not mounted'})"))
        return Table("Environment", ("what", "value"), rows)

    def __repr__(self):
        return str(self.table())

    def _repr_html_(self):
        return self.table()._repr_html_()

    def require(self, accelerator: str, *, cores: int = 1) -> "Environment":
        """Return the environment to train in if this accelerator is here, with at least this many cores; else
        a TpukitError names the menu to open.

        accelerator, in small or capital letters: "any" is whatever is here. "tpu" (the CPU XLA device counts,
        so that a notebook can be tried without a TPU) or "gpu" (or "cuda") must be here. "cpu" is the
        processor even if an accelerator is here, for this process and those that it starts, until it requires
        another. On a CPU a core is a process, so any number will do."""
        accepted = {"tpu": ("tpu", "xla"), "cuda": ("cuda",), "xla": ("xla",), "any": tuple(NAMES)}
        accepted["cpu"] = accepted["any"]
        requested, accelerator = accelerator, str(accelerator).lower()
        accelerator = {"gpu": "cuda", "auto": "any"}.get(accelerator, accelerator)  # auto: the older guides'
        if accelerator not in accepted:
            raise TpukitError(f"require({requested!r}): choose 'any', 'tpu', 'gpu', 'xla' or 'cpu'")
        if accelerator == "cpu" and self.accelerator in ("tpu", "cuda"):
            os.environ[CHOSEN] = "cpu"
            return dataclasses.replace(self, accelerator="cpu", cores=1, device_name=_chosen_processor())
        if accelerator != "cpu" and os.environ.pop(CHOSEN, None):
            return detect().require(accelerator, cores=cores)
        is_here = self.accelerator in accepted[accelerator]
        if is_here and self.accelerator == "tpu" and self.misfit:
            raise TpukitError(f"{self.misfit}. Start a fresh session and install nothing over its versions")
        if is_here and (self.cores >= cores or self.accelerator in ("xla", "cpu")):
            if accelerator == "any" and self.accelerator == "cpu" and self.host in ("colab", "kaggle"):
                print(f"this {self.host} session has no TPU and no GPU: its CPU trains, slowly")
                print(TPU_MENU[self.host], GPU_MENU[self.host], sep="\n")
            return self
        lines = [f"requested {cores} cores, found {self.cores} ({self.device_name})."]
        if not is_here:
            has = f"{NAMES[self.accelerator]} ({self.device_name})"
            lines = [f"{NAMES[accelerator]} needed, but this {self.host} session has: {has}."]
        menu = {"tpu": TPU_MENU, "cuda": GPU_MENU}.get(self.accelerator if is_here else accelerator, {})
        lines.append(menu.get(self.host, "set PJRT_DEVICE=CPU before Python starts"))
        if not is_here:
            lines.append(
                'Or take what is here: ACCELERATOR = "any" in a notebook\'s Settings, require("any").'
            )
        # COLAB_TPU_1VM exists on Colab's GPU machines too, but empty.
        tpu_machine = self.variables.get("TPU_ACCELERATOR_TYPE") or self.variables.get("COLAB_TPU_1VM")
        if accelerator == "tpu" and self.tpu_backend is None and tpu_machine:
            lines.append("There is a TPU, but neither torch_xla nor torch_tpu: start a fresh session.")
        for name, (why, instead) in OLD_VARIABLES.items():
            if self.variables.get(name):
                lines.append(f"{name} is set: {why}. Instead: {instead}.")
        raise TpukitError("\n".join(lines))


def detect(environ: Mapping[str, str] | None = None, root: str | Path = "/") -> Environment:
    """Find out where this Python runs, without touching a device.

    environ: environment variables; by default those of this process. root: the file system's root (for
    tests)."""
    environ = os.environ if environ is None else environ
    root = Path(root)
    environ = {**environ, **failed_lookups(environ, root)}
    host = _host(environ)
    versions = {name: version for name in PACKAGES if (version := version_of(name))}
    accelerator, cores, device_name = _accelerator(environ, root, versions)
    base = {"colab": root / "content", "kaggle": root / "kaggle" / "working"}.get(host, Path.cwd())
    return Environment(
        host=host,
        accelerator=accelerator,
        cores=cores,
        device_name=device_name,
        python=platform.python_version(),
        versions=versions,
        outputs=base / "outputs",
        drive=root / "content/drive/MyDrive" if host == "colab" else None,
        inputs=root / "kaggle/input" if host == "kaggle" else None,
        variables={name: environ[name] for name in KEPT_VARIABLES if name in environ},
    )


def _host(environ):
    if environ.get("COLAB_RELEASE_TAG"):
        return "colab"
    if environ.get("KAGGLE_KERNEL_RUN_TYPE") or environ.get("KAGGLE_URL_BASE"):
        return "kaggle"
    return "tpu-vm" if environ.get("TPU_ACCELERATOR_TYPE") or environ.get("TPU_NAME") else "local"


def under_torchrun() -> bool:
    """Whether torchrun started this process, as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """This process's number among those that torchrun started; 0 elsewhere."""
    number = os.environ.get("RANK", "0") if under_torchrun() else "0"
    if not number.isdecimal():
        raise TpukitError(f"RANK={number} is no number: unset RANK and WORLD_SIZE, or use torchrun")
    return int(number)


def version_of(package: str) -> str | None:
    """The installed version of a package, or None. Reads metadata, imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str, parts: int = 2) -> tuple[int, ...]:
    """The first numbers of a version: "2.13.0+cpu" -> (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:parts])


def _torch_tpu_fits(versions: Mapping[str, str]) -> bool:
    """Whether torch and libtpu are as torch_tpu needs them, see TORCH_TPU_NEEDS."""
    torch, libtpu = release(versions.get("torch", "")), release(versions.get("libtpu", ""), 3)
    return (2, 11) <= torch <= (2, 15) and libtpu >= (0, 0, 50)


def _accelerator(environ, root, versions):
    """(accelerator, cores, device name)."""
    if environ.get(CHOSEN) == "cpu":
        return "cpu", 1, _chosen_processor()
    chosen = environ.get("PJRT_DEVICE", "").upper()
    if "torch_xla" in versions and chosen == "CPU":
        return "xla", 1, "CPU XLA device (PJRT_DEVICE=CPU), for trying things out, not for speed"
    chips = chips_here(environ, root)
    is_tpu = chosen == "TPU" or (chosen == "" and chips)
    if is_tpu and ("torch_xla" in versions or "torch_tpu" in versions):
        return "tpu", chips, environ.get("TPU_ACCELERATOR_TYPE") or _accelerator_type(root) or "TPU"
    if gpus := nvidia_gpus(environ):
        return "cuda", len(gpus), ", ".join(sorted(set(gpus)))
    return "cpu", 1, _processor()


def _processor():
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _chosen_processor():
    return f"{_processor()}; chosen by {CHOSEN}=cpu"


def chips_here(environ: Mapping[str, str], root: str | Path = "/") -> int:
    """Number of TPU chips on the PCI bus, or of device files if that is hidden and PJRT_DEVICE=TPU."""
    on_bus = len(tpu_chips(root))
    if on_bus or environ.get("PJRT_DEVICE", "").upper() != "TPU":
        return on_bus
    devices = Path(root) / "dev"
    names = [path.name.removeprefix("accel") for path in (*devices.glob("vfio/*"), *devices.glob("accel*"))]
    return sum(name.isdecimal() for name in names)


def tpu_chips(root: str | Path = "/") -> list[str]:
    """The device ids of the TPU chips on the PCI bus, as torch_xla lists them."""
    ids = [(device / "device").read_text().strip() for device in _pci_devices(root, GOOGLE_PCI_VENDOR)]
    return [name for name in ids if name in TPU_PCI_DEVICES]


def _accelerator_type(root):
    """The chips on the PCI bus as TPU_ACCELERATOR_TYPE names them, "" for unknown ones."""
    chips = tpu_chips(root)
    kind = ACCELERATOR_TYPES.get(chips[0]) if chips else None
    return f"{kind}-{len(chips)}" if kind else ""


def failed_lookups(environ: Mapping[str, str], root: str | Path = "/") -> dict[str, str]:
    """Variables that hold the text of a warning, which libtpu refuses, because the host's look-up failed ->
    the value of a single host, "" if unknown."""
    of_one_host = dict(TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE=_accelerator_type(root))
    return {name: value for name, value in of_one_host.items() if " " in environ.get(name, "").strip()}


def check_one_host(env: Environment) -> None:
    """Raise TpukitError where the variables name several hosts, of a TPU slice or of torchrun."""
    names = os.environ.get("TPU_WORKER_HOSTNAMES", "") if env.accelerator == "tpu" else ""
    hosts = max(names.count(",") + 1, int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    if hosts > 1:
        raise TpukitError(f"this is one of {hosts} hosts: {ONE_HOST}")


def has_nvidia_card(root: str | Path = "/") -> bool:
    """Whether an NVIDIA GPU is on the PCI bus, with a driver or without."""
    cards = _pci_devices(root, NVIDIA_PCI_VENDOR)
    return any((card / "class").read_text().startswith(PCI_DISPLAY) for card in cards)


def _pci_devices(root, vendor):
    files = Path(root).glob("sys/bus/pci/devices/*/vendor")
    return [file.parent for file in files if file.read_text().strip() == vendor]


def nvidia_smi(environ: Mapping[str, str], *arguments: str) -> str:
    """The output of nvidia-smi, or "" if it is missing or finds no driver."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        found = subprocess.check_output(command, env=dict(environ), stderr=subprocess.DEVNULL, timeout=30)
        return found.decode(errors="replace")
    return ""


def nvidia_gpus(environ: Mapping[str, str]) -> list[str]:
    """Names of the NVIDIA GPUs that CUDA shows to this process, from `nvidia-smi -L`.

    CUDA_VISIBLE_DEVICES is read as CUDA does, up to the first part that names no single GPU. A MIG instance
    counts only if it is named there. nvidia-smi numbers the cards by their bus, CUDA the fastest first: where
    they differ, the count is right, a name may not be."""
    listed = nvidia_smi(environ, "-L") or _listed_by_driver()
    cards = re.findall(r"^GPU \d+: (.+) \(UUID: (\S+)\)", listed, re.M)
    instances = re.findall(r"^\s+(MIG \S+)\s+Device\s+\d+: \(UUID: (\S+)\)", listed, re.M)
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [name for name, _ in cards]
    chosen = []
    for part in map(str.strip, visible.split(",")):
        named = [name for name, uuid in cards + instances if len(part) > 3 and uuid.startswith(part)]
        if part.isdecimal():
            named = [name for name, _ in cards[int(part) : int(part) + 1]]
        if len(named) != 1:
            break
        chosen += named
    return chosen


def _listed_by_driver() -> str:
    """As `nvidia-smi -L`, from the driver itself, for containers that have it without nvidia-smi."""
    lines = ""
    for path in sorted(DRIVER_CARDS.glob("*/information")):
        facts = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", path.read_text(errors="replace"), re.M))
        lines += f"GPU 0: {facts.get('Model', 'NVIDIA GPU')} (UUID: {facts.get('GPU UUID', '-')})\n"
    return lines


def supports(capability: tuple[int, ...], built_for: Iterable[str]) -> bool:
    """Whether a GPU can run a torch with these architectures (NVIDIA, CUDA C++ Programming Guide, 6.1).

    Args:
        capability: of the GPU, (major, minor).
        built_for: `torch.cuda.get_arch_list()`. "sm_80" is machine code for 8.0 and newer 8.x, "compute_90"
            compiled by the driver for 9.0 and newer.
    """
    architectures = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built_for))
    return not architectures or any(
        capability >= (int(major), int(minor)) and (kind == "compute" or capability[0] == int(major))
        for kind, major, minor in architectures
    )


def is_interactive_notebook() -> bool:
    """Whether this is a notebook on a page, whose user can answer; not papermill, not a shell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    # As the page set it when it sent the cell.
    return getattr(getattr(shell, "kernel", None), "_allow_stdin", False)
