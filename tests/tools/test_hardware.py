"""`tpukit doctor --hardware`: what its checks find on an accelerator as assumed, and on one that is not."""

import dataclasses
import json

import pytest
import torch

from tpukit import cli, detect
from tpukit.devices.runtime import Runtime
from tpukit.tools.doctor import NOTE, OK, WARNING, Check, hardware

GRADIENT = 256 * 256 * 4


@pytest.fixture
def machine():
    """A function: the `Environment` of this machine, as if it had another accelerator."""
    return lambda accelerator: dataclasses.replace(detect({}, "/nowhere"), accelerator=accelerator)


class Filling(Runtime):
    """Holds the gradients of each step until it is waited for."""

    held_at_once = 1
    steps, most = 0, 0

    def autocast(self):
        self.steps += 1
        self.most = max(self.most, min(self.steps, self.held_at_once))
        return super().autocast()

    def sync(self):
        self.steps = 0

    def memory(self):
        return [(10**9 + self.most * GRADIENT, 10**10)]


@pytest.mark.parametrize("held, level", [(1, OK), (6, OK), (7, WARNING)])
def test_gradients_of_many_steps_at_once_are_a_warning_with_the_option_that_helps(
    held, level, machine, monkeypatch
):
    runtime = Filling("cpu", "bf16")
    runtime.held_at_once = held
    monkeypatch.setattr("tpukit.devices.open_runtime", lambda env, precision: runtime)
    check = hardware.run_ahead(machine("xla"))
    assert check.level == level and f"of {held}.0 steps" in check.found
    assert ("--log-every" in check.fix) == (level == WARNING)


@pytest.fixture
def of_the_cpu(monkeypatch):
    monkeypatch.setattr("tpukit.devices.open_runtime", lambda env, precision: Runtime("cpu", "bf16"))


def test_attention_that_computes_its_formula_is_right(machine, of_the_cpu):
    check = hardware.attention(machine("cuda"))
    assert check.level == OK and "in bf16: windows " in check.found


@pytest.mark.parametrize("broken", ["training", "evaluation"])
@pytest.mark.parametrize("wrong", [0.9, float("nan")])
def test_a_kernel_that_is_wrong_in_training_or_in_evaluation_alone_is_a_warning(
    broken, wrong, machine, of_the_cpu, monkeypatch
):
    monkeypatch.setattr(hardware, "ATTENTION_SHAPES", dict(small=((2, 2, 16, 8), True)))
    right = torch.nn.functional.scaled_dot_product_attention

    def attend(query, *arguments, **settings):
        is_kernel = query.dtype == torch.bfloat16 and torch.is_grad_enabled() == (broken == "training")
        return right(query, *arguments, **settings) * (wrong if is_kernel else 1.0)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    check = hardware.attention(machine("cuda"))
    assert check.level == WARNING and "enable_cudnn_sdp(False)" in check.fix


def test_without_an_accelerator_there_is_nothing_to_check(machine):
    [check] = hardware.check_hardware(machine("cpu"))
    assert check.level == NOTE


@pytest.mark.slow
def test_each_check_has_a_process_of_its_own_and_is_rehearsed_on_the_cpu_xla_device(monkeypatch):
    pytest.importorskip("torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    [check] = hardware.check_hardware(detect())
    assert (check.what, check.level) == ("run ahead", NOTE) and "does not tell" in check.found


@pytest.mark.parametrize(
    "code, found",
    [
        ("raise SystemExit('the chip is gone')", "the chip is gone"),
        ("raise SystemExit(7)", "exit code 7"),
        ("print('no answer')", "exit code 0"),
        ("import time; time.sleep(60)", "did not end within"),
    ],
)
def test_a_check_that_fails_or_hangs_costs_itself_alone(code, found, machine, monkeypatch):
    run_python = hardware.run_python
    monkeypatch.setattr(
        hardware, "run_python", lambda *_, timeout_s: run_python("-c", code, timeout_s=timeout_s)
    )
    monkeypatch.setattr(hardware, "LIMIT_S", 3)
    [check] = hardware.check_hardware(machine("cuda"))
    assert (check.what, check.level) == ("attention", WARNING) and found in check.found and check.fix


def test_doctor_shows_the_hardware_checks_beside_its_own(capsys, monkeypatch):
    from tpukit.tools import doctor

    monkeypatch.setattr(doctor, "import_packages", lambda packages, environ: (dict.fromkeys(packages), None))
    monkeypatch.setattr(
        hardware, "check_hardware", lambda env: [Check("attention", WARNING, "wrong", "mend")]
    )
    cli.main(["doctor", "--hardware", "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert dict(what="attention", level=WARNING, found="wrong", fix="mend") in checks
    cli.main(["doctor", "--json"])
    assert "attention" not in capsys.readouterr().out
