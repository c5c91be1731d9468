"""`tpukit plan`: traced graphs, the TPU compiler's answers, and every way in which it can fail."""

import dataclasses
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import plans
from tests.conftest import refuses
from tests.tasks.mshnet.small import Narrow
from tpukit import CDEIT, MNIST, MSHNet, TpukitError, cli
from tpukit.devices import lanes
from tpukit.devices.chips import MACHINES
from tpukit.host.tables import GIB
from tpukit.reporting import display
from tpukit.tasks.datasets import make_synthetic
from tpukit.tools import plan as package
from tpukit.tools.child import run_python
from tpukit.tools.plan import Plan, compiler
from tpukit.training.task import to_request

COMMITTED = json.loads(plans.PATH.read_text())
TINY = MNIST(batch_size=32, channels=8)
V5E = MACHINES["v5e-1"]
FIGURES = ("peak_bytes", "flops", "hbm_bytes", "vmem_bytes", "cycles")


@pytest.fixture(scope="module")
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
@pytest.mark.parametrize(
    "case",
    [
        "mnist small",
        pytest.param("mshnet small", marks=pytest.mark.nightly),
        pytest.param("mnist small, torch_tpu", marks=pytest.mark.nightly),
    ],
)
def test_a_small_graph_has_the_figures_of_the_committed_plan(case, needs_xla, request):
    backend = "torch_tpu" if "torch_tpu" in case else "torch_xla"
    folder = compiler.folder_of(backend)
    if not folder.is_dir() and not request.node.get_closest_marker("nightly"):
        pytest.skip("the compiler is not installed; the nightly tests install it")
    if not folder.is_dir() and shutil.disk_usage(Path(folder).parent).free < 6e9:
        pytest.skip("under 6 GB are free, and torch_tpu's environment takes 2.5")
    assert COMMITTED["compiler"] == list(compiler.COMPILER)
    assert COMMITTED["plans"].keys() <= plans.CASES.keys()
    found, wanted = plans.measure(case, quiet), COMMITTED["plans"][case]
    assert found.keys() == wanted.keys() and found["fits"]
    for name in FIGURES:
        assert found[name] == pytest.approx(wanted[name], rel=0.02), name
    if case.startswith("mnist"):
        # The arithmetic by hand: forward, and twice that backward, less the gradient of the images.
        c, pixels = TINY.channels, 28 * 28
        first, rest = 9 * c * pixels, 9 * c * 2 * c * pixels / 4 + 2 * c * 49 * 128 + 128 * 10
        assert found["flops"] == pytest.approx(2 * 32 * (2 * first + 3 * rest), rel=0.2)


def test_both_backends_need_as_much_arithmetic_and_memory_traffic():
    one, other = (COMMITTED["plans"][f"mnist small{backend}"] for backend in ("", ", torch_tpu"))
    for name in ("flops", "hbm_bytes"):
        assert one[name] == pytest.approx(other[name], rel=0.1), name


def test_tiled_mshnet_needs_less_than_half_of_the_network_taken_literally():
    now, literally = (COMMITTED["plans"][f"mshnet {case}"] for case in ("full", "literal"))
    for name in ("hbm_bytes", "peak_bytes", "cycles"):
        assert now[name] < 0.5 * literally[name], name


@pytest.fixture
def lowered_by_torch_tpu(tmp_path):
    """Function: the digest of a task's step, lowered by torch_tpu and not compiled."""
    compiler.install_compiler(quiet, "torch_tpu")

    def lower(task):
        (graph,), _ = compiler.trace(task, "train", task.batch_size, V5E, tmp_path, backend="torch_tpu")
        return graph["digest"]

    return lower


# One level of it has a layer norm of bf16 values, the other one in float32.
CDEIT_OF_TWO_LEVELS = CDEIT(batch_size=2, patch=8, width=64, heads=2, window=4, levels=2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "task", [TINY, plans.CASES["mshnet small"][0], CDEIT_OF_TWO_LEVELS], ids=lambda t: t.name
)
def test_a_step_lowered_by_torch_tpu_has_the_schedules_factor_as_an_argument(lowered_by_torch_tpu, task):
    # The first step's factor is 1 with the cosine and 1/2 with the warm-up: as constants they would be two
    # graphs.
    cosine, warm_up = (
        dataclasses.replace(task, **options) for options in (dict(schedule="cosine"), dict(warmup_epochs=1))
    )
    plain, scheduled = lowered_by_torch_tpu(task), lowered_by_torch_tpu(cosine)
    assert plain != scheduled == lowered_by_torch_tpu(warm_up)
    assert scheduled != lowered_by_torch_tpu(dataclasses.replace(cosine, micro_batches=2))


@pytest.mark.nightly
def test_eight_cores_sum_their_gradients_once_and_each_has_an_eighth_of_the_batch(needs_xla):
    alone, micro = row_of(TINY), dataclasses.replace(TINY, micro_batches=2, schedule="cosine")
    replicas, spmd, parts = (
        row_of(task, chip="v5e-8", batch_sizes=[8 * 32], parallel=parallel)
        for task, parallel in [(TINY, "processes"), (TINY, "spmd"), (micro, "processes")]
    )
    sums = [row["graphs"][0]["all_reduces"] for row in (alone, replicas, spmd, parts)]
    assert sums[0] == 0 < min(sums[1:]) and sums[1] == sums[3]
    assert replicas["flops"] == pytest.approx(alone["flops"], rel=0.05)
    assert spmd["flops"] == pytest.approx(replicas["flops"], rel=0.05)
    assert spmd["peak_bytes"] == pytest.approx(replicas["peak_bytes"], rel=0.2)  # not eight times as much


@pytest.mark.nightly
def test_micro_batches_need_less_memory_for_the_same_arithmetic(needs_xla):
    wide = MNIST(batch_size=512, channels=128)
    whole, parts = (row_of(dataclasses.replace(wide, micro_batches=count)) for count in (1, 2))
    assert parts["peak_bytes"] < 0.9 * whole["peak_bytes"]
    assert parts["flops"] == pytest.approx(whole["flops"], rel=0.01)


# Tracing


TRAIN = """
import sys, json
from tpukit import Run, train
from tpukit.devices.xla import XLARuntime
from tpukit.training.task import from_request
task, runtime = from_request(json.load(sys.stdin)), XLARuntime("xla")
train(task, Run.open(sys.argv[1], task), runtime=runtime, progress=False)
print(runtime.compilations()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(
            MNIST(batch_size=16, channels=8, epochs=3, ema_decay=0.9, data_on="device"),
            id="an average of the weights",
        ),
        pytest.param(
            Narrow(batch_size=4, base_size=32, crop_size=32, epochs=2, warm_epoch=0, data_on="device"),
            id="a warm-up",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_session_has_as_many_graphs_as_a_training_compiles(task, needs_xla, tmp_path):
    task = dataclasses.replace(task, dataset_dir=make_synthetic(task.dataset, tmp_path / "set", size=80))
    request = json.dumps(to_request(task))
    trained = run_python("-c", TRAIN, tmp_path / "run", text=request, variables=dict(PJRT_DEVICE="CPU"))
    graphs, _ = compiler.trace(task, "session", task.batch_size, V5E, tmp_path)
    assert len(graphs) == int(trained.stdout.splitlines()[-1]), trained.stderr
    assert [graph["name"] for graph in graphs].count("step") == 1


@pytest.mark.slow
def test_sampling_is_two_graphs_one_of_which_a_batch_runs_at_every_step(needs_xla, tmp_path):
    graphs, _ = compiler.trace(plans.SMALL_CDEIT, "evaluate", 4, V5E, tmp_path)
    assert [graph["times"] for graph in graphs] == [1, plans.SMALL_CDEIT.sampling_steps]


@pytest.mark.slow
def test_a_step_is_the_same_graph_every_time_and_beside_it_count_its_average_and_the_set_it_does_not_use(
    needs_xla, digits, tmp_path
):
    task = dataclasses.replace(TINY, ema_decay=0.9, data_on="device")
    averaged = sum(values.nbytes for values in task.model().state_dict().values())
    sizes, resident, digests = [], [], []
    for name, folder in (("a", None), ("b", None), ("given", digits)):
        (tmp_path / name).mkdir()
        one = dataclasses.replace(task, dataset_dir=folder)
        (graph,), resident_bytes = compiler.trace(one, "train", 32, V5E, tmp_path / name)
        sizes.append(graph["path"].stat().st_size)
        digests.append(graph["digest"])
        resident.append(resident_bytes - averaged)
    train, test = dataclasses.replace(task, dataset_dir=digits).datasets()
    assert resident == [0, 0, sum(map(lanes.stored_nbytes, test.device_arrays().values()))]
    # The batch is gathered in the graph, and the pixels are not in it: they are an argument of it.
    assert digests[0] == digests[1] and sizes[1] < sizes[2] < sizes[1] + train.device_nbytes() / 4


def test_what_cannot_be_traced_says_what_to_change_and_no_traceback(tmp_path, monkeypatch):
    Celled = type("Celled", (MNIST,), {"__module__": "__main__"})
    with refuses("Celled", " module"):
        compiler.trace(Celled(), "train", 8, V5E, tmp_path)
    (tmp_path / "mine.py").write_text("raise __import__('tpukit').TpukitError('heads must divide the width')")
    monkeypatch.setitem(
        sys.modules, "mine", types.SimpleNamespace(__name__="mine", __file__=tmp_path / "mine.py")
    )
    Mine = type("Mine", (MNIST,), {"__module__": "mine"})
    with pytest.raises(TpukitError, match="cannot be traced: heads must divide the width$"):
        compiler.trace(Mine(), "train", 8, V5E, tmp_path)
    missing = ran(stderr="Traceback\nModuleNotFoundError: No module named 'torch_xla'\n")
    monkeypatch.setattr(compiler, "run_python", lambda *_, **__: missing)
    with refuses("pip install torch==2.9.0 torch-xla==2.9.0"):
        compiler.trace(TINY, "train", 8, V5E, tmp_path)


# Asking


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(chip="v2-8"), ["'v2-8'", "v5e-1, v5e-8, v6e-1"]),
        (dict(part="test"), ["'test'", "train, evaluate, session"]),
        (dict(chip="v5e-8", batch_sizes=[12]), ["batch_size=12", "8 cores", "8 or 16"]),
        (dict(batch_sizes=[0]), ["batch_size=0"]),
        (dict(parallel="threads"), ["'threads'", "processes, spmd"]),
        (dict(backend="jax"), ["'jax'", "torch_xla, torch_tpu"]),
        (dict(backend="torch_tpu", chip="v5e-8"), ["torch_tpu", "v5e-8"]),
        (dict(backend="torch_tpu", part="session"), ["torch_tpu", "session"]),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_before_anything_is_installed(options, words, monkeypatch):
    monkeypatch.setattr(package, "install_compiler", None)
    with refuses(*words):
        plan(TINY, **dict(batch_sizes=[32]) | options)


NO_MEMORY = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.25G of 15.75G hbm."


def row(size, fits=True, **more):
    numbers = dict(peak_bytes=size * 2**27, flops=1e12, hbm_bytes=1e10, vmem_bytes=2e10, cycles=10**8)
    numbers |= dict(flop_s=0.005, hbm_s=0.0122, graphs=[])
    return dict(
        batch_size=size, fits=fits, compile_s=1.0, **(numbers if fits else dict(why=NO_MEMORY)), **more
    )


def test_a_plan_is_shown_as_a_table_with_the_chips_memory(capsys):
    display.show(Plan("mshnet", "train", "v5e-1", [row(32), row(128, False)]))
    shown = capsys.readouterr().out
    for words in ("4.00", "12.2", "15.75 GiB", "needs 31.25G"):
        assert words.lower() in shown.lower(), words
    assert V5E.chip.hbm_bytes == 15.75 * GIB


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
    graph, given = dict(name="step", digest="x", times=5, kernels=[], path=path), []
    answer = json.dumps(dict(peak_bytes=1, flops=1e12, hlo=KERNEL))
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--of_this_process=1")
    for module in (package, compiler):
        monkeypatch.setattr(module, "install_compiler", lambda log, backend: tmp_path)
    monkeypatch.setattr(compiler, "trace", lambda *_: ([graph], 0))
    monkeypatch.setattr(
        compiler, "run_python", lambda *_, variables: given.append(variables) or ran(answer, code=0)
    )
    return graph, given


def test_what_kernels_do_beyond_their_operands_is_added_and_the_caption_says_so(answers):
    graph, _ = answers
    graph["kernels"] = [dict(name="flash attention", hbm_bytes=3e9, flops=2e12)]
    found = plan(TINY)
    assert found.rows[0]["hbm_bytes"] == 5 * (2 * 4096 + 3e9) and found.rows[0]["flops"] == 5 * 3e12
    calls = found.rows[0]["graphs"][0]["custom_calls"]
    assert calls == {"tpu_custom_call": dict(calls=1, hbm_bytes=2 * 4096)}
    for words in ("flash attention", "15 GB", "10 TFLOP", "counted by hand"):
        assert words in found.caption, words
    graph["kernels"] = []
    assert "by hand" not in plan(TINY).caption


def test_an_answer_is_cached_for_its_graph_machine_and_flags_which_depend_on_the_images_of_one_core(answers):
    graph, given = answers

    def planned(task=MSHNet(), size=8, **options):
        plan(task, batch_sizes=[size], **options)
        return [(variables["LIBTPU_INIT_ARGS"] or "").count("--") for variables in given]

    assert planned() == planned() == [0]
    assert planned(size=16) == [0, 1]
    assert planned(chip="v5e-8", size=128) == [0, 1, 1]
    assert planned(chip="v5e-8", size=32) == [0, 1, 1, 0]
    assert planned(chip="v5e-8", size=32, parallel="spmd") == [0, 1, 1, 0, 0]
    graph["digest"] = "another"
    assert planned() == [0, 1, 1, 0, 0, 0]


# What the compiler's process can say


def ran(stdout="", stderr="", code=1):
    return subprocess.CompletedProcess([], code, stdout, stderr)


def refused(error):
    return ran(json.dumps(dict(error=error)), code=0)


@pytest.mark.parametrize(
    "result, words",
    [
        (
            refused("ABORTED: The TPU is already in use: /tmp/libtpu_lockfile"),
            ["remove /tmp/libtpu_lockfile"],
        ),
        (ran(stderr="x", code=-9), ["killed", "memory"]),
        (ran(stderr="F0000 check failed: no layout", code=-6), ["does not run", "check failed: no layout"]),
        (ran(stderr="OSError: wrong ELF class"), ["wrong ELF class", "Linux on x86-64"]),
        (refused('UNIMPLEMENTED: pool\nmetadata={op_name="window.5"}'), ["refuses", "window.5"]),
    ],
)
def test_a_failure_of_the_compiler_is_explained(result, words, tmp_path):
    with refuses(*words):
        compiler.read_answer(result, tmp_path)


def test_a_batch_that_cannot_fit_is_an_answer_with_what_it_needs(answers, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "run_python", lambda *_, **__: refused(NO_MEMORY))
    assert cli.main(["plan", "mnist", "--channels", "8", "--batch-sizes", "32"]) == 1
    shown = capsys.readouterr()
    assert "31.25G" in shown.out and "batch 32" in shown.err


def test_a_compiler_that_cannot_be_installed_is_explained_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "folder_of", lambda backend: tmp_path / "compiler")
    stderr = "WARNING: x\nERROR: No matching distribution found for libtpu==0.0.21\n"
    monkeypatch.setattr(compiler, "run_python", lambda *_, **__: ran(stderr=stderr))
    with refuses("ERROR: No matching distribution", "tpukit[plan]"):
        compiler.install_compiler(quiet)
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".lock"]
