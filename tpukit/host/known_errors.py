"""Known errors of accelerators, their causes and fixes: used by `tpukit doctor`, by error messages and for
docs/TROUBLESHOOTING.md. The error texts are those of torch_xla, libtpu and PyTorch.
"""

import contextlib
import dataclasses
import re
import sys
import traceback

from tpukit.host.errors import TpukitError


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownError:
    """A known problem. cause and fix are for a reader; error messages show the fix alone."""

    title: str
    """What the user sees: the text of an error, or a symptom."""
    cause: str
    fix: str
    pattern: str | None = None
    """Matches error messages; None for a symptom that is not an error message."""
    phrases: str | None = None
    """Matches how users describe it, in lower case."""


# By a code of its own. The first entry whose pattern matches a message counts.
KNOWN_ERRORS = {
    "runtime-open": KnownError(
        title=(
            "RuntimeError: Runtime is already initialized. Do not use the XLA device before calling"
            " xmp.spawn."
        ),
        cause=(
            "Something in this kernel has opened the TPU (training on one core, `torch_xla.device()`,"
            " `xr.world_size()`, `xm.master_print()`, a metrics report), so processes forked from it cannot."
        ),
        fix="This kernel has already used the TPU. Restart the session and use no device before the launch.",
        pattern=r"Runtime is already initialized",
    ),
    "torch-tpu-fork": KnownError(  # before the next, whose text it resembles
        title=(
            "RuntimeError: cannot access or re-initialize TPU in a forked subprocess. To use TPU with"
            " multiprocessing, you must use the 'spawn' start method"
        ),
        cause=(
            'Something in this kernel has used the TPU through torch_tpu (a tensor on "tpu", a training on'
            " one core), so processes forked from it cannot."
        ),
        fix="This kernel has already used the TPU. Restart the session and use no device before the launch.",
        pattern=r"re-initialize TPU in a forked subprocess",
    ),
    "cuda-fork": KnownError(  # huggingface/accelerate #3524, #940
        title=(
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing,"
            " you must use the 'spawn' start method"
        ),
        cause=(
            "Something in this kernel, or in torchrun's agent, queried CUDA before the launch."
            " `torch.cuda.is_available()` is enough, although `torch.cuda.is_initialized()` stays False."
        ),
        fix=(
            "This kernel used CUDA before the launch. Restart the session and launch first: before it no"
            " tensor on a GPU, no training on one GPU and no torch.cuda.is_available()."
        ),
        pattern=r"forked subprocess|fork-based multiprocessing",  # the second: of autograd
    ),
    "autograd-before-xla": KnownError(
        title="device_ready_queues_ INTERNAL ASSERT FAILED",
        cause=(
            "At the first gradient autograd starts one thread for each type of device that is open at that"
            " time."
        ),
        fix=(
            "A gradient was computed before the XLA device was opened. Restart the session and train on the"
            " XLA device first."
        ),
        pattern=r"device_ready_queues_",
    ),
    "nprocs": KnownError(
        title="ValueError: Unsupported nprocs (8). Please use nprocs=1 or None (default).",
        cause=(
            "Old guides start eight processes with `xmp.spawn(fn, nprocs=8)`. PJRT determines the number"
            " itself."
        ),
        fix="Current torch_xla starts all cores by itself: leave nprocs out.",
        pattern=r"Unsupported nprocs",
    ),
    "spawn-from-notebook": KnownError(
        title="AttributeError: Can't get attribute 'train' on <module '__main__' (built-in)>",
        cause="A spawned process imports the main module again, and a notebook cannot be imported.",
        fix="Spawned processes cannot find functions of a notebook cell: use fork, as tpukit.launch does.",
        pattern=r"Can't get attribute .* on <module '__main__'",
    ),
    "worker-addresses": KnownError(
        title="Expected 4 worker addresses, got 1",
        cause="TPU_PROCESS_ADDRESSES=local, which Kaggle sets, is valid for a single process only.",
        fix=(
            "Call os.environ.pop('TPU_PROCESS_ADDRESSES') before starting several processes; tpukit.launch"
            " does."
        ),
        pattern=r"Expected \d+ worker addresses",
    ),
    "process-count": KnownError(
        title="Expected 8 processes but got 1",
        cause=(
            "The environment declares more chips than processes were started: TPU_CHIPS_PER_HOST_BOUNDS on"
            " Colab's single chip, for example, or eight cores of which one was requested."
        ),
        fix="Start all cores (leave cores out) or one (tpukit.launch(..., cores=1)), in a fresh session.",
        pattern=r"Expected \d+ processes,? but got",
    ),
    "no-chip-on-bus": KnownError(  # pytorch/xla #8591
        title="ValueError: max_workers must be greater than 0, from torch_xla.launch or xmp.spawn",
        cause=(
            "torch_xla starts a process for each chip that it recognizes on the PCI bus, and found none:"
            " there is no TPU, a container hides the bus, or this torch_xla is older than the chip (2.4 does"
            " not know v6e)."
        ),
        fix=(
            "torch_xla finds no TPU chip on the PCI bus: run `tpukit doctor`. Choose a TPU session, or use"
            " torch_xla 2.8 or newer for a v6e. If a container hides the bus, run it privileged, or use one"
            " core (cores=1)."
        ),
        pattern=r"max_workers must be greater than 0",
    ),
    "metadata": KnownError(
        title="Failed to get TPU metadata",
        cause="libtpu asks Google Cloud's metadata server about this host, and there is no such server here.",
        fix=(
            "This host has no metadata server: set TPU_SKIP_MDS_QUERY=1 and TPU_ACCELERATOR_TYPE (for example"
            " v5litepod-8) before Python starts. On Colab and Kaggle start a fresh session instead."
        ),
        pattern=r"Failed to get TPU metadata|metadata\.google\.internal.*tpu-env",
    ),
    "worker-hostname": KnownError(  # ARahim3/kaggle-tpu-lab #6
        title=(
            "INVALID_ARGUMENT: Error: unexpected worker hostname 'WARNING: could not determine TPU worker"
            " hostnames or IP addresses' from env var TPU_WORKER_HOSTNAMES"
        ),
        cause=(
            "The host's look-up of its own addresses failed, and the text of the warning was left in"
            " TPU_WORKER_HOSTNAMES, in TPU_ACCELERATOR_TYPE, or in both. libtpu takes it for a value."
        ),
        fix=(
            "tpukit replaces these texts before it opens a chip. In other code set"
            " TPU_WORKER_HOSTNAMES=localhost and TPU_ACCELERATOR_TYPE (v5litepod-8 on Kaggle) before"
            " torch_xla or jax is imported, or start a fresh session."
        ),
        pattern=(
            r"unexpected worker hostname|could not determine TPU (worker|accelerator)|Failed to find host"
            r" bounds"
        ),
    ),
    "chip-busy": KnownError(
        title="open(/dev/vfio/0): Device or resource busy: Couldn't open iommu group /dev/vfio/0",
        cause="Only one process at a time can use a chip. Often another notebook's kernel still holds it.",
        fix=(
            "Another process holds the chip; `tpukit doctor` names it. End that process, or restart the"
            " session."
        ),
        pattern=r"/dev/(vfio|accel).*busy|Device or resource busy",
    ),
    "lock-file": KnownError(
        title="The TPU is already in use by process with pid 1234. libtpu_lockfile",
        cause=(
            "libtpu keeps a lock file while a process holds the chip; a process that was killed can leave it"
            " behind."
        ),
        fix=(
            "Another process holds the chip, or left its lock file: end that process, then remove"
            " /tmp/libtpu_lockfile."
        ),
        pattern=r"lockfile|TPU is already in use",
    ),
    "no-chip": KnownError(  # pytorch/xla #8960, #9753
        title="RuntimeError: TPU initialization failed: No jellyfish device found.",
        cause=(
            "Kaggle can start a TPU session without a TPU, a rented VM can have the wrong software version"
            " for its chip, and a container may not see the devices."
        ),
        fix=(
            "There is no TPU that libtpu can open: `tpukit doctor` shows what is here. On Colab and Kaggle"
            " stop the session and start a TPU session again; on a TPU VM choose the software version of its"
            " chip (v2-alpha-tpuv6e for v6e)."
        ),
        pattern=(
            r"No jellyfish device found|Failed to get global TPU topology|No TPU devices? (were |was"
            r" )?found|TPU not found"
        ),
        phrases=r"(can.?t|cannot|not) find (a |the |my )?tpu",
    ),
    "cpu-instead": KnownError(  # pytorch/xla #8626
        title="WARNING:root:Defaulting to PJRT_DEVICE=CPU",
        cause=(
            "torch_xla found no TPU library (libtpu) or no chip, and falls back to the CPU without an error."
        ),
        fix=(
            "torch_xla sees no TPU here: `tpukit doctor` shows why. Set PJRT_DEVICE=TPU before Python starts"
            " to get an error instead of the CPU; on Colab and Kaggle choose a TPU session, and do not"
            " reinstall torch_xla or libtpu."
        ),
        pattern=r"Defaulting to PJRT_DEVICE=CPU",
    ),
    "broken-pool": KnownError(
        title=(
            "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated"
            " abruptly"
        ),
        cause=(
            "torch_xla's process pool reports only that a process died. tpukit shows the traceback of the"
            " failed rank."
        ),
        fix="One process died and took the others down; the cause is in the first traceback above.",
        pattern=r"BrokenProcessPool",
    ),
    "torch-tpu-symbol": KnownError(
        title=(
            "ImportError: torch_tpu/csrc/common/glue_2_15_0/libpywrap_2_15_0_common.so: undefined symbol:"
            " _ZN3c10"
        ),
        cause=(
            "torch_tpu (TorchTPU, the successor of torch_xla) has an extension for each torch from 2.11 to"
            " 2.15, and loads the newest into a newer torch."
        ),
        fix=(
            "torch_tpu and torch do not match: install the torch that torch_tpu requires (pip show torch_tpu)"
            " in a separate environment. On Colab and Kaggle start a fresh session instead; `tpukit doctor`"
            " shows which versions fit."
        ),
        pattern=r"undefined symbol.*torch_tpu|torch_tpu.*undefined symbol",
    ),
    "torch-tpu-launch": KnownError(
        title=(
            "RuntimeError: missing required environment variables for distributed training: "
            "TORCH_TPU_SLICEBUILDER_ADDRESSES, TORCH_TPU_TOPOLOGY"
        ),
        cause=(
            "torch_tpu needs environment variables that torchrun does not set, although the message"
            " recommends torchrun."
        ),
        fix=(
            "Start the processes by tpukit.launch, which sets these variables, or export what "
            "`python -m torch.tpu.distributed` prints before torchrun."
        ),
        pattern=r"program via torchrun or similar tools|TORCH_TPU_(SLICEBUILDER|TOPOLOGY)",
    ),
    "torch-tpu-torch": KnownError(
        title=(
            "ImportError: torch_tpu has no extension module compatible with PyTorch 2.9.0: it predates the"
            " oldest supported release."
        ),
        cause=(
            "torch_tpu was installed beside a torch that is too old for it: torch_tpu 0.2 has code for 2.11"
            " to 2.15. `import torch` loads it, and ends with `Failed to load the backend extension:"
            " torch_tpu`."
        ),
        fix=(
            "torch_tpu and torch do not match: `tpukit doctor` shows which versions fit. On Colab and Kaggle"
            " start a fresh session; elsewhere install torch_tpu in an environment of its own, where pip"
            " takes a torch that fits. With TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch leaves it alone."
        ),
        pattern=(
            r"torch_tpu has no extension module|Extensions are available for PyTorch|backend extension:"
            r" torch_tpu"
        ),
    ),
    "torch-tpu-shape": KnownError(
        title="RuntimeError: No TPU topology found for count: 2",
        cause="torch_tpu knows how the chips of a v5e host are linked for 1, 4 and 8 of them.",
        fix="torch_tpu starts 1, 4 or 8 chips of a v5e host: use cores=1, cores=4 or cores=8.",
        pattern=r"No TPU topology found for count",
    ),
    "torch-tpu-inductor": KnownError(
        title=(
            "torch.compile(..., backend='inductor') on TPU is experimental and does not yet have full TPU"
            " support"
        ),
        cause=(
            "torch_tpu has a backend of its own for torch.compile, and refuses torch's default one where it"
            " is named."
        ),
        fix="Leave `backend` out of torch.compile, or pass backend='tpu'.",
        pattern=r"backend='inductor'\) on TPU",
    ),
    "torch-tpu-dynamic": KnownError(
        title="NotImplementedError: TPU backend does not support torch.compile(..., dynamic=True, ...).",
        cause="torch_tpu compiles a graph for each shape, and refuses dynamic shapes.",
        fix="Pass dynamic=False to torch.compile, and keep every batch the same shape.",
        pattern=r"TPU backend does not support torch\.compile",
    ),
    "inference-tensor": KnownError(
        title="RuntimeError: Cannot set version_counter for inference tensor",
        cause=(
            "torch.inference_mode makes tensors that a TPU's backends cannot use: torch_xla raises this"
            " error, and torch.compile through torch_tpu is reported to crash."
        ),
        fix="Use torch.no_grad() instead of torch.inference_mode().",
        pattern=r"Cannot set version_counter for inference tensor",
    ),
    "torch-tpu-device": KnownError(
        title="ValueError: Cannot set TPU device to index 1, current process is bound to device index 0.",
        cause=(
            "With torch_tpu each process sees its own chip as tpu:0: set_device(local_rank) fails in all but"
            " the first."
        ),
        fix="Do not call set_device: with torch_tpu each process has one chip, tpu:0.",
        pattern=r"Cannot set TPU device to index",
    ),
    "torch-tpu-internal": KnownError(
        title="is internal to TorchTPU",
        cause="Some modules and operators of torch_tpu are private.",
        fix=(
            "Use the documented interface: torch.device('tpu'), torch.tpu, and torch.accelerator"
            " (synchronize, device_count)."
        ),
        pattern=r"is internal to TorchTPU",
    ),
    "versions": KnownError(
        title="ImportError: _XLAC.cpython-312-x86_64-linux-gnu.so: undefined symbol",
        cause=(
            "torch_xla is compiled for one version of torch: another torch installed over the image's breaks"
            " it. So does another libtpu, which torch_xla reports as `Unexpected PJRT_Client_Create_Args"
            " size`."
        ),
        fix=(
            "torch, torch_xla and libtpu do not match: start a fresh session and install nothing over the"
            " image's versions."
        ),
        pattern=r"undefined symbol.*(_XLAC|torch)|_XLAC.*undefined symbol|Unexpected PJRT_\w+ size",
    ),
    "mosaic": KnownError(  # pytorch/xla #9614
        title=(
            "ValueError: Failed to deserialize the Mosaic module: INTERNAL: Unsupported version: expected <="
            " 7 but got 8"
        ),
        cause=(
            "A kernel (Pallas, flash attention) was serialized by a newer jax or torch_xla than this libtpu"
            " can read."
        ),
        fix=(
            "jax, torch_xla and libtpu do not match: start a fresh session and install nothing over the"
            " image's versions; on your own machine, reinstall torch_xla together with its libtpu and jax:"
            " pip install 'torch_xla[tpu,pallas]'."
        ),
        pattern=(
            r"Failed to deserialize the Mosaic module|Unsupported Mosaic version|Mosaic.*expected <= \d+ but"
            r" got \d+"
        ),
    ),
    "xla-dist": KnownError(  # pytorch/xla #5240
        title="No module named torch_xla.distributed.xla_dist",
        cause=(
            "Old guides start a slice of several hosts with `python -m torch_xla.distributed.xla_dist`, which"
            " was removed."
        ),
        fix=(
            "xla_dist was removed: start the same command on every host of the slice (gcloud compute tpus"
            " tpu-vm ssh NAME --worker=all --command=...); the processes find one another."
        ),
        pattern=r"xla_dist\b",
    ),
    "old-wheel": KnownError(  # pytorch/xla #4987, googlecolab/colabtools #6081
        title="ERROR: torch_xla-2.0-cp310-cp310-linux_x86_64.whl is not a supported wheel on this platform.",
        cause="The wheel of an old guide is for another Python version (cp310 is 3.10).",
        fix=(
            "Leave the installation out: a TPU session of Colab or Kaggle has torch_xla. For code that needs"
            " an older image, use *Change runtime version* in Colab's command palette (26.07 has Python"
            " 3.12); it applies to one session."
        ),
        pattern=r"is not a supported wheel on this platform",
    ),
    "no-torch-xla": KnownError(
        title="ModuleNotFoundError: No module named 'torch_xla'",
        cause=(
            "Only the TPU images of Colab and Kaggle include torch_xla, and a newer image may have"
            " dropped it."
        ),
        fix=(
            "Choose a TPU session; do not install torch_xla into another one. If a new Colab image lacks it,"
            " choose an earlier one (command palette, *Change runtime version*). On a TPU VM: pip install"
            " torch~=2.9.0 'torch_xla[tpu]~=2.9.0'."
        ),
        pattern=r"No module named '?torch_xla(?!\.?\w)",
    ),
    "tensorflow": KnownError(
        title="TensorFlow and torch_xla in one process: crashes, or no TPU for torch_xla",
        cause=(
            "TensorFlow claims the TPU when it is imported, and some libraries import it whenever it is"
            " installed."
        ),
        fix=(
            "pip uninstall -y tensorflow && pip install tensorflow-cpu, then restart the session; `tpukit"
            " doctor` detects it."
        ),
        phrases=r"tensorflow.*(conflict|crash|tpu|torch)",
    ),
    "read-in-step": KnownError(
        title="Unexpected execution happens inside the compiled function",
        cause=(
            "The step must be one graph. `.item()`, `print(loss)`, `if loss > x` and `bool(tensor)` would"
            " split it."
        ),
        fix=(
            "The step reads a value back from the device in the middle (.item(), print(loss), if loss > x)."
            " Accumulate on the device and read after the step. `tpukit report RUN --trace 1` shows the line."
        ),
        pattern=r"Unexpected execution happens inside the compiled function",
    ),
    "recompiles": KnownError(
        title="maximum number of different graphs exceeded: every step compiles again",
        cause=(
            "A graph is compiled for given shapes and Python numbers. A ragged last batch, a varying padded"
            " length or a number computed by Python requires another one, which takes minutes. tpukit stops"
            " instead, and names what changed."
        ),
        fix=(
            "A batch changed its shape, or a Python number its value, between steps, so XLA would compile"
            " again. Keep all batches the same shape; choose between losses by torch.where."
        ),
        pattern=r"different graphs|maximum number of.*graphs",
        phrases=r"recompil|compil\w* (again|every|each|anew)",
    ),
    "vmem": KnownError(  # pytorch/xla #9524, #7942, #8429
        title=(
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem."
            " Used 32.42M of 16.00M vmem."
        ),
        cause=(
            "One operation may use 16 MiB of a core's on-chip memory (vmem) by default. This one needs more,"
            " whatever the batch size."
        ),
        fix=(
            "One operation does not fit into a core's vmem; the message names it. Use another formulation of"
            " it (int32 instead of int64; no sort, cumsum or top-k over a long axis), use smaller blocks in a"
            " Pallas kernel, or raise the limit: LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=32768"
            " before Python starts."
        ),
        pattern=r"memory space vmem|vmem capacity|scoped vmem limit",
    ),
    "device-memory": KnownError(
        title="RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm",
        cause=(
            "Weights, optimizer state and activations do not fit. `tpukit plan --find-batch` finds the"
            " largest batch."
        ),
        fix=(
            "The step does not fit into the device's memory: use a smaller batch_size, a smaller crop, or"
            " precision='bf16'."
        ),
        pattern=r"RESOURCE_EXHAUSTED|out of memory",
    ),
    "shared-memory": KnownError(
        title="unable to open shared memory object: No space left on device (/dev/shm)",
        cause=(
            "Worker processes of a DataLoader pass batches through shared memory, which is small in"
            " containers."
        ),
        fix="Shared memory is full: use num_workers=0 in a DataLoader. tpukit's own workers are threads.",
        pattern=r"No space left on device.*shm|/dev/shm|unable to open shared memory",
    ),
    "gpu-expected": KnownError(
        title="Launching training on 8 GPUs. nvidia-smi: not found",
        cause="A library counts eight devices and assumes GPUs, because nothing declares them as TPU cores.",
        fix=(
            "On a TPU host set PJRT_DEVICE=TPU before Python starts. If there is no TPU either, switch an"
            " accelerator on."
        ),
        pattern=(
            r"nvidia-smi.*not found|No such file or directory: '?nvidia-smi|Launching training on \d+ GPUs"
        ),
    ),
    "checkpointing": KnownError(  # huggingface/trl #4182, huggingface/transformers #29314
        title="AttributeError: module 'torch' has no attribute 'xla'",
        cause=(
            "torch.utils.checkpoint, which gradient checkpointing uses, looks for a module torch.xla, which"
            " does not exist."
        ),
        fix=(
            "Set gradient_checkpointing=False, or use torch_xla.utils.checkpoint instead of"
            " torch.utils.checkpoint."
        ),
        pattern=r"module 'torch' has no attribute 'xla'",
    ),
    "half-on-xla": KnownError(
        title="fp16 or GradScaler on a TPU: errors, or a loss of NaN",
        cause="XLA devices train in bfloat16. Its range is that of float32, so there is nothing to scale.",
        fix=(
            "Use precision='bf16' (or 'auto'): torch.autocast('xla', dtype=torch.bfloat16), without a loss"
            " scaler."
        ),
        phrases=r"fp16|float16|grad ?scaler",
    ),
    "old-call": KnownError(
        title="AttributeError: module 'torch_xla.core.xla_model' has no attribute 'xrt_world_size'",
        cause=(
            "The calls of old guides were removed: xrt_world_size, get_ordinal, old uses of ParallelLoader,"
            " COLAB_TPU_ADDR."
        ),
        fix=(
            "This call was removed: `tpukit migrate FILE` lists such calls and their replacements; --fix"
            " rewrites safe ones."
        ),
        pattern=(
            r"(no attribute|import name) '(xrt_world_size|get_ordinal|is_master_ordinal)'|KeyError:"
            r" 'COLAB_TPU_ADDR'"
        ),
    ),
    "metric-port": KnownError(
        title="Could not set metric server port",
        cause="libtpu tries to serve its own metrics, and the port is in use or not permitted.",
        fix="Harmless: nothing needs that server. The real error is further down.",
    ),
    "tpu-info": KnownError(  # AI-Hypercomputer/cloud-accelerator-diagnostics #6, #9
        title="Libtpu metrics unavailable. Is there a framework using the TPU?",
        cause=(
            "tpu-info asks the process that holds the chip: without a training nothing answers, on Kaggle"
            " only in part."
        ),
        fix=(
            "The training is not affected. `tpukit report RUN --follow` shows its log; `tpukit report RUN"
            " --trace 5` profiles it."
        ),
        phrases=r"tpu-info",
    ),
    "save-hangs": KnownError(
        title="Saving hangs when only the first process saves",
        cause="`xm.save` copies the tensors of every process to the host, so every process must call it.",
        fix="Call xm.save on all ranks, or save CPU copies with torch.save on rank 0, as tpukit does.",
        phrases=r"sav\w+.*hang|hang\w*.*\bsav",
    ),
    "epoch-hangs": KnownError(
        title="The training hangs at the end of an epoch",
        cause=(
            "The ranks have different numbers of batches: one waits in an all-reduce for ranks that have"
            " finished."
        ),
        fix=(
            "Give every rank the same number of steps: drop the ragged last batch. In tpukit all ranks follow"
            " one plan; a hang is reported with the stack of every core after `hang_timeout_s`."
        ),
        phrases=r"hang\w*.*epoch|epoch.*hang",
    ),
    "workers-freeze": KnownError(
        title="DataLoader workers freeze after a fork",
        cause="A process that is forked from one with threads inherits their locks, but not the threads.",
        fix="Use num_workers=0 in a DataLoader, or threads. tpukit's `num_workers` are threads.",
        phrases=r"(workers?|dataloader).*(freez|hang|stuck)",
    ),
    "same-data": KnownError(
        title="Every core sees the same data",
        cause="MpDeviceLoader and ParallelLoader move batches to the device; they do not shard them.",
        fix=(
            "Use a DistributedSampler with the rank and world size. In tpukit each rank takes its part of"
            " every global batch."
        ),
        phrases=r"same (data|samples|batch)",
    ),
    "first-step": KnownError(
        title="The first step takes minutes",
        cause="The whole step is traced and compiled into one graph, which later steps reuse.",
        fix=(
            "Wait for it: tpukit prints when the compilation starts and how long it took. Every session"
            " compiles once, because torch_xla cannot reload a TPU graph from a compilation cache"
            " (pytorch/xla #9094)."
        ),
        phrases=r"first step.*(minute|long|slow|hang)|(minute|long|slow)\w*.*first step",
    ),
    "slow": KnownError(
        title="The TPU is slower than a GPU",
        cause=(
            "Usually it waits for the host: values read in every step, small batches, compilation, data from"
            " one thread."
        ),
        fix=(
            "`tpukit report RUN` shows which. Read the loss rarely, use large batches of one shape, keep"
            " pixels on the device."
        ),
        phrases=r"slow\w*.*(gpu|tpu)|tpu.*slow",
    ),
    "cuda-graph": KnownError(
        title="`step` is not captured as a CUDA graph, because the host waits for the GPU in loss.py line 12",
        cause=(
            "Something in the step cannot be replayed: a value is read on the host (`.item()`, `if tensor:`,"
            " a mask that makes a shape), a random number is drawn there, the optimizer computes on the host,"
            " or the step takes over half of the memory. PyTorch says: operation not permitted when stream is"
            " capturing."
        ),
        fix=(
            "The training is right, only slower. Keep values in tensors on the GPU (torch.where instead of"
            " if), use a smaller batch, or an optimizer with capturable=True. `--no-cuda-graph` captures"
            " nothing."
        ),
        pattern=r"not captured as a CUDA graph|when stream is capturing",
    ),
    "xla-tensors": KnownError(
        title=(
            "Could not run 'aten::empty.memory_format' with arguments from the 'XLA' backend: a checkpoint"
            " saved on a TPU"
        ),
        cause="torch.save stores tensors with their device, and `xla:0` does not exist elsewhere.",
        fix=(
            "Save CPU copies ({name: value.cpu()}). tpukit's checkpoints and best.safetensors hold CPU"
            " tensors."
        ),
        pattern=r"with arguments from the 'XLA' backend",
        phrases=r"(checkpoint|weights).*(load|open)",
    ),
    "kaggle-push": KnownError(  # Kaggle/kaggle-cli #1197
        title="kaggle kernels push for a TPU silently gets the standard image, without a TPU",
        cause=(
            "`kaggle kernels pull` records the image of the old session, which overrides the requested TPU."
        ),
        fix=(
            "Delete docker_image from kernel-metadata.json and dockerImageVersionId from the notebook's"
            " metadata, then push with machine_shape TpuV5E8. env.require('tpu') in the first cell stops a"
            " run without a TPU."
        ),
        pattern=r"kernels push\b.*(tpu|image)|dockerImageVersionId|docker_image.*kaggle",
    ),
    "silent-cpu": KnownError(
        title="A batch run on Kaggle silently uses the CPU",
        cause="A saved version can get no accelerator when none is free, and the notebook runs anyway.",
        fix="env.require('tpu') stops such a run in the first minute; `tpukit doctor` ends with exit code 1.",
        phrases=r"silent\w*.*cpu|batch run.*cpu",
    ),
    "learns-nothing": KnownError(
        title="The model does not learn on a TPU: the loss stays constant",
        cause=(
            "Moving a model to an XLA device creates new parameters. An optimizer created before keeps the"
            " old ones."
        ),
        fix=(
            "Create the optimizer after model.to(device). tpukit does; `tpukit migrate` finds this in your"
            " code."
        ),
        phrases=r"(nothing|not|n't|never) learn|loss.*(stays|constant|not (fall|change))",
    ),
}


def match(message):
    """The `KnownError` whose pattern matches an error message, or None."""
    for known in KNOWN_ERRORS.values():
        if known.pattern and re.search(known.pattern, message, re.IGNORECASE | re.DOTALL):
            return known
    return None


def find(text):
    """The `KnownError` of a text that a user saw or wrote, or None. Also finds symptoms that are not error
    messages."""
    if known := match(text):
        return known
    text = text.lower()
    for known in KNOWN_ERRORS.values():
        # A long text, such as a traceback, has many words that are not about the error.
        described = known.phrases and len(text) < 100 and re.search(known.phrases, text)
        if known.title.lower() in text or described:
            return known
    return None


def fix_for(message):
    """How to fix an error of an accelerator's runtime, or None for an unknown message."""
    known = match(message)
    return known.fix if known else None


HEAD = """# Troubleshooting

[中文](TROUBLESHOOTING.zh-CN.md) · [README](../README.md)

The problems that users of TPUs and GPUs on Colab and Kaggle meet most often, by the text that they see. tpukit adds the same
fix to an error of its own, and knows messages from elsewhere as well:

    tpukit doctor                                # checks this machine
    tpukit doctor --error "Unsupported nprocs (8)"

(This page is generated by `python -m tpukit.host.known_errors`.)
"""


@contextlib.contextmanager
def explain_known_errors():
    """Context manager: raise an error of an accelerator's runtime that has a known fix as a TpukitError with
    the fix."""
    try:
        yield
    except TpukitError:
        raise
    except Exception as error:
        fix = fix_for(str(error))
        if fix is None:
            raise
        traceback.clear_frames(error.__traceback__)  # a notebook keeps it, and with it a step's activations
        # The runtime's first lines name the problem and, where a shape changed, the shape; the rest is its
        # own stack.
        lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
        raise TpukitError("\n".join([*lines[:3], fix])) from error


def page():
    """The text of docs/TROUBLESHOOTING.md."""
    sections = [
        f"\n## {e.title}\n\n**Cause.** {e.cause}\n\n**Fix.** {e.fix}\n" for e in KNOWN_ERRORS.values()
    ]
    return HEAD + "".join(sections)


if __name__ == "__main__":
    sys.stdout.write(page())
