"""Detect the host and its accelerator from environment variables, PCI folders and package metadata.

Touches no device and imports no torch, so that it works even if torch is broken.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from tpukit.host.errors import TpukitError
from tpukit.host.text import notebook_kernel

if TYPE_CHECKING:
    from tpukit.host.tables import Table

Backend = Literal["cpu", "cuda", "torch_xla", "torch_tpu"]
TPU_PACKAGES = ("torch_xla", "torch_tpu")  # by each of which torch reaches a TPU
PACKAGES = ("torch", "torchvision", *TPU_PACKAGES, "libtpu", "tensorflow", "tensorflow-cpu", "jax")
CHOSEN = "TPUKIT_ACCELERATOR"  # "cpu" if `require("cpu")` chose the processor over an accelerator
TORCHRUN = "TORCHELASTIC_RUN_ID"  # is set in the processes that torchrun starts
ONE_HOST = "tpukit trains on one host: use one machine that has all the chips or GPUs, such as a v5litepod-8"
NAMES = {"tpu": "TPU", "cuda": "GPU", "xla": "CPU XLA device", "cpu": "CPU"}
GOOGLE_PCI_VENDOR = "0x1ae0"
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
    "colab": "Colab menu: Runtime > Change runtime type > Hardware accelerator > T4 GPU (L4, G4, A100, H100)",
    "kaggle": "Kaggle: Settings (or Session options) > Accelerator > GPU T4 x2",
    "tpu-vm": "a TPU VM has no GPU",
    "local": "nvidia-smi finds no NVIDIA GPU: check the driver, or open the notebook on Colab or Kaggle",
}
ACCELERATOR_TYPES = {"0x0063": "v5litepod", "0x006f": "v6e"}  # by PCI device
CHIP_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}  # of the chips of a host


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Environment:
    """The host and accelerator that `detect()` found. Printing it is a table."""

    host: str
    """colab, kaggle, tpu-vm or local."""
    accelerator: str
    """tpu, cuda, xla (the CPU XLA device, chosen by PJRT_DEVICE=CPU) or cpu."""
    cores: int
    """TPU chips or GPUs; 1 for the CPU."""
    device_name: str
    """For instance v5litepod-8, or Tesla T4."""
    python: str
    """Version of Python."""
    versions: dict[str, str]
    """Package -> version, of those in `PACKAGES` that are installed."""
    outputs: Path
    """Where results go."""
    drive: Path | None
    """MyDrive on Colab, mounted or not; None elsewhere."""
    inputs: Path | None
    """Kaggle's read-only inputs; None elsewhere."""

    @property
    def has_drive(self) -> bool:
        """True if Drive is mounted and answers, where `Path.is_dir` would raise if it does not."""
        return self.drive is not None and os.path.isdir(self.drive)

    @property
    def backend(self) -> Backend:
        """What opens the accelerator, one of `devices.RUNTIMES`. Of the packages for a TPU it is torch_xla if
        that fits torch or is the only one."""
        torch_xla_fits = "torch_xla" in self.versions and not self.misfit
        if self.accelerator == "tpu" and "torch_tpu" in self.versions and not torch_xla_fits:
            return "torch_tpu"
        if self.accelerator in ("tpu", "xla"):
            return "torch_xla"
        return "cuda" if self.accelerator == "cuda" else "cpu"

    @property
    def misfit(self) -> str:
        """The reason why an installed torch_xla does not work with tpukit or the installed torch; "" without
        one."""
        torch_xla, torch = self.versions.get("torch_xla"), self.versions.get("torch")
        if torch_xla and release(torch_xla) < (2, 8):
            return f"torch_xla {torch_xla} is too old: tpukit needs torch_xla 2.8 or 2.9"
        if torch_xla is None or release(torch_xla) == release(torch or ""):
            return ""
        return f"torch_xla {torch_xla} does not match torch {torch}"

    def run_folder(self, name: str, outputs: str | Path = "") -> Path:
        """Return the folder of a run.

        Args:
            name: name of the folder, as RUN_NAME in a notebook. No path.
            outputs: parent folder; by default this machine's `outputs`.

        Returns:
            Path of the folder, which need not exist.

        Raises:
            TpukitError: if the name leads to another folder."""
        parent, name = Path(str(outputs or self.outputs)), str(name)  # papermill makes 7 a number
        if Path(name).name != name or not name.strip("."):
            raise TpukitError(f"RUN_NAME={name!r}: give the name of a folder, to be made in {parent}")
        return parent / name

    def check_versions(self) -> None:
        """Raise what `misfit` says, or that torch_xla would find no libtpu and compute on the CPU.

        Raises:
            TpukitError: if torch_xla does not work with tpukit or torch, or cannot reach the chips here."""
        if self.misfit:
            raise TpukitError(f"{self.misfit}. Start a fresh session and install nothing over its versions")
        if chips_here(os.environ) and not has_libtpu():
            install = f"pip install 'torch_xla[tpu]=={self.versions['torch_xla']}'"
            fix = "start a fresh session" if self.host in ("colab", "kaggle") else install
            raise TpukitError(f"a TPU is here, but no libtpu: torch_xla would compute on the CPU. Fix: {fix}")

    def table(self) -> "Table":
        """Return the environment as a `Table`."""
        from tpukit.host.tables import Table  # here: most of the library's parts show none

        cores = f"{self.cores} x " if self.accelerator in ("tpu", "cuda") else ""
        backend = f" through {self.backend}" if self.accelerator == "tpu" else ""
        rows = [
            ("host", self.host),
            ("accelerator", f"{self.accelerator}: {cores}{self.device_name}{backend}"),
            ("python", self.python),
            *self.versions.items(),
            ("outputs", self.outputs),
        ]
        if self.drive is not None:
            rows.append(("drive", f"{self.drive} ({'mounted' if self.has_drive else 'not mounted'})"))
        return Table("Environment", ("what", "value"), rows)

    def __repr__(self):
        return str(self.table())

    def _repr_html_(self):
        return self.table().as_html()

    def require(self, accelerator: str, *, cores: int = 1) -> "Environment":
        """Check that this machine has the hardware that you need, before anything slow starts.

        Args:
            accelerator: in lower or upper case. "any": whatever is here. "tpu": a TPU, or the CPU XLA device,
                so that a notebook can be tried without a TPU. "gpu" or "cuda": a GPU. "cpu": the processor
                even if an accelerator is here, for this process and those that it starts, until it requires
                another.
            cores: least number of TPU chips or GPUs. On a CPU a core is a process, so any number will do.

        Returns:
            The environment to train in: this one, or a new one if "cpu" hides an accelerator, or no longer
            does.

        Raises:
            TpukitError: if the accelerator is missing or has too few cores; it names the menu to open.
                Also if torch_xla is too old or does not match torch."""
        if not isinstance(cast(object, cores), int):  # a notebook's form may hold anything
            raise TpukitError(f"cores={cores!r} (CORES in a notebook): it must be a whole number")
        accepted = {"tpu": ("tpu", "xla"), "cuda": ("cuda",), "any": NAMES, "cpu": NAMES}
        requested, accelerator = accelerator, str(accelerator).lower()
        if accelerator == "gpu":
            accelerator = "cuda"
        if accelerator not in accepted:
            raise TpukitError(f"require({requested!r}): choose 'any', 'tpu', 'gpu' or 'cpu'")
        if accelerator == "cpu" and self.accelerator in ("tpu", "cuda"):
            os.environ[CHOSEN] = "cpu"
            return detect()
        if accelerator != "cpu" and os.environ.pop(CHOSEN, None):
            return detect().require(accelerator, cores=cores)
        is_here = self.accelerator in accepted[accelerator]
        if is_here and self.backend == "torch_xla":
            self.check_versions()
        if is_here and (self.cores >= cores or self.accelerator in ("xla", "cpu")):
            if accelerator == "any" and self.accelerator == "cpu" and self.host in ("colab", "kaggle"):
                print(f"this {self.host} session has no TPU and no GPU: training runs on the CPU, slowly")
                print(TPU_MENU[self.host], GPU_MENU[self.host], sep="\n")
            return self
        menus = {"tpu": TPU_MENU, "cuda": GPU_MENU}
        advice = menus[self.accelerator if is_here else accelerator][self.host]
        if is_here:
            raise TpukitError(f"requested {cores} cores, found {self.cores} ({self.device_name}).\n{advice}")
        has = self.device_name  # a CPU XLA device has its kind in its name
        if self.accelerator != "xla":
            has = f"{NAMES[self.accelerator]} ({has})"
        raise TpukitError(
            f"{NAMES[accelerator]} needed, but this {self.host} session has: {has}.\n{advice}\n"
            'Or use what is here: ACCELERATOR = "any" in a notebook\'s Settings, require("any").'
        )


def detect(environ: Mapping[str, str] | None = None, root: str | Path = "/") -> Environment:
    """Detect where this Python runs, without touching a device.

    Args:
        environ: environment variables; by default those of this process.
        root: root of the file system, for tests.

    Returns:
        An `Environment`. Printing it shows a table."""
    root = Path(root)
    if environ is None:  # what this process imports and starts reads them
        os.environ.update(failed_lookups(os.environ, root))
        environ = os.environ
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
    )


def _host(environ: Mapping[str, str]) -> str:
    if environ.get("COLAB_RELEASE_TAG"):
        return "colab"
    if environ.get("KAGGLE_KERNEL_RUN_TYPE") or environ.get("KAGGLE_URL_BASE"):
        return "kaggle"
    return "tpu-vm" if environ.get("TPU_ACCELERATOR_TYPE") or environ.get("TPU_NAME") else "local"


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None. Reads metadata, imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str, parts: int = 2) -> tuple[int, ...]:
    """Return the first numbers of a version: "2.13.0+cpu" -> (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:parts])


def _accelerator(environ: Mapping[str, str], root: Path, versions: Mapping[str, str]) -> tuple[str, int, str]:
    """Return (accelerator, cores, device name)."""
    if environ.get(CHOSEN) == "cpu":
        return "cpu", 1, f"{_processor()}; chosen by {CHOSEN}=cpu"
    chosen = environ.get("PJRT_DEVICE", "").upper()
    if "torch_xla" in versions and chosen == "CPU":
        return "xla", 1, "CPU XLA device (PJRT_DEVICE=CPU), for trying things out, not for speed"
    chips = chips_here(environ, root)
    is_tpu = chosen == "TPU" or (chosen == "" and chips)
    if is_tpu and any(package in versions for package in TPU_PACKAGES):
        return "tpu", chips, environ.get("TPU_ACCELERATOR_TYPE") or _accelerator_type(root) or "TPU"
    if gpus := nvidia_gpus(environ):
        return "cuda", len(gpus), ", ".join(sorted(set(gpus)))
    unused = "; it has a TPU, but neither torch_xla nor torch_tpu: start a fresh session" if chips else ""
    return "cpu", 1, _processor() + unused


def _processor():
    return f"{platform.machine()}, {os.cpu_count()} cores"


def chips_here(environ: Mapping[str, str], root: str | Path = "/") -> int:
    """Count the TPU chips on the PCI bus, or their device files if that is hidden and PJRT_DEVICE=TPU."""
    on_bus = len(tpu_chips(root))
    if on_bus or environ.get("PJRT_DEVICE", "").upper() != "TPU":
        return on_bus
    devices = Path(root) / "dev"
    names = [path.name.removeprefix("accel") for path in (*devices.glob("vfio/*"), *devices.glob("accel*"))]
    return sum(name.isdecimal() for name in names)


def tpu_chips(root: str | Path = "/") -> list[str]:
    """Return the device ids of the TPU chips on the PCI bus, as torch_xla lists them."""
    ids = [(device / "device").read_text().strip() for device in pci_devices(root, GOOGLE_PCI_VENDOR)]
    return [name for name in ids if name in TPU_PCI_DEVICES]


def has_libtpu() -> bool:
    """Return whether torch_xla looks for libtpu where there is one, or is told to use a TPU, and will say
    itself what it lacks. Imports neither."""
    is_chosen = "TPU_LIBRARY_PATH" in os.environ or os.environ.get("PJRT_DEVICE", "").upper() == "TPU"
    torch_xla = importlib.util.find_spec("torch_xla")
    bundled = Path(str(torch_xla and torch_xla.origin)).with_name("lib") / "libtpu.so"
    return is_chosen or bundled.exists() or importlib.util.find_spec("libtpu") is not None


def _accelerator_type(root: str | Path) -> str:
    """Name the chips on the PCI bus as TPU_ACCELERATOR_TYPE does, "" for unknown ones."""
    chips = tpu_chips(root)
    kind = ACCELERATOR_TYPES.get(chips[0]) if chips else None
    return f"{kind}-{len(chips)}" if kind else ""


def failed_lookups(environ: Mapping[str, str], root: str | Path = "/") -> dict[str, str]:
    """Return {variable: its value on a single host, "" if unknown} for variables that hold the text of a
    warning, because the host's look-up failed, which libtpu refuses; and for all of them in a shell of Colab
    or Kaggle that has none, where torch_xla would look for them on a server that is not there."""
    single_host = dict(TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE=_accelerator_type(root))
    broken = {name: value for name, value in single_host.items() if " " in environ.get(name, "").strip()}
    bounds = CHIP_BOUNDS.get(len(tpu_chips(root)), "")
    single_host |= dict(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_ID="0", TPU_HOST_BOUNDS="1,1,1")
    single_host |= dict(TPU_CHIPS_PER_HOST_BOUNDS=bounds)
    is_hosted = _host(environ) in ("colab", "kaggle") or (Path(root) / "kaggle/working").is_dir()
    is_bare = is_hosted and bounds and not any(environ.get(name) for name in single_host)
    return single_host if is_bare and single_host["TPU_ACCELERATOR_TYPE"] else broken


def check_one_host(env: Environment) -> None:
    """Raise TpukitError if the variables name several hosts of a TPU slice."""
    names = os.environ.get("TPU_WORKER_HOSTNAMES", "") if env.accelerator == "tpu" else ""
    hosts = names.count(",") + 1
    if hosts > 1:
        raise TpukitError(f"this is one of {hosts} hosts: {ONE_HOST}")


def pci_devices(root: str | Path, vendor: str) -> list[Path]:
    """Return the folders of a vendor's devices on the PCI bus."""
    files = Path(root).glob("sys/bus/pci/devices/*/vendor")
    return [file.parent for file in files if file.read_text().strip() == vendor]


def nvidia_smi(environ: Mapping[str, str]) -> str:
    """Return the list of `nvidia-smi -L`, or "" if it is missing or finds no driver."""
    command, quiet = ["nvidia-smi", "-L"], subprocess.DEVNULL
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.check_output(command, env=dict(environ), stderr=quiet, timeout=30)
        return listed.decode(errors="replace")
    return ""


def nvidia_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the NVIDIA GPUs that CUDA shows to this process, from `nvidia-smi -L`.

    Of CUDA_VISIBLE_DEVICES only the number of GPUs counts, up to a -1: a name may be that of another card of
    this machine."""
    names = re.findall(r"^GPU \d+: (.+) \(UUID: ", nvidia_smi(environ), re.M)
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return names
    parts = [part.strip() for part in visible.split(",")]
    if "-1" in parts:
        parts = parts[: parts.index("-1")]
    return names[: len([part for part in parts if part])]


def is_interactive_notebook() -> bool:
    """Return True in a notebook on a page, whose user can answer; not papermill, not a shell."""
    return getattr(notebook_kernel(), "_allow_stdin", False)  # as the page set it when it sent the cell
