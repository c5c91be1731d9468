"""`launch` of a plain function, which asks `core()` where it runs."""

import collections
import os
import sys

import pytest
import torch
import torch.distributed as dist

import tpukit
from tests.conftest import loaded_by, refuses
from tests.tpukit.launching.conftest import CPU, needs_torch_xla, python, xla_environ
from tpukit.launching import core as core_module

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

def unknown():
    return dict(losses=[0.5, (number for number in range(3))])

def early():
    core = tpukit.core()
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3 + (core.rank == 0)):
        weight.sum().backward()
        core.optimizer_step(optimizer)

def slow():
    time.sleep(8)

def outcome(function, *args, **how):
    try:
        return launch(function, *args, cores=2, **how)
    except CoreFailed as error:
        return str(error)

left = lambda: glob.glob(tempfile.gettempdir() + "/tpukit-*")
whole = [outcome(fail, "", 1), left()]
Job.start_timeout_s = 6
whole.append(outcome(slow))
messages = [
    outcome(fail, "raise", 3),
    outcome(fail, "raise", 0),
    outcome(fail, "hang", 1, hang_timeout_s=4),
    outcome(unknown),
    outcome(early),
    outcome(slow, hang_timeout_s=2),
]
print("RESULT", [whole, messages, children(os.getpid())])
"""


@pytest.mark.slow
def test_a_core_of_a_plain_function_that_fails_ends_the_launch_in_its_own_words(tmp_path):
    ran = python(PLAIN + FAILURES, env={**CPU, "TMPDIR": str(tmp_path)})
    whole, messages, left = printed(ran)
    # Nothing stays after a launch that went well, and a call without steps may take its time.
    assert whole == [None, [], None] and left == []
    raised, at_once, hung, unknown, early, never = messages
    assert "core 1 (rank 1) in step 4 failed" in raised and "core 1 (rank 1) failed" in at_once
    for message in (raised, at_once):
        assert "ValueError: sample 7 is broken" in message and "in cause" in message
        assert 'raise ValueError("sample 7 is broken")' in message  # its line
    assert "no core completed a step for 4 s" in hung and "in cause" in hung and "in all_gather" in hung
    assert "(rank 0) failed" in unknown or "(rank 1) failed" in unknown
    assert "result['losses'][1], a generator" in unknown and "Traceback" not in unknown
    assert "core 1 ended after 3 steps, and core 0 waits for it in step 4" in early
    assert "drop_last=True" in early and "Traceback" not in early
    assert "no core completed a step for 2 s" in never and "in slow" in never
    log = raised.rpartition("What each core printed: ")[2].replace("NN", "01")
    assert os.path.exists(log)


@pytest.mark.slow
def test_an_interrupt_ends_a_plain_function_at_once():
    program = """
import signal, threading
def wait():
    core = tpukit.core()
    core.print("waiting")
    time.sleep(600)
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(8, interrupt).start()
try:
    launch(wait, cores=2)
except KeyboardInterrupt:
    from tests.tpukit.launching.launched import children
    print("RESULT", children(os.getpid()))
"""
    ran = python(PLAIN + program, env=CPU, timeout=120)
    assert printed(ran) == [] and "ending all cores" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_a_process_that_launches_a_plain_function_loads_1120_lines_of_code_at_most(cores, tmp_path):
    program = f"import tpukit\nassert tpukit.launch(lambda: tpukit.core().size, cores={cores}) == {cores}"
    _, parts, lines = loaded_by(program, tmp_path, CPU)
    assert parts == {"devices", "host", "launching"} and lines <= 1_120


STDERR = """
import logging, warnings
from tqdm import tqdm

logging.basicConfig(level=logging.INFO, format="logged: %(message)s")

def talk(fails):
    core = tpukit.core()
    print("first words")
    logging.info(f"by {core.rank}")
    warnings.warn(f"careful, {core.rank}")
    for _ in tqdm(range(3), desc=f"bar {core.rank}", mininterval=0):
        time.sleep(0.3)
    sys.stderr.write("caf\u00e9")
    if fails:
        raise ValueError("sample 7 is broken")

launch(talk, False, cores=2)
try:
    launch(talk, True, cores=2)
except CoreFailed as error:
    print("RAISED", error)
"""


@pytest.mark.slow
def test_what_rank_0_logs_warns_and_redraws_is_shown_in_its_order_and_kept_in_its_log(tmp_path):
    ran = python(PLAIN + STDERR, env={**CPU, "TMPDIR": str(tmp_path)})
    whole, failed = ran.stdout.split("all 2 cores started\n")[1:]
    wanted = ["first words", "logged: by 0", "careful, 0", "bar 0:   0%", "bar 0: 100%", "caf\u00e9"]
    places = [whole.find(words) for words in wanted]
    assert -1 not in places and places == sorted(places), whole
    assert "33%" in whole and "67%" in whole  # as they come
    assert "by 1" not in ran.stdout and "careful, 1" not in ran.stdout and "bar 1" not in ran.stdout
    assert failed.count("sample 7 is broken") == 1
    assert "sample 7" not in failed.partition("RAISED")[0] + ran.stderr
    [folder] = tmp_path.glob("tpukit-cores-*")  # the one that failed
    for rank in (0, 1):
        log = (folder / f"rank-0{rank}.log").read_text()
        assert f"careful, {rank}" in log and f"bar {rank}: 100%" in log and "caf\u00e9" in log


RESULTS = """
import collections, dataclasses
import numpy as np

@dataclasses.dataclass
class Score:
    loss: float

def varied():
    history = collections.defaultdict(list, loss=[np.float32(0.5)])
    return dict(history=history, array=np.arange(3), score=Score(0.25), path=Path("a"), tensor=torch.ones(2))

def leave():
    tpukit.core().print("leaves")
    sys.exit(0)

def nested():
    launch(print, cores=1)

def sentence(function, cores):
    try:
        return launch(function, cores=cores)
    except TpukitError as error:
        return str(error)

def large():
    return float(torch.ones(4_000_000).exp().sum())

torch.set_num_threads(4)
large()  # starts OpenMP's threads
os.cpu_count = lambda: 8
found = [launch(varied, cores=cores) for cores in (1, 2)]
same = [sorted(map(str, each.items())) for each in found]
kinds = {name: type(value).__name__ for name, value in found[1].items()}
print("RESULT", [same[0] == same[1], kinds, launch(leave, cores=1), launch(leave, cores=2),
    sentence(nested, 2), sentence(lambda: [0, lambda: 1], 2), launch(large, cores=2)])
"""


@pytest.mark.slow
def test_two_cores_pass_on_what_one_does_after_their_process_has_computed_with_threads():
    environ = {name: value for name, value in CPU.items() if name != "OMP_NUM_THREADS"}
    same, kinds, *left, nested, refused, total = printed(python(PLAIN + RESULTS, env=environ, timeout=100))
    wanted = dict(history="defaultdict", array="ndarray", score="Score", path="PosixPath", tensor="Tensor")
    assert same and kinds == wanted and left == [None, None]
    assert "launch in a launched function" in nested and "result[1], a function" in refused
    assert total == pytest.approx(4_000_000 * 2.718281828, rel=1e-4)


def test_what_is_no_function_or_no_option_or_within_a_launch_or_cannot_be_passed_on_is_one_sentence():
    def train(lr=0.1):
        return [lr]

    with refuses("needs a function, not [0.1]", "launch(f, x), not launch(f(x))"):
        tpukit.launch(train())
    with refuses("no option lr, core", "functools.partial"):
        tpukit.launch(train, lr=0.2, core=2)
    with refuses("launch in a launched function"):
        tpukit.launch(tpukit.launch, train, cores=1)
    with refuses("result['a'][1], a generator"):
        tpukit.launch(lambda: dict(a=[1, (n for n in range(2))]), cores=1)
    with refuses("result, a defaultdict"):
        tpukit.launch(lambda: collections.defaultdict(lambda: 0, a=1), cores=1)
    assert tpukit.launch(sys.exit, cores=1) is None
    with pytest.raises(SystemExit):
        tpukit.launch(sys.exit, 3, cores=1)


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


UNUSED = """
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

print("RESULT", launch(train, cores=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "xla"])
def test_a_parameter_without_a_gradient_on_one_core_has_half_of_the_others(kind):
    """The first has one of 1 on both, the second on one, the third, which does not decay, on none."""
    if kind == "xla":
        needs_torch_xla()
    rows = printed(python(PLAIN + UNUSED, env=CPU if kind == "cpu" else xla_environ(), timeout=200))
    wanted = [1.0, 1.0, 1.0]
    for _ in range(3):
        wanted = [wanted[0] / 2 - 1.0, wanted[1] / 2 - 0.5, wanted[2]]
    assert rows == [wanted] * 2
