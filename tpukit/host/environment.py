"""Which host this is, and which accelerator it has, from environment variables, PCI folders and package metadata.

Touches no device and imports no torch, so that it works even where torch is broken.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import traceback
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.host.known_errors import fix_for
from tpukit.host.tables import Table

PACKAGES = ("torch", "torchvision", "torch_xla", "libtpu", "tensorflow", "tensorflow-cpu", "jax")
NAMES = {"tpu": "TPU", "cuda": "GPU", "xla": "CPU XLA device", "cpu": "CPU"}
GOOGLE_PCI_VENDOR, NVIDIA_PCI_VENDOR = "0x1ae0", "0x10de"
PCI_DISPLAY = "0x03"  # how the class of a graphics processor begins
# The PCI devices that are TPU chips, as torch_xla 2.9 lists them; Google's network cards have other ids. All other facts of
# chips are in devices/chips.py, a layer above, which this file cannot import.
TPU_PCI_DEVICES = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076")
TPU_MENU = {
    "colab": "Colab menu: Runtime > Change runtime type > Hardware accelerator > v5e-1 TPU (or v6e-1)",
    "kaggle": "Kaggle: Settings (or Session options) > Accelerator > TPU v5e-8; for a batch run, choose it before Save Version",
    "tpu-vm": "on this TPU VM, install the torch_xla that matches torch: pip install 'torch_xla[tpu]'",
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
    "COLAB_TPU_ADDR": ("nothing reads it since Colab's TPU Node runtime is gone", "tpukit.detect() shows what is here"),
    "XRT_TPU_CONFIG": ("nothing reads it since torch_xla's XRT runtime is gone", "leave it out, nothing replaces it"),
    "XLA_USE_BF16": ("it silently turns every float32 tensor into bf16, the loss and the weights too", AUTOCAST),
    "XLA_DOWNCAST_BF16": ("it silently turns float32 tensors into bf16 and float64 into float32", AUTOCAST),
}
# Only these are recorded: a host's other variables can hold secrets (Colab's COLAB_JUPYTER_TOKEN).
TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_PROCESS_ADDRESSES", "TPU_SKIP_MDS_QUERY")
RECORDED_VARIABLES = (*TPU_VARIABLES, *OLD_VARIABLES, "PJRT_DEVICE", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "COLAB_TPU_1VM")


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

    def table(self):
        """The environment as a `Table`."""
        cores = f"{self.cores} x " if self.accelerator in ("tpu", "cuda") else ""
        rows = [
            ("host", self.host),
            ("accelerator", f"{self.accelerator}: {cores}{self.device_name}"),
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
        """Return self if this accelerator is here, with at least this many cores; else a TpukitError names the menu to open.

        accelerator: "tpu" (the CPU XLA device counts, so that a notebook can be tried without a TPU), "cuda" or "cpu". On a CPU
        a core is a process, so any number will do.
        """
        accepted = {"tpu": ("tpu", "xla"), "cuda": ("cuda",), "xla": ("xla",), "cpu": tuple(NAMES)}
        if accelerator not in accepted:
            raise TpukitError(f"require({accelerator!r}): choose 'tpu', 'cuda', 'xla' or 'cpu'")
        if self.accelerator in accepted[accelerator]:
            if self.cores >= cores or self.accelerator in ("xla", "cpu"):
                return self
            lines = [f"asked for {cores} cores, found {self.cores} ({self.device_name})."]
        else:
            has = f"{NAMES[self.accelerator]} ({self.device_name})"
            lines = [f"{NAMES[accelerator]} needed, but this {self.host} session has: {has}."]
        menus = {"tpu": TPU_MENU, "cuda": GPU_MENU}
        lines.append(menus[accelerator][self.host] if accelerator in menus else "set PJRT_DEVICE=CPU before Python starts")
        # COLAB_TPU_1VM exists on Colab's GPU machines too, but empty.
        tpu_machine = self.variables.get("TPU_ACCELERATOR_TYPE") or self.variables.get("COLAB_TPU_1VM")
        if accelerator == "tpu" and "torch_xla" not in self.versions and tpu_machine:
            lines.append("There seems to be a TPU, but something removed torch_xla from this image: start a fresh session.")
        for name, (why, instead) in OLD_VARIABLES.items():
            if self.variables.get(name):
                lines.append(f"{name} is set: {why}. Instead: {instead}.")
        raise TpukitError("\n".join(lines))


def detect(environ=None, root="/"):
    """Find out where this Python runs, without touching a device.

    environ: environment variables; by default those of this process. root: the file system's root (for tests).
    """
    environ = os.environ if environ is None else environ
    root = Path(root)
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
    return int(os.environ.get("RANK", 0)) if under_torchrun() else 0


def version_of(package):
    """The installed version of a package, or None. Reads metadata, imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerator(environ, root, versions):
    """(accelerator, cores, device name)."""
    chosen = environ.get("PJRT_DEVICE", "").upper()
    if "torch_xla" in versions and chosen == "CPU":
        return "xla", 1, "CPU XLA device (PJRT_DEVICE=CPU), for trying things out, not for speed"
    chips = chips_here(environ, root)
    if "torch_xla" in versions and chosen in ("", "TPU") and (chips or chosen == "TPU"):
        return "tpu", chips, environ.get("TPU_ACCELERATOR_TYPE") or "TPU"
    gpus = nvidia_gpus(environ)
    if gpus:
        return "cuda", len(gpus), ", ".join(sorted(set(gpus)))
    return "cpu", 1, f"{platform.machine()}, {os.cpu_count()} cores"


def chips_here(environ, root="/"):
    """Number of TPU chips on the PCI bus, or where a container hides it and PJRT_DEVICE=TPU, of their device files."""
    on_bus = tpu_chips(root)
    if on_bus or environ.get("PJRT_DEVICE", "").upper() != "TPU":
        return on_bus
    devices = Path(root) / "dev"
    names = [path.name.removeprefix("accel") for path in (*devices.glob("vfio/*"), *devices.glob("accel*"))]
    return sum(name.isdecimal() for name in names)


def tpu_chips(root="/"):
    """Number of TPU chips on the PCI bus, which is what torch_xla counts."""
    return sum(
        vendor == GOOGLE_PCI_VENDOR and (device / "device").read_text().strip() in TPU_PCI_DEVICES
        for device, vendor in _pci_devices(root)
    )


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
    try:
        ran = subprocess.run(["nvidia-smi", *arguments], env=dict(environ), capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def nvidia_gpus(environ):
    """Names of the NVIDIA GPUs that CUDA shows to this process, from `nvidia-smi -L` and CUDA_VISIBLE_DEVICES.

    nvidia-smi numbers the cards by their bus, CUDA the fastest first: where they differ, the count is right, a name may not be.
    """
    cards = re.findall(r"^GPU (\d+): (.+) \(UUID: (\S+)\)", nvidia_smi(environ, "-L"), re.MULTILINE)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [name for _, name, _ in cards]
    names = []
    for part in map(str.strip, visible.split(",")):  # a number, or the start of a UUID
        named = [name for number, name, uuid in cards if number == part or (part[:4] == "GPU-" and uuid.startswith(part))]
        if len(named) != 1:  # CUDA stops at what it does not know
            break
        names += named
    return names


def supports(capability, built_for):
    """Whether a GPU can run a torch with these architectures (NVIDIA, CUDA C++ Programming Guide, 6.1).

    capability: of the GPU, (major, minor). built_for: `torch.cuda.get_arch_list()`. "sm_80" is machine code for 8.0 and newer
    8.x; "compute_90" is compiled by the driver, for 9.0 and newer. Where none is of these forms (AMD) it is taken to run.
    """
    architectures = [m.groups() for name in built_for if (m := re.fullmatch(r"(sm|compute)_(\d+)(\d)", name))]
    for kind, major, minor in architectures:
        if capability >= (int(major), int(minor)) and (kind == "compute" or capability[0] == int(major)):
            return True
    return not architectures


@contextlib.contextmanager
def explain_known_errors():
    """Context manager: raise an error of an accelerator's runtime that has a known fix as a TpukitError with the fix."""
    try:
        yield
    except TpukitError:
        raise
    except Exception as error:
        fix = fix_for(str(error))
        if fix is None:
            raise
        traceback.clear_frames(error.__traceback__)  # a notebook keeps it, and with it a step's activations
        # The runtime's first lines name the problem and, where a shape changed, the shape; the rest is its own stack.
        lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
        raise TpukitError("\n".join([*lines[:3], fix])) from error
