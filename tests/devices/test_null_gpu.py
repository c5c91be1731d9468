"""PyTorch's own CUDA code on a GPU that computes nothing, see null_gpu/cuda.cpp: what is launched, captured
and waited for."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.launching.conftest import CPU

pytestmark = pytest.mark.slow
SITE = Path(torch.__file__).parent.parent
HEADERS = [SITE / "nvidia/cudnn/include", SITE / "triton/backends/nvidia/include"]
SOURCES = [ROOT / f"tests/devices/null_gpu/{name}.cpp" for name in ("cuda", "libraries")]
WAITS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaHostAlloc",
}


@pytest.fixture(scope="session")
def null_gpu(tmp_path_factory):
    """The built library. It has the name of the driver's, which torch looks for."""
    if not (torch.version.cuda or "").startswith("12."):
        pytest.skip("needs a torch that was built for CUDA 12")
    if not shutil.which("g++") or not all(folder.is_dir() for folder in HEADERS):
        pytest.skip("needs g++, and the headers that come with torch's CUDA packages and triton")
    library = tmp_path_factory.mktemp("null_gpu") / "libcuda.so.1"
    options = "-std=c++17 -O1 -w -fPIC -shared -Wl,-soname,libcuda.so.1".split()
    headers = [f"-I{folder}" for folder in HEADERS]
    subprocess.run(["g++", *options, "-o", library, *SOURCES, *headers], check=True, timeout=300)
    return library


@pytest.fixture(scope="session")
def on_null_gpu(null_gpu):
    """A function that calls one of `on_null_gpu` in a process of its own and returns its result."""

    def call(function, card="H200", cards=1, **arguments):
        environ = {name: value for name, value in CPU.items() if name != "CUDA_VISIBLE_DEVICES"}
        environ |= dict(TPUKIT_CACHE=os.environ["TPUKIT_CACHE"], TPUKIT_OFFLINE="1", OMP_NUM_THREADS="1")
        environ |= dict(LD_PRELOAD=str(null_gpu), NULL_GPU_NAME=card, NULL_GPU_CARDS=str(cards))
        options = json.dumps(arguments, default=str)
        command = [sys.executable, "-m", "tests.devices.on_null_gpu", function, options]
        ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500)
        assert "RESULT " in ran.stdout, ran.stdout[-2000:] + ran.stderr[-4000:]
        return json.loads(ran.stdout.split("RESULT ")[1])

    return call


def launches(counts):
    return sum(number for what, number in counts.items() if what.startswith("launched "))


def frequent(counts):
    """The kernels of a step, the most frequent first: what to look at where there are too many."""
    return "\n".join(f"{counts[what]} {what}" for what in sorted(counts, key=counts.get, reverse=True)[:20])


def check_steps(found):
    """Three steps as they are, one that is captured, and then each is one launch, for which the host waits
    for nothing."""
    *warm_ups, captured, first, second, last = found["steps"]
    assert found["why"] == [[]]
    assert [counts.get("cudaGraphLaunch", 0) for counts in found["steps"]] == [0, 0, 0, 1, 1, 1, 1]
    assert launches(warm_ups[-1]) + 1 >= captured["captured nodes"] > 10 * launches(last)
    for counts in (first, second, last):
        assert not WAITS & counts.keys() and launches(counts) == counts["launched copy"] < 12
    assert not [what for counts in found["steps"] for what in counts if what.startswith("refused")]


@pytest.fixture(scope="session")
def of_tasks(on_null_gpu, digits, infrared, tank, shapes, tmp_path_factory):
    """(card, kind, precision) -> `count_steps`. MSHNet as published: 256 pixels, 4 images a step."""
    pytest.importorskip("timm")
    mnist, cdeit = dict(kind="mnist", folder=digits), dict(kind="cdeit", folder=tank)
    mshnet = dict(kind="mshnet", folder=infrared, base_size=256, crop_size=256)
    images = dict(kind="images", folder=shapes)
    tasks = [dict(mnist, precision="fp32"), mnist, dict(mshnet, precision="bf16"), cdeit, images]
    found = {}
    for card, ours in dict(H200=tasks, T4=[mnist, mshnet, cdeit]).items():
        counted = on_null_gpu("steps", card, tasks=ours, run=tmp_path_factory.mktemp(card) / "run")
        found |= {
            (card, task["kind"], task.get("precision", "auto")): steps for task, steps in zip(ours, counted)
        }
    return found


def test_a_step_of_each_task_is_one_launch_and_waits_for_nothing(of_tasks):
    assert len(of_tasks) == 8
    for found in of_tasks.values():
        check_steps(found)


@pytest.mark.parametrize("card, precision, nodes", [("H200", "bf16", 2000), ("T4", "auto", 2400)])
def test_a_step_of_mshnet_launches_and_moves_no_more_than_it_needs(card, precision, nodes, of_tasks):
    found = of_tasks[card, "mshnet", precision]
    captured = found["steps"][3]
    assert captured["captured nodes"] <= nodes, frequent(captured)
    assert found["bytes"] <= 6.0e9


def test_a_training_is_evaluated_saved_and_resumed_around_its_captured_steps(on_null_gpu, digits, tmp_path):
    tasks = [dict(kind="mnist", folder=digits, epochs=epochs) for epochs in (1, 3, 4)]
    trainings = on_null_gpu("trainings", tasks=tasks, run=tmp_path / "run")
    # Of 8 steps of the first one's trial, too: a process tries once.
    for ran, steps, tried in zip(trainings, (25, 50, 25), (8 - 3, 0, 0), strict=True):
        assert (ran["ending"], ran["refused"], ran["launches"]) == ("done", [], steps - 3 + tried)
    assert len({ran["memory"] for ran in trainings}) == 1, "a training leaves memory behind"


BROKEN = {  # (what, always) -> the reason in the log
    ("forward", False): "not permitted when stream is capturing",
    ("copy", False): "not permitted when stream is capturing",
    ("error", False): "ValueError: mine",
    ("interrupt", False): None,
    ("backward", False): "not permitted when stream is capturing",
    ("forward", True): "the host waits for the GPU in on_null_gpu.py line",
    ("backward", True): "the host waits for the GPU in on_null_gpu.py line",
    ("draw", True): "random numbers were drawn on the host",
    ("buffer", True): "replaces parameters or buffers",
    ("decay", True): "Adagrad computes with numbers on the host",
    ("settings", True): "the optimizer's seen is new",
}


def test_a_capture_that_breaks_costs_the_graph_alone_and_the_next_training_is_captured(
    on_null_gpu, digits, tmp_path
):
    found = on_null_gpu("broken", folder=digits, run=tmp_path / "run", ways=list(BROKEN))
    for ((what, always), reason), ran in zip(BROKEN.items(), found, strict=True):
        broken, sound, peaks = ran["broken"], ran["sound"], ran["broken"]["peaks"]
        ending = "done" if reason else "KeyboardInterrupt"
        assert broken["launches"] == 0 and broken["ending"] == ending, what
        assert len(broken["why"]) == bool(reason) and (not reason or reason in broken["why"][0][0]), broken
        assert not always or not broken["refused"], "found before the capture"
        assert len(peaks) == (4 if reason else 0) and all(peak < 1 for peak in peaks), (what, peaks)
        assert (sound["ending"], sound["why"], sound["launches"], sound["refused"]) == ("done", [[]], 22, [])


@pytest.mark.parametrize("batch_norm", ["per-core", "synced"])
def test_on_two_gpus_a_step_is_one_launch_that_holds_the_all_reduce(
    batch_norm, on_null_gpu, infrared, tmp_path
):
    task = dict(kind="mshnet", folder=infrared, batch_norm=batch_norm, precision="fp16")
    found = on_null_gpu("steps_of_two", cards=2, task=task, run=tmp_path / "run")
    check_steps(found)
    assert found["steps"][3]["launched ncclAllReduce"] >= 1
    assert found["of_the_launching_process"] == {"memory": 0}, "which then could not fork"


@pytest.mark.parametrize(
    "what, always, reason",
    [("forward", True, "the host waits for the GPU in on_null_gpu.py line"), ("error", False, "mine")],
)
def test_what_one_gpu_cannot_capture_no_gpu_captures_and_rank_0_says_why(
    what, always, reason, on_null_gpu, digits, tmp_path
):
    task = dict(kind="breaking", folder=digits, what=what, always=always, rank="1")
    found = on_null_gpu("steps_of_two", cards=2, task=task, run=tmp_path / "run")
    assert len(found["why"]) == 1 and reason in found["why"][0][0]
    assert not [counts for counts in found["steps"] if "cudaGraphLaunch" in counts]
