"""`tpukit doctor --hardware`: what each check finds on a device that is right and on one that is wrong, what
becomes of a check that hangs or crashes, and what is in the report."""

import dataclasses
import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import tpukit
from tests.conftest import refuses
from tpukit import TpukitError, detect
from tpukit.devices.runtime import Runtime
from tpukit.host.text import GIB
from tpukit.launching.core import Core, running
from tpukit_tools import cli, emulate, subprocess_call
from tpukit_tools.doctor import causes, hardware
from tpukit_tools.doctor.hardware import FAIL, PASS, SKIP
from tpukit_tools.subprocess_call import run_python

pytestmark = pytest.mark.usefixtures("warm_calls")


@pytest.fixture
def machine(tmp_path):
    """A function: the `Environment` of this machine, as if it had another accelerator."""
    here = dataclasses.replace(detect({}, "/nowhere"), outputs=tmp_path / "outputs")
    return lambda accelerator, cores=1: dataclasses.replace(here, accelerator=accelerator, cores=cores)


@pytest.fixture
def found_on(machine, monkeypatch):
    """A function: what a check finds on a runtime that stands for the accelerator, in this process."""

    def found(name, runtime=Runtime, accelerator="cpu"):
        def launched(function, *args, cores, **settings):
            there = (runtime if cores > 1 else Runtime)("cpu", "fp32")  # on one core the device is right
            if function is tpukit.train:
                return function(*args, runtime=there, progress=False)
            with running(Core(there)):
                return function(*args)

        monkeypatch.setattr(hardware, "open_runtime", lambda env, precision="auto": runtime("cpu", precision))
        monkeypatch.setattr(hardware, "STEPS", 5)
        monkeypatch.setattr(hardware, "WIDTH", 100)
        monkeypatch.setattr(tpukit, "launch", launched)
        return hardware.CHECKS[name](machine(accelerator))

    return found


# Devices that are wrong


class Adding(Runtime):
    """Adds to what it is given."""

    def _put(self, value):
        return super()._put(value) + 1


class Rounding(Runtime):
    """Rounds factors to bf16, as a TPU does by default."""

    def _put(self, value):
        return super()._put(value).bfloat16().to(value.dtype)


class Forgetful(Runtime):
    """Loses every third step."""

    def compile(self, function, **settings):
        if not self.trusts_graphs:
            return function
        calls = iter(range(1000))

        def step(batch, epoch, sums, lr_factor):
            return sums if next(calls) % 3 == 2 else function(batch, epoch, sums, lr_factor)

        return step


class OfTwoGraphs(Runtime):
    """Compiles the step twice."""

    has_graphs = True

    def compile(self, function, **settings):
        for _ in range(2):
            self.compile_events.append(dict(what="step", programs=1))
        return function


class Leaking(Runtime):
    calls = 0

    def memory(self):
        self.calls += 1
        return [(self.calls * GIB, 16 * GIB)]


class NotLearning(Runtime):
    def optimizer_step(self, optimizer, lr_factor=None):
        pass


class Doubling(Runtime):
    """Its all-reduce gives the sum of two cores."""

    def all_reduce_gradients(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 2


class Reserving(Runtime):
    """Its memory grows by what a step returns."""

    steps = 0

    def compile(self, function, **settings):
        def step(*arguments):
            self.steps += 1
            return function(*arguments)

        return step

    def memory(self):
        return [(self.steps * 4 * 10 * 100**2, 16 * GIB)]


class AsTold(Runtime):
    """Leaves the weights in their order, as XLA does."""

    def to_device(self, model):
        return model


class TakingOverflows(Runtime):
    def _step_unless_overflow(self, optimizer):
        optimizer.step()


@pytest.mark.parametrize(
    "name, runtime, accelerator, words",
    [
        ("opens", Adding, "cpu", "host processor"),
        ("opens", Runtime, "cuda", "unknown size"),
        ("step", Forgetful, "cpu", "fp32 "),
        ("all_reduce", Doubling, "cpu", "wrong by 1.0e+00"),
        ("replays", OfTwoGraphs, "cpu", "graphs: 2"),
        ("replays", Leaking, "cpu", "1024.0 MiB more"),
        ("run_ahead", Reserving, "cpu", "12.2 MiB more"),
        ("precision", Rounding, "cpu", "product 2"),
        ("overflow", TakingOverflows, "cpu", "CHANGED"),
    ],
)
def test_what_a_check_assumes_holds_on_a_device_that_is_right_and_on_no_other(
    name, runtime, accelerator, words, found_on
):
    assert found_on(name)[0]
    holds, text = found_on(name, runtime, accelerator)
    assert not holds and words in text


@pytest.mark.slow
@pytest.mark.parametrize("runtime, is_right", [(Runtime, True), (NotLearning, False)])
def test_a_training_on_all_cores_must_learn_as_on_one(runtime, is_right, found_on):
    holds, text = found_on("all_cores", runtime)
    assert holds is is_right and re.match(r"losses differ by \d+\.\d+%, accuracy 0\.\d+", text)


# The report


@pytest.fixture
def check(machine, monkeypatch, tmp_path):
    """A function: the report of the checks of these names, or of all, that have these results, or raise them,
    on an accelerator."""

    def run(*results, names=(*hardware.CHECKS,), accelerator="cuda", cores=1, **settings):
        def called(function, name, *, timeout_s):
            if isinstance(result := next(left), Exception):
                raise result
            return result

        left = iter(results)
        monkeypatch.setattr(subprocess_call, "call", called)
        monkeypatch.setattr(hardware, "CHECKS", {name: hardware.CHECKS[name] for name in names})
        return hardware.check_hardware(machine(accelerator, cores), tmp_path / "report.json", **settings)

    return run


@pytest.mark.parametrize(
    "error, words",
    [
        (subprocess.TimeoutExpired("python", 1), f"did not end within {hardware.LIMIT_S} s"),
        (TpukitError("exit code -11, without a message"), "exit code -11"),
    ],
)
def test_a_check_that_hangs_or_crashes_fails_alone(error, words, check):
    first, second = check(error, (True, "right"), names=["opens", "step"])["checks"]
    assert [first["outcome"], second["outcome"]] == [FAIL, PASS] and words in first["text"]


def test_what_a_check_raises_is_its_outcome_with_the_place(monkeypatch):
    monkeypatch.setitem(hardware.CHECKS, "step", lambda env: torch.ones(2) @ torch.ones(3))
    holds, text = hardware.answer("step")
    assert not holds and re.match(r"RuntimeError in test_hardware\.py line \d+: ", text)


TILES = """
import sys
from tpukit.devices.runtime import Runtime
from tpukit_tasks.mshnet.tpu import tiling
from tpukit_tools.doctor import hardware

exchange_halo, merge = tiling.exchange_halo, tiling.merge
if "exchange_halo" in sys.argv:  # the tile above, of the next image
    tiling.exchange_halo = lambda x, tiles, halo: exchange_halo(x.roll(1, 0), tiles, halo).roll(-1, 0)
if "merge" in sys.argv:  # tiles in another order
    tiling.merge = lambda x, tiles: merge(x.roll(8, 0), tiles)
Runtime.to_device = lambda self, model: model  # leaves the weights in their order, as XLA does
hardware.open_runtime = lambda env, precision: Runtime("cpu", precision)
print(*hardware.mshnet(hardware.detect()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrong, holds", [("", True), ("exchange_halo", False), ("merge", False)])
def test_mshnet_on_tiles_has_the_gradients_of_the_plain_network_unless_a_tile_is_wrong(wrong, holds):
    """A process of its own, because it changes what others use."""
    output = run_python("-c", TILES, wrong, timeout_s=300).stdout
    assert output.startswith(f"{holds} 8 tiles of an image; relative differences: loss "), output


AT = r"string. line \d+"
ACCIDENTS = {  # of core 1, which core 0 waits for -> what the report says
    "raise": rf"core 1 \(rank 1\) failed: RuntimeError in <{AT}: open\(/dev/vfio/0\): .* busy$",
    "refuse": r"core 1 \(rank 1\) failed: batch_size=3: use 4$",
    "abort": rf"core 1 ended .*: SIGABRT, in <{AT}: F1129 12 x\.cc:33\] Check failed: a == b$",
    "hang": rf"no core .* for 8 s: core 0 in distributed\.py line \d+; core 1 in <{AT}$",
}
PROGRAM = """
import os, sys, time, tpukit
from tpukit_tools.doctor import causes, hardware
def work():
    core, accident = tpukit.core(), sys.argv[1]
    if core.rank == 0:
        core.world.all_gather(1.0)
    if accident == "raise":
        raise RuntimeError("open(/dev/vfio/0): Device or resource busy") from KeyError("other")
    if accident == "refuse":
        raise tpukit.TpukitError("batch_size=3: use 4")
    if accident == "abort":
        print("F1129 12 x.cc:33] Check failed: a == b\\nlast line", file=sys.stderr)
        os.abort()
    time.sleep(60)
hardware.CHECKS["all_reduce"] = lambda env: tpukit.launch(work, cores=2, hang_timeout_s=8)
holds, text = hardware.answer("all_reduce")
print("FOUND", causes.scrub(text))
"""


@pytest.mark.slow
@pytest.mark.parametrize("accident", ACCIDENTS)
def test_of_a_check_on_several_cores_the_core_that_failed_and_its_error_are_reported(accident):
    ran = run_python("-c", PROGRAM, accident, timeout_s=300)
    text = ran.stdout.rpartition("FOUND ")[2].strip()
    assert re.match(ACCIDENTS[accident], text), text or ran.stderr


def test_a_check_that_is_stopped_says_where_it_was(check):
    stacks = b'Timeout (0:04:55)!\nThread 0x1 (most recent call first):\n  File "/x/tqdm.py", line 3 in run\n'
    stacks += b'Thread 0x2 (most recent call first):\n  File "/a/torch/x.py", line 7 in f\n'
    stacks += b'  File "/a/tpukit/devices/xla.py", line 8 in sync\n'
    stopped = subprocess.TimeoutExpired("python", 300, stderr=stacks)
    [row] = check(stopped, names=["step"])["checks"]
    assert row["text"].endswith("was stopped, in xla.py line 8")


def test_the_report_is_written_after_each_check_and_holds_nothing_but_these_fields(
    check, monkeypatch, tmp_path
):
    def look(line):
        if line.startswith("    "):
            written.append(json.loads((tmp_path / "report.json").read_text()))

    written = []
    monkeypatch.setattr(hardware, "say", look)
    report = check((True, "a"), (False, "b"), names=["opens", "precision"])
    assert [len(one["checks"]) for one in written] == [1, 2] and written[-1] == report
    fields = "format tpukit date rehearsal host accelerator backend chip chips python versions checks"
    assert set(report) == set(fields.split()) and report["rehearsal"] is False
    assert {tuple(row) for row in report["checks"]} == {("name", "outcome", "text", "seconds")}


def test_a_report_names_no_path_address_user_or_host(check, monkeypatch, tmp_path):
    texts = [
        "no file /srv/jane.doe/my data/secret.npz",
        "[Errno 2] No such file: '/data/my set/last secret.npz'",
        "~/secret/x and C:\\People\\jane\\x.py",
        "C:\\People\\jane\\x.py",
        "see https://hf.co/secret?token=abc",
        "gs://secret/run",
        "/dev/shm/secret, /dev/vfio/0-secret",
        "ask jane@example.org at 10.1.2.3:8471 or [fe80::1ff:fe23:4567:890a]:29500",
        f"{Path.home()}/a b/secret",
        "jdoe on lab-box.example, lab-box",
    ]
    monkeypatch.setenv("USER", "jdoe")
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-box.example")
    report = check(*((False, text) for text in texts), cores=2)
    assert [row["outcome"] for row in report["checks"]].count(FAIL) == len(texts)
    written = (tmp_path / "report.json").read_text()
    assert not re.search(r"secret|jane|jdoe|lab-box|data/|token|10\.1\.2\.3|fe80|890a", written), written


def test_scrubbing_leaves_rates_and_versions_as_they_are():
    text = "an error of 1/2, a / b, ~3 s, 120 images/s, 3.1 ms/step, c10::Error, fp32 1e-07, 12.8, a and/or b"
    assert causes.scrub(text) == text
    assert len(causes.scrub("x" * 9999)) < 500 and "\x1b" not in causes.scrub("\x1b[31m")


def test_a_check_is_skipped_where_it_does_not_apply(check):
    def skipped(**machine):
        rows = check(*[(True, "right")] * 12, rehearse=True, **machine)["checks"]
        return [row["name"] for row in rows if row["outcome"] == SKIP]

    assert skipped(accelerator="tpu", cores=8) == ["overflow"]
    assert skipped(accelerator="tpu", cores=1) == ["all_reduce", "all_cores", "overflow"]
    assert skipped(accelerator="cuda", cores=2) == ["attention_kernels", "mshnet"]
    assert skipped(accelerator="cpu") == ["attention_kernels", "mshnet"]  # a rehearsal of two processes


def test_a_report_of_emulated_chips_says_so_and_is_seen_on_no_hardware(check, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(hardware.EMULATED, "8")
    report = check(*[(True, "right")] * 12, accelerator="tpu", cores=8)
    assert report["rehearsal"] is True and report["chip"].startswith("emulated ")
    skipped = [row["name"] for row in report["checks"] if row["outcome"] == SKIP]
    assert skipped == ["attention_kernels", "overflow"]
    assert "nothing in it was seen on hardware" in capsys.readouterr().out
    assert hardware.EMULATED in emulate.variables(tmp_path, tmp_path, 8, "2,4,1")


def test_without_an_accelerator_a_rehearsal_is_named(check):
    with refuses("--rehearse"):
        check(accelerator="cpu")


def test_doctor_prints_the_outcomes_and_ends_with_1_where_one_failed(capsys, monkeypatch, machine):
    from tpukit_tools import doctor

    env = machine("cuda")
    monkeypatch.setattr(doctor, "examine", lambda env, environ: [])
    monkeypatch.setattr(tpukit, "detect", lambda: env)
    outcomes = dict.fromkeys(hardware.CHECKS, PASS)
    monkeypatch.setattr(hardware, "run_check", lambda name, env: (outcomes[name], "found"))
    assert cli.main(["doctor", "--hardware"]) == 0 and "12/12 out_of_memory" in capsys.readouterr().out
    outcomes["replays"] = FAIL
    assert cli.main(["doctor", "--hardware"]) == 1 and "FAIL in " in capsys.readouterr().out
    assert '"FAIL"' in (env.outputs / hardware.REPORT).read_text()
