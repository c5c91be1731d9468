"""Loops of one's own on two cores: what averages their gradients, and what is said if nothing does."""

from types import SimpleNamespace

import pytest
import torch

from tests.tpukit.launching.conftest import CPU, needs_torch_xla, python, xla_environ
from tpukit.devices.optimizers import watch_gradients
from tpukit.launching import core_process
from tpukit.launching.core import Core

LOOPS = """
import contextlib, io
import tpukit
from torch import nn

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
Y = X.sum(1, keepdim=True) * 3

def start(seed=0, kind=torch.optim.SGD, **settings):
    core = tpukit.core()
    torch.manual_seed(seed)
    model = nn.Linear(4, 1).to(core.device)
    x, y = (values[core.rank :: core.size].to(core.device) for values in (X, Y))
    return core, model, kind(model.parameters(), **(settings or dict(lr=0.1))), x, y

def loss_of(model, x, y):
    return (model(x) - y).square().mean()

def ranks(core, *models):
    return core.world.all_gather([w for m in models for w in m.weight.detach().cpu().flatten().tolist()])

def clip():
    core, model, optimizer, x, y = start()
    for _ in range(5):
        for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            (loss_of(model, x[half], y[half]) / 2).backward()
        core.average_gradients(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        core.end_step()
    return ranks(core, model), core.world.step

def clip_first(norm=0.5):
    core, model, optimizer, x, y = start()
    for _ in range(5):
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        core.optimizer_step(optimizer)
        optimizer.zero_grad()

def scaler():
    core, model, optimizer, x, y = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        loss = loss_of(model, x, y)
        if step == 2 and core.rank == core.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        core.average_gradients(optimizer)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return ranks(core, model), scaler.get_scale()

def closure():
    core, model, optimizer, x, y = start(kind=torch.optim.LBFGS, max_iter=6, line_search_fn="strong_wolfe")
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        core.average_gradients(optimizer)
        return torch.tensor(core.world.all_gather(loss.item())).mean()
    for _ in range(2):
        optimizer.step(closure)
    return ranks(core, model)

def two(averages_second):
    core, first, optimizer, x, y = start()
    _, second, other, *_ = start(1)
    for _ in range(3):
        (loss_of(first, x, y) + loss_of(second, x, -y)).backward()
        core.average_gradients(optimizer, *[other][: averages_second])
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    return ranks(core, first, second)

def alone(seed=0, is_same=False, ranks_that_train=(0, 1)):
    core, model, optimizer, x, y = start(seed)
    if is_same:
        x, y = X, Y
    for _ in range(3 if core.rank in ranks_that_train else 0):
        loss_of(model, x, y).backward()
        optimizer.step()

def by_ddp():
    core, model, optimizer, x, y = start()
    model = nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        loss_of(model, x, y).backward()
        optimizer.step()

def late():
    core, model, optimizer, x, y = start()
    optimizer.step()
    core.optimizer_step(optimizer)
    if core.rank == 0:
        nn.init.zeros_(model.weight)  # as if it put the best ones in place

def seeded():
    core, model, optimizer, x, y = start(tpukit.core().rank)
    _, second, other, *_ = start(1 + tpukit.core().rank)
    before = ranks(core, model)[0]
    core.average_gradients(optimizer, other)
    after = ranks(core, model)
    core.optimizer_step(optimizer)
    core.optimizer_step(other)
    return before, after, ranks(core, model, second)

def views(groups):
    core = tpukit.core()
    biases = [nn.Parameter(torch.zeros(4, device=core.device)) for _ in range(2)]
    x = torch.ones(1, 4, 1, 1).to(core.device)
    (x * (x + biases[0].view(x.shape) + biases[1].view(x.shape))).sum().backward()
    of = [biases] if groups == 1 else [[bias] for bias in biases]
    core.average_gradients(*(torch.optim.SGD(each, lr=0.1) for each in of))
    nn.utils.clip_grad_norm_(biases, 2**0.5)
    return core.world.all_gather([g for bias in biases for g in bias.grad.cpu().tolist()])

def told(function, *args, cores=2):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = launch(function, *args, cores=cores)
    return result, out.getvalue()
"""
CPU_LOOPS = """
print("RESULT", dict(
    clip=[told(clip), told(clip, cores=1)],
    clip_first=[told(clip_first), told(clip_first, cores=1)],
    scaler=[told(scaler), told(scaler, cores=1)],
    closure=[told(closure), told(closure, cores=1)],
    two=[told(two, 1), told(two, 1, cores=1)],
    second_forgotten=told(two, 0),
    alone=told(alone),
    same_data=told(alone, 0, True),
    on_rank_0=told(alone, 0, False, (0,)),
    on_one_core=told(alone, cores=1),
    by_ddp=told(by_ddp),
    late=told(late),
    seeded=told(seeded),
    views=[told(views, groups, cores=cores) for groups in (1, 2) for cores in (1, 2)],
))
"""
UNAVERAGED, CHANGED = "nothing averaged", "Gradients changed"


@pytest.fixture(scope="module")
def loops():
    """name -> (result, what was printed) of a launch on two cores, or a list of that and of one on one."""
    ran = python(LOOPS + CPU_LOOPS, env=CPU)
    assert "RESULT " in ran.stdout, ran.stdout[-2000:] + ran.stderr[-3000:]
    return eval(ran.stdout.partition("RESULT ")[2])


def check_equal(ranks, alone):
    """Assert that the cores have the same weights, which are those of one core to 8 digits."""
    assert ranks[0] == ranks[1] == pytest.approx(alone[0], abs=1e-8, rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "xla"])
def test_two_cores_that_accumulate_and_clip_equal_one_to_eight_digits(kind, request):
    if kind == "xla":
        needs_torch_xla()
        program = 'print("RESULT", [told(clip), told(clip, cores=1)])'
        ran = python(LOOPS + program, env=xla_environ())
        [two, _], [one, _] = eval(ran.stdout.partition("RESULT ")[2])
    else:
        [two, _], [one, _] = request.getfixturevalue("loops")["clip"]
    check_equal(two[0], one[0])
    assert one[0][0][0] == pytest.approx(0.04451792, abs=1e-8)  # Lightning Fabric's, on two processes
    assert two[1] == one[1] == 5  # steps


@pytest.mark.slow
def test_gradients_that_are_views_of_one_tensor_are_clipped_once_though_two_optimizers_have_them(loops):
    for ranks, _ in loops["views"]:
        assert all(rank == pytest.approx([0.5] * 8, abs=1e-5) for rank in ranks)


@pytest.mark.slow
def test_an_overflow_on_one_core_skips_the_step_of_a_users_own_scaler_on_both(loops):
    [two, _], [one, _] = loops["scaler"]
    check_equal(two[0], one[0])
    assert two[1] == one[1] == 512.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["closure", "two"])
def test_a_closure_and_two_optimizers_on_two_cores_equal_one(name, loops):
    [two, out], [one, _] = loops[name]
    assert two[0] == two[1] == pytest.approx(one[0], abs=1e-5)
    assert UNAVERAGED not in out and "differed" not in out


@pytest.mark.slow
def test_a_clip_before_the_average_is_said_once_where_there_are_several_cores_and_only_there(loops):
    [_, two], [_, one] = loops["clip_first"]
    assert two.count(CHANGED) == 1 and CHANGED not in one
    for name in ("clip", "scaler", "closure", "two"):
        assert CHANGED not in loops[name][0][1]


@pytest.mark.parametrize("runtime", ["cpu", "xla"])
def test_writes_to_gradients_after_the_backward_pass_are_noticed_once_and_no_others(runtime, request):
    device = request.getfixturevalue(runtime).device
    model = torch.nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    were_changed = watch_gradients(optimizer)

    def backward():
        model(torch.ones(3, 2, device=device)).sum().backward()

    assert not were_changed()  # before the first pass
    for passes in (1, 2):  # the second adds to the gradients, which are kept as zeros
        for _ in range(passes):
            backward()
        assert not were_changed()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert not were_changed()  # asked for this pass before
        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert were_changed() and not were_changed()
        optimizer.zero_grad(set_to_none=False)
        assert not were_changed()
    backward()
    optimizer.zero_grad()
    assert not were_changed()  # there are none
    frozen = torch.nn.Linear(2, 1).requires_grad_(False).to(device)
    assert not watch_gradients(torch.optim.SGD(frozen.parameters(), lr=0.1))()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alone", "same_data", "second_forgotten"])
def test_steps_that_nothing_averaged_are_counted_and_said(name, loops):
    out = loops[name][1]
    assert out.count(UNAVERAGED) == 1 and "\n3 optimizer steps" in out and "core.average_gradients" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by_ddp", "on_rank_0", "on_one_core", "late"])
def test_what_something_else_averaged_or_only_one_core_did_is_not_accused(name, loops):
    assert UNAVERAGED not in loops[name][1]


@pytest.mark.slow
def test_cores_with_other_weights_get_rank_0s_at_the_first_average_and_that_is_said_once(loops):
    (before, after, at_the_end), out = loops["seeded"]
    assert after == [before, before] and at_the_end[0] == at_the_end[1]
    assert out.count("weights differed") == 1
    assert all("differed" not in loops[name][0][1] for name in ("clip", "scaler", "two"))


@pytest.mark.parametrize("group", [None, object()])
def test_on_a_tpu_and_without_a_group_equal_weights_are_not_taken_for_cores_that_trained_alone(
    group, cpu, monkeypatch
):
    monkeypatch.setattr(core_process.dist, "group", SimpleNamespace(WORLD=group))
    cpu.accelerator = "tpu" if group else "cpu"
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    counted = core_process._StepsAlone(Core(cpu))
    optimizer.step()
    assert counted.end() == (1, cpu.checksum(optimizer))
