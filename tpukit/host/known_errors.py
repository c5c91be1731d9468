"""What goes wrong on accelerators, why, and what to do: the one source of `doctor`, of the fixes of error messages, and of
docs/TROUBLESHOOTING.md.

The errors are those that users of torch_xla, Colab and Kaggle report most; their texts are torch_xla's, libtpu's and PyTorch's.
"""

import dataclasses
import re
import sys


@dataclasses.dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong. code: its name. said: what is to be seen, an error's text or, without a pattern, a symptom.
    why and fix: for a reader; `fix` alone for an error message. pattern: how a message is recognised. asked: how somebody's
    own words are."""

    code: str
    said: str
    why: str
    fix: str
    pattern: str | None = None
    asked: str | None = None


# The first whose pattern fits a message counts.
TROUBLES = (
    Trouble(
        "runtime-open",
        "RuntimeError: Runtime is already initialized. Do not use the XLA device before calling xmp.spawn.",
        "Something in this kernel has opened the TPU already: a training on one core, `torch_xla.device()`, "
        "`xr.world_size()`, `xm.master_print()`, a metrics report. Processes made from it cannot open it again.",
        "This kernel already used the TPU once. Restart the session and touch no device before the launch.",
        r"Runtime is already initialized",
    ),
    # huggingface/accelerate #3524, #940
    Trouble(
        "cuda-fork",
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
        "'spawn' start method",
        "Something in this kernel, or in torchrun's agent, asked CUDA for its devices before the launch, and processes that "
        "are forked from it cannot use CUDA any more. `torch.cuda.is_available()` is enough, though "
        "`torch.cuda.is_initialized()` stays False.",
        "This kernel touched CUDA before the launch. Restart the session and launch first: no tensor on a GPU, no "
        "training on one GPU and no torch.cuda.is_available() before it.",
        r"forked subprocess",
    ),
    Trouble(
        "autograd-before-xla",
        "device_ready_queues_ INTERNAL ASSERT FAILED",
        "Autograd sets up its threads with the first gradient, one for each kind of device that is open then.",
        "A gradient was computed on the CPU before the XLA device was opened, which autograd does not allow. Restart the "
        "session and train on the XLA device first.",
        r"device_ready_queues_",
    ),
    Trouble(
        "nprocs",
        "ValueError: Unsupported nprocs (8). Please use nprocs=1 or None (default).",
        "Old guides start eight processes by `xmp.spawn(fn, nprocs=8)`. PJRT knows itself how many there are.",
        "Today's torch_xla starts all cores by itself: leave nprocs out.",
        r"Unsupported nprocs",
    ),
    Trouble(
        "spawn-from-notebook",
        "AttributeError: Can't get attribute 'train' on <module '__main__' (built-in)>",
        "A process that is started by spawn imports the program anew, and a notebook is no file to import.",
        "Processes started by spawn cannot find functions of a notebook cell: start them by fork. tpukit.launch does.",
        r"Can't get attribute .* on <module '__main__'",
    ),
    Trouble(
        "worker-addresses",
        "Expected 4 worker addresses, got 1",
        "TPU_PROCESS_ADDRESSES=local, which Kaggle sets, is meant for one process; several read it and disagree.",
        "Kaggle sets TPU_PROCESS_ADDRESSES for one process: os.environ.pop('TPU_PROCESS_ADDRESSES') first. tpukit.launch does.",
        r"Expected \d+ worker addresses",
    ),
    Trouble(
        "process-count",
        "Expected 8 processes but got 1",
        "The variables of this host speak of more chips than the processes that were started: TPU_CHIPS_PER_HOST_BOUNDS on "
        "Colab's one chip, or eight cores of which one was asked for.",
        "Start all cores or one: tpukit.launch(..., cores=1) for one chip, or leave cores out for all; in a fresh session.",
        r"Expected \d+ processes,? but got",
    ),
    # pytorch/xla #8591
    Trouble(
        "no-chip-on-bus",
        "ValueError: max_workers must be greater than 0, from torch_xla.launch or xmp.spawn",
        "torch_xla starts a process for each chip that it knows on the PCI bus, and found none: there is no TPU, the bus "
        "is hidden (a container), or this torch_xla is older than the chip (2.4 does not know v6e).",
        "torch_xla finds no TPU chip on the PCI bus: see `tpukit doctor`. Choose a TPU session, or use torch_xla 2.8 or "
        "newer for a v6e; where a container hides the bus, run it privileged, or use one core (cores=1).",
        r"max_workers must be greater than 0",
    ),
    Trouble(
        "metadata",
        "Failed to get TPU metadata",
        "libtpu asks Google Cloud's metadata server what this host is, and there is none here.",
        "This host has no metadata server: set TPU_SKIP_MDS_QUERY=1 and TPU_ACCELERATOR_TYPE (v5litepod-8, for instance) "
        "before Python starts. On Colab and Kaggle start a fresh session instead.",
        r"Failed to get TPU metadata|metadata\.google\.internal.*tpu-env",
    ),
    Trouble(
        "chip-busy",
        "open(/dev/vfio/0): Device or resource busy: Couldn't open iommu group /dev/vfio/0",
        "One process at a time holds a chip: often another notebook's kernel, or one that was not shut down.",
        "Another process holds the chip; `tpukit doctor` names it. End it, or restart the session.",
        r"/dev/(vfio|accel).*busy|Device or resource busy",
    ),
    Trouble(
        "lock-file",
        "The TPU is already in use by process with pid 1234. libtpu_lockfile",
        "libtpu keeps a lock while a process holds the chip; one that was killed can leave it behind.",
        "Another process holds the chip, or left its lock: end it, then remove /tmp/libtpu_lockfile.",
        r"lockfile|TPU is already in use",
    ),
    # pytorch/xla #8960, #9753
    Trouble(
        "no-chip",
        "RuntimeError: TPU initialization failed: No jellyfish device found.",
        "libtpu was asked for a TPU and cannot find one: Kaggle can start a TPU session without one, a rented VM can run "
        "software that is not for its chip, a container may not see the devices.",
        "There is no TPU that libtpu can open: `tpukit doctor` says what is here. On Colab and Kaggle stop the session "
        "and start a TPU session again; on a TPU VM choose the software version of its chip (v2-alpha-tpuv6e for v6e).",
        r"No jellyfish device found|Failed to get global TPU topology|No TPU devices? (were |was )?found|TPU not found",
        asked=r"(can.?t|cannot|not) find (a |the |my )?tpu",
    ),
    # pytorch/xla #8626
    Trouble(
        "cpu-instead",
        "WARNING:root:Defaulting to PJRT_DEVICE=CPU",
        "torch_xla found no TPU library (libtpu) or no chip, and takes the CPU without an error.",
        "torch_xla sees no TPU here: `tpukit doctor` says why. Set PJRT_DEVICE=TPU before Python starts to get an error "
        "instead of the CPU; on Colab and Kaggle choose a TPU session, and do not reinstall torch_xla or libtpu.",
        r"Defaulting to PJRT_DEVICE=CPU",
    ),
    Trouble(
        "broken-pool",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
        "torch_xla waits for its processes in a pool, which only says that one is gone. tpukit shows the failing rank's own "
        "traceback.",
        "One process died and took the others along; the cause is in the first traceback above.",
        r"BrokenProcessPool",
    ),
    Trouble(
        "torch-tpu-symbol",
        "ImportError: torch_tpu/_C.so: undefined symbol: _ZN3c10",
        "torch_tpu (TorchTPU, the successor of torch_xla) is compiled against one version of torch, 2.11 or newer, and "
        "another one is installed.",
        "torch_tpu and torch do not match: install the torch that torch_tpu asks for (pip show torch_tpu), in an "
        "environment of its own. tpukit does not support torch_tpu yet: it needs torch 2.8 or 2.9 with the torch_xla of "
        "the same version.",
        r"undefined symbol.*torch_tpu|torch_tpu.*undefined symbol",
    ),
    Trouble(
        "torch-tpu-launch",
        "RuntimeError: missing required environment variables for distributed training: TORCH_TPU_SLICEBUILDER_ADDRESSES, "
        "TORCH_TPU_TOPOLOGY",
        "Several processes of torch_tpu need variables that torchrun does not set, whatever the message says.",
        "tpukit does not support torch_tpu yet: its launch starts the cores through torch_xla, which needs no such "
        "variable. With torch_tpu itself, use its own launcher, or one process.",
        r"TORCH_TPU_(SLICEBUILDER|TOPOLOGY)",
    ),
    Trouble(
        "torch-tpu-device",
        "ValueError: Cannot set TPU device to index 1, current process is bound to device index 0.",
        "With torch_tpu every process sees its own chip as tpu:0, so that the usual set_device(local_rank) fails in all "
        "but the first.",
        "With torch_tpu leave set_device out: a process has one chip, tpu:0. tpukit does not support torch_tpu yet; it "
        "trains through torch_xla.",
        r"Cannot set TPU device to index",
    ),
    Trouble(
        "torch-tpu-internal",
        "is internal to TorchTPU",
        "torch_tpu keeps a part of its modules and operators for itself.",
        "Call what torch_tpu documents: import torch_tpu, then torch.device('tpu'). tpukit does not support torch_tpu "
        "yet; it trains through torch_xla.",
        r"is internal to TorchTPU",
    ),
    Trouble(
        "versions",
        "ImportError: _XLAC.cpython-312-x86_64-linux-gnu.so: undefined symbol",
        "torch_xla is compiled against one version of torch. Installing another torch over an image's breaks it, and so does "
        "another libtpu, which torch_xla reports as `Unexpected PJRT_Client_Create_Args size`.",
        "torch, torch_xla and libtpu do not match: start a fresh session and install nothing over the image's versions.",
        r"undefined symbol.*(_XLAC|torch)|_XLAC.*undefined symbol|Unexpected PJRT_\w+ size",
    ),
    # pytorch/xla #9614
    Trouble(
        "mosaic",
        "ValueError: Failed to deserialize the Mosaic module: INTERNAL: Unsupported version: expected <= 7 but got 8",
        "A kernel (Pallas, flash attention) was written down by a newer jax or torch_xla than this libtpu reads.",
        "jax, torch_xla and libtpu do not match: start a fresh session and install nothing over the image's versions; on "
        "a machine of your own, reinstall torch_xla with its libtpu and jax together: pip install 'torch_xla[tpu,pallas]'.",
        r"Failed to deserialize the Mosaic module|Unsupported Mosaic version|Mosaic.*expected <= \d+ but got \d+",
    ),
    # pytorch/xla #5240
    Trouble(
        "xla-dist",
        "No module named torch_xla.distributed.xla_dist",
        "Old guides start a slice of several hosts by `python -m torch_xla.distributed.xla_dist`, which is gone.",
        "xla_dist is gone: start the same command on every host of the slice (gcloud compute tpus tpu-vm ssh NAME "
        "--worker=all --command=...); the processes find one another. `tpukit cloud run` does.",
        r"xla_dist\b",
    ),
    # pytorch/xla #4987, googlecolab/colabtools #6081
    Trouble(
        "old-wheel",
        "ERROR: torch_xla-2.0-cp310-cp310-linux_x86_64.whl is not a supported wheel on this platform.",
        "The wheel of an old guide is for another Python (cp310: 3.10). The TPU images of Colab and Kaggle bring a "
        "torch_xla of their own.",
        "Leave the installation out: a TPU session of Colab or Kaggle has torch_xla. Where code needs an older image, "
        "Colab's command palette has *Change runtime version* (26.07 has Python 3.12), for one session at a time.",
        r"is not a supported wheel on this platform",
    ),
    Trouble(
        "no-torch-xla",
        "ModuleNotFoundError: No module named 'torch_xla'",
        "torch_xla is in the TPU images of Colab and Kaggle only; sessions without an accelerator or with a GPU have "
        "none, and a newer image may have dropped it.",
        "Choose a TPU session; do not install torch_xla into another one. If a new Colab image lacks it, take an earlier "
        "one (command palette, *Change runtime version*). On a TPU VM: pip install 'torch_xla[tpu]' with the torch of the "
        "same version.",
        r"No module named '?torch_xla(?!\.?\w)",
    ),
    Trouble(
        "tensorflow",
        "TensorFlow and torch_xla in one process: crashes, or no TPU for torch_xla",
        "TensorFlow, once imported, takes the TPU; some libraries import it only because it is there.",
        "pip uninstall -y tensorflow && pip install tensorflow-cpu, then restart the session; `tpukit doctor` sees it.",
        asked=r"tensorflow.*(conflict|crash|tpu|torch)",
    ),
    Trouble(
        "read-in-step",
        "Unexpected execution happens inside the compiled function",
        "The step has to be one program. `.item()`, `print(loss)`, `if loss > x`, `bool(tensor)` ask for a value in the "
        "middle, so it would be cut.",
        "The step reads a value back from the device in the middle (.item(), print(loss), if loss > x). Sum on the device and "
        "read after the step. `tpukit report RUN --trace 1` names the line.",
        r"Unexpected execution happens inside the compiled function",
    ),
    Trouble(
        "recompiles",
        "maximum number of different graphs exceeded: every step compiles again",
        "A program is made for given shapes and Python numbers. A ragged last batch, a padded length that varies, a number "
        "computed by Python in the step make another program, minutes each. tpukit stops instead, and names what changed.",
        "A batch or a Python number changed its shape or value between steps, so XLA would compile again. Keep every batch "
        "the same shape; declare phases in the workload.",
        r"different graphs|maximum number of.*graphs",
        asked=r"recompil|compil\w* (again|every|each|anew)",
    ),
    # pytorch/xla #9524, #7942, #8429
    Trouble(
        "vmem",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 32.42M of "
        "16.00M vmem.",
        "vmem is the small memory in which a core works on one operation at a time, 16 MiB unless it is told otherwise. One "
        "operation needs more; how large the batch is hardly matters.",
        "One operation does not fit into a core's vmem; the message names it. Use another formulation of it (int32 "
        "instead of int64, no sort, cumsum or top-k over a long axis), smaller blocks in a Pallas kernel, or allow it "
        "more: LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=32768 before Python starts.",
        r"memory space vmem|vmem capacity|scoped vmem limit",
    ),
    Trouble(
        "device-memory",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm",
        "Weights, optimizer state, activations and the program's own buffers do not fit. `tpukit plan --find-batch` asks the "
        "compiler which batch does.",
        "The step does not fit into the device's memory: use a smaller batch_size, a smaller crop, or precision='bf16'.",
        r"RESOURCE_EXHAUSTED|Ran out of memory in memory space|CUDA out of memory|out of memory",
    ),
    Trouble(
        "shared-memory",
        "unable to open shared memory object: No space left on device (/dev/shm)",
        "DataLoader's worker processes hand batches over in shared memory, which containers keep small. tpukit's batches are "
        "made by threads.",
        "Shared memory is full: use num_workers=0.",
        r"No space left on device.*shm|/dev/shm|unable to open shared memory",
    ),
    Trouble(
        "gpu-expected",
        "Launching training on 8 GPUs. nvidia-smi: not found",
        "A library counts eight devices and takes them for GPUs, because nothing says that they are TPU cores.",
        "A GPU was expected on a TPU host: set PJRT_DEVICE=TPU before Python starts. Where there is no TPU either, switch an "
        "accelerator on.",
        r"nvidia-smi.*not found|No such file or directory: '?nvidia-smi|Launching training on \d+ GPUs",
    ),
    # huggingface/trl #4182, huggingface/transformers #29314
    Trouble(
        "checkpointing",
        "AttributeError: module 'torch' has no attribute 'xla'",
        "torch.utils.checkpoint, which gradient checkpointing uses, looks for a module torch.xla, which does not exist. "
        "It was reported after an upgrade of trl from 0.21 to 0.22.",
        "Switch gradient checkpointing off (gradient_checkpointing=False), or use torch_xla.utils.checkpoint.checkpoint "
        "instead of torch.utils.checkpoint.",
        r"module 'torch' has no attribute 'xla'",
    ),
    Trouble(
        "half-on-xla",
        "fp16, GradScaler: errors, or losses of nan, on a TPU",
        "XLA devices train in bfloat16, whose range is that of float32, so that there is nothing to scale.",
        "Use precision='bf16' (or 'auto'): torch.autocast('xla', dtype=torch.bfloat16), without a loss scaler.",
        asked=r"fp16|float16|grad ?scaler",
    ),
    Trouble(
        "old-call",
        "AttributeError: module 'torch_xla.core.xla_model' has no attribute 'xrt_world_size'",
        "The calls of old guides are gone: xrt_world_size, get_ordinal, ParallelLoader's old uses, COLAB_TPU_ADDR.",
        "This call is gone from torch_xla: `tpukit migrate FILE` lists such calls with what replaced them; --fix rewrites the "
        "safe ones.",
        r"(has no attribute|cannot import name) '(xrt_world_size|get_ordinal|is_master_ordinal)'|KeyError: 'COLAB_TPU_ADDR'",
    ),
    Trouble(
        "metric-port",
        "Could not set metric server port",
        "libtpu wants to serve its own metrics, and the port is taken or forbidden.",
        "Harmless: nothing needs that server. Look further down for what really went wrong.",
    ),
    # AI-Hypercomputer/cloud-accelerator-diagnostics #6, #9
    Trouble(
        "tpu-info",
        "Libtpu metrics unavailable. Is there a framework using the TPU?",
        "tpu-info asks the process that holds the chip for its metrics. Without a running training nobody answers; on "
        "Kaggle it shows the chips, but no utilisation.",
        "No fault of the training. `tpukit watch RUN` shows how fast it is, `tpukit report RUN --trace 5` where a step's "
        "time goes.",
        asked=r"tpu-info",
    ),
    Trouble(
        "save-hangs",
        "Saving hangs when only the first process saves",
        "`xm.save` brings the tensors of every process to the host, so every process has to call it.",
        "Call xm.save on all ranks, or save CPU copies by torch.save on rank 0, as tpukit does.",
        asked=r"sav\w+.*hang|hang\w*.*\bsav",
    ),
    Trouble(
        "epoch-hangs",
        "The training hangs at the end of an epoch",
        "The ranks have different numbers of batches: one waits in a gradient sum for others that are done.",
        "Give every rank the same number of steps: drop the ragged tail. tpukit's plan of an epoch is one for all ranks; a "
        "hang is reported with every core's stack after `hang_timeout_s`.",
        asked=r"hang\w*.*epoch|epoch.*hang",
    ),
    Trouble(
        "workers-freeze",
        "DataLoader workers freeze after a fork",
        "A process that is forked from one with threads inherits their locks, but not the threads.",
        "num_workers=0 in a DataLoader, or threads. tpukit's `num_workers` are threads.",
        asked=r"(workers?|dataloader).*(freez|hang|stuck)",
    ),
    Trouble(
        "same-data",
        "Every core sees the same data",
        "MpDeviceLoader and ParallelLoader move batches; they do not share them out.",
        "Use a DistributedSampler with the rank and world size, or tpukit.launch, where rank r takes its part of every global "
        "batch.",
        asked=r"same (data|samples|batch)",
    ),
    Trouble(
        "first-step",
        "The first step takes minutes",
        "The whole step is traced and compiled into one program. Later steps reuse it.",
        "Wait for it: tpukit says when it starts and how long it took. Every session pays it once, because torch_xla cannot "
        "read a kept TPU program back (pytorch/xla #9094).",
        asked=r"first step.*(minute|long|slow|hang)|(minute|long|slow)\w*.*first step",
    ),
    Trouble(
        "slow",
        "A TPU slower than the GPU before",
        "Usually the host is waited for: values read in every step, small batches, a program that is compiled again, data "
        "decoded in one thread.",
        "`tpukit report RUN` says which. Read the loss once in many steps, use a larger batch, keep shapes fixed, keep the "
        "pixels on the device.",
        asked=r"slow\w*.*(gpu|tpu)|tpu.*slow",
    ),
    Trouble(
        "xla-tensors",
        "Could not run 'aten::empty.memory_format' with arguments from the 'XLA' backend: a checkpoint of a TPU elsewhere",
        "torch.save keeps tensors with their device, and `xla:0` exists only there.",
        "Save CPU copies ({name: value.cpu()}). tpukit's checkpoints and best.safetensors hold CPU tensors.",
        r"with arguments from the 'XLA' backend",
        r"(checkpoint|weights).*(load|open)",
    ),
    # Kaggle/kaggle-cli #1197
    Trouble(
        "kaggle-push",
        "kaggle kernels push for a TPU silently gets the standard image, without a TPU",
        "`kaggle kernels pull` writes the image of the old session down, as docker_image in kernel-metadata.json and "
        "dockerImageVersionId in the notebook. A pinned image wins over the TPU that is asked for.",
        "Delete docker_image from kernel-metadata.json and dockerImageVersionId from the notebook's metadata, then push "
        "with machine_shape TpuV5E8. env.require('tpu') in the first cell stops a run without a TPU.",
        r"kernels push\b.*(tpu|image)|dockerImageVersionId|docker_image.*kaggle",
    ),
    Trouble(
        "silent-cpu",
        "A batch run on Kaggle is silently on the CPU",
        "A saved version can get no accelerator when none is free, and the notebook runs anyway.",
        "env.require('tpu') stops it in the first minute; `tpukit doctor` ends with exit code 1.",
        asked=r"silent\w*.*cpu|batch run.*cpu",
    ),
    Trouble(
        "learns-nothing",
        "Nothing learns: the loss stays where it was on a TPU",
        "Moving a model to an XLA device makes new parameters. An optimizer that was made before keeps the old ones.",
        "Make the optimizer after model.to(device). tpukit does; `tpukit migrate` finds it in your code.",
        asked=r"(nothing|not|n't|never) learn|loss.*(stays|constant|not (fall|change))",
    ),
)


def known_error(message):
    """The `Trouble` whose pattern an error message fits, or None."""
    known = (t for t in TROUBLES if t.pattern)
    return next((t for t in known if re.search(t.pattern, message, re.IGNORECASE | re.DOTALL)), None)


def known(message):
    """The `Trouble` of a text that a user saw, or None: also where it is no error of its own."""
    words = message.lower()
    asked = words if len(words) < 100 else ""  # a traceback has many words of others
    named = (t for t in TROUBLES if t.said.lower() in words or (t.asked and re.search(t.asked, asked)))
    return known_error(message) or next(named, None)


def fix_for(message):
    """What to do about an error message of an accelerator's runtime, or None."""
    return (trouble := known_error(message)) and trouble.fix


def explain(message):
    """What to do about a text that a user saw, or None."""
    return (trouble := known(message)) and trouble.fix


HEAD = """# Troubleshooting

[中文](TROUBLESHOOTING.zh-CN.md) · [README](../README.md)

What users of TPUs and GPUs on Colab and Kaggle meet most, by the text that they see. tpukit says the same words when it meets
an error, and knows them for a message from elsewhere too:

    tpukit doctor                                # looks at this machine
    tpukit doctor --error "Unsupported nprocs (8)"

(This page is written by `python -m tpukit.host.known_errors`, from the same list.)
"""


def page():
    """docs/TROUBLESHOOTING.md."""
    parts = [f"\n## {t.said}\n\n**Why.** {t.why}\n\n**What to do.** {t.fix}\n" for t in TROUBLES]
    return HEAD + "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
