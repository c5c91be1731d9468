"""The training loop and its run directory: what is recorded, what survives, and what is refused."""

import copy
import dataclasses
import gc
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import SMALL, best_weights, checkpoint, exact, same
from tpukit import CDEIT, MNIST, MSHNet, Run, TpukitError, Workload, train
from tpukit.devices.runtime import Runtime
from tpukit.devices.xla import XLARuntime
from tpukit.runs.run import setting
from tpukit.training.data import BatchLoader, evaluation_plan, training_plan
from tpukit.training.divergence import Diverged
from tpukit.training.evaluation import evaluate

# Every workload


@pytest.mark.parametrize("name", ["mnist", "mshnet", "cdeit"])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_every_workload_moves_its_weights_scores_and_shows(name, device, digits, infrared, tank, tmp_path, request, capsys):
    from tpukit import show
    from tpukit.reporting import figures

    runtime = request.getfixturevalue(device)
    task = {
        "mnist": lambda: MNIST(dataset_dir=digits, epochs=2, **SMALL),
        "mshnet": lambda: MSHNet(dataset_dir=infrared, epochs=2, warm_epoch=0, base_size=32, crop_size=32, **SMALL),
        "cdeit": lambda: CDEIT(dataset_dir=tank, epochs=2, patch=16, width=16, heads=2, window=4, levels=1, lr=1e-3, **SMALL),
    }[name]()
    run = Run.open(tmp_path / "run", task)
    torch.manual_seed(task.seed)
    before = task.model().state_dict()
    scores = train(task, run, runtime=runtime, progress=False)
    after = checkpoint(run)["model"]
    assert all(not torch.equal(before[n], after[n]) for n in before if n.endswith("weight")), "a weight did not move"
    assert -1 <= scores[task.score] <= 1
    assert all(v.device.type == "cpu" for v in after.values())
    assert run.records("train")[-1]["grad_norm"] > 0
    (
        figures.show_task(task),
        figures.show_samples(task),
        show(run),
        figures.show_report(run),
        figures.show_predictions(run, task),
    )
    assert (run.path / "pictures/curves.png").stat().st_size > 5000
    assert (run.path / "pictures/predictions.png").stat().st_size > 3000
    assert f"It ran on {runtime}" in capsys.readouterr().out


def test_mnist_learns_made_up_digits(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, epochs=16, lr=0.03, **SMALL)
    assert train(task, Run.open(tmp_path, task), runtime=cpu, progress=False)["accuracy"] > 0.7  # 0.1 by guessing


# Which samples


def test_an_epoch_sees_every_sample_once_and_drops_only_the_tail():
    seen = np.concatenate([indices for indices, _, _ in training_plan(23, 5, seed=1, epoch=0)])
    assert len(seen) == 20 == len(set(seen))
    other = np.concatenate([indices for indices, _, _ in training_plan(23, 5, seed=1, epoch=1)])
    assert not np.array_equal(seen, other)


def test_a_plan_started_in_the_middle_equals_the_rest_of_the_whole_one():
    whole = list(training_plan(40, 4, seed=3, epoch=2, num_draws=6))
    rest = list(training_plan(40, 4, seed=3, epoch=2, num_draws=6, start=7))
    for (a, b, _), (c, d, _) in itertools.zip_longest(whole[7:], rest):
        assert np.array_equal(a, c) and np.array_equal(b, d)


@pytest.mark.parametrize("size, batch", [(10, 4), (8, 4), (3, 8), (1, 1)])
def test_an_evaluation_sees_every_sample_once_in_batches_of_one_shape(size, batch):
    plan = list(evaluation_plan(size, batch))
    assert all(len(indices) == batch for indices, _, _ in plan)
    assert np.concatenate([indices[valid] for indices, _, valid in plan]).tolist() == list(range(size))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_in_order_whatever_the_number_of_workers(workers, infrared, cpu):
    data, _ = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32).datasets()
    plan = lambda: training_plan(len(data), 2, seed=0, epoch=0, num_draws=data.num_draws)  # noqa: E731
    wanted = [data.batch(indices, numbers)["image"] for indices, numbers, _ in plan()]
    got = [batch["image"].numpy() for batch in BatchLoader(data, cpu, workers=workers).batches(plan())]
    assert len(got) == 8 and all(np.array_equal(a, b) for a, b in zip(wanted, got))


@pytest.mark.parametrize("kind", ["mnist", "mshnet", "cdeit"])
def test_pixels_on_the_device_make_the_batches_of_the_host(kind, digits, infrared, tank, xla):
    tasks = dict(mnist=MNIST(dataset_dir=digits), mshnet=MSHNet(dataset_dir=infrared, base_size=64, crop_size=64))
    task = tasks.get(kind) or CDEIT(dataset_dir=tank)
    for data, numbers in zip(task.datasets(), (np.random.default_rng(0).random((4, 6)), None)):
        numbers = numbers if numbers is None else numbers[:, : data.num_draws]
        plan = [(np.array([3, 0, 2, 2]), numbers, None if numbers is not None else np.array([True, True, True, False]))]
        there, here = BatchLoader(data, xla), BatchLoader(data, xla, on="host")
        assert there.resident and not here.resident
        found, wanted = ({k: v.cpu() for k, v in feed.compose(next(feed.batches(plan))).items()} for feed in (there, here))
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(
                found[name].float(), wanted[name].float(), atol=0.51 if kind == "mshnet" and name == "image" else 0, rtol=0
            )


def test_a_set_is_streamed_where_it_would_crowd_the_device_and_the_feed_says_so(digits, xla, cpu, monkeypatch):
    data = MNIST(dataset_dir=digits).datasets()[0]
    size = data.device_nbytes()
    assert "on the device, whole: a batch is an index" in BatchLoader(data, xla).description
    monkeypatch.setattr(type(xla), "memory_size", lambda self: 8 * size - 1)
    feed = BatchLoader(data, xla)
    assert (
        feed.resident is None
        and "would crowd the device" in feed.description
        and "2 threads make the batches" in feed.description
    )
    assert BatchLoader(data, xla, on="device").resident
    assert BatchLoader(data, cpu).resident is None  # the host's memory is the device's
    plain = types.SimpleNamespace(batch=data.batch, __len__=data.__len__)
    with pytest.raises(TpukitError, match="data_on='device'.*device_arrays, device_nbytes, sample_parameters and compose"):
        BatchLoader(plain, xla, on="device")
    with pytest.raises(TpukitError, match="data_on='gpu': choose one of auto, device, host"):
        BatchLoader(data, xla, on="gpu")


def test_a_set_lies_whole_on_each_core_or_in_parts_and_is_never_whole_where_only_parts_have_room(digits, cpu, monkeypatch):
    data, asked = MNIST(dataset_dir=digits).datasets()[0], []
    put_whole = lambda arrays, sharded: asked.append(sharded) or arrays  # noqa: E731
    for name, value in dict(accelerator="xla", shards=8, put_whole=put_whole).items():
        monkeypatch.setattr(cpu, name, value, raising=False)
    for room, on, resident, parts in (
        (1.0, "auto", True, False),
        (0.5, "auto", True, True),
        (0.1, "auto", False, False),
        (0.5, "device", True, True),
        (0.1, "device", True, True),
        (1.0, "host", False, False),
    ):
        monkeypatch.setattr(cpu, "memory_size", lambda room=room: 8 * int(room * data.device_nbytes() + 1))
        feed = BatchLoader(data, cpu, on=on)
        assert (feed.resident is not None, feed.bytes_a_core) == (
            resident,
            data.device_nbytes() // (8 if parts else 1) * resident,
        )
        assert not resident or asked.pop() == parts
        assert ("a part on each of 8 cores" in feed.description) == parts


def test_a_test_set_without_samples_is_an_error_that_says_so(digits, cpu):
    task = MNIST(dataset_dir=digits)
    empty = task.test_set()
    empty.images, empty.labels = empty.images[:0], empty.labels[:0]
    with pytest.raises(TpukitError, match="its test set has no samples to score"):
        evaluate(task, task.model(), empty, cpu)


def test_scores_counted_while_the_next_epoch_trains_are_recorded_in_the_same_order(infrared, cpu, tmp_path, monkeypatch):
    task = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32, batch_size=4, epochs=3, log_every=2, data_on="host")
    order = []
    for name, delay in (("fast", 0), ("slow", 0.5)):
        count = MSHNet.evaluate
        monkeypatch.setattr(MSHNet, "evaluate", lambda self, found: (time.sleep(delay), count(self, found))[1])
        run = Run.open(tmp_path / name, task)
        assert train(task, run, runtime=cpu, progress=False) == run.records("evaluation")[-1]["scores"]
        monkeypatch.undo()
        order.append([(r["kind"], r["step"], r.get("scores")) for r in run.records() if r["kind"] != "start"])
    assert order[0] == order[1]
    assert [kind for kind, _, _ in order[0]] == ["train", "train", "epoch", "evaluation"] * 3


def test_evaluation_scores_do_not_depend_on_the_batch_size(infrared, cpu):
    task = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32, batch_size=1)
    torch.manual_seed(0)
    model, (_, data) = task.model(), task.datasets()
    one = evaluate(task, model, data, cpu)
    three = evaluate(dataclasses.replace(task, batch_size=3), model, data, cpu)
    assert one == three and one["images"] == 4


# Resume


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_two_and_two_epochs_equal_four(device, digits, tmp_path, request):
    runtime = request.getfixturevalue(device)
    task = MNIST(dataset_dir=digits, epochs=4, **SMALL)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=runtime, progress=False)
    for epochs in (2, 4):
        part = dataclasses.replace(task, epochs=epochs)
        parted = Run.open(tmp_path / "parted", part)
        train(part, parted, runtime=runtime, progress=False)
    assert exact(parted) == exact(straight) and len(exact(straight)) > 30
    assert same(best_weights(parted), best_weights(straight))


def test_mshnet_resumes_exactly_across_its_phases_with_augmentation(infrared, tmp_path, cpu):
    task = MSHNet(dataset_dir=infrared, epochs=4, warm_epoch=1, base_size=32, crop_size=32, batch_size=4, log_every=3)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=cpu, progress=False)
    for epochs in (1, 3, 4):
        part = dataclasses.replace(task, epochs=epochs)
        train(part, Run.open(tmp_path / "parted", part), runtime=cpu, progress=False)
    assert exact(Run.find(tmp_path / "parted")) == exact(straight)


KILLED = """
import os, sys
from pathlib import Path
from tpukit import MNIST, Run, train
from tpukit.training.loop import Trainer
from tpukit.devices.runtime import Runtime

folder, data, kill_at, save_every_s = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
task = MNIST(dataset_dir=data, epochs=3, batch_size=8, log_every=3, save_every_s=save_every_s, seed=5)
steps = 0
whole_step = Trainer.take_step

def step(self, *args):
    global steps
    steps += 1
    if steps == kill_at:
        os.kill(os.getpid(), 9)
    whole_step(self, *args)

Trainer.take_step = step
train(task, Run.open(folder, task), runtime=Runtime("cpu"), progress=False)
"""


@pytest.mark.parametrize("save_every_s, kills", [(0.0, (5, 23, 24)), (300.0, (11, 44, 18))])
def test_killing_the_process_again_and_again_changes_nothing_that_is_logged(save_every_s, kills, digits, tmp_path, cpu):
    """Each kill comes before that step of its session: with a checkpoint after every step, and with epochs' ends only."""
    task = MNIST(dataset_dir=digits, epochs=3, batch_size=8, log_every=3, seed=5)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=cpu, progress=False)
    codes = []
    for kill_at in (*kills, 999):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(digits), str(kill_at), str(save_every_s)]
        codes.append(subprocess.run(command, capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}).returncode)
    assert codes == [-9, -9, -9, 0]
    assert exact(Run.find(tmp_path / "killed")) == exact(straight)


STOPPED = """
import sys
from pathlib import Path
from tpukit import MNIST, Run, train
from tpukit.devices.runtime import Runtime

# No evaluation: the stop has to come between two steps.
task = MNIST(dataset_dir=Path(sys.argv[2]), epochs=5000, batch_size=8, log_every=3, eval_every=5000)
train(task, Run.open(sys.argv[1], task), runtime=Runtime("cpu"), progress=False)
"""


@pytest.mark.parametrize("number, code, word", [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, None, "interrupted")])
def test_sigterm_and_interrupt_save_before_leaving(number, code, word, digits, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path / "run"), str(digits)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        records = tmp_path / "run/records.jsonl"
        while not (records.exists() and records.read_text().count("train") > 5):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    if code:
        assert process.returncode == code
    else:
        assert "KeyboardInterrupt" in err
    run = Run.find(tmp_path / "run")
    saved = checkpoint(run)["state"]["step"]
    assert f"saved at step {saved}" in out and word in out
    assert saved >= run.records("train")[-1]["step"]


# A loss that is not a number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisoned(MNIST):
    """MNIST whose loss is not a number from a given step on."""

    bad_from: int = 0

    def loss(self, model, batch, epoch):
        self.calls.append(1)
        return super().loss(model, batch, epoch) * (float("nan") if len(self.calls) >= self.bad_from else 1)


@pytest.mark.parametrize("bad_from", [1, 17, 29])
def test_a_nan_loss_stops_with_the_step_and_the_last_good_checkpoint(bad_from, digits, tmp_path, cpu):
    task = Poisoned(dataset_dir=digits, epochs=3, batch_size=8, log_every=10, bad_from=bad_from)
    object.__setattr__(task, "calls", [])
    run = Run.open(tmp_path, task)
    good = "there is no checkpoint yet" if bad_from <= 25 else "last good checkpoint is step-00000025.pt"
    with pytest.raises(Diverged, match=f"at step {bad_from}; .*{good}.*a lower lr"):
        train(task, run, runtime=cpu, progress=False)
    assert run.records("diverged")[0]["step"] == bad_from
    for c in run.checkpoints():
        saved = torch.load(run.path / "checkpoints" / c["file"], weights_only=True)["state"]["model"]
        assert all(torch.isfinite(v).all() for v in saved.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Starving(MNIST):
    """MNIST whose loss is a number, while its gradient from the second epoch on is none."""

    def loss(self, model, batch, epoch):
        loss = super().loss(model, batch, epoch)
        return loss + (next(model.parameters()).square().sum() * 0).sqrt() if epoch >= 1 else loss


def test_an_fp16_training_whose_every_gradient_overflows_ends_and_names_the_scale_of_its_loss(digits, tmp_path):
    task = Starving(dataset_dir=digits, epochs=3, batch_size=8, log_every=1, num_workers=1)  # 25 steps an epoch
    run = Run.open(tmp_path, task)
    with pytest.raises(Diverged, match=r"at step 56 even with the loss scaled down to 3\.1e-05; .*step-00000050\.pt"):
        train(task, run, runtime=Runtime("cpu", "fp16"), progress=False)  # from 2 ** 16 to 2 ** -15: 31 steps are skipped
    assert run.records("diverged")[0]["step"] == 56
    assert all(r["loss"] < 9 for r in run.records("train"))


# Memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remembered(MNIST):
    """MNIST whose models can be asked for afterwards, and which may want more memory than there is."""

    models: list = dataclasses.field(default_factory=list)
    full_at: int = 99

    def model(self):
        model = super().model().insert(1, torch.nn.BatchNorm2d(32))
        self.models.append(weakref.ref(model))
        return model

    def loss(self, model, batch, epoch):
        if epoch >= self.full_at:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(model, batch, epoch)


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("settings", [dict(ema_decay=0.9), dict(batch_norm="frozen")], ids=str)
def test_the_model_of_a_training_is_freed_as_soon_as_it_ends(device, settings, digits, tmp_path, request):
    task = Remembered(dataset_dir=digits, epochs=1, **SMALL, **settings)
    run = Run.open(tmp_path, task)
    gc.collect()
    gc.disable()
    try:
        train(task, run, runtime=request.getfixturevalue(device), progress=False)
        assert task.models[0]() is None
    finally:
        gc.enable()


def test_the_model_of_a_training_that_ran_out_of_memory_is_freed_though_its_error_is_kept(digits, tmp_path, cpu):
    task = Remembered(dataset_dir=digits, epochs=2, full_at=1, **SMALL)
    run = Run.open(tmp_path, task)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(TpukitError, match="smaller batch_size") as kept:
            train(task, run, runtime=cpu, progress=False)
        assert kept.value.__cause__ is not None and task.models[0]() is None
    finally:
        gc.enable()


# Precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains_and_fp16_resumes_with_its_scaler(precision, digits, tmp_path):
    task = MNIST(dataset_dir=digits, epochs=4, precision=precision, **SMALL)
    runtime = Runtime("cpu", precision)
    run = Run.open(tmp_path / "straight", task)
    scores = train(task, run, runtime=runtime, progress=False)
    assert scores["accuracy"] > 0.3 and run.records("epoch")[-1]["loss"] < 0.6 * run.records("epoch")[0]["loss"]
    assert bool(checkpoint(run)["scaler"]) == (precision == "fp16")
    for epochs in (2, 4):
        part = dataclasses.replace(task, epochs=epochs)
        train(part, Run.open(tmp_path / "parted", part), runtime=Runtime("cpu", precision), progress=False)
    assert exact(Run.find(tmp_path / "parted")) == exact(run)


def test_the_loss_is_computed_in_float32_under_autocast(infrared):
    runtime = Runtime("cpu", "bf16")
    task = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32)
    batch = {k: torch.as_tensor(v) for k, v in task.datasets()[0].batch([0, 1], np.full((2, 6), 0.3)).items()}
    with runtime.autocast():
        model = task.model()
        assert model.conv_init(torch.zeros(1, 3, 8, 8)).dtype == torch.bfloat16
        assert task.loss(model, batch, epoch=9).dtype == torch.float32


def gpu(monkeypatch, capability=(7, 5), built_for=("sm_75", "sm_80", "compute_90")):
    """Let torch find a GPU, on which nothing can be computed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built_for))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)


def test_gpus_without_bf16_take_fp16_with_a_scaler_and_unknown_precisions_are_refused(monkeypatch):
    from tpukit.devices.runtime import open_runtime
    from tpukit.host.environment import detect

    gpu(monkeypatch)
    assert Runtime("cuda").precision == "fp16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert Runtime("cuda").precision == "bf16"
    with pytest.raises(TpukitError, match="choose one of"):
        open_runtime(detect(), "fp8")


@pytest.mark.parametrize("precision, allowed", [("fp32", False), ("bf16", True)])
def test_fp32_on_a_gpu_rounds_no_factor_to_tf32(precision, allowed, monkeypatch):
    gpu(monkeypatch, capability=(8, 0))
    cudnn = torch.backends.cudnn
    assert cudnn.allow_tf32  # torch's default
    try:
        Runtime("cuda", precision)
        assert cudnn.allow_tf32 == allowed and not torch.backends.cuda.matmul.allow_tf32
        if hasattr(cudnn, "conv"):  # the newer way to ask, which has to agree
            assert (cudnn.conv.fp32_precision == "tf32") == allowed
    finally:
        cudnn.allow_tf32 = True


def test_a_frozen_batch_norm_keeps_the_dtype_under_autocast_and_learns_as_on_xla(cpu, xla):
    from tpukit.training.batch_norm import freeze

    found = []
    for runtime in (cpu, xla):
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(3)
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
        freeze(norm.train())
        norm = runtime.place(copy.deepcopy(norm))
        made = norm(runtime.put({"x": torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)})["x"])
        made.square().sum().backward()
        found.append(runtime.host([made, norm.weight.grad, norm.bias.grad, norm.running_mean]))
    for here, there in zip(*found):
        torch.testing.assert_close(here, there)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3))
    freeze(layers)
    with Runtime("cpu", "bf16").autocast():
        assert layers(torch.ones(1, 3, 4, 4)).dtype == torch.bfloat16


# GPUs, of which there is none here


@pytest.mark.parametrize("capability, fine", [((6, 0), False), ((7, 5), True), ((8, 9), True), ((12, 0), True)])
def test_a_gpu_that_torch_was_not_built_for_is_refused_before_its_first_kernel(capability, fine, monkeypatch):
    gpu(monkeypatch, capability)
    if fine:
        assert Runtime("cuda").device.type == "cuda"
        return
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P100-PCIE-16GB")
    with pytest.raises(TpukitError, match=r"P100-PCIE-16GB has compute capability 6\.0, .* sm_75, sm_80, compute_90 alone"):
        Runtime("cuda")


def test_a_gpu_that_torch_cannot_use_at_all_is_refused_with_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TpukitError, match="built without CUDA, or the driver is too old"):
        Runtime("cuda")


def test_a_set_that_stays_on_a_gpu_is_not_pinned_on_its_way(monkeypatch, cpu):
    pinned, moved = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *more, **named: moved.append(self) or self)
    cpu.device = torch.device("cuda")
    cpu.put_whole({"image": np.zeros((3, 2), np.uint8)})
    assert len(moved) == 1 and not pinned
    cpu.put({"image": np.zeros((3, 2), np.uint8)})
    assert len(moved) == 2 and len(pinned) == 1


def test_the_peak_of_a_gpus_memory_starts_anew_with_each_training(digits, tmp_path, cpu, monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: order.append("anew"))
    monkeypatch.setattr(Runtime, "memory", lambda self: order.append("read") or [])
    reset = Runtime.reset_statistics

    def on_a_gpu(self):
        self.device = torch.device("cuda")
        reset(self)
        self.device = torch.device("cpu")

    monkeypatch.setattr(Runtime, "reset_statistics", on_a_gpu)
    task = MNIST(dataset_dir=digits, epochs=1, batch_size=8, log_every=25)
    train(task, Run.open(tmp_path, task), runtime=cpu, progress=False)
    assert order.count("anew") == 1 and order[-1] == "read"


def test_predictions_are_copied_before_the_next_batch_is_asked_for_and_waited_for_after_it(digits, cpu, monkeypatch):
    order, count = [], itertools.count(1)

    class Event:
        def __init__(self):
            self.number = next(count)

        def record(self):
            order.append(f"copy {self.number}")

        def synchronize(self):
            order.append(f"wait {self.number}")

    class Told(MNIST):
        def predict(self, model, batch, epoch=None):
            order.append("predict")
            return super().predict(model, batch, epoch)

    task = Told(dataset_dir=digits, batch_size=16)  # 40 test samples are 3 batches
    model, data = task.model(), task.test_set()
    wanted, order[:] = evaluate(task, model, data, cpu), []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    host_later = Runtime.host_later

    def on_a_gpu(self, tree):
        self.device = torch.device("cuda")
        waited = host_later(self, tree)
        self.device = torch.device("cpu")
        return waited

    monkeypatch.setattr(Runtime, "host_later", on_a_gpu)
    assert evaluate(task, model, data, cpu) == wanted
    assert order == "predict,copy 1,predict,copy 2,wait 1,predict,copy 3,wait 2,wait 3".split(",")


# The optimizer's state


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    ],
)
def test_priming_an_optimizer_changes_no_step_of_it(make, cpu):
    def trajectory(primed):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = make(model.parameters())
        if primed:
            assert XLARuntime.init_optimizer_state(cpu, optimizer)
            assert all(optimizer.state[p] for p in model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    torch.testing.assert_close(trajectory(True), trajectory(False))


@pytest.mark.parametrize("make", [torch.optim.NAdam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)])
def test_an_optimizer_whose_state_does_not_start_at_zero_is_left_alone(make, cpu):
    optimizer = make(torch.nn.Linear(2, 2).parameters())
    assert XLARuntime.init_optimizer_state(cpu, optimizer) is False and not optimizer.state


# A user's own workload, defined outside the library


def test_the_readme_way_of_writing_a_workload_trains(tmp_path, cpu):
    class Line:
        num_draws = 0

        def __init__(self, n):
            self.x = np.linspace(-1, 1, n, dtype=np.float32)[:, None]

        def __len__(self):
            return len(self.x)

        def batch(self, indices, numbers=None):
            return dict(x=self.x[indices], y=3 * self.x[indices] + 1)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Fit(Workload):
        name, dataset, score = "fit", "none", "fit"
        epochs: int = setting(20, free=True)
        lr: float = 0.1

        def datasets(self):
            return Line(64), Line(10)

        def model(self):
            return torch.nn.Linear(1, 1)

        def optimizer(self, model):
            return torch.optim.AdamW(model.parameters(), lr=self.lr)

        def loss(self, model, batch, epoch):
            return (model(batch["x"]) - batch["y"]).square().mean()

        def predict(self, model, batch, epoch=None):
            return model(batch["x"])

        def evaluate(self, predictions):
            errors = torch.cat([(p - b["y"]).abs()[b["valid"]] for p, b in predictions])
            assert len(errors) == 10
            return dict(fit=1 - float(errors.mean()))

    task = Fit(dataset_dir=Path("."))
    assert train(task, Run.open(tmp_path, task), runtime=cpu, progress=False)["fit"] > 0.9
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["lr"] == 0.1


# Clipped gradients and averaged weights


def test_a_gradient_above_the_norm_is_scaled_down_to_it_and_a_small_one_left_alone(cpu):
    for size, wanted in ((10.0, 1.0), (0.5, 0.5)):
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        direction = torch.tensor([0.6, 0.0, 0.8, 0.0])
        cpu.backward((weight * direction * size).sum(), optimizer)
        norm = cpu.clip_gradients(optimizer, 1.0)
        cpu.optimizer_step(optimizer)
        assert float(norm) == pytest.approx(size) and torch.allclose(weight, -wanted * direction)


def test_the_average_of_the_weights_forgets_the_start_quickly_and_then_as_slowly_as_asked(digits, tmp_path, cpu, monkeypatch):
    from tpukit.training import ema

    task = MNIST(dataset_dir=digits, epochs=4, ema_decay=0.6, **SMALL)  # 25 steps an epoch
    seen = []
    update_average = ema.update_average

    def noting(averaged, model, weight):
        seen.append({n: v.clone() for n, v in model.state_dict().items()})
        update_average(averaged, model, weight)

    monkeypatch.setattr(ema, "update_average", noting)
    run = Run.open(tmp_path / "run", task)
    train(task, run, runtime=cpu, progress=False)
    torch.manual_seed(task.seed)
    mean = task.model().state_dict()
    assert len(seen) == 10
    for count, now in enumerate(seen, 1):
        decay = min(0.6, 1 - (1 + count) ** (-2 / 3))
        mean = {n: decay * mean[n] + (1 - decay) * now[n] for n in mean}
    kept = checkpoint(run)["averaged"]
    assert all(torch.allclose(kept[n], mean[n], atol=1e-6) for n in mean)
    assert not torch.allclose(kept["0.weight"], checkpoint(run)["model"]["0.weight"], atol=1e-4)


class Loud(MNIST):
    """MNIST whose loss, and so its gradient, is out of all proportion from the second epoch on."""

    def loss(self, model, batch, epoch):
        return super().loss(model, batch, epoch) * (1e9 if epoch >= 1 else 1.0)


@pytest.mark.parametrize("clip_norm, step", [(1e-3, 26), (None, 27)])
def test_an_unusual_gradient_norm_is_said_once_with_its_step(digits, tmp_path, cpu, capsys, clip_norm, step):
    task = Loud(dataset_dir=digits, epochs=3, lr=1e-12, clip_norm=clip_norm, **SMALL)  # read every 3 steps
    run = Run.open(tmp_path / "run", task)
    train(task, run, runtime=cpu, progress=False)
    assert [r["step"] for r in run.records("odd_norm")] == [step]  # once, though it stays so over two epochs
    assert capsys.readouterr().out.count(f"step {step}: the gradient norm left 1e-07 to 1000") == 1
    assert run.records("train")[-1]["grad_norm"] > 1e3  # as it was before it was clipped


@pytest.mark.parametrize("method", ["datasets", "model", "optimizer", "loss", "predict", "evaluate", "panels"])
def test_a_workload_that_leaves_a_method_out_is_told_which(method):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Empty(Workload):
        name, dataset, score = "empty", "none", "x"

    arguments = inspect.signature(getattr(Empty(), method)).parameters.values()
    with pytest.raises(NotImplementedError, match=rf"Empty must implement {method}\(\)"):
        getattr(Empty(), method)(*[None for a in arguments if a.default is a.empty])


@pytest.mark.parametrize(
    "wrong",
    [dict(batch_size=0), dict(batch_size=-4), dict(log_every=0), dict(eval_every=0), dict(num_workers=-1), dict(seed=-1)],
    ids=str,
)
@pytest.mark.parametrize("workload", [MNIST, MSHNet, CDEIT])
def test_settings_that_no_training_can_have_are_refused_by_their_name(workload, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(TpukitError, match=rf"{name}={value}: it has to be [01] or more"):
        workload(**wrong)


def test_a_mask_is_drawn_by_what_it_could_hold_so_that_all_true_is_white_and_all_false_black():
    from tpukit.reporting.figures import panels_figure

    full, half = np.ones((4, 4), bool), np.full((4, 4), 51, np.uint8)
    figure = panels_figure([[("all", full), ("none", ~full), ("grey", half)]], "masks")
    drawn = [axis.images[0].to_rgba(axis.images[0].get_array())[0, 0, 0] for axis in figure.axes]
    assert np.allclose(drawn, [1.0, 0.0, 0.2], atol=0.01)
