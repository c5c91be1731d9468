"""`tpukit emulate`: run a command on TPU chips that are not there.

torch_xla loads emulated_tpu.c as libtpu. Behind it computes XLA's CPU plugin, as the package index has it;
nothing of torch_xla is patched. A mount namespace shows the chips on the PCI bus, where torch_xla and tpukit
look for them."""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from tpukit.host import cache, files
from tpukit.host.environment import release
from tpukit.host.errors import TpukitError
from tpukit.host.folders import atomic_folder
from tpukit.host.signals import end_with_parent
from tpukit_tools.subprocess_call import last_line, run_python

# XLA's CPU PJRT plugin with any number of devices: Apache-2.0, of the OpenXLA authors.
PLUGIN = "lammps-jax-pjrt-cpu==0.11.2"
SHA256 = "1319390d948b39f69f7dade496b7c385149d9ca6097a6b62114da113216d9ad1"
PLUGIN_FILE = "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so"
SOURCE = Path(__file__).with_name("emulated_tpu.c")
TORCH_XLA = ((2, 8), (2, 9))
# The chips of a machine by name, and how they lie on it
MACHINES = {"v5e-1": (1, "1,1,1"), "v5e-2": (2, "1,2,1"), "v5e-4": (4, "2,2,1"), "v5e-8": (8, "2,4,1")}
BUS = Path("/sys/bus/pci/devices")
V5E = dict(vendor="0x1ae0", device="0x0063", **{"class": "0x120000"}, numa_node="-1")
# libtpu's version in the images with torch_xla 2.9, for those who ask which is installed
LIBTPU = "0.0.21"
LIBTPU_MODULE = """import os
def get_library_path(): return os.environ["TPU_LIBRARY_PATH"]
def configure_library_path(): pass
"""
PREFIX = "tpukit-emulate-"
# Of shared memory, for what all chips give to a collective at once; with less, its files are on the disk
ROOM = 4 << 30
NEWNS, NEWUSER, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x1000, 0x4000, 0x40000
INTRODUCTION = """\
tpukit: {chips} emulated TPU v5e, computed by XLA on this machine's CPU, along torch_xla's own path to a TPU:
a process for each chip, collectives between them, and a limit of memory for tensors. They cannot show speed,
Mosaic (Pallas) kernels, the layouts and rounding of a TPU, and the memory inside a step (`tpukit plan`)."""


def emulate(machine: str, command: Sequence[str]) -> int:
    """Run a command on emulated TPU chips. Return its exit code.

    Args:
        machine: one of `MACHINES`.
        command: a program and its arguments.

    Raises TpukitError if this machine or its packages cannot."""
    chips, bounds = MACHINES[machine]
    check_torch_xla()
    plugin = install_plugin()
    with working_folder() as work:
        build(work / "libtpu.so")
        bus = make_bus(work / "bus", chips)
        return run(command, variables(work, plugin, chips, bounds), bus, INTRODUCTION.format(chips=chips))


def check_torch_xla() -> None:
    """Raise TpukitError without a torch_xla that the emulator is made for."""
    needed = "torch_xla 2.8 or 2.9: pip install torch==2.9.0 torch-xla==2.9.0 (Linux on x86-64)"
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError as error:
        raise TpukitError(f"the emulated TPU needs {needed}; here is none") from error
    if release(version) not in TORCH_XLA:
        raise TpukitError(f"the emulated TPU needs {needed}; here is {version}")


def plugin_folder() -> Path:
    """Return the folder in which XLA's CPU plugin is installed."""
    return (
        files.cache_folder()
        / f"emulated-tpu-{hashlib.sha256(f'{PLUGIN} {SHA256}'.encode()).hexdigest()[:10]}"
    )


def install_plugin() -> Path:
    """Install XLA's CPU plugin into `plugin_folder`, unless it is there. Return its library."""
    folder = cache.checked(plugin_folder())
    with files.file_lock(folder):
        if not folder.is_dir():
            print(f"installing {PLUGIN} (XLA's CPU plugin; 200 MB, once) into {folder}", file=sys.stderr)
            with atomic_folder(folder) as work, tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
                pinned.write(f"{PLUGIN} --hash=sha256:{SHA256}\n")
                pinned.flush()
                work.chmod(0o755)  # with a umask of 0, too
                options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
                ran = run_python(
                    "-m", "pip", "install", *options, "--target", work, "--require-hashes", "-r", pinned.name
                )
                if ran.returncode:
                    raise TpukitError(
                        f"the emulated TPU's {PLUGIN} could not be installed: {last_line(ran)}. It is on PyPI"
                        " for Linux on x86-64; install pip if it is missing"
                    )
    return folder / PLUGIN_FILE


def build(library: Path) -> None:
    """Compile the emulator."""
    compiler = os.environ.get("CC") or "cc"
    if not shutil.which(compiler):
        raise TpukitError(
            f"the emulated TPU is compiled here, and there is no C compiler {compiler!r}: on Debian and"
            " Ubuntu, apt install gcc libc6-dev"
        )
    flags = "-shared -fPIC -O2 -fvisibility=hidden".split()
    command = [compiler, *flags, SOURCE, "-o", library, "-ldl", "-lpthread"]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if "error" in line]
        why = said[0] if said else last_line(ran)
        raise TpukitError(f"{compiler} cannot compile the emulated TPU, as gcc 12 and newer can: {why}")


@contextlib.contextmanager
def working_folder() -> Generator[Path]:
    """Yield a folder for one emulation, in shared memory if that has room. Remove it, and what killed
    ones left."""
    with files.file_lock(files.cache_folder() / PREFIX):  # nobody takes a new folder for a left one
        shared = Path("/dev/shm")
        for left in (*shared.glob(f"{PREFIX}*"), *Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid == os.getuid() and (locked := lock(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(locked)
        has_room = shared.is_dir() and shutil.disk_usage(shared).free >= ROOM
        work = Path(tempfile.mkdtemp(prefix=PREFIX, dir=shared if has_room else None))
        locked = lock(work)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if locked is not None:
            os.close(locked)


def lock(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of a folder, or None if another process does."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        return None
    return number


def make_bus(bus: Path, chips: int) -> Path:
    """Make a folder as `BUS` is: what is there, and chips."""
    if not BUS.is_dir():
        raise TpukitError(
            f"the emulated TPU needs {BUS}, over which it lies: this machine or container has none"
        )
    bus.mkdir()
    for device in BUS.iterdir():
        (bus / device.name).symlink_to(device.resolve())
    for chip in range(chips):
        folder = bus / f"0009:00:{chip + 1:02x}.0"
        folder.mkdir()
        for name, text in V5E.items():
            (folder / name).write_text(f"{text}\n")
    return bus


def show(bus: Path) -> None:
    """From here on, show this process and its children another folder as `BUS`. Raises OSError. If it is not
    root's, the process must have one thread."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(failed: int) -> None:
        if failed:
            raise OSError(ctypes.get_errno(), "no namespace")

    if libc.unshare(NEWNS):
        uid, gid = os.getuid(), os.getgid()
        check(libc.unshare(NEWNS | NEWUSER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    check(libc.mount(os.fsencode(bus), os.fsencode(BUS), None, MS_BIND, None))


def variables(work: Path, plugin: Path, chips: int, bounds: str) -> dict[str, str]:
    """Return the environment of a machine with a TPU."""
    site = work / "site"
    described = site / f"libtpu-{LIBTPU}.dist-info" / "METADATA"
    described.parent.mkdir(parents=True)
    described.write_text(f"Metadata-Version: 2.1\nName: libtpu\nVersion: {LIBTPU}\n")
    (site / "libtpu.py").write_text(LIBTPU_MODULE)
    known = ("TPU_", "CLOUD_TPU_", "PJRT_", "XRT_", "LIBTPU_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    return kept | dict(
        PYTHONPATH=os.pathsep.join(filter(None, (str(site), kept.get("PYTHONPATH")))),
        OMP_NUM_THREADS=kept.get("OMP_NUM_THREADS", "1"),
        PJRT_DEVICE="TPU",
        TPU_LIBRARY_PATH=str(work / "libtpu.so"),
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=f"v5litepod-{chips}",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        TPU_HOST_BOUNDS="1,1,1",
        TPU_CHIPS_PER_HOST_BOUNDS=bounds,
        TPUKIT_EMULATE_CHIPS=str(chips),
        TPUKIT_EMULATE_DIRECTORY=str(work),
        TPUKIT_EMULATE_PLUGIN=str(plugin),
    )


def run(command: Sequence[str], environ: dict[str, str], bus: Path, introduction: str) -> int:
    """Run a command that sees a folder as `BUS`, gets the signals of this process, and ends with it. Return
    its exit code, as a shell does."""
    parent = os.getpid()

    def begin() -> None:  # in the new process, which has one thread
        end_with_parent(parent)
        show(bus)
        os.write(sys.stderr.fileno(), f"{introduction}\n".encode())

    try:
        process = subprocess.Popen(command, env=environ, preexec_fn=begin)
    except subprocess.SubprocessError as error:
        raise TpukitError(
            "the emulated TPU shows its chips in a mount namespace, which this machine refuses: run it as"
            " root, or allow user namespaces (in a container: docker run --cap-add SYS_ADMIN --security-opt"
            " apparmor=unconfined)"
        ) from error
    except OSError as error:
        raise TpukitError(f"cannot run {command[0]}: {error.strerror}") from error
    # A terminal sends Ctrl-C to both; what it means is for the command to say.
    handlers = {signal.SIGINT: signal.SIG_IGN}
    handlers |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP), lambda number, _: process.send_signal(number))
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
