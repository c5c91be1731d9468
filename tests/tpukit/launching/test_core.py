"""`launch` of a plain function, which asks `core()` where it runs."""

import copy
import os

import pytest
import torch
import torch.distributed as dist

import tpukit
from tests.conftest import loaded_by, refuses
from tests.tpukit.launching.conftest import CPU, needs_torch_xla, python, xla_environ
from tpukit.launching import core as core_module
from tpukit.launching.core import Core

PLAIN = """
import tpukit

def line(steps, seed=0):
    core = tpukit.core()
    print("native words of", core.rank)
    if core.rank > 0:
        print("caf\\udce9")  # a name that is not UTF-8
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).to(core.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(6, 2, generator=generator)[core.rank :: core.size].to(core.device)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        core.optimizer_step(optimizer)
    core.print(f"{core.size} cores, {steps} steps")
    print("no end of line", end="")
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return dict(weights=weights, shape=(core.rank, core.size), ranks=core.world.all_gather(core.rank))
"""


def printed(ran):
    """What a program printed after the word RESULT, evaluated."""
    assert "RESULT " in ran.stdout, ran.stdout[-2000:] + ran.stderr[-3000:]
    return eval(ran.stdout.partition("RESULT ")[2], dict(tensor=torch.tensor))


def test_outside_of_a_launch_the_core_is_the_only_one_and_has_this_machines_device(xla):
    core = tpukit.core()
    assert (core.rank, core.size, core.device) == (0, 1, xla.device)
    assert tpukit.core() is core


@pytest.mark.parametrize("starter", ["torchrun", "init_process_group", "xmp.spawn"])
def test_one_of_several_processes_that_no_launch_started_is_not_taken_for_the_only_one(
    starter, xla, monkeypatch
):
    core_module._alone.cache_clear()
    if starter == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("WORLD_SIZE", "2")
    elif starter == "init_process_group":
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    else:
        import torch_xla.runtime as xr

        monkeypatch.setattr(xr, "world_size", lambda: 2)
    with refuses("one of 2", "tpukit.launch"):
        tpukit.core()


def test_on_one_core_a_function_runs_in_this_process_and_a_step_updates_and_counts(xla, capsys):
    def function(lr, steps):
        core = tpukit.core()
        weight = torch.ones(2, device=core.device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            weight.sum().backward()
            core.optimizer_step(optimizer)
        core.print("rank", core.rank)
        return weight.tolist(), core.world.step, os.getpid()

    values, steps, pid = tpukit.launch(function, 0.25, 2, cores=1)
    assert (values, steps, pid) == ([0.5, 0.5], 2, os.getpid())
    assert capsys.readouterr().out == "rank 0\n"


def test_two_optimizers_end_one_step_on_one_core_and_no_gradient_changes(xla):
    core = Core(xla)
    weights = [torch.full((2,), value, device=core.device, requires_grad=True) for value in (1.0, 3.0)]
    optimizers = [torch.optim.SGD([weight], lr=0.25) for weight in weights]
    (weights[0] * weights[1]).sum().backward()
    core.average_gradients(*optimizers)
    for optimizer in optimizers:
        optimizer.step()
    core.end_step()
    assert [weight.tolist() for weight in weights] == [[0.25] * 2, [2.75] * 2] and core.world.step == 1


@pytest.mark.parametrize("name", ["world_size", "barrier", "gather"])
def test_a_name_that_a_core_lacks_names_those_that_it_has(name, cpu):
    core = Core(cpu)
    assert not hasattr(core, name)
    with pytest.raises(AttributeError) as error:
        getattr(core, name)
    words = str(error.value)
    assert (
        f"{name!r}" in words
        and ", rank, runtime, share, size, state_dict, world;" in words
        and " _" not in words
    )
    for of_world in words.partition("world has ")[2].split(", "):
        assert callable(getattr(core.world, of_world))
    for other in Core.__annotations__:  # every name that the class describes is there, and named
        assert hasattr(core, other) and other in words
    assert copy.copy(core).rank == 0  # which asks for names before there are any


def test_a_core_hides_no_error_of_its_own(cpu, monkeypatch):
    core = Core(cpu)
    monkeypatch.delattr(core, "runtime")
    with pytest.raises(AttributeError, match="'runtime'"):
        core.end_step()
    monkeypatch.setattr(core.world, "heartbeat", lambda step: step.absent)
    monkeypatch.setattr(core, "runtime", cpu, raising=False)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'absent'"):
        core.end_step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "xla"])
def test_three_cores_return_rank_0s_result_and_learn_what_one_does(kind):
    if kind == "xla":
        needs_torch_xla()
    env = CPU if kind == "cpu" else xla_environ()
    program = """
three = launch(line, 5, cores=3)
one = launch(line, 5, cores=1)
print("RESULT", [three, one])
"""
    ran = python(PLAIN + program, env=env)
    three, one = printed(ran)
    assert three["shape"] == (0, 3) and one["shape"] == (0, 1) and three["ranks"] == [0.0, 1.0, 2.0]
    for name, values in one["weights"].items():
        torch.testing.assert_close(three["weights"][name], values, atol=1e-3, rtol=0)  # printed to 4 digits
    lines = ran.stdout.splitlines()
    assert lines.count("3 cores, 5 steps") == 1 and {"all 3 cores started", "no end of line"} <= {*lines}
    assert [line for line in lines if line.startswith("native")] == ["native words of 0"] * 2


FAILURES = """
import glob, tempfile
from tests.tpukit.launching.launched import cause, children

def fail(accident, steps):
    core = tpukit.core()
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        weight.sum().backward()
        core.optimizer_step(optimizer)
    if core.rank == 1:
        cause(accident)
    core.world.all_gather(0)

def early():
    core = tpukit.core()
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3 + (core.rank == 0)):
        weight.sum().backward()
        core.optimizer_step(optimizer)

def slow():
    time.sleep(14)

def outcome(function, *args, **how):
    try:
        return launch(function, *args, cores=2, **how)
    except CoreFailed as error:
        return str(error)

left = lambda: glob.glob(tempfile.gettempdir() + "/tpukit-*")
whole = [outcome(fail, "", 1), left()]
Job.start_timeout_s = 12
whole.append(outcome(slow))
messages = [
    outcome(fail, "raise", 3),
    outcome(fail, "raise", 0),
    outcome(fail, "hang", 1, hang_timeout_s=6),
    outcome(early),
    outcome(slow, hang_timeout_s=4),
]
print("RESULT", [whole, messages, children(os.getpid())])
"""


@pytest.mark.slow
def test_a_core_of_a_plain_function_that_fails_ends_the_launch_in_its_own_words(tmp_path):
    ran = python(PLAIN + FAILURES, env={**CPU, "TMPDIR": str(tmp_path)})
    whole, messages, left = printed(ran)
    # Nothing stays after a launch that went well, and a call without steps may take its time.
    assert whole == [None, [], None] and left == []
    raised, at_once, hung, early, never = messages
    assert "core 1 (rank 1) in step 4 failed" in raised and "core 1 (rank 1) failed" in at_once
    for message in (raised, at_once):
        assert "ValueError: sample 7 is broken" in message and "in cause" in message
        assert 'raise ValueError("sample 7 is broken")' in message  # its line
    assert "no core completed a step for 6 s" in hung and "in cause" in hung and "in all_gather" in hung
    assert "core 1 ended after 3 steps, and core 0 waits for it in step 4" in early
    assert "drop_last=True" in early and "Traceback" not in early
    assert "no core completed a step for 4 s" in never and "in slow" in never
    log = raised.rpartition("What each core printed: ")[2].replace("NN", "01")
    assert os.path.exists(log)


@pytest.mark.slow
def test_an_interrupt_ends_a_plain_function_at_once(tmp_path):
    program = """
import pathlib, signal, threading
waiting = pathlib.Path(sys.argv[1])
def wait():
    core = tpukit.core()
    waiting.touch()
    time.sleep(600)
def interrupt():
    while not waiting.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    launch(wait, cores=2)
except KeyboardInterrupt:
    from tests.tpukit.launching.launched import children
    print("RESULT", children(os.getpid()))
"""
    ran = python(PLAIN + program, tmp_path / "waiting", env=CPU, timeout=120)
    assert printed(ran) == [] and "ending all cores" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_a_process_that_launches_a_plain_function_loads_1350_lines_of_code_at_most(cores, tmp_path):
    program = f"import tpukit\nassert tpukit.launch(lambda: tpukit.core().size, cores={cores}) == {cores}"
    _, parts, lines = loaded_by(program, tmp_path, CPU)
    assert parts == {"devices", "host", "launching", "runs"} and lines <= 1_350


def test_a_step_that_torch_xla_compiles_as_one_graph_trains_as_one_that_it_does_not(xla):
    import torch_xla

    def losses(compile):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).to(xla.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        core = core_module.Core(xla)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            core.optimizer_step(optimizer)
            return loss

        step = compile(step)
        return [step(torch.ones(4, 4, device=xla.device)).item() for _ in range(3)]

    compiled = losses(lambda step: torch_xla.compile(step, full_graph=True))
    assert compiled == pytest.approx(losses(lambda step: step)) and compiled[0] > compiled[1]


AVERAGED = """
def train():
    core = tpukit.core()
    weights = [torch.nn.Parameter(torch.ones(2, device=core.device)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=1.0, weight_decay=0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss = weights[0].sum()
        if core.rank == step % 2:
            loss = loss + weights[1].sum()
        loss.backward()
        core.optimizer_step(optimizer)
    return core.world.all_gather([weight[0].item() for weight in weights])

def summed():
    core = tpukit.core()
    weight = torch.nn.Parameter(torch.ones(3).to(core.device))
    (weight.sum() * (core.rank + 1)).backward()
    core.average_gradients(torch.optim.SGD([weight], lr=0.1))
    return weight.grad.cpu().tolist()

print("RESULT", [launch(train, cores=2), launch(summed, cores=2)])
"""


@pytest.fixture(scope="module", params=["cpu", "xla"])
def averaged(request):
    """What AVERAGED returns, of one process for each kind."""
    if request.param == "xla":
        needs_torch_xla()
    return printed(python(PLAIN + AVERAGED, env=CPU if request.param == "cpu" else xla_environ()))


@pytest.mark.slow
def test_a_parameter_without_a_gradient_on_one_core_has_half_of_the_others(averaged):
    """The first has one of 1 on both, the second on one, the third, which does not decay, on none."""
    rows, _ = averaged
    wanted = [1.0, 1.0, 1.0]
    for _ in range(3):
        wanted = [wanted[0] / 2 - 1.0, wanted[1] / 2 - 0.5, wanted[2]]
    assert rows == [wanted] * 2


@pytest.mark.slow
def test_the_gradient_of_a_sum_which_is_one_number_in_memory_is_averaged(averaged):
    _, gradient = averaged
    assert gradient == [1.5, 1.5, 1.5]
