"""`tpukit plan`: traced graphs, the TPU compiler's answers, and every way in which it can fail."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plans
from tests.conftest import ROOT, refuses, wait_for
from tests.tpukit.launching.conftest import are_gone
from tpukit import MNIST, TpukitError
from tpukit.devices import lanes
from tpukit.host.text import GIB
from tpukit.reporting import display
from tpukit_tools import cli
from tpukit_tools import plan as package
from tpukit_tools.plan import Plan, compiler
from tpukit_tools.plan import trace as tracing
from tpukit_tools.plan.compiler import MACHINES

COMMITTED = json.loads(plans.PATH.read_text())
TINY = MNIST(batch_size=32, channels=8)
V5E = MACHINES["v5e-1"]

pytestmark = pytest.mark.usefixtures("warm_calls")


@pytest.fixture
def needs_xla():
    pytest.importorskip("torch_xla", reason="torch_xla traces the step")


def quiet(text):
    pass


def plan(task, **options):
    return package.plan(task, log=quiet, **options)


def row_of(task, **options):
    (row,) = plan(task, **options).rows
    return row


# With the compiler


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mnist small", pytest.param("mshnet small", marks=pytest.mark.nightly)])
def test_a_small_graph_has_the_figures_of_the_committed_plan(case, needs_xla, request):
    if not compiler.folder_of().is_dir() and not request.node.get_closest_marker("nightly"):
        pytest.skip("the compiler is not installed; the nightly tests install it")
    assert COMMITTED["compiler"] == list(compiler.COMPILER)
    assert COMMITTED["plans"].keys() == plans.CASES.keys()
    found, wanted = plans.measure(case), COMMITTED["plans"][case]
    assert found.keys() == wanted.keys() and found["fits"]
    for name in ("peak_bytes", "flops", "hbm_bytes"):
        assert found[name] == pytest.approx(wanted[name], rel=0.02), name
    if case.startswith("mnist"):
        # The arithmetic by hand: forward, and twice that backward, less the gradient of the images.
        c, pixels = TINY.channels, 28 * 28
        first, rest = 9 * c * pixels, 9 * c * 2 * c * pixels / 4 + 2 * c * 49 * 128 + 128 * 10
        assert found["flops"] == pytest.approx(2 * 32 * (2 * first + 3 * rest), rel=0.2)


@pytest.mark.nightly
def test_each_of_eight_cores_has_an_eighth_of_the_batch(needs_xla):
    alone, replicas = row_of(TINY), row_of(TINY, chip="v5e-8", batch_sizes=[8 * 32])
    for name in ("flops", "peak_bytes"):
        assert replicas[name] == pytest.approx(alone[name], rel=0.2), name


@pytest.mark.nightly
def test_micro_batches_need_less_memory_for_the_same_arithmetic(needs_xla):
    wide = MNIST(batch_size=512, channels=128)
    whole, parts = (row_of(dataclasses.replace(wide, micro_batches=count)) for count in (1, 2))
    assert parts["peak_bytes"] < 0.9 * whole["peak_bytes"]
    assert parts["flops"] == pytest.approx(whole["flops"], rel=0.01)


# Tracing


@pytest.mark.slow
def test_a_step_is_the_same_graph_every_time_and_beside_it_count_its_average_and_the_set_it_does_not_use(
    needs_xla, digits, tmp_path
):
    task = dataclasses.replace(TINY, ema_decay=0.9, data_on="device", dataset_dir=digits)
    train, test = task.datasets()
    averaged = sum(values.nbytes for values in task.model().state_dict().values())
    graphs = set()
    for choice in ("auto", "no"):  # a plan is of the compiled step
        (tmp_path / choice).mkdir()
        chosen = dataclasses.replace(task, compile=choice)
        graph = tracing.trace_step(chosen, 32, V5E, tmp_path / choice)
        graphs.add(Path(graph["path"]).read_bytes())
        stored = sum(lanes.to_rows(array).nbytes for array in test.device_arrays().values())
        assert graph["resident_bytes"] == averaged + stored
        # The batch is gathered in the graph, and the pixels are not in it: they are an argument of it.
        assert Path(graph["path"]).stat().st_size < train.device_nbytes() / 4
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "error, words",
    [
        ("heads must divide the width", ["mnist at batch 8 cannot be traced: heads must divide the width"]),
        ("ModuleNotFoundError: No module named 'torch_xla'", ["pip install torch==2.9.0 torch-xla==2.9.0"]),
    ],
)
def test_what_cannot_be_traced_says_why_and_what_to_install(error, words, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise TpukitError(error)

    monkeypatch.setattr(tracing.subprocess_call, "call", fail)
    with refuses(*words):
        tracing.trace_step(TINY, 8, V5E, tmp_path)


def test_a_task_of_a_notebook_cell_is_told_to_move_to_a_module(tmp_path):
    Celled = type("Celled", (MNIST,), {"__module__": "__main__"})
    with refuses("Celled", " module"):
        tracing.trace_step(Celled(), 8, V5E, tmp_path)


# Asking


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(chip="v2-8"), ["'v2-8'", "v5e-1, v5e-8, v6e-1"]),
        (dict(chip="v5e-8", batch_sizes=[12]), ["batch_size=12", "8 cores", "8 or 16"]),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_before_anything_is_installed(options, words, monkeypatch):
    monkeypatch.setattr(package, "install_compiler", None)
    with refuses(*words):
        plan(TINY, **options)


NO_MEMORY = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.25G of 15.75G hbm."


def test_a_plan_is_shown_with_which_batch_fits_its_figures_and_the_chips_memory(capsys):
    fits = dict(peak_bytes=4 * GIB, flops=1e12, flop_s=0.00508, kernels=[])
    rows = [
        dict(batch_size=32, fits=True, compile_s=1.0, **fits),
        dict(batch_size=128, fits=False, compile_s=1.0, why=NO_MEMORY),
    ]
    found = Plan("mshnet", "v5e-1", rows)
    assert found.largest_batch == 32 and V5E.chip.hbm_bytes == 15.75 * GIB
    display.show(found)
    shown = capsys.readouterr().out
    for words in ("4.00", "5.08", "15.75 GiB", "needs 31.25G"):
        assert words in shown, words


KERNEL = """ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %k = f32[8,128]{1,0:T(8,128)} custom-call(%p), custom_call_target="tpu_custom_call"
}
"""


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """The compiler answers `KERNEL`. Returns (a traced graph, which tests may change; the variables that each
    of its processes had)."""
    path = tmp_path / "0.mlirbc"
    path.write_bytes(b"a graph")
    graph, given = dict(kernels=[], path=path, resident_bytes=0), []
    answer = json.dumps(dict(peak_bytes=1, flops=1e12, hlo=KERNEL))
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--of_this_process=1")
    for module in (package, compiler):
        monkeypatch.setattr(module, "install_compiler", lambda log: tmp_path)
    monkeypatch.setattr(package, "trace_step", lambda *_: dict(graph))
    monkeypatch.setattr(
        compiler, "run_python", lambda *_, variables: given.append(variables) or ran(answer, code=0)
    )
    return graph, given


def test_what_kernels_compute_is_added_and_the_caption_says_so(answers):
    graph, _ = answers
    graph["kernels"] = [dict(name="flash attention", flops=2e12)]
    found = plan(TINY)
    assert found.rows[0]["flops"] == 3e12
    assert "flash attention" in found.caption
    graph["kernels"] = []
    assert "by hand" not in plan(TINY).caption


def test_the_kept_figures_have_the_bytes_of_the_compiled_graph_and_none_if_it_does_not_fit(answers):
    graph, _ = answers
    found = plans.measure("mnist small")
    assert (found["hbm_bytes"], found["peak_bytes"], found["flops"]) == (2 * 4096, 1, 1e12)
    graph["resident_bytes"] = 16 * GIB
    found = plans.measure("mnist small")
    assert not found["fits"] and found["hbm_bytes"] is found["flops"] is None


def test_the_compiler_gets_no_flag_of_this_process(answers):
    _, given = answers
    plan(TINY)
    assert given == [dict(given[0], LIBTPU_INIT_ARGS=None, XLA_FLAGS=None)]


# What the compiler's process can say


def ran(stdout="", stderr="", code=1):
    return subprocess.CompletedProcess([], code, stdout, stderr)


def refused(error):
    return ran(json.dumps(dict(error=error)), code=0)


@pytest.mark.parametrize(
    "result, words",
    [
        (refused("ABORTED: The TPU is already in use: /tmp/libtpu_lockfile"), "remove /tmp/libtpu_lockfile"),
        (refused('UNIMPLEMENTED: pool\nmetadata={op_name="window.5"}'), "window.5"),
        (ran(stderr="x", code=-9), "memory"),
        (ran(stderr="OSError: wrong ELF class"), "Linux on x86-64"),
    ],
)
def test_a_failure_of_the_compiler_is_explained(result, words, tmp_path):
    with refuses(words):
        compiler.read_answer(result, tmp_path)


def test_a_plan_that_is_killed_leaves_no_compiler_behind(tmp_path):
    """The compiler is a package that says in which process it is imported, and waits."""
    package_text = "import os, time; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(60)"
    (tmp_path / "jaxlib.py").write_text(package_text)
    program = "from tpukit_tools.plan.compiler import *; run_compiler('', MACHINES['v5e-1'], Path.cwd())"
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environ) as parent:
        told = tmp_path / "pid"
        wait_for(lambda: told.exists() and told.read_text().endswith(" "), parent)
        parent.kill()
    assert are_gone([int(told.read_text())])


def test_a_batch_that_cannot_fit_is_an_answer_with_what_it_needs(answers, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "run_python", lambda *_, **__: refused(NO_MEMORY))
    assert cli.main(["plan", "mnist", "--channels", "8", "--batch-sizes", "32"]) == 1
    shown = capsys.readouterr()
    assert "31.25G" in shown.out and "batch 32" in shown.err


def test_a_compiler_that_cannot_be_installed_is_explained_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "folder_of", lambda packages: tmp_path / "compiler")
    stderr = "WARNING: x\nERROR: No matching distribution found for libtpu==0.0.21\n"
    monkeypatch.setattr(compiler, "run_python", lambda *_, **__: ran(stderr=stderr))
    with refuses("ERROR: No matching distribution", "install pip"):
        compiler.install_compiler(quiet)
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".lock"]


def test_a_compiler_that_another_user_may_have_changed_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "folder_of", lambda packages: tmp_path / "compiler")
    (tmp_path / "compiler").mkdir()
    assert compiler.install_compiler(quiet) == tmp_path / "compiler"
    (tmp_path / "compiler").chmod(0o757)
    with refuses(tmp_path / "compiler", "TPUKIT_CACHE"):
        compiler.install_compiler(quiet)
