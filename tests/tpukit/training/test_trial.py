"""A first training on new hardware tries whether it computes what it should, does without what is wrong, and
is otherwise the same training."""

import copy
import dataclasses
import json
import math

import pytest
import torch

from tests.conftest import SMALL, checkpoint, exact, same
from tests.tpukit.devices.conftest import told_by_ranks
from tests.tpukit.devices.emulated_gpu import EmulatedRuntime, Graph
from tests.tpukit.training.conftest import train_in
from tpukit import MNIST
from tpukit.devices import cuda_graph
from tpukit.devices.runtime import Runtime
from tpukit.host import environment
from tpukit.training import trial

LAST = trial.STEPS - cuda_graph.WARM_UP  # replay on a GPU


@pytest.fixture(autouse=True)
def no_trial_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def replays(xla, monkeypatch):
    """A list that gets an item at each replay on XLA."""
    from tpukit.devices.xla_graph import ReplayedStep

    made, replay = [], ReplayedStep._replay
    monkeypatch.setattr(ReplayedStep, "_replay", lambda *arguments: made.append(1) or replay(*arguments))
    return made


@pytest.fixture
def like_tpu(xla, monkeypatch):
    """The CPU XLA device, taken for a TPU."""
    runtime = copy.copy(xla)
    runtime.accelerator = "tpu"
    found = dataclasses.replace(environment.detect(), device_name="v5litepod-8")
    monkeypatch.setattr(environment, "detect", lambda: found)
    return runtime


# The two measures


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_captured_steps_of_a_sound_gpu_have_no_error_worth_a_word(precision, emulated):
    runtime = EmulatedRuntime(precision)
    assert trial.step_error(runtime) <= trial.MAX_ERROR
    assert emulated.launches == LAST
    assert runtime.scaler.state_dict() == EmulatedRuntime(precision).scaler.state_dict()


def test_neither_have_replayed_ones_or_a_cpus(xla, replays, cpu):
    assert trial.step_error(xla) <= 1e-3
    assert len(replays) == trial.STEPS
    assert trial.step_error(cpu) == 0


def test_steps_that_give_nan_are_wrong(monkeypatch, emulated):
    given = iter([[torch.ones(2), torch.tensor([math.nan, 1])], [torch.ones(2), torch.ones(2)]])
    monkeypatch.setattr(trial, "_take_steps", lambda *_, **__: next(given))
    assert "off by nan" in trial.try_out(EmulatedRuntime())


def lose_one_replay(monkeypatch, number):
    replay, made = Graph.replay, []

    def lossy(graph):
        made.append(1)
        if len(made) != number:
            replay(graph)

    monkeypatch.setattr(Graph, "replay", lossy)


@pytest.mark.parametrize("number, precision", [(1, "bf16"), (LAST, "fp16")])
def test_one_replay_that_does_nothing_is_an_error_beyond_rounding(number, precision, emulated, monkeypatch):
    lose_one_replay(monkeypatch, number)
    assert not trial.step_error(EmulatedRuntime(precision)) <= 2 * trial.MAX_ERROR


# At the start of a training


def trained(folder, digits, runtime, **more):
    return train_in(folder, MNIST(dataset_dir=digits, epochs=1, **SMALL, **more), runtime)


def log_of(run):
    return (run.path / "log.txt").read_text()


def check_same(run, other):
    assert exact(run) == exact(other)
    assert same(checkpoint(run)["model"], checkpoint(other)["model"])
    mine, others = (checkpoint(one)["random"][0] for one in (run, other))
    assert torch.equal(mine.pop("cpu"), others.pop("cpu")) and mine == others
    states = (checkpoint(one)["optimizer"]["state"].values() for one in (run, other))
    assert all(map(same, *states))


def test_a_training_is_the_same_with_a_trial_and_without(digits, tmp_path, like_tpu, replays):
    width = dict(channels=5)  # of no other test, whose graph this process would find compiled
    tried = trained(tmp_path / "tried", digits, like_tpu, **width)
    assert len(replays) == trial.STEPS + 25
    plain = trained(tmp_path / "plain", digits, like_tpu, **width)
    assert len(replays) == trial.STEPS + 2 * 25
    check_same(tried, plain)
    compiled = [(r["what"], r["programs"]) for r in tried.records("compile")]
    assert compiled.count(("step", 1)) == 1


def test_a_gpu_whose_replays_lose_an_update_trains_by_eager_steps(digits, tmp_path, emulated, monkeypatch):
    lose_one_replay(monkeypatch, 2)
    runtime = EmulatedRuntime()
    run = trained(tmp_path / "run", digits, runtime)
    assert not runtime.trusts_graphs and len(emulated.graphs) == 1
    assert "training steps do not run as one captured graph, which is slower" in log_of(run)
    assert "the results were off by" in log_of(run)
    check_same(run, trained(tmp_path / "eager", digits, Runtime("cpu")))


# When it is made


@pytest.mark.parametrize("error", [0.0, 0.12])
def test_a_machine_keeps_what_passed_and_tries_again_what_failed(error, monkeypatch):
    tries = []
    monkeypatch.setattr(trial, "step_error", lambda runtime: tries.append(1) or error)
    for _ in range(2):
        runtime = EmulatedRuntime()
        assert ("off by 12.0%" in trial.try_out(runtime)) == (not runtime.trusts_graphs) == (error > 0)
    assert len(tries) == (2 if error else 1)
    trial.try_out(EmulatedRuntime("bf16"))
    assert len(tries) == (3 if error else 2)  # in other products


def test_a_result_that_another_user_may_have_kept_is_not_believed(tmp_path, monkeypatch):
    tries = []
    monkeypatch.setattr(trial, "step_error", lambda runtime: tries.append(1) or 0.0)
    for kept in (1, 2, 3):
        assert trial.try_out(EmulatedRuntime()) == "" and len(tries) == kept
        for passed in (tmp_path / "cache").iterdir():
            passed.chmod(0o646)


def test_without_a_cache_folder_it_is_made_each_time(monkeypatch):
    monkeypatch.setattr(trial, "step_error", lambda runtime: 0.0)
    monkeypatch.setenv("TPUKIT_CACHE", "/dev/null")
    assert trial.try_out(EmulatedRuntime()) == ""


def test_nothing_is_tried_on_a_cpu_and_each_hardware_by_itself(cpu, xla, like_tpu, monkeypatch):
    tries = []
    monkeypatch.setattr(trial, "step_error", lambda runtime: tries.append(1) or 0.0)
    assert trial.try_out(cpu) == trial.try_out(xla) == "" and not tries
    v5e = environment.detect()
    machines = [("v5litepod-8", "2.9"), ("v6e-1", "2.9"), ("v6e-1", "2.8"), ("v6e-1", "2.9")]
    for device_name, version in machines:
        found = dataclasses.replace(v5e, device_name=device_name, versions=dict(torch=version))
        monkeypatch.setattr(environment, "detect", lambda found=found: found)
        trial.try_out(like_tpu)
    assert len(tries) == 3


# Several cores

RANK = """
import json
from tpukit.training import trial

runtime = Runtime("cpu", "fp32", world=world)
told = dict(sound=trial.step_error(runtime))
trial.step_error = lambda runtime: float(rank)
runtime.accelerator = "cuda"
told["failed"] = trial.try_out(runtime)
told["trusts"] = runtime.trusts_graphs
tell(json.dumps(told))
"""


def test_two_cores_of_which_one_steps_wrong_both_do_without(tmp_path, warm_calls):
    for [line] in told_by_ranks(RANK, 2, tmp_path):
        rank = json.loads(line)
        assert rank["sound"] <= 1e-3 and not rank["trusts"]
        assert "off by 100.0%" in rank["failed"]
