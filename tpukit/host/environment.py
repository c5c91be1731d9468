"""Which host this is, and which accelerator it has, from environment variables, PCI folders and package
metadata.

Touches no device and imports no torch, so that it works even where torch is broken.
"""

import dataclasses
import importlib.metadata
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table

PACKAGES = ("torch", "torchvision", "torch_xla", "torch_tpu", "libtpu", "tensorflow", "tensorflow-cpu", "jax")
NAMES = {"tpu": "TPU", "cuda": "GPU", "xla": "CPU XLA device", "cpu": "CPU"}
GOOGLE_PCI_VENDOR, NVIDIA_PCI_VENDOR = "0x1ae0", "0x10de"
DRIVER_CARDS = Path("/proc/driver/nvidia/gpus")  # a folder for each card
PCI_DISPLAY = "0x03"  # how the class of a graphics processor begins
# The PCI devices that are TPU chips, as torch_xla 2.9 lists them; Google's network cards have other ids. All
# other facts of chips are in devices/chips.py, a layer above, which this file cannot import.
TPU_PCI_DEVICES = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076")
TPU_MENU = {
    "colab": "Colab menu: Runtime > Change runtime type > Hardware accelerator > v5e-1 TPU (or v6e-1)",
    "kaggle": (
        "Kaggle: Settings (or Session options) > Accelerator > TPU v5e-8; for a batch run, choose it before"
        " Save Version"
    ),
    "tpu-vm": (
        "on this TPU VM, install what matches torch: pip install 'torch_xla[tpu]', or torch_tpu from torch"
        " 2.11 on"
    ),
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
        "it belonged to Colab's TPU Node runtime, which no longer exists; nothing reads it today",
        "tpukit.detect() shows what is here",
    ),
    "XRT_TPU_CONFIG": (
        "it configured the XRT runtime, which torch_xla no longer has; nothing reads it today",
        "leave it out, nothing replaces it",
    ),
    "XLA_USE_BF16": (
        (
            "it silently turns every float32 tensor into bf16, the loss and the weights too; torch_xla will"
            " drop it"
        ),
        AUTOCAST,
    ),
    "XLA_DOWNCAST_BF16": (
        "it silently turns float32 tensors into bf16 and float64 into float32; torch_xla will drop it",
        AUTOCAST,
    ),
}
# The versions that torch_tpu 0.2 asks for in its metadata; before 2.11 and after 2.15 it has no code for
# torch.
TORCH_TPU_NEEDS = "torch 2.11 to 2.15 and libtpu 0.0.50 or newer"
# Where the look-up of these failed, they hold the text of a warning, which libtpu refuses.
LOOKED_UP_VARIABLES = ("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")
ACCELERATOR_TYPES = {"0x0063": "v5litepod", "0x006f": "v6e"}  # by PCI device
# Only these are recorded: a host's other variables can hold secrets (Colab's COLAB_JUPYTER_TOKEN).
TPU_VARIABLES = (
    "TPU_ACCELERATOR_TYPE",
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_PROCESS_ADDRESSES",
    "TPU_SKIP_MDS_QUERY",
)
OTHER_VARIABLES = ("PJRT_DEVICE", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "COLAB_TPU_1VM")
RECORDED_VARIABLES = (*OTHER_VARIABLES, *TPU_VARIABLES, *OLD_VARIABLES)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Environment:
    """What `detect()` found. Printing it is a table."""

    host: str  # colab, kaggle, tpu-vm or local
    accelerator: str  # tpu, cuda, xla (the CPU XLA device, chosen by PJRT_DEVICE=CPU) or cpu
    cores: int  # TPU chips or GPUs; 1 for the CPU
    device_name: str  # for instance v5litepod-8, or Tesla T4
    python: str
    versions: dict  # package -> version, of those in PACKAGES that are installed
    outputs: Path  # where results go
    drive: Path | None  # MyDrive on Colab, mounted or not; None elsewhere
    inputs: Path | None  # Kaggle's read-only inputs; None elsewhere
    variables: dict  # RECORDED_VARIABLES that are set

    @property
    def tpu_backend(self):
        """ "torch_xla" or "torch_tpu", what torch reaches a TPU by here; None where neither is installed."""
        return find_tpu_backend(self.versions)

    @property
    def uses_torch_tpu(self):
        """Whether this machine has a TPU and torch reaches it by torch_tpu."""
        return self.accelerator == "tpu" and self.tpu_backend == "torch_tpu"

    def table(self):
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

    def require(self, accelerator, *, cores=1):
        """Return self if this accelerator is here, with at least this many cores; else a TpukitError names
        the menu to open.

        accelerator: "tpu" (the CPU XLA device counts, so that a notebook can be tried without a TPU), "cuda"
        or "cpu". On a CPU a core is a process, so any number will do."""
        accepted = {
            "tpu": ("tpu", "xla"),
            "cuda": ("cuda",),
            "xla": ("xla",),
            "cpu": ("tpu", "cuda", "xla", "cpu"),
        }
        if accelerator not in accepted:
            raise TpukitError(f"require({accelerator!r}): choose 'tpu', 'cuda', 'xla' or 'cpu'")
        found = self.accelerator in accepted[accelerator]
        if found and self.accelerator == "tpu" and (reason := misfit(self.versions)):
            raise TpukitError(
                f"{reason}. Start a fresh session and install nothing over its versions; see `tpukit doctor`"
            )
        if found and (self.cores >= cores or self.accelerator in ("xla", "cpu")):
            return self
        if found:
            lines = [f"asked for {cores} cores, found {self.cores} ({self.device_name})."]
        else:
            has = f"{NAMES[self.accelerator]} ({self.device_name})"
            lines = [f"{NAMES[accelerator]} needed, but this {self.host} session has: {has}."]
        menus = {"tpu": TPU_MENU, "cuda": GPU_MENU}
        lines.append(
            menus[accelerator][self.host]
            if accelerator in menus
            else "set PJRT_DEVICE=CPU before Python starts"
        )
        # COLAB_TPU_1VM exists on Colab's GPU machines too, but empty.
        tpu_machine = self.variables.get("TPU_ACCELERATOR_TYPE") or self.variables.get("COLAB_TPU_1VM")
        if accelerator == "tpu" and self.tpu_backend is None and tpu_machine:
            lines.append(
                "There seems to be a TPU, but neither torch_xla nor torch_tpu: something removed it from this"
                " image; start a fresh session."
            )
        for name, (why, instead) in OLD_VARIABLES.items():
            if self.variables.get(name):
                lines.append(f"{name} is set: {why}. Instead: {instead}.")
        raise TpukitError("\n".join(lines))


def detect(environ=None, root="/"):
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
        variables={name: environ[name] for name in RECORDED_VARIABLES if name in environ},
    )


def _host(environ):
    if environ.get("COLAB_RELEASE_TAG"):
        return "colab"
    if environ.get("KAGGLE_KERNEL_RUN_TYPE") or environ.get("KAGGLE_URL_BASE"):
        return "kaggle"
    return "tpu-vm" if environ.get("TPU_ACCELERATOR_TYPE") or environ.get("TPU_NAME") else "local"


def under_torchrun():
    """Whether torchrun started this process, as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank():
    """This process's number among those that torchrun started; 0 elsewhere."""
    number = os.environ.get("RANK", "0") if under_torchrun() else "0"
    if not number.isdecimal():
        raise TpukitError(
            f"RANK={number}: it must be a number, which torchrun sets: unset RANK and WORLD_SIZE, or use"
            " torchrun"
        )
    return int(number)


def version_of(package):
    """The installed version of a package, or None. Reads metadata, imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version, parts=2):
    """The first numbers of a version: "2.13.0+cpu" -> (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:parts])


def torch_tpu_fits(versions):
    """Whether torch and libtpu are as an installed torch_tpu needs them, see TORCH_TPU_NEEDS."""
    torch, libtpu = release(versions.get("torch", "")), release(versions.get("libtpu", ""), 3)
    return (2, 11) <= torch <= (2, 15) and libtpu >= (0, 0, 50)


def misfit(versions):
    """Why the backend that TPUs are reached by does not work with these versions, or "" where it does."""
    torch, libtpu = versions.get("torch"), versions.get("libtpu")
    backend = find_tpu_backend(versions)
    if backend == "torch_tpu" and not torch_tpu_fits(versions):
        return (
            f"torch_tpu {versions['torch_tpu']} with torch {torch} and libtpu {libtpu}: it needs"
            f" {TORCH_TPU_NEEDS}"
        )
    if backend == "torch_xla" and release(versions["torch_xla"]) != release(torch or ""):
        return f"torch_xla {versions['torch_xla']} does not match torch {torch}"
    return ""


def find_tpu_backend(versions):
    """What torch reaches a TPU by: of two installed backends the one that fits torch, of which there is one
    at most."""
    if "torch_tpu" in versions and ("torch_xla" not in versions or torch_tpu_fits(versions)):
        return "torch_tpu"
    return "torch_xla" if "torch_xla" in versions else None


def _accelerator(environ, root, versions):
    """(accelerator, cores, device name)."""
    chosen = environ.get("PJRT_DEVICE", "").upper()
    if "torch_xla" in versions and chosen == "CPU":
        return "xla", 1, "CPU XLA device (PJRT_DEVICE=CPU), for trying things out, not for speed"
    chips = chips_here(environ, root)
    if find_tpu_backend(versions) and chosen in ("", "TPU") and (chips or chosen == "TPU"):
        return "tpu", chips, environ.get("TPU_ACCELERATOR_TYPE") or _accelerator_type(root) or "TPU"
    gpus = nvidia_gpus(environ)
    if gpus:
        return "cuda", len(gpus), ", ".join(sorted(set(gpus)))
    return "cpu", 1, f"{platform.machine()}, {os.cpu_count()} cores"


def chips_here(environ, root="/"):
    """Number of TPU chips on the PCI bus, or where a container hides it and PJRT_DEVICE=TPU, of their device
    files."""
    on_bus = tpu_chips(root)
    if on_bus or environ.get("PJRT_DEVICE", "").upper() != "TPU":
        return on_bus
    devices = Path(root) / "dev"
    names = [path.name.removeprefix("accel") for path in (*devices.glob("vfio/*"), *devices.glob("accel*"))]
    return sum(name.isdecimal() for name in names)


def tpu_chips(root="/"):
    """Number of TPU chips on the PCI bus, which is what torch_xla counts."""
    return len(_tpu_chip_ids(root))


def _accelerator_type(root):
    """The chips on the PCI bus as TPU_ACCELERATOR_TYPE names them, or "" for those that ACCELERATOR_TYPES
    lacks."""
    ids = _tpu_chip_ids(root)
    kind = ACCELERATOR_TYPES.get(ids[0]) if ids else None
    return f"{kind}-{len(ids)}" if kind else ""


def _tpu_chip_ids(root):
    google = [device for device, vendor in _pci_devices(root) if vendor == GOOGLE_PCI_VENDOR]
    ids = [(device / "device").read_text().strip() for device in google]
    return [name for name in ids if name in TPU_PCI_DEVICES]


def failed_lookups(environ, root="/"):
    """The LOOKED_UP_VARIABLES that hold a warning, with the values of a single host for them; "" where the
    chip is unknown."""
    of_one_host = dict(TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE=_accelerator_type(root))
    return {name: of_one_host[name] for name in LOOKED_UP_VARIABLES if " " in environ.get(name, "").strip()}


def nvidia_cards_on_bus(root="/"):
    """Number of NVIDIA GPUs on the PCI bus, with a driver or without."""
    return sum(
        vendor == NVIDIA_PCI_VENDOR and (device / "class").read_text().startswith(PCI_DISPLAY)
        for device, vendor in _pci_devices(root)
    )


def _pci_devices(root):
    vendors = Path(root).glob("sys/bus/pci/devices/*/vendor")
    return [(vendor.parent, vendor.read_text().strip()) for vendor in vendors]


def chips_by_bounds(environ):
    """Number of chips in TPU_CHIPS_PER_HOST_BOUNDS ("2,4,1": 8), or None where it is not set."""
    bounds = environ.get("TPU_CHIPS_PER_HOST_BOUNDS", "")
    return math.prod(int(part) for part in bounds.split(",")) if re.fullmatch(r"\d+(,\d+)*", bounds) else None


def nvidia_smi(environ, *arguments):
    """The output of nvidia-smi, or "" where it is missing or finds no driver."""
    if not shutil.which("nvidia-smi", path=environ.get("PATH")):
        return ""
    try:
        how = dict(env=dict(environ), capture_output=True, text=True, errors="replace", timeout=30)
        ran = subprocess.run(["nvidia-smi", *arguments], **how)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def nvidia_gpus(environ):
    """Names of the NVIDIA GPUs that CUDA shows to this process, from `nvidia-smi -L`, or where it is missing
    from the driver.

    Of a divided GPU (MIG) a process sees one instance, and then no whole GPU (NVIDIA's MIG guide, "CUDA
    Device Enumeration"). nvidia-smi numbers the cards by their bus, CUDA the fastest first: where they
    differ, the count is right, a name may not be."""
    cards = [] if shutil.which("nvidia-smi", path=environ.get("PATH")) else _cards_of_driver()
    for line in nvidia_smi(environ, "-L").splitlines():
        if card := re.match(r"GPU \d+: (.+) \(UUID: (\S+)\)", line):
            cards.append((card[1], card[2], []))
        elif cards and (instance := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (\S+)\)", line)):
            cards[-1][2].append((f"{cards[-1][0]} MIG {instance[1]}", instance[2]))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    instances = [instance for card in cards for instance in card[2]]
    if visible is not None and visible.startswith("MIG-"):
        return [name for name, uuid in instances if uuid.startswith(visible.split(",")[0])][:1]
    cards = cards if visible is None else _chosen(cards, visible)
    return [name for card in cards for name, _ in card[2]][:1] or [card[0] for card in cards]


def _cards_of_driver():
    """What `nvidia_gpus` knows of each card, from the driver itself: some containers have it without
    nvidia-smi."""
    texts = [path.read_text(errors="replace") for path in sorted(DRIVER_CARDS.glob("*/information"))]
    facts = [dict(line.split(":", 1) for line in text.splitlines() if ":" in line) for text in texts]
    return [(of.get("Model", "NVIDIA GPU").strip(), of.get("GPU UUID", "").strip(), []) for of in facts]


def _chosen(cards, visible):
    """The cards that CUDA_VISIBLE_DEVICES names, by number or by the start of a UUID, as CUDA reads it: up to
    the first unknown one; none where one is named twice."""
    chosen = []
    for part in visible.split(","):
        number = re.match(r"\s*\+?(\d+)", part)
        named = [card for card in cards if card[1].startswith(part)] if part.startswith("GPU-") else []
        named = cards[int(number[1]) : int(number[1]) + 1] if number else named
        if len(named) != 1:
            break
        if named[0] in chosen:
            return []
        chosen += named
    return chosen


def supports(capability, built_for):
    """Whether a GPU can run a torch with these architectures (NVIDIA, CUDA C++ Programming Guide, 6.1).

    capability: of the GPU, (major, minor). built_for: `torch.cuda.get_arch_list()`. "sm_80" is machine code
    for 8.0 and newer
    8.x; "compute_90" is compiled by the driver, for 9.0 and newer; a suffix "a" restricts either to exactly
    that capability, "f" to newer ones of the same major number."""
    architectures = [m for name in built_for if (m := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name))]
    for kind, major, minor, suffix in (m.groups() for m in architectures):
        target = int(major), int(minor)
        same_major = capability[0] == target[0]
        if suffix == "a":
            runs = capability == target
        elif kind == "compute" and not suffix:
            runs = capability >= target
        else:
            runs = same_major and capability >= target
        if runs:
            return True
    return not architectures


def is_interactive_notebook():
    """Whether this is a notebook on a page, whose user sees what changes and can answer; not papermill, not a
    shell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(
        getattr(shell, "kernel", None), "_allow_stdin", False
    )  # as the page set it when it sent the cell
