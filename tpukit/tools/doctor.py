"""`tpukit doctor`: what stands between this machine and training, one line each with its fix. Touches no device, unless a
model is to be tried."""

import copy
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tpukit.host import environment
from tpukit.host.known_errors import fix_for
from tpukit.host.tables import GIB, Table

OK, NOTE, WARNING, BLOCKS = "ok", "note", "warning", "BLOCKS"
NEEDED = ("numpy", "pillow", "safetensors", "scikit-image", "tqdm", "rich", "tyro", "matplotlib", "scipy", "pyeit", "libcst")
# What is needed for a part of tpukit only -> (what to say of it where it is missing, for what).
NEEDED_FOR = {
    "tyro": (NOTE, "the options of the command line"),
    "matplotlib": (NOTE, "figures"),
    "libcst": (NOTE, "`tpukit migrate`"),
    "pyeit": (NOTE, "`tpukit simulate eit` and synthetic data for cdeit"),
    "scipy": (NOTE, "`tpukit simulate eit` and synthetic data for cdeit"),
    "scikit-image": (WARNING, "the workloads mshnet and cdeit"),
}
IMAGES = ("colab", "kaggle")  # hosts whose torch, torch_xla and libtpu have to stay as they are
FRESH = "start a fresh session and install nothing over the image's versions"
PAST = ". Where a new image is to blame, take an earlier one: command palette > Change runtime version (26.07 has Python 3.12)"
IMPORT_TIMEOUT_S = 120
LARGEST_MOVE = 0.05  # of an output by half precision, as a share of its norm


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding: what was looked at, level (ok, note, warning, BLOCKS), what was found, and the fix."""

    what: str
    level: str
    found: str
    fix: str = ""


def examine(env=None, *, environ=None, root="/"):
    """Look at everything that can be seen without a device. Returns a list of `Check`.

    env, environ, root: as for `environment.detect`, for tests.
    """
    environ = os.environ if environ is None else environ
    env = env or environment.detect(environ, root)
    root = Path(root)
    checks = []
    for look in (
        _python,
        _packages,
        _torch,
        _gpu,
        _torch_xla,
        _tensorflow,
        _accelerator,
        _chip_holders,
        _variables,
        _disk,
        _memory,
        _drive,
    ):
        checks += look(env, environ, root)
    return checks


def try_model(task, env):
    """Compute a workload's loss and gradients on this machine's device in every precision that suits it.

    The batch is one synthetic sample. Weights are the task's own, or fresh ones; what starts at zero is made small random
    numbers then, so that every part of the model has a say in its output. Returns a list of `Check`.
    """
    import torch

    from tpukit.devices.runtime import open_runtime
    from tpukit.runs import weights

    torch.manual_seed(0)
    model = task.model()
    if task.weights:
        weights.load(model, task.weights)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(0, 0.02)
    said, exact = [], None
    # fp16 is what GPUs without bf16 train in; a CPU takes minutes for it, and XLA has none.
    for precision in ("fp32", "bf16", "fp16") if env.accelerator == "cuda" else ("fp32", "bf16"):
        try:
            runtime = open_runtime(env, precision)
            output, loss, norm = _one_step(task, model, runtime)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            fix = "train in fp32" if exact is not None else (fix_for(reason) or "")
            said.append(
                Check(f"{task.name} in {precision}", WARNING if exact is not None else BLOCKS, f"does not run: {reason}", fix)
            )
            continue
        if exact is None:
            exact = output
            found = f"runs on {runtime}: loss {loss:.4g}, gradient norm {norm:.3g}"
            said.append(Check(f"{task.name} in {precision}", OK, found))
            continue
        moved = float((output - exact).norm() / exact.norm())
        most = float((output - exact).abs().max() / exact.abs().max())
        found = f"runs: the output moves by {moved:.2%} (at most {most:.2%} of its largest), loss {loss:.4g}, "
        found += f"gradient norm {norm:.3g}"
        fine = moved < LARGEST_MOVE
        fix = (
            "" if fine else "more than rounding explains: train in fp32, and look for sums over many numbers in half precision"
        )
        said.append(Check(f"{task.name} in {precision}", OK if fine else WARNING, found, fix))
    return said


def _one_step(task, model, runtime):
    """(the model's first output in float32 on the CPU, the loss, the gradient norm)."""
    import torch

    seen = []
    model = runtime.place(copy.deepcopy(model)).train()
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    batch = runtime.put(task.example(1))
    with runtime.autocast():
        loss = task.loss(model, batch, task.epochs).float()
    (loss if runtime.scaler is None else runtime.scaler.scale(loss)).backward()
    scale = 1.0 if runtime.scaler is None else runtime.scaler.get_scale()
    output = seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]
    norm = runtime.gradient_norm(model)
    runtime.sync()
    output, loss, norm = runtime.host((output, loss.detach(), norm))
    return output.float(), float(loss), float(norm[0]) / scale


def table(checks):
    """The checks as a `Table`, worst first."""
    order = (BLOCKS, WARNING, NOTE, OK)
    rows = [(c.what, c.level, c.found, c.fix) for c in sorted(checks, key=lambda c: order.index(c.level))]
    return Table("Checks", ("what", "level", "found", "fix"), rows)


def blocked(checks):
    """Whether something stops training altogether."""
    return any(check.level == BLOCKS for check in checks)


def _python(env, environ, root):
    version = tuple(int(part) for part in env.python.split(".")[:2])
    if (3, 11) <= version <= (3, 13):
        return [Check("python", OK, env.python)]
    return [Check("python", WARNING, env.python, "tpukit is tried on Python 3.11 to 3.13")]


def _packages(env, environ, root):
    missing = [name for name in NEEDED if environment.version_of(name) is None]
    if not missing:
        return [Check("packages", OK, "all there")]
    levels = {NEEDED_FOR.get(name, (BLOCKS,))[0] for name in missing}
    said = [f"{name} (for {NEEDED_FOR[name][1]})" if name in NEEDED_FOR else name for name in missing]
    level = next(level for level in (BLOCKS, WARNING, NOTE) if level in levels)
    return [Check("packages", level, f"missing: {', '.join(said)}", f"pip install {' '.join(missing)}")]


def _installing(env, packages):
    """The fix that installs one of torch, torch_xla and libtpu, where that is allowed."""
    if env.host in IMAGES:
        return FRESH + (PAST if env.host == "colab" else "")
    return f"pip install {packages}"


def _torch(env, environ, root):
    version = env.versions.get("torch")
    if version is None:
        return [Check("torch", BLOCKS, "not installed", _installing(env, "torch"))]
    problem = import_problem("torch", environ)
    if problem:
        fix = fix_for(problem) or _installing(env, "--force-reinstall torch")
        return [Check("torch", BLOCKS, f"{version} cannot be imported: {problem}", fix)]
    if _release(version) < (2, 6):
        found = f"{version}: its torch.load runs code from checkpoints, weights_only or not (CVE-2025-32434)"
        return [Check("torch", BLOCKS, found, _installing(env, "'torch>=2.8'"))]
    if _release(version) < (2, 8):
        return [Check("torch", WARNING, version, "tpukit is tried with torch 2.8 and newer")]
    return [Check("torch", OK, version)]


def _release(version, parts=2):
    return tuple(int(part) for part in re.findall(r"\d+", version)[:parts])


def run_python(program, environ):
    """A process of its own that runs a program, without the current folder on its path: what lies there is not to be run."""
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)


def import_problem(package, environ):
    """The last line of the error of importing a package in a process of its own, or None if it imports. The process has these
    variables and no others, so that it fails where a training would."""
    try:
        ran = run_python(f"import {package}", environ)
    except subprocess.TimeoutExpired:
        return f"the import did not end within {IMPORT_TIMEOUT_S} s"
    lines = ran.stderr.strip().splitlines()
    return None if ran.returncode == 0 else (lines[-1] if lines else f"ended with code {ran.returncode}")


# Opens no context on a GPU.
CUDA_OF_TORCH = """
import json, torch
found = dict(built=torch.version.cuda, usable=torch.cuda.is_available(), arch_list=torch.cuda.get_arch_list(), reason="")
if found["built"] and not found["usable"]:
    try:
        torch.cuda.init()
    except Exception as error:
        found["reason"] = str(error).partition(chr(10))[0]
print(json.dumps(found))
"""


def cuda_of_torch(environ):
    """What torch says of CUDA in a process of its own: dict(built, the CUDA that it was built with or None; usable; arch_list;
    reason, why it is not usable), or None where it does not answer."""
    try:
        return json.loads(run_python(CUDA_OF_TORCH, environ).stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return None


def _gpu(env, environ, root):
    """Whether torch can use the GPUs, and if not, why."""
    if env.accelerator == "cpu" and environment.nvidia_cards_on_bus(root) and not environment.nvidia_smi(environ, "-L"):
        fix = f"install NVIDIA's driver. {environment.GPU_MENU[env.host]}" if env.host == "local" else FRESH
        return [Check("gpu", WARNING, "an NVIDIA card is on the PCI bus, but nvidia-smi finds no driver for it", fix)]
    if env.accelerator != "cuda" or "torch" not in env.versions or (cuda := cuda_of_torch(environ)) is None:
        return []
    torch = f"torch {env.versions['torch']}"
    if cuda["built"] is None:
        fix = FRESH if env.host in IMAGES else "install a CUDA build of torch (pytorch.org/get-started/locally)"
        return [Check("gpu", BLOCKS, f"{torch} was built without CUDA, but a GPU is here: {env.device_name}", fix)]
    if cuda["usable"]:
        built, gpus = cuda["arch_list"], environment.nvidia_gpus(environ)
        other = "install a torch that was built for it" if env.host == "local" else environment.GPU_MENU[env.host]
        return [
            Check("gpu", BLOCKS, f"{name} is of compute capability {has}; {torch} was built for {', '.join(built)}", other)
            for name, has in _capabilities(environ)
            if any(gpu.startswith(name) for gpu in gpus) and not environment.supports(_release(has), built)
        ]
    driver = re.search(r"CUDA[\w ]* Version\s*:\s*([\d.]+)", environment.nvidia_smi(environ))
    if driver and _release(driver[1], 1) < _release(cuda["built"], 1):  # within a major version they go together
        found = f"the driver is for CUDA {driver[1]}, and {torch} was built with CUDA {cuda['built']}"
        fix = FRESH if env.host in IMAGES else "update NVIDIA's driver, or install a torch that was built with an older CUDA"
        return [Check("gpu", BLOCKS, found, fix)]
    fix = fix_for(cuda["reason"]) or "check NVIDIA's driver (nvidia-smi), then restart the session"
    return [Check("gpu", BLOCKS, f"{torch} cannot use {env.device_name}: {cuda['reason'] or 'it does not say why'}", fix)]


def _capabilities(environ):
    """[(name, compute capability)] of the GPUs; empty for drivers that do not tell."""
    rows = environment.nvidia_smi(environ, "--query-gpu=name,compute_cap", "--format=csv,noheader").splitlines()
    return [(row[0].strip(), row[1].strip()) for row in (line.rsplit(",", 1) for line in dict.fromkeys(rows)) if len(row) == 2]


def _torch_xla(env, environ, root):
    torch, xla = env.versions.get("torch"), env.versions.get("torch_xla")
    if xla is None:
        return []
    if torch and torch.split(".")[:2] != xla.split(".")[:2]:
        fix = _installing(env, f"'torch~={'.'.join(xla.split('.')[:2])}.0'")
        return [Check("torch_xla", BLOCKS, f"{xla} does not match torch {torch}", fix)]
    if torch and (problem := import_problem("torch_xla", environ)):
        fix = fix_for(problem) or FRESH
        if environ.get("TPU_SKIP_MDS_QUERY") and not environ.get("TPU_ACCELERATOR_TYPE") and environment.tpu_chips(root):
            fix = "TPU_SKIP_MDS_QUERY is set, so torch_xla reads TPU_ACCELERATOR_TYPE, which is not: set both or neither"
        return [Check("torch_xla", BLOCKS, f"{xla} cannot be imported: {problem}", fix)]
    checks = [Check("torch_xla", OK, xla)]
    wanted, found = _wanted_libtpu(), env.versions.get("libtpu")
    if found is None and environment.chips_here(environ, root):
        fix = _installing(env, f"libtpu=={wanted}" if wanted else "'torch_xla[tpu]'")
        checks.append(Check("libtpu", BLOCKS, "not installed", fix))
    elif wanted and found and _release(wanted, 3) != _release(found, 3):  # images ship 0.0.21.1 for 0.0.21
        said = f"{found}, but torch_xla {xla} was built for {wanted}"
        checks.append(Check("libtpu", WARNING, said, _installing(env, f"libtpu=={wanted}")))
    return checks


def _wanted_libtpu():
    """The libtpu version that the installed torch_xla names in its `tpu` extra, or None."""
    try:
        requirements = importlib.metadata.requires("torch_xla") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((named[1] for line in requirements if (named := re.match(r"libtpu\s*==\s*([\d.]+)", line))), None)


def _tensorflow(env, environ, root):
    if "torch_xla" in env.versions and "tensorflow" in env.versions and "tensorflow-cpu" not in env.versions:
        fix = "it takes the TPU when imported: pip uninstall -y tensorflow && pip install tensorflow-cpu"
        return [Check("tensorflow", WARNING, f"{env.versions['tensorflow']} beside torch_xla", fix)]
    return []


def _accelerator(env, environ, root):
    chips = environment.chips_here(environ, root)
    found = f"{env.accelerator}: {env.device_name}"
    pjrt = environ.get("PJRT_DEVICE", "").upper()
    if pjrt and pjrt not in ("CPU", "TPU"):
        return [
            Check(
                "accelerator", BLOCKS, f"PJRT_DEVICE={pjrt}", "torch_xla knows TPU and CPU today; for a GPU unset PJRT_DEVICE"
            )
        ]
    if pjrt == "TPU" and not chips:
        fix = "unset PJRT_DEVICE. " + environment.TPU_MENU[env.host]
        found = "PJRT_DEVICE=TPU, but no TPU chip is on the PCI bus or in /dev"
        return [Check("accelerator", BLOCKS, found, fix)]
    if chips and env.accelerator == "xla":
        return [
            Check("accelerator", WARNING, f"{chips} TPU chips are here, but PJRT_DEVICE=CPU hides them", "unset PJRT_DEVICE")
        ]
    if chips and env.accelerator != "tpu":
        fix = _installing(env, "'torch_xla[tpu]'")
        return [Check("accelerator", BLOCKS, f"{chips} TPU chips are here, but torch_xla is not installed", fix)]
    if env.accelerator in ("tpu", "cuda", "xla"):
        return [Check("accelerator", OK, found)]
    if environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower() == "batch":
        return [Check("accelerator", BLOCKS, "this Kaggle batch run got no accelerator", environment.TPU_MENU["kaggle"])]
    if env.host == "local":
        return [Check("accelerator", NOTE, found, "training works, slowly; Colab and Kaggle lend accelerators for free")]
    return [Check("accelerator", WARNING, f"{found}: no accelerator is switched on", environment.TPU_MENU[env.host])]


def _chip_holders(env, environ, root):
    """Processes, other than this one, that hold a TPU chip open."""
    checks = []
    for process in sorted(root.glob("proc/[0-9]*"), key=lambda p: int(p.name)):
        if int(process.name) == os.getpid():
            continue
        held = sorted({target for target in _open_files(process) if re.match(r"/dev/(vfio/\d+|accel\d*)", target)})
        if held:
            # The program and its script; what follows can hold a token.
            command = " ".join(_read(process / "cmdline").split("\0")[:2])
            found = f"process {process.name} ({command}) holds {', '.join(held)}"
            checks.append(Check("chip", BLOCKS, found, f"end it (kill {process.name}), or restart the session of its notebook"))
    lock = root / "tmp/libtpu_lockfile"
    if lock.exists() and not checks and environment.chips_here(environ, root):
        checks.append(Check("chip", WARNING, f"{lock} was left behind, though nothing holds a chip", f"rm {lock}"))
    return checks


def _open_files(process):
    try:
        return [os.readlink(link) for link in (process / "fd").iterdir()]
    except OSError:  # ended meanwhile, or not ours to look at
        return []


def _variables(env, environ, root):
    checks = []
    for name, (why, instead) in environment.OLD_VARIABLES.items():
        if environ.get(name):
            level = WARNING if name.endswith("BF16") else NOTE  # these are still read
            checks.append(Check("variable", level, f"{name}={environ[name]}: {why}", f"unset it. Instead: {instead}"))
    if environ.get("TPU_PROCESS_ADDRESSES"):
        fix = "`launch` takes it away; before starting one process a core yourself: os.environ.pop('TPU_PROCESS_ADDRESSES')"
        checks.append(Check("variable", NOTE, f"TPU_PROCESS_ADDRESSES={environ['TPU_PROCESS_ADDRESSES']}", fix))
    chips, expected = environment.chips_here(environ, root), environment.chips_by_bounds(environ)
    if chips and expected and expected != chips:
        found = f"TPU_CHIPS_PER_HOST_BOUNDS={environ['TPU_CHIPS_PER_HOST_BOUNDS']} means {expected} chips, {chips} here"
        checks.append(
            Check("variable", NOTE, found, "one core works; a launch of one process a core would wait for the missing ones")
        )
    if environ.get("XLA_FLAGS"):
        checks.append(Check("variable", NOTE, f"XLA_FLAGS={environ['XLA_FLAGS']}", "unset it unless you know why it is there"))
    if env.accelerator == "tpu" and not environ.get("PJRT_DEVICE"):
        fix = "tpukit needs none; libraries that look for GPUs here (accelerate) want PJRT_DEVICE=TPU before Python starts"
        checks.append(Check("variable", NOTE, "PJRT_DEVICE is not set", fix))
    if env.accelerator == "tpu" and env.host == "local" and not environ.get("TPU_SKIP_MDS_QUERY"):
        fix = "fine on a VM of Google Cloud. Elsewhere torch_xla wants both TPU_SKIP_MDS_QUERY=1 and TPU_ACCELERATOR_TYPE"
        checks.append(Check("variable", NOTE, "no variable says which TPU this is: a metadata server is asked", fix))
    return checks


def _disk(env, environ, root):
    place = next(p for p in (env.outputs, *env.outputs.parents) if p.exists())
    if not os.access(place, os.W_OK):
        return [Check("disk", BLOCKS, f"{place} cannot be written", "choose another output folder (--run)")]
    free = shutil.disk_usage(place).free / GIB
    level = BLOCKS if free < 0.5 else WARNING if free < 3 else OK
    fix = (
        "" if level == OK else "delete old runs, or choose another output folder (--run); a checkpoint of MSHNet takes 0.03 GiB"
    )
    return [Check("disk", level, f"{free:.1f} GiB free at {place}", fix)]


def _memory(env, environ, root):
    checks = []
    shared = root / "dev/shm"
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / GIB
        fix = "" if free >= 0.25 else "keep num_workers small; tpukit's own batches use threads, which need none"
        checks.append(Check("shared memory", WARNING if fix else OK, f"{free:.1f} GiB free at {shared}", fix))
    if available := re.search(r"MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo")):
        free = int(available[1]) / 2**20
        fix = "" if free >= 2 else "restart other notebooks; the decoded IRSTD-1k takes 0.3 GiB, torch about 1 GiB"
        checks.append(Check("memory", WARNING if fix else OK, f"{free:.1f} GiB available", fix))
    return checks


def _drive(env, environ, root):
    if env.drive is None:
        return []
    if env.drive.is_dir():
        return [Check("drive", OK, f"mounted at {env.drive}")]
    return [Check("drive", NOTE, "not mounted", "results go with this session; tpukit.mount_drive(env) keeps a copy on Drive")]


def _read(path):
    try:
        return path.read_text(errors="replace")  # a command line may hold any bytes
    except OSError:
        return ""
