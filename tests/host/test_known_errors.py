"""Known errors: recognized by their own text, by what users posted, and by how users describe them."""

import pytest

from tpukit import TpukitError, cli
from tpukit.host import known_errors
from tpukit.host.known_errors import KNOWN_ERRORS


@pytest.mark.parametrize("code", [code for code, error in KNOWN_ERRORS.items() if error.pattern])
def test_the_text_on_the_page_is_recognized_and_doctor_prints_its_fix(code, capsys):
    error = KNOWN_ERRORS[code]
    assert known_errors.match(error.title) is error and known_errors.fix_for(error.title) == error.fix
    assert cli.main(["doctor", "--error", f"Traceback\n{error.title}\n at line 3"]) == 0
    assert capsys.readouterr().out.strip() == error.fix


def test_a_symptom_is_found_by_its_text_but_is_no_cause_of_an_error(capsys):
    message = "E1121 Could not set metric server port: 8431"
    assert cli.main(["doctor", "--error", message]) == 0
    assert capsys.readouterr().out.strip() == KNOWN_ERRORS["metric-port"].fix
    assert known_errors.fix_for(message) is None  # whatever raised it has another cause


def test_an_unknown_text_is_no_known_error(capsys):
    assert known_errors.find("the moon is full") is None
    assert cli.main(["doctor", "--error", "the moon is full"]) == 1
    assert "Troubleshooting" in capsys.readouterr().out


def test_every_known_error_can_be_recognized():
    assert [code for code, error in KNOWN_ERRORS.items() if not error.pattern and not error.phrases] == [
        "metric-port"
    ]


def test_the_texts_of_torch_tpu_are_not_taken_for_those_of_cuda_or_torch_xla():
    codes = [code for code in KNOWN_ERRORS if code.startswith("torch-tpu")]
    assert [known_errors.match(KNOWN_ERRORS[code].title) for code in codes] == [
        KNOWN_ERRORS[code] for code in codes
    ]
    assert "forked subprocess" in KNOWN_ERRORS["torch-tpu-fork"].title and len(codes) == 9


# What users posted -> the code of its entry.
THREADS = {
    # huggingface/accelerate #3358
    "FileNotFoundError: [Errno 2] No such file or directory: 'nvidia-smi'": "gpu-expected",
    # a log of February 2026
    "Failed to find host bounds for accelerator type: WARNING: could not determine TPU accelerator type, please set env var `TPU_ACCELERATOR_TYPE` manually, otherwise libtpu.so may not properly initialize.": (
        "worker-hostname"
    ),
    # huggingface/trl #4182
    "AttributeError: module 'torch' has no attribute 'xla'": "checkpointing",
    # pytorch/xla #9614
    "ValueError: Failed to deserialize the Mosaic module: INTERNAL: Unsupported version: expected <= 7 but got 8": (
        "mosaic"
    ),
    # pytorch/xla #8591
    'File "/usr/lib/python3.10/concurrent/futures/process.py", line 611, in __init__\nraise ValueError("max_workers must be greater than 0")\nValueError: max_workers must be greater than 0': (
        "no-chip-on-bus"
    ),
    # pytorch/xla #8960
    "Everyting installs correct but execution can't find TPU?": "no-chip",
    # pytorch/xla #8626
    "WARNING:root:Defaulting to PJRT_DEVICE=CPU": "cpu-instead",
    # pytorch/xla #9753
    "RuntimeError: Bad StatusOr access: INTERNAL: Failed to get global TPU topology.": "no-chip",
    "ModuleNotFoundError: No module named 'torch_xla'": "no-torch-xla",
    # pytorch/xla #5010, #4974
    "ERROR: torch_xla-2.0-cp39-cp39-linux_x86_64.whl is not a supported wheel on this platform.": "old-wheel",
    # ronghanghu/vit_10b_fsdp_example #1
    "python3: No module named torch_xla.distributed.xla_dist": "xla-dist",
    # huggingface/accelerate #940
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method": (
        "cuda-fork"
    ),
    # Kaggle/kaggle-cli #1197
    "`kaggle kernels push` accepts `enable_tpu`/`machine_shape` for TPU but silently provisions the standard (non-TPU) image": (
        "kaggle-push"
    ),
    # AI-Hypercomputer/cloud-accelerator-diagnostics #9, #6
    "The `!tpu-info` can only detect TPU chips on Kaggle and can't show utilization": "tpu-info",
    "Libtpu metrics unavailable. Is there a framework using the TPU? See https://github.com/google/cloud-accelerator-diagnostics/tree/main/tpu_info for more information": (
        "tpu-info"
    ),
    "Backend 'tpu' failed to initialize: UNKNOWN: TPU initialization failed: No jellyfish device found.": (
        "no-chip"
    ),
    "RuntimeError: missing required environment variables for distributed training: TORCH_TPU_SLICEBUILDER_ADDRESSES, TORCH_TPU_TOPOLOGY; please run the program via torchrun or similar tools": (
        "torch-tpu-launch"
    ),
    "ValueError: Cannot set TPU device to index 1, current process is bound to device index 0. Changing the active TPU device within a process is not supported.": (
        "torch-tpu-device"
    ),
    # of torch_tpu, where module and symbol differ from one report to the next
    "torch_tpu._internal is internal to TorchTPU": "torch-tpu-internal",
    # seen with 0.2.0: its extension for torch 2.15 in torch 2.13; a launch without MASTER_ADDR; beside torch
    # 2.9
    "ImportError: /usr/lib/python3/site-packages/torch_tpu/_internal/../csrc/common/glue_2_15_0/libpywrap_2_15_0_common.so: undefined symbol: _ZN3c1013GeneratorImpl12philox_stateEmRN2at6TensorES3_S3_": (
        "torch-tpu-symbol"
    ),
    "FAILED_PRECONDITION: missing required environment variables for distributed training: MASTER_ADDR, MASTER_PORT; please run the program via torchrun or similar tools so that the environment is set up properly": (
        "torch-tpu-launch"
    ),
    "RuntimeError: Failed to load the backend extension: torch_tpu. You can disable extension auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0.": (
        "torch-tpu-torch"
    ),
    # pytorch/xla #9524, #6611
    "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem. Exceeded vmem capacity by 16.42M": (
        "vmem"
    ),
    "EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %reduce-window.1": (
        "vmem"
    ),
    # Lightning-AI/pytorch-lightning #20244
    "RuntimeError: Bad StatusOr access: UNKNOWN: TPU initialization failed: Invalid --2a886c8_slice_builder_worker_addresses specified. Expected 4 worker addresses, got 1.": (
        "worker-addresses"
    ),
    # Kaggle/docker-python #1499
    "pjrt_c_api_helpers.cc:258] Unexpected error status Unexpected PJRT_Plugin_Attributes_Args size: expected 32, got 24.": (
        "versions"
    ),
    # pytorch/xla #2538
    "ImportError: /opt/conda/lib/python3.7/site-packages/_XLAC.cpython-37m-x86_64-linux-gnu.so: undefined symbol: _ZN5torch11CppFunctionC1EN3c1014KernelFunctionE": (
        "versions"
    ),
    # pytorch/xla #6568
    "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: http://metadata.google.internal/computeMetadata/v1/instance/attributes/tpu-env": (
        "metadata"
    ),
    # pytorch/xla #8234
    "BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running or pending.": (
        "broken-pool"
    ),
    # huggingface/accelerate #2893
    "Launching training on 8 GPUs.": "gpu-expected",
    "RuntimeError: Runtime is already initialized. Do not use the XLA device before calling xmp.spawn.": (
        "runtime-open"
    ),
    "ValueError: Unsupported nprocs (8). Please use nprocs=1 or None (default).": "nprocs",
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.10G of 15.75G hbm.": (
        "device-memory"
    ),
}


@pytest.mark.parametrize("text", THREADS)
def test_a_text_that_users_posted_gets_its_entry(text, capsys):
    error = KNOWN_ERRORS[THREADS[text]]
    assert known_errors.find(text) is error
    assert cli.main(["doctor", "--error", text]) == 0 and capsys.readouterr().out.strip() == error.fix


# How users describe a problem in forums and in the issue lists of the platforms -> the code of its entry.
DESCRIPTIONS = {
    "Unexpected PJRT_Client_Create_Args size: expected 64, got 56": "versions",
    "NotImplementedError: Could not run 'aten::empty.memory_format' with arguments from the 'XLA' backend": (
        "xla-tensors"
    ),
    "ImportError: cannot import name 'xrt_world_size'": "old-call",
    "KeyError: 'COLAB_TPU_ADDR'": "old-call",
    "TensorFlow conflict": "tensorflow",
    "save hangs on master only": "save-hangs",
    "hang at epoch end": "epoch-hangs",
    "DataLoader workers freeze after fork": "workers-freeze",
    "every core sees the same data": "same-data",
    "recompiles every step": "recompiles",
    "minutes-long first step": "first-step",
    "slower than a GPU": "slow",
    "fp16 on XLA": "half-on-xla",
    "checkpoint will not load off-TPU": "xla-tensors",
    "batch run silently on CPU": "silent-cpu",
}


@pytest.mark.parametrize("text", DESCRIPTIONS)
def test_a_users_own_description_gets_its_entry(text):
    assert known_errors.find(text) is KNOWN_ERRORS[DESCRIPTIONS[text]]


@pytest.mark.parametrize(
    "text", ["loss 0.5 at step 3", "File tensorflow/python/x.py line 3", "how do I save the model?"]
)
def test_an_unrelated_text_is_not_guessed_at(text):
    assert known_errors.find(text) is None


@pytest.mark.parametrize(
    "message, word",
    [
        (
            "Runtime is already initialized. Do not use the XLA device before calling xmp.spawn",
            "Restart the session",
        ),
        ("Expected 4 worker addresses, got 1", "TPU_PROCESS_ADDRESSES"),
        ("open(/dev/vfio/0): Device or resource busy: Couldn't open iommu group", "doctor"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.", "smaller batch_size"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "smaller batch_size"),
        ("_XLAC.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN5torch4lazy", "do not match"),
        ("Failed to get TPU metadata (tpu-env) from instance metadata", "TPU_SKIP_MDS_QUERY=1"),
        ("0 <= device.index() && device.index() < device_ready_queues_.size()", "Restart the session"),
    ],
)
def test_errors_of_the_runtime_are_raised_with_their_fix(message, word):
    with pytest.raises(TpukitError, match=word), known_errors.explain_known_errors():
        raise RuntimeError(message)
    assert known_errors.fix_for("some other problem") is None


def test_an_error_without_a_known_fix_stays_what_it_was():
    with pytest.raises(KeyError), known_errors.explain_known_errors():
        raise KeyError("x")
