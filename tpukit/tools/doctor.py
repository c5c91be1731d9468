"""`tpukit doctor`: what stands between this machine and training, one line each with its mend. Touches no device, unless a
model is to be tried."""

import copy
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tpukit import environment
from tpukit.tables import GIB, Table
from tpukit.troubles import mend_for

OK, NOTE, WARNING, BLOCKS = "ok", "note", "warning", "BLOCKS"
NEEDED = ("numpy", "pillow", "safetensors", "scikit-image", "tqdm", "rich", "tyro", "matplotlib", "scipy", "pyeit", "libcst")
FOR_ONE_COMMAND = dict(pyeit="tpukit simulate eit", libcst="tpukit migrate")
LARGEST_MOVE = 0.05  # of an output by half precision, as a share of its norm


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding: what was looked at, level (ok, note, warning, BLOCKS), what was found, and the mend."""

    what: str
    level: str
    found: str
    mend: str = ""


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

    The batch is one made-up sample. Weights are the task's own, or fresh ones; what starts at zero is made small random
    numbers then, so that every part of the model has a say in its output. Returns a list of `Check`.
    """
    import torch

    from tpukit import weights
    from tpukit.devices import open_runtime

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
            mend = "train in fp32" if exact is not None else (mend_for(reason) or "")
            said.append(
                Check(f"{task.name} in {precision}", WARNING if exact is not None else BLOCKS, f"does not run: {reason}", mend)
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
        mend = (
            "" if fine else "more than rounding explains: train in fp32, and look for sums over many numbers in half precision"
        )
        said.append(Check(f"{task.name} in {precision}", OK if fine else WARNING, found, mend))
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
    rows = [(c.what, c.level, c.found, c.mend) for c in sorted(checks, key=lambda c: order.index(c.level))]
    return Table("Checks", ("what", "level", "found", "mend"), rows)


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
    if missing and set(missing) <= FOR_ONE_COMMAND.keys():
        said = ", ".join(f"{name}, for `{FOR_ONE_COMMAND[name]}` alone" for name in missing)
        return [Check("packages", NOTE, f"missing: {said}", f"pip install {' '.join(missing)}")]
    if missing:
        return [Check("packages", BLOCKS, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")]
    return [Check("packages", OK, "all there")]


def _torch(env, environ, root):
    version = env.versions.get("torch")
    if version is None:
        return [
            Check("torch", BLOCKS, "not installed", "pip install torch (on Colab and Kaggle: start a fresh session instead)")
        ]
    problem = import_problem("torch", environ)
    if problem:
        mend = mend_for(problem) or "reinstall torch, or start a fresh session"
        return [Check("torch", BLOCKS, f"{version} cannot be imported: {problem}", mend)]
    checks = [Check("torch", OK, version)]
    if tuple(int(p) for p in re.findall(r"\d+", version)[:2]) < (2, 8):
        checks = [Check("torch", WARNING, version, "tpukit is tried with torch 2.8 and newer")]
    gpus = environment.nvidia_gpus(environ)
    if gpus and "+cpu" in version and env.accelerator != "xla":
        checks.append(
            Check("torch", BLOCKS, f"{version} has no CUDA, but a GPU is here: {gpus[0]}", "install a CUDA build of torch")
        )
    if any("P100" in gpu for gpu in gpus):
        checks.append(Check("gpu", WARNING, "P100: today's torch is no longer built for it", "choose GPU T4 x2 instead"))
    return checks


def import_problem(package, environ):
    """The last line of the error of importing a package in a process of its own, or None if it imports."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import {package}"], env={**environ, "TPU_SKIP_MDS_QUERY": "1"}, capture_output=True, text=True
    )
    lines = ran.stderr.strip().splitlines()
    return None if ran.returncode == 0 else (lines[-1] if lines else f"ended with code {ran.returncode}")


def _torch_xla(env, environ, root):
    torch, xla = env.versions.get("torch"), env.versions.get("torch_xla")
    if xla is None:
        return []
    if torch and torch.split(".")[:2] != xla.split(".")[:2]:
        mend = (
            f"pip install torch_xla=={'.'.join(torch.split('.')[:2])}.0, or start a fresh session and install nothing over it"
        )
        return [Check("torch_xla", BLOCKS, f"{xla} does not match torch {torch}", mend)]
    if torch and (problem := import_problem("torch_xla", environ)):
        mend = mend_for(problem) or "start a fresh session and install nothing over the image's versions"
        return [Check("torch_xla", BLOCKS, f"{xla} cannot be imported: {problem}", mend)]
    checks = [Check("torch_xla", OK, xla)]
    wanted, found = _wanted_libtpu(), env.versions.get("libtpu")
    if environment.tpu_chips(root) and found is None:
        checks.append(
            Check("libtpu", BLOCKS, "not installed", f"pip install {f'libtpu=={wanted}' if wanted else 'torch_xla[tpu]'}")
        )
    elif wanted and found and wanted != found:
        checks.append(
            Check("libtpu", WARNING, f"{found}, but torch_xla {xla} was built for {wanted}", f"pip install libtpu=={wanted}")
        )
    return checks


def _wanted_libtpu():
    """The libtpu version that the installed torch_xla names in its `tpu` extra, or None."""
    import importlib.metadata

    for requirement in importlib.metadata.requires("torch_xla") or []:
        if named := re.match(r"libtpu\s*==\s*([\d.]+)", requirement):
            return named[1]
    return None


def _tensorflow(env, environ, root):
    if "torch_xla" in env.versions and "tensorflow" in env.versions and "tensorflow-cpu" not in env.versions:
        mend = "it takes the TPU when imported: pip uninstall -y tensorflow && pip install tensorflow-cpu"
        return [Check("tensorflow", WARNING, f"{env.versions['tensorflow']} beside torch_xla", mend)]
    return []


def _accelerator(env, environ, root):
    chips = environment.tpu_chips(root)
    found = f"{env.accelerator}: {env.device_name}"
    pjrt = environ.get("PJRT_DEVICE", "").upper()
    if pjrt and pjrt not in ("CPU", "TPU"):
        return [
            Check(
                "accelerator", BLOCKS, f"PJRT_DEVICE={pjrt}", "torch_xla knows TPU and CPU today; for a GPU unset PJRT_DEVICE"
            )
        ]
    if pjrt == "TPU" and not chips:
        mend = "unset PJRT_DEVICE. " + environment.TPU_MENU[env.host]
        return [Check("accelerator", BLOCKS, "PJRT_DEVICE=TPU, but no TPU chip is on the PCI bus", mend)]
    if chips and env.accelerator == "xla":
        return [
            Check("accelerator", WARNING, f"{chips} TPU chips are here, but PJRT_DEVICE=CPU hides them", "unset PJRT_DEVICE")
        ]
    if chips and env.accelerator != "tpu":
        mend = "start a fresh session; on a TPU VM: pip install 'torch_xla[tpu]'"
        return [Check("accelerator", BLOCKS, f"{chips} TPU chips are here, but torch_xla is not installed", mend)]
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
    if lock.exists() and not checks and environment.tpu_chips(root):
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
        mend = "`launch` takes it away; before starting one process a core yourself: os.environ.pop('TPU_PROCESS_ADDRESSES')"
        checks.append(Check("variable", NOTE, f"TPU_PROCESS_ADDRESSES={environ['TPU_PROCESS_ADDRESSES']}", mend))
    chips, expected = environment.tpu_chips(root), environment.chips_by_bounds(environ)
    if chips and expected and expected != chips:
        found = f"TPU_CHIPS_PER_HOST_BOUNDS={environ['TPU_CHIPS_PER_HOST_BOUNDS']} means {expected} chips, {chips} here"
        checks.append(
            Check("variable", NOTE, found, "one core works; a launch of one process a core would wait for the missing ones")
        )
    if environ.get("XLA_FLAGS"):
        checks.append(Check("variable", NOTE, f"XLA_FLAGS={environ['XLA_FLAGS']}", "unset it unless you know why it is there"))
    if env.accelerator == "tpu" and not environ.get("PJRT_DEVICE"):
        mend = "tpukit needs none; libraries that look for GPUs here (accelerate) want PJRT_DEVICE=TPU before Python starts"
        checks.append(Check("variable", NOTE, "PJRT_DEVICE is not set", mend))
    if env.accelerator == "tpu" and env.host == "local" and not environ.get("TPU_SKIP_MDS_QUERY"):
        checks.append(
            Check("variable", NOTE, "TPU outside Google's hosts", "if 'Failed to get TPU metadata' comes: TPU_SKIP_MDS_QUERY=1")
        )
    return checks


def _disk(env, environ, root):
    place = next(p for p in (env.outputs, *env.outputs.parents) if p.exists())
    if not os.access(place, os.W_OK):
        return [Check("disk", BLOCKS, f"{place} cannot be written", "choose another output folder (--run)")]
    free = shutil.disk_usage(place).free / GIB
    level = BLOCKS if free < 0.5 else WARNING if free < 3 else OK
    mend = (
        "" if level == OK else "delete old runs, or choose another output folder (--run); a checkpoint of MSHNet takes 0.03 GiB"
    )
    return [Check("disk", level, f"{free:.1f} GiB free at {place}", mend)]


def _memory(env, environ, root):
    checks = []
    shared = root / "dev/shm"
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / GIB
        mend = "" if free >= 0.25 else "keep num_workers small; tpukit's own batches use threads, which need none"
        checks.append(Check("shared memory", WARNING if mend else OK, f"{free:.1f} GiB free at {shared}", mend))
    if available := re.search(r"MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo")):
        free = int(available[1]) / 2**20
        mend = "" if free >= 2 else "restart other notebooks; the decoded IRSTD-1k takes 0.3 GiB, torch about 1 GiB"
        checks.append(Check("memory", WARNING if mend else OK, f"{free:.1f} GiB available", mend))
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
