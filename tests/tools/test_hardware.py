"""`tpukit doctor --hardware`: what each check finds on a device that is right and on one that is wrong, and
what becomes of a check that hangs or crashes."""

import dataclasses
import getpass
import json
import os
import re
import socket
import time
from pathlib import Path

import pytest
import torch

import tpukit
from tests.conftest import refuses
from tpukit import cli, detect
from tpukit.devices.runtime import Runtime
from tpukit.host.tables import GIB
from tpukit.tools.doctor import hardware
from tpukit.tools.doctor.hardware import checks
from tpukit.tools.doctor.hardware.checks import FAIL, INFO, PASS, SKIP, Outcome

GRADIENT = 256 * 256 * 4


@pytest.fixture
def machine(tmp_path):
    """A function: the `Environment` of this machine, as if it had another accelerator."""
    here = dataclasses.replace(detect({}, "/nowhere"), outputs=tmp_path / "outputs")
    return lambda accelerator, cores=1: dataclasses.replace(here, accelerator=accelerator, cores=cores)


@pytest.fixture
def outcome_on(machine, monkeypatch):
    """A function: the outcome of a check on a runtime that stands for the accelerator, in this process."""

    def outcome(name, runtime=Runtime, accelerator="cpu", cores=1):
        def opened(env, precision="auto", **settings):
            return runtime("cpu", precision)

        def launched(function, task, run, **settings):
            run.echo = False
            cores = settings["cores"]
            fitting = Runtime if cores == 1 and name == "all_cores" else runtime
            more = dict(progress=False) if function is tpukit.train else {}
            return function(task, run, runtime=fitting("cpu", "fp32"), **more)

        monkeypatch.setattr(checks, "open_runtime", opened)
        monkeypatch.setattr(checks, "STEPS", 5)
        monkeypatch.setattr(tpukit, "launch", launched)
        return hardware.CHECKS[name].function(machine(accelerator, cores))

    return outcome


# Devices that are wrong


class Adding(Runtime):
    """Adds to what it is given."""

    def put(self, arrays):
        return {
            name: value + 1 if value.dtype.is_floating_point else value
            for name, value in super().put(arrays).items()
        }


class Rounding(Runtime):
    """Rounds factors to bf16, as a TPU does by default."""

    def put(self, arrays):
        return {name: value.bfloat16().to(value.dtype) for name, value in super().put(arrays).items()}


class Forgetful(Runtime):
    """Loses every third step."""

    def compile(self, function, **settings):
        calls = iter(range(1000))
        return lambda *arguments: torch.zeros(1) if next(calls) % 3 == 2 else function(*arguments)


class OfTwoGraphs(Runtime):
    """Compiles the step twice."""

    has_graphs = True

    def compile(self, function, **settings):
        for _ in range(2):
            self.record_compilation("step", 1, 0.1, [])
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


class LosingMicroBatches(Runtime):
    def barrier_after_gradients(self, optimizer, batch):
        optimizer.zero_grad(set_to_none=True)
        return batch


class TakingOverflows(Runtime):
    def _step_unless_overflow(self, optimizer, scaler):
        optimizer.step()


RIGHT = "opens step replays precision speed attention overflow copies micro_batches libtpu_flag all_reduce"


@pytest.mark.parametrize("name", RIGHT.split())
def test_a_check_passes_on_a_device_that_is_right(name, outcome_on, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--one=1")
    found = outcome_on(name)
    assert found.outcome == (INFO if name == "speed" else PASS) and found.text
    assert all(isinstance(value, float) for value in found.numbers.values())
    flags = f"--one=1 {checks.FLAG}=2.5" if name == "libtpu_flag" else "--one=1"
    assert os.environ["LIBTPU_INIT_ARGS"] == flags


@pytest.mark.parametrize(
    "name, runtime, accelerator, words",
    [
        ("opens", Adding, "cpu", "opened in"),
        ("opens", Runtime, "cuda", "does not tell"),
        ("precision", Rounding, "cpu", "product 2"),
        ("step", Forgetful, "cpu", "fp32 "),
        ("replays", OfTwoGraphs, "cpu", "graphs: 2"),
        ("replays", Leaking, "cpu", "1024.0 MiB more"),
        ("training", NotLearning, "cpu", "accuracy 0."),
        ("all_cores", NotLearning, "xla", "spmd: losses differ"),
        ("libtpu_flag", Adding, "cpu", "WRONG"),
        ("all_reduce", Doubling, "cpu", "wrong by 1.0e+00"),
        ("micro_batches", LosingMicroBatches, "xla", "norm"),
        ("overflow", TakingOverflows, "cpu", "CHANGED"),
        ("copies", Runtime, "cuda", "50 of 50"),  # a processor copies late, as a GPU must not
    ],
)
def test_a_check_fails_on_a_device_that_is_wrong(name, runtime, accelerator, words, outcome_on):
    found = outcome_on(name, runtime, accelerator)
    assert found.outcome == FAIL and words in found.text, found


@pytest.mark.slow
def test_a_training_on_a_device_that_is_right_passes(outcome_on):
    for name in ("training", "all_cores"):
        assert outcome_on(name).outcome == PASS


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


@pytest.mark.parametrize("held, outcome", [(1, PASS), (6, PASS), (7, FAIL)])
def test_gradients_of_many_steps_at_once_fail_with_the_option_that_helps(
    held, outcome, outcome_on, monkeypatch
):
    monkeypatch.setattr(Filling, "held_at_once", held)
    found = outcome_on("run_ahead", Filling, "xla")
    assert found.outcome == outcome and found.numbers["steps_held"] == held
    assert ("--log-every" in found.text) == (outcome == FAIL)


@pytest.mark.parametrize("broken", ["training", "evaluation"])
@pytest.mark.parametrize("wrong", [0.9, float("nan")])
def test_a_kernel_that_is_wrong_in_training_or_in_evaluation_alone_fails(
    broken, wrong, outcome_on, monkeypatch
):
    right = torch.nn.functional.scaled_dot_product_attention

    def attend(query, *arguments, **settings):
        is_kernel = query.dtype == torch.bfloat16 and torch.is_grad_enabled() == (broken == "training")
        return right(query, *arguments, **settings) * (wrong if is_kernel else 1.0)

    monkeypatch.setattr(checks, "scaled_dot_product_attention", attend)
    found = outcome_on("attention", lambda accelerator, precision: Runtime(accelerator, "bf16"))
    assert found.outcome == FAIL and "enable_cudnn_sdp(False)" in found.text


@pytest.mark.parametrize(
    "reason, kernels_s, outcome", [(None, 1, PASS), (None, 3, FAIL), ("they are wrong", 1, FAIL)]
)
def test_attention_kernels_that_are_slow_or_do_not_work_fail(
    reason, kernels_s, outcome, outcome_on, monkeypatch
):
    pytest.importorskip("torch_xla", reason="the kernels are called through torch_xla")
    from tpukit.tasks.cdeit.tpu import attention

    def choose(runtime):
        attention._disabled_reason = reason
        return "chosen"

    times_s = iter([2, kernels_s])
    monkeypatch.setattr(attention, "_disabled_reason", None)
    monkeypatch.setattr(attention, "choose", choose)
    monkeypatch.setattr(checks, "best_of", lambda runtime, function: next(times_s))
    assert outcome_on("attention_kernels", accelerator="tpu").outcome == outcome


@pytest.mark.parametrize(
    "raised, outcome",
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm", PASS),
        ("CUDA out of memory. Tried to allocate 4096.00 GiB", PASS),
        ("the device is gone", FAIL),
        (None, FAIL),
    ],
)
def test_running_out_of_memory_must_be_a_known_error(raised, outcome, outcome_on, monkeypatch):
    def allocate(runtime):
        if raised:
            raise RuntimeError(raised)

    monkeypatch.setattr(checks, "_allocate_4_tib", allocate)
    assert outcome_on("out_of_memory").outcome == outcome


# The processes of the checks


@pytest.fixture
def run_as(machine, monkeypatch, tmp_path):
    """A function: the report on a GPU whose checks are these programs, with this limit in seconds each."""

    def run(*codes, limit_s=60.0, **settings):
        named = {f"check{n}": hardware.HardwareCheck(checks.opens, limit_s) for n in range(len(codes))}
        monkeypatch.setattr(hardware, "CHECKS", named)
        child = "import sys; exec(dict(zip({!r}, {!r}))[sys.argv[1]])".format(list(named), codes)
        monkeypatch.setattr(hardware, "CHILD", child)
        return hardware.check_hardware(machine("cuda"), path=tmp_path / "report.json", **settings)

    return run


def answers(outcome, text="found"):
    return f"print('noise'); print({json.dumps(dict(outcome=outcome, text=text, numbers={}))!r})"


@pytest.mark.parametrize(
    "code, words",
    [
        ("raise SystemExit('the chip is gone')", "the chip is gone"),
        ("raise SystemExit(7)", "exit code 7"),
        ("print('no answer')", "exit code 0"),
        ("import os; os.kill(os.getpid(), 11)", "exit code -11"),
    ],
)
def test_a_check_that_crashes_fails_alone(code, words, run_as):
    report = run_as(code, answers(PASS))
    assert [row["outcome"] for row in report["checks"]] == [FAIL, PASS]
    assert words in report["checks"][0]["text"] and hardware.has_failed(report)


def test_a_check_that_hangs_is_ended_with_all_that_it_started(run_as, tmp_path):
    pid = tmp_path / "pid"
    hang = (
        "import subprocess; p = subprocess.Popen(['sleep', '600']);"
        f" open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    began = time.monotonic()
    [row] = run_as(hang, limit_s=4)["checks"]
    assert row["outcome"] == FAIL and "did not end within 4 s" in row["text"]
    assert 4 <= row["seconds"] and time.monotonic() - began < 30
    stat = Path(f"/proc/{pid.read_text()}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_what_the_budget_does_not_reach_is_skipped_and_the_check_that_it_ends_does_not_fail(run_as):
    report = run_as("import time; time.sleep(600)", answers(PASS), budget_s=3, limit_s=60)
    first, second = report["checks"]
    assert [first["outcome"], second["outcome"]] == [SKIP, SKIP] and not hardware.has_failed(report)
    assert "over the budget" in first["text"] and "--budget" in second["text"] and second["seconds"] < 1


def test_the_report_is_written_after_each_check(run_as, tmp_path):
    seen = []

    def look(line):
        if line.startswith("    "):
            seen.append(len(json.loads((tmp_path / "report.json").read_text())["checks"]))

    run_as(answers(PASS), answers(INFO), answers(FAIL), log=look)
    assert seen == [1, 2, 3]


SECRET_TEXTS = [
    "no file /srv/jane.doe/my data/secret.npz",
    "[Errno 2] No such file: '/data/my set/last secret.npz'",
    "~/secret/x and C:\\People\\jane\\x.py",
    "/kaggle/input/secret-set/a.png, '/content/drive/MyDrive/secret'",
    "see https://hf.co/secret?token=abc and gs://secret/run, ask jane@example.org at 10.1.2.3:8471",
    f"{Path.home()}/a b/secret on {socket.gethostname()} by {getpass.getuser()}",
    f"{Path.cwd()}/secret",
]


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_report_names_no_path_address_user_or_host(text, run_as, monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/srv/jane/secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-box.example")
    run_as(answers(FAIL, f"{text} jdoe@lab-box.example jdoe lab-box"))
    written = (tmp_path / "report.json").read_text()
    assert not re.search(r"secret|jane|jdoe|lab-box|MyDrive|kaggle/|content/|token|10\.1\.2\.3", written), (
        written
    )


def test_scrubbing_leaves_rates_and_versions_as_they_are():
    text = "an error of 1/2, a / b, ~3 s, 120 images/s, 3.1 ms/step, libtpu 0.0.21.1, fp32 1e-07, a and/or b"
    assert hardware.scrub(text) == text
    assert len(hardware.scrub("x" * 9999)) < 500 and "\x1b" not in hardware.scrub("\x1b[31m")


def test_wrong_use_says_what_there_is(machine):
    with refuses("--rehearse"):
        hardware.check_hardware(machine("cpu"))
    with refuses("nonsense", "opens"):
        hardware.check_hardware(machine("cuda"), only=["nonsense"])
    with refuses("run_ahead"):  # of a TPU alone
        hardware.check_hardware(machine("cuda"), only=["run_ahead"])
    mine = machine("cuda").outputs.with_name("train.py")
    mine.write_text("print('mine')")
    with refuses("train.py", "--report"):
        hardware.check_hardware(machine("cuda"), path=mine)
    assert mine.read_text() == "print('mine')"


def test_checks_of_several_chips_and_of_torch_xla_are_skipped_elsewhere(machine):
    several, flag = hardware.CHECKS["all_reduce"], hardware.CHECKS["libtpu_flag"]
    assert several.reason_to_skip(machine("tpu", 1)) and not several.reason_to_skip(machine("tpu", 8))
    assert not several.reason_to_skip(machine("cpu"))  # a rehearsal of two processes
    by_torch_tpu = dataclasses.replace(machine("tpu"), versions=dict(torch_tpu="0.2.0"))
    assert flag.reason_to_skip(by_torch_tpu) and not flag.reason_to_skip(machine("xla"))


@pytest.mark.slow
@pytest.mark.parametrize("pjrt, accelerator", [("CPU", "xla"), (None, "cpu")])
def test_a_rehearsal_says_that_it_is_one(pjrt, accelerator, monkeypatch, tmp_path):
    if pjrt:
        pytest.importorskip("torch_xla")
        monkeypatch.setenv("PJRT_DEVICE", pjrt)
    else:
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
    path = tmp_path / "report.json"
    report = hardware.check_hardware(detect(), only=["opens"], path=path, rehearse=True)
    assert json.loads(path.read_text()) == report
    assert report["rehearsal"] is True and report["accelerator"] == accelerator
    [row] = report["checks"]
    assert row["outcome"] == PASS and "not seen on hardware" in hardware.table(report).title


def test_doctor_prints_the_outcomes_and_ends_with_1_where_one_failed(capsys, monkeypatch, machine):
    from tpukit.tools import doctor

    env = machine("cuda")
    monkeypatch.setattr(doctor, "examine", lambda env: [])
    monkeypatch.setattr(tpukit, "detect", lambda: env)
    monkeypatch.setattr(hardware, "_run", lambda name, env, left_s: Outcome(FAIL, f"wrong at {left_s:.0f} s"))
    assert cli.main(["doctor", "--hardware", "--only", "opens", "--budget", "50", "--json"]) == 1
    printed = capsys.readouterr()
    [row] = json.loads(printed.out)["hardware"]["checks"]
    assert (row["name"], row["outcome"], row["text"]) == ("opens", FAIL, "wrong at 50 s")
    assert "1/1 opens: A process opens" in printed.err
    assert json.loads((env.outputs / hardware.REPORT).read_text())["checks"] == [row]
    assert cli.main(["doctor", "--hardware", "--only", "opens"]) == 1
    assert "wrong at 600 s" in capsys.readouterr().out


def test_without_an_accelerator_doctor_says_how_to_rehearse(capsys, monkeypatch, machine):
    monkeypatch.setattr(tpukit, "detect", lambda: machine("cpu"))
    assert cli.main(["doctor", "--hardware"]) == 1
    assert "no TPU and no GPU is here" in (printed := capsys.readouterr().err) and "--rehearse" in printed
