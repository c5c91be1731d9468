"""What goes wrong on accelerators, why, and what to do: the one source of `doctor`, of the mends of error messages, and of
docs/TROUBLESHOOTING.md.

The errors are those that users of torch_xla, Colab and Kaggle report most; their texts are torch_xla's, libtpu's and PyTorch's.
"""

import dataclasses
import re
import sys


@dataclasses.dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong. said: what is to be seen, an error's text or, without a pattern, a symptom. why and mend: for
    a reader; `mend` alone for an error message. pattern: how a message is recognised. asked: how somebody's own words are."""

    said: str
    why: str
    mend: str
    pattern: str | None = None
    asked: str | None = None


# The first whose pattern fits a message counts.
TROUBLES = (
    Trouble(
        "RuntimeError: Runtime is already initialized. Do not use the XLA device before calling xmp.spawn.",
        "Something in this kernel has opened the TPU already: a training on one core, `torch_xla.device()`, "
        "`xr.world_size()`, `xm.master_print()`, a metrics report. Processes made from it cannot open it again.",
        "This kernel already used the TPU once. Restart the session and touch no device before the launch.",
        r"Runtime is already initialized",
    ),
    Trouble(
        "device_ready_queues_ INTERNAL ASSERT FAILED",
        "Autograd sets up its threads with the first gradient, one for each kind of device that is open then.",
        "A gradient was computed on the CPU before the XLA device was opened, which autograd does not allow. Restart the "
        "session and train on the XLA device first.",
        r"device_ready_queues_",
    ),
    Trouble(
        "ValueError: Unsupported nprocs (8). Please use nprocs=1 or None (default).",
        "Old guides start eight processes by `xmp.spawn(fn, nprocs=8)`. PJRT knows itself how many there are.",
        "Today's torch_xla starts all cores by itself: leave nprocs out.",
        r"Unsupported nprocs",
    ),
    Trouble(
        "AttributeError: Can't get attribute 'train' on <module '__main__' (built-in)>",
        "A process that is started by spawn imports the program anew, and a notebook is no file to import.",
        "Processes started by spawn cannot find functions of a notebook cell: start them by fork. tpukit.launch does.",
        r"Can't get attribute .* on <module '__main__'",
    ),
    Trouble(
        "Expected 4 worker addresses, got 1",
        "TPU_PROCESS_ADDRESSES=local, which Kaggle sets, is meant for one process; several read it and disagree.",
        "Kaggle sets TPU_PROCESS_ADDRESSES for one process: os.environ.pop('TPU_PROCESS_ADDRESSES') first. tpukit.launch does.",
        r"Expected \d+ worker addresses",
    ),
    Trouble(
        "Expected 8 processes but got 1",
        "The variables of this host speak of more chips than the processes that were started: TPU_CHIPS_PER_HOST_BOUNDS on "
        "Colab's one chip, or eight cores of which one was asked for.",
        "Start all cores or one: tpukit.launch(..., cores=1) for one chip, or leave cores out for all; in a fresh session.",
        r"Expected \d+ processes,? but got",
    ),
    Trouble(
        "Failed to get TPU metadata",
        "libtpu asks Google Cloud's metadata server what this host is, and there is none here.",
        "Set TPU_SKIP_MDS_QUERY=1 before Python starts: this host has no metadata server.",
        r"Failed to get TPU metadata",
    ),
    Trouble(
        "open(/dev/vfio/0): Device or resource busy: Couldn't open iommu group /dev/vfio/0",
        "One process at a time holds a chip: often another notebook's kernel, or one that was not shut down.",
        "Another process holds the chip; `tpukit doctor` names it. End it, or restart the session.",
        r"/dev/(vfio|accel).*busy|Device or resource busy",
    ),
    Trouble(
        "The TPU is already in use by process with pid 1234. libtpu_lockfile",
        "libtpu keeps a lock while a process holds the chip; one that was killed can leave it behind.",
        "Another process holds the chip, or left its lock: end it, then remove /tmp/libtpu_lockfile.",
        r"lockfile|TPU is already in use",
    ),
    Trouble(
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
        "torch_xla waits for its processes in a pool, which only says that one is gone. tpukit shows the failing rank's own "
        "traceback.",
        "One process died and took the others along; the cause is in the first traceback above.",
        r"BrokenProcessPool",
    ),
    Trouble(
        "ImportError: _XLAC.cpython-312-x86_64-linux-gnu.so: undefined symbol",
        "torch_xla is compiled against one version of torch. Installing another torch over an image's breaks it, and so does "
        "another libtpu, which torch_xla reports as `Unexpected PJRT_Client_Create_Args size`.",
        "torch, torch_xla and libtpu do not match: restart a fresh session and install nothing over the image's versions.",
        r"undefined symbol.*(_XLAC|torch)|_XLAC.*undefined symbol|Unexpected PJRT_\w+ size",
    ),
    Trouble(
        "TensorFlow and torch_xla in one process: crashes, or no TPU for torch_xla",
        "TensorFlow, once imported, takes the TPU; some libraries import it only because it is there.",
        "pip uninstall -y tensorflow && pip install tensorflow-cpu, then restart the session; `tpukit doctor` sees it.",
        asked=r"tensorflow.*(conflict|crash|tpu|torch)",
    ),
    Trouble(
        "Unexpected execution happens inside the compiled function",
        "The step has to be one program. `.item()`, `print(loss)`, `if loss > x`, `bool(tensor)` ask for a value in the "
        "middle, so it would be cut.",
        "The step reads a value back from the device in the middle (.item(), print(loss), if loss > x). Sum on the device and "
        "read after the step. `tpukit report RUN --trace 1` names the line.",
        r"Unexpected execution happens inside the compiled function",
    ),
    Trouble(
        "maximum number of different graphs exceeded: every step compiles again",
        "A program is made for given shapes and Python numbers. A ragged last batch, a padded length that varies, a number "
        "computed by Python in the step make another program, minutes each. tpukit stops instead, and names what changed.",
        "A batch or a Python number changed its shape or value between steps, so XLA would compile again. Keep every batch "
        "the same shape; declare phases in the workload.",
        r"different graphs|maximum number of.*graphs",
        asked=r"recompil|compil\w* (again|every|each|anew)",
    ),
    Trouble(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm",
        "Weights, optimizer state, activations and the program's own buffers do not fit. `tpukit plan --find-batch` asks the "
        "compiler which batch does.",
        "The step does not fit into the device's memory: use a smaller batch_size, a smaller crop, or precision='bf16'.",
        r"RESOURCE_EXHAUSTED|Ran out of memory in memory space|CUDA out of memory|out of memory",
    ),
    Trouble(
        "unable to open shared memory object: No space left on device (/dev/shm)",
        "DataLoader's worker processes hand batches over in shared memory, which containers keep small. tpukit's batches are "
        "made by threads.",
        "Shared memory is full: use num_workers=0.",
        r"No space left on device.*shm|/dev/shm|unable to open shared memory",
    ),
    Trouble(
        "Launching training on 8 GPUs. nvidia-smi: not found",
        "A library counts eight devices and takes them for GPUs, because nothing says that they are TPU cores.",
        "A GPU was expected on a TPU host: set PJRT_DEVICE=TPU before Python starts.",
        r"nvidia-smi.*not found|Launching training on \d+ GPUs",
    ),
    Trouble(
        "fp16, GradScaler: errors, or losses of nan, on a TPU",
        "XLA devices train in bfloat16, whose range is that of float32, so that there is nothing to scale.",
        "Use precision='bf16' (or 'auto'): torch.autocast('xla', dtype=torch.bfloat16), without a loss scaler.",
        asked=r"fp16|float16|grad ?scaler",
    ),
    Trouble(
        "AttributeError: module 'torch_xla.core.xla_model' has no attribute 'xrt_world_size'",
        "The calls of old guides are gone: xrt_world_size, get_ordinal, ParallelLoader's old uses, COLAB_TPU_ADDR.",
        "This call is gone from torch_xla: `tpukit migrate FILE` lists such calls with what replaced them; --fix rewrites the "
        "safe ones.",
        r"(has no attribute|cannot import name) '(xrt_world_size|get_ordinal|is_master_ordinal)'|KeyError: 'COLAB_TPU_ADDR'",
    ),
    Trouble(
        "Could not set metric server port",
        "libtpu wants to serve its own metrics, and the port is taken or forbidden.",
        "Harmless: nothing needs that server. Look further down for what really went wrong.",
    ),
    Trouble(
        "Saving hangs when only the first process saves",
        "`xm.save` brings the tensors of every process to the host, so every process has to call it.",
        "Call xm.save on all ranks, or save CPU copies by torch.save on rank 0, as tpukit does.",
        asked=r"sav\w+.*hang|hang\w*.*\bsav",
    ),
    Trouble(
        "The training hangs at the end of an epoch",
        "The ranks have different numbers of batches: one waits in a gradient sum for others that are done.",
        "Give every rank the same number of steps: drop the ragged tail. tpukit's plan of an epoch is one for all ranks; a "
        "hang is reported with every core's stack after `hang_timeout_s`.",
        asked=r"hang\w*.*epoch|epoch.*hang",
    ),
    Trouble(
        "DataLoader workers freeze after a fork",
        "A process that is forked from one with threads inherits their locks, but not the threads.",
        "num_workers=0 in a DataLoader, or threads. tpukit's `num_workers` are threads.",
        asked=r"(workers?|dataloader).*(freez|hang|stuck)",
    ),
    Trouble(
        "Every core sees the same data",
        "MpDeviceLoader and ParallelLoader move batches; they do not share them out.",
        "Use a DistributedSampler with the rank and world size, or tpukit.launch, where rank r takes its part of every global "
        "batch.",
        asked=r"same (data|samples|batch)",
    ),
    Trouble(
        "The first step takes minutes",
        "The whole step is traced and compiled into one program. Later steps reuse it.",
        "Wait for it once: tpukit says when it starts and how long it took. A later session compiles it again.",
        asked=r"first step.*(minute|long|slow|hang)|(minute|long|slow)\w*.*first step",
    ),
    Trouble(
        "A TPU slower than the GPU before",
        "Usually the host is waited for: values read in every step, small batches, a program that is compiled again, data "
        "decoded in one thread.",
        "`tpukit report RUN` says which. Read the loss once in many steps, use a larger batch, keep shapes fixed, keep the "
        "pixels on the device.",
        asked=r"slow\w*.*(gpu|tpu)|tpu.*slow",
    ),
    Trouble(
        "Could not run 'aten::empty.memory_format' with arguments from the 'XLA' backend: a checkpoint of a TPU elsewhere",
        "torch.save keeps tensors with their device, and `xla:0` exists only there.",
        "Save CPU copies ({name: value.cpu()}). tpukit's checkpoints and best.safetensors hold CPU tensors.",
        r"with arguments from the 'XLA' backend",
        r"(checkpoint|weights).*(load|open)",
    ),
    Trouble(
        "A batch run on Kaggle is silently on the CPU",
        "A saved version can get no accelerator when none is free, and the notebook runs anyway.",
        "env.require('tpu') stops it in the first minute; `tpukit doctor` ends with exit code 1.",
        asked=r"silent\w*.*cpu|batch run.*cpu",
    ),
    Trouble(
        "Nothing learns: the loss stays where it was on a TPU",
        "Moving a model to an XLA device makes new parameters. An optimizer that was made before keeps the old ones.",
        "Make the optimizer after model.to(device). tpukit does; `tpukit migrate` finds it in your code.",
        asked=r"(nothing|not|n't|never) learn|loss.*(stays|constant|not (fall|change))",
    ),
)


def mend_for(message):
    """What to do about an error message of an accelerator's runtime, or None."""
    known = (t for t in TROUBLES if t.pattern)
    return next((t.mend for t in known if re.search(t.pattern, message, re.IGNORECASE | re.DOTALL)), None)


def about(message):
    """What to do about a text that a user saw, or None: also where it is no error of its own."""
    words = message.lower()
    asked = words if len(words) < 100 else ""  # a traceback has many words of others
    mends = (t.mend for t in TROUBLES if t.said.lower() in words or (t.asked and re.search(t.asked, asked)))
    return mend_for(message) or next(mends, None)


HEAD = """# Troubleshooting

[中文](TROUBLESHOOTING.zh-CN.md) · [README](../README.md)

What users of TPUs and GPUs on Colab and Kaggle meet most, by the text that they see. tpukit says the same words when it meets
an error, and knows them for a message from elsewhere too:

    tpukit doctor                                # looks at this machine
    tpukit doctor --error "Unsupported nprocs (8)"

(This page is written by `python -m tpukit.troubles`, from the same list.)
"""


def page():
    """docs/TROUBLESHOOTING.md."""
    parts = [f"\n## {t.said}\n\n**Why.** {t.why}\n\n**What to do.** {t.mend}\n" for t in TROUBLES]
    return HEAD + "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
