"""`tpukit plan`: traced graphs, the TPU compiler's answers, and every way in which it can fail."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plans
from tests.conftest import refuses
from tpukit import CDEIT, MNIST, MSHNet, TpukitError, cli
from tpukit.devices import lanes
from tpukit.devices.chips import MACHINES
from tpukit.host.tables import GIB
from tpukit.reporting import display
from tpukit.tasks.datasets import make_synthetic
from tpukit.tools import hlo
from tpukit.tools import plan as tool
from tpukit.tools.child import run_python
from tpukit.tools.plan import PARALLEL, Plan, plan
from tpukit.training.task import to_request

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads(plans.PATH.read_text())
TINY = MNIST(batch_size=32, channels=8)


@pytest.fixture(scope="module")
def needs_xla():
    pytest.importorskip("torch_xla", reason="torch_xla traces the step")


@pytest.fixture
def quiet():
    return lambda text: None


# With the compiler


@pytest.mark.slow
def test_small_graphs_have_the_figures_of_the_committed_plan(needs_xla, quiet, tmp_path, monkeypatch):
    compiler = tool.install_compiler(quiet)
    monkeypatch.setattr(tool, "install_compiler", lambda log, backend="torch_xla": compiler)
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path))  # so that no earlier answer is taken
    assert COMMITTED["compiler"] == list(tool.COMPILER) and COMMITTED["plans"].keys() <= plans.CASES.keys()
    for case in ("mshnet small", "mnist small"):
        found, wanted = plans.measure(case, quiet), COMMITTED["plans"][case]
        assert found.keys() == wanted.keys() and found["fits"]
        for name in ("peak_bytes", "flops", "hbm_bytes", "vmem_bytes", "cycles"):
            assert found[name] == pytest.approx(wanted[name], rel=0.02), (case, name)
    # The network's arithmetic by hand: forward, and twice that backward, less the gradient of the images.
    c, pixels = TINY.channels, 28 * 28
    first, rest = 9 * c * pixels, 9 * c * 2 * c * pixels / 4 + 2 * c * 49 * 128 + 128 * 10
    assert found["flops"] == pytest.approx(2 * 32 * (2 * first + 3 * rest), rel=0.2)


@pytest.mark.slow
def test_a_step_lowered_by_torch_tpu_has_the_figures_of_the_committed_plan(quiet, tmp_path, monkeypatch):
    if shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("torch_tpu's environment takes 2.5 GB")
    case = "mnist small, torch_tpu"
    found, wanted = plans.measure(case, quiet), COMMITTED["plans"][case]
    for name in ("peak_bytes", "flops", "hbm_bytes", "vmem_bytes", "cycles"):
        assert found[name] == pytest.approx(wanted[name], rel=0.02), name
    # The same step by the other backend: as much arithmetic and memory traffic.
    for name in ("flops", "hbm_bytes"):
        assert found[name] == pytest.approx(COMMITTED["plans"]["mnist small"][name], rel=0.1), name


@pytest.fixture
def lowered_by_torch_tpu(quiet, tmp_path):
    """Function: the digest of a task's step, lowered by torch_tpu and not compiled."""
    if shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("torch_tpu's environment takes 2.5 GB")
    tool.install_compiler(quiet, "torch_tpu")

    def lower(task):
        (graph,), _ = tool._trace(
            task, "train", task.batch_size, MACHINES["v5e-1"], tmp_path, backend="torch_tpu"
        )
        return graph["digest"]

    return lower


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [TINY, MSHNet(batch_size=4, base_size=64, crop_size=64)], ids=["mnist", "mshnet"]
)
def test_a_step_lowered_by_torch_tpu_has_the_schedules_factor_as_an_argument(lowered_by_torch_tpu, task):
    # The first step's factor is 1 with the cosine and 1/2 with the warm-up: as constants they would be two
    # graphs.
    cosine, warm_up = (
        dataclasses.replace(task, **options) for options in (dict(schedule="cosine"), dict(warmup_epochs=1))
    )
    plain, scheduled = lowered_by_torch_tpu(task), lowered_by_torch_tpu(cosine)
    assert plain != scheduled == lowered_by_torch_tpu(warm_up)
    halves = dataclasses.replace(cosine, micro_batches=2)
    assert scheduled != lowered_by_torch_tpu(halves)


@pytest.mark.slow
def test_torch_tpu_lowers_a_layer_norm_of_bf16_values(lowered_by_torch_tpu):
    task = CDEIT(batch_size=2, patch=8, width=64, heads=2, window=4, levels=2)  # one level has it in float32
    assert lowered_by_torch_tpu(task)


@pytest.mark.parametrize("options", [dict(chip="v5e-8"), dict(part="session"), dict(backend="jax")])
def test_what_torch_tpu_cannot_lower_without_a_tpu_is_refused_before_anything_is_installed(
    options, quiet, monkeypatch
):
    monkeypatch.setattr(tool, "install_compiler", None)
    with refuses(*options.values()):
        plan(TINY, **dict(backend="torch_tpu", batch_sizes=[32], log=quiet) | options)


@pytest.mark.slow
def test_eight_cores_sum_their_gradients_in_the_graph_and_each_has_an_eighth_of_the_batch(needs_xla, quiet):
    (alone,) = plan(TINY, log=quiet).rows
    (shared,) = plan(TINY, chip="v5e-8", batch_sizes=[8 * 32], log=quiet).rows
    assert alone["graphs"][0]["all_reduces"] == 0 < shared["graphs"][0]["all_reduces"]
    assert shared["flops"] == pytest.approx(alone["flops"], rel=0.05)


@pytest.mark.slow
def test_one_graph_over_eight_cores_computes_on_each_what_eight_replicas_do(needs_xla, quiet):
    replicas, spmd = (
        plan(TINY, chip="v5e-8", batch_sizes=[8 * 32], parallel=parallel, log=quiet).rows[0]
        for parallel in PARALLEL
    )
    assert spmd["graphs"][0]["all_reduces"] > 0
    assert spmd["flops"] == pytest.approx(replicas["flops"], rel=0.05)
    assert spmd["peak_bytes"] == pytest.approx(replicas["peak_bytes"], rel=0.2)  # not eight times as much


@pytest.mark.slow
def test_micro_batches_need_less_memory_and_the_gradients_cross_the_cores_once(needs_xla, quiet):
    wide = MNIST(batch_size=512, channels=128)
    whole, parts = (
        plan(dataclasses.replace(wide, micro_batches=count), log=quiet).rows[0] for count in (1, 2)
    )
    assert parts["peak_bytes"] < 0.9 * whole["peak_bytes"] and parts["flops"] == pytest.approx(
        whole["flops"], rel=0.01
    )
    scheduled = dataclasses.replace(TINY, micro_batches=2, schedule="cosine")
    one, two = (
        plan(task, chip="v5e-8", batch_sizes=[8 * 32], log=quiet).rows[0] for task in (TINY, scheduled)
    )
    assert one["graphs"][0]["all_reduces"] == two["graphs"][0]["all_reduces"] > 0


@pytest.mark.slow
def test_a_batch_that_cannot_fit_is_an_answer_with_what_it_needs(needs_xla, monkeypatch, capsys):
    why = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used"
        " 21.52G of 15.75G hbm."
    )
    monkeypatch.setattr(
        tool,
        "_compile",
        lambda path, machine, parallel, log, backend="torch_xla": (
            tool._read_answer(ran(json.dumps(dict(error=why))), None) | dict(compile_s=9)
        ),
    )
    assert cli.main(["plan", "mnist", "--channels", "8", "--batch-sizes", "32"]) == 1
    shown = capsys.readouterr()
    assert "21.52G" in shown.out and "batch 32" in shown.err


def test_tiled_mshnet_needs_less_than_half_of_the_network_taken_literally():
    now, literally = (COMMITTED["plans"][f"mshnet {case}"] for case in ("full", "literal"))
    for name in ("hbm_bytes", "peak_bytes", "cycles"):
        assert now[name] < 0.5 * literally[name], name


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
        MNIST(batch_size=16, channels=8, epochs=3, ema_decay=0.9, data_on="device"),
        MSHNet(batch_size=4, base_size=32, crop_size=32, epochs=2, warm_epoch=0, data_on="device"),
    ],
    ids=["an average of the weights", "a warm-up"],
)
def test_a_session_has_as_many_graphs_as_a_training_compiles(task, needs_xla, tmp_path):
    task = dataclasses.replace(task, dataset_dir=make_synthetic(task.dataset, tmp_path / "set", size=80))
    trained = run_python(
        "-c", TRAIN, tmp_path / "run", text=json.dumps(to_request(task)), variables=dict(PJRT_DEVICE="CPU")
    )
    graphs, _ = tool._trace(task, "session", task.batch_size, MACHINES["v5e-1"], tmp_path)
    assert len(graphs) == int(trained.stdout.splitlines()[-1]), trained.stderr
    assert [graph["name"] for graph in graphs].count("step") == 1


@pytest.mark.slow
def test_sampling_is_two_graphs_one_of_which_a_batch_runs_at_every_step(needs_xla, tmp_path):
    task = plans.SMALL_CDEIT
    graphs, _ = tool._trace(task, "evaluate", 4, MACHINES["v5e-1"], tmp_path)
    assert [graph["times"] for graph in graphs] == [1, task.sampling_steps]


@pytest.mark.slow
def test_with_a_dataset_its_pixels_lie_beside_the_graph_and_the_test_set_counts_too(
    needs_xla, infrared, tmp_path
):
    task = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32)
    sizes, beside = {}, {}
    for name, task in (("with", task), ("without", MSHNet(base_size=32, crop_size=32))):
        (tmp_path / name).mkdir()
        (graph,), beside[name] = tool._trace(task, "train", 4, MACHINES["v5e-1"], tmp_path / name)
        sizes[name] = graph["path"].stat().st_size
    train, test = MSHNet(dataset_dir=infrared).datasets()
    assert beside == {"with": sum(map(lanes.stored_nbytes, test.device_arrays().values())), "without": 0}
    # The augmentation is in the graph, and the pixels are not: they are an argument of it.
    assert sizes["without"] < sizes["with"] < sizes["without"] + train.device_nbytes() / 4


@pytest.mark.slow
def test_the_average_of_the_weights_is_counted_beside_the_step(needs_xla, tmp_path):
    _, resident_bytes = tool._trace(plans.SMALL_CDEIT, "train", 4, MACHINES["v5e-1"], tmp_path)
    weights = sum(value.nbytes for value in plans.SMALL_CDEIT.model().state_dict().values())
    assert resident_bytes == weights > 0


def test_a_task_of_a_notebook_cell_is_refused_by_name(tmp_path):
    Celled = type("Celled", (MNIST,), {"__module__": "__main__"})
    with pytest.raises(TpukitError, match="Celled.* module"):
        tool._trace(Celled(), "train", 8, MACHINES["v5e-1"], tmp_path)


def test_without_torch_xla_the_error_says_what_to_install(tmp_path, monkeypatch):
    ran = subprocess.CompletedProcess(
        [], 1, "", "Traceback\nModuleNotFoundError: No module named 'torch_xla'\n"
    )
    monkeypatch.setattr(tool, "run_python", lambda *_, **__: ran)
    with pytest.raises(TpukitError, match="pip install torch==2.9.0 torch-xla==2.9.0"):
        tool._trace(TINY, "train", 8, MACHINES["v5e-1"], tmp_path)


@pytest.mark.slow
def test_a_model_that_cannot_be_built_says_why_and_no_traceback(needs_xla, tmp_path):
    with pytest.raises(TpukitError, match="cdeit.*heads") as caught:
        tool._trace(
            CDEIT(width=64, heads=7, patch=16, window=4, levels=1), "train", 8, MACHINES["v5e-1"], tmp_path
        )
    assert "Traceback" not in str(caught.value)


# Asking


@pytest.mark.parametrize(
    "how, words",
    [
        (dict(chip="v2-8"), "'v2-8'.* v5e-1, v5e-8, v6e-1"),
        (dict(part="test"), "'test'.* train, evaluate, session"),
        (dict(chip="v5e-8", batch_sizes=[12]), "batch_size=12 .*8 cores of v5e-8.* 8 or 16$"),
        (dict(batch_sizes=[0]), "batch_size=0"),
        (dict(parallel="threads"), "'threads'.* processes, spmd"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(how, words):
    with pytest.raises(TpukitError, match=words):
        plan(TINY, **how)


def row(size, fits=True, **more):
    numbers = dict(peak_bytes=size * 2**27, flops=1e12, hbm_bytes=1e10, vmem_bytes=2e10, cycles=10**8)
    numbers |= dict(flop_s=0.005, hbm_s=0.0122, graphs=[])
    why = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.25G of 15.75G hbm."
    return dict(batch_size=size, fits=fits, compile_s=1.0, **(numbers if fits else dict(why=why)), **more)


@pytest.mark.parametrize(
    "chip, limit, start", [("v5e-1", 1000, 16), ("v5e-1", 1000, 4096), ("v5e-8", 1000, 8), ("v5e-1", 3, 16)]
)
def test_the_largest_batch_is_found_to_within_a_sixteenth(chip, limit, start, monkeypatch, quiet):
    asked = []
    monkeypatch.setattr(
        tool,
        "_plan_batch",
        lambda task, machine, size, part, parallel, log, backend: (
            asked.append(size) or row(size, size <= limit)
        ),
    )
    found = plan(TINY, chip=chip, batch_sizes=[start], find_batch=True, log=quiet)
    step = max(MACHINES[chip].chips, limit // 16)
    assert limit - step <= found.largest_batch <= limit
    assert len(asked) == len(set(asked)) < 20 and not [size for size in asked if size % MACHINES[chip].chips]


def test_nothing_fits_is_an_answer_too(monkeypatch, quiet):
    monkeypatch.setattr(
        tool, "_plan_batch", lambda task, machine, size, part, parallel, log, backend: row(size, False)
    )
    found = plan(TINY, batch_sizes=[8], find_batch=True, log=quiet)
    assert found.largest_batch is None and [r["batch_size"] for r in found.rows] == [1, 2, 4, 8]
    assert "needs 31.25G" in str(found)


def test_a_plan_is_shown_as_a_table_with_the_chips_memory(capsys):
    found = Plan("mshnet", "train", "v5e-1", [row(32), row(128, False)])
    display.show_plan(found)
    shown = capsys.readouterr().out
    for words in ("4.00", "12.2", "15.75 GiB", "needs 31.25G"):
        assert words.lower() in shown.lower(), words
    assert MACHINES["v5e-1"].chip.hbm_bytes == 15.75 * GIB


KERNEL = """ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %k = f32[8,128]{1,0:T(8,128)} custom-call(%p), custom_call_target="tpu_custom_call"
}
"""


def test_what_kernels_do_beyond_their_operands_is_added_and_the_caption_says_so(monkeypatch, quiet):
    kernel = dict(name="flash attention", hbm_bytes=3e9, flops=2e12)
    graph = dict(name="step", digest="x", times=5, kernels=[kernel])
    answer = dict(peak_bytes=1, flops=1e12, hlo=KERNEL, compile_s=1.0)
    monkeypatch.setattr(tool, "_trace", lambda *_: ([graph], 0))
    monkeypatch.setattr(tool, "_compile", lambda graph, machine, parallel, log, backend: dict(answer))
    found = plan(TINY, log=quiet)
    assert found.rows[0]["hbm_bytes"] == 5 * (2 * 4096 + 3e9) and found.rows[0]["flops"] == 5 * 3e12
    assert found.rows[0]["graphs"][0]["custom_calls"] == {
        "tpu_custom_call": dict(calls=1, hbm_bytes=2 * 4096)
    }
    for words in ("flash attention", "15 GB", "10 TFLOP", "counted by hand"):
        assert words in found.caption, words
    monkeypatch.setattr(tool, "_trace", lambda *_: ([graph | dict(kernels=[])], 0))
    assert "by hand" not in plan(TINY, log=quiet).caption


@pytest.mark.parametrize(
    ("chip", "size", "flagged"), [("v5e-1", 16, 1), ("v5e-1", 8, 0), ("v5e-8", 128, 1), ("v5e-8", 32, 0)]
)
def test_the_flags_of_mshnet_depend_on_the_images_of_one_core(monkeypatch, quiet, chip, size, flagged):
    monkeypatch.setattr(tool, "install_compiler", lambda log, backend: None)
    monkeypatch.setattr(tool, "_trace", lambda *_: ([dict(name="step", digest="x", times=1, kernels=[])], 0))
    flags = []
    answer = dict(peak_bytes=1, flops=1e12, hlo=KERNEL, compile_s=1.0)
    monkeypatch.setattr(
        tool, "_compile", lambda graph, *_: flags.append(graph["libtpu_args"]) or dict(answer)
    )
    plan(MSHNet(), chip=chip, batch_sizes=[size], log=quiet)
    assert [len(found.split()) for found in flags] == [flagged]


def test_the_heaviest_operations_come_first_by_their_share_of_bytes_or_cycles(monkeypatch):
    def operation(name, hbm_bytes, cycles):
        return hlo.Operation(name, "fusion", "f32[8]", "aten__add, step.py:1", "", 1, hbm_bytes, 0.0, cycles)

    graph = dict(times=1, kernels=[], custom_calls={})
    graph["operations"] = [
        operation("small", 1e6, 10),
        operation("slow", 0.0, 900),
        operation("large", 3e6, 0),
    ]
    heavy = row(32) | dict(hbm_bytes=4e6, cycles=910, graphs=[graph])
    table = Plan("mshnet", "train", "v5e-1", [heavy]).heaviest(2)
    assert [line[0] for line in table.rows] == ["fusion slow", "fusion large"] and table.rows[1][3] == "3"


# What the compiler's process can say


def ran(stdout="", stderr="", code=1):
    return subprocess.CompletedProcess([], code, stdout, stderr)


@pytest.mark.parametrize(
    "result, words",
    [
        (
            ran(json.dumps(dict(error="ABORTED: The TPU is already in use: /tmp/libtpu_lockfile"))),
            "libtpu_lockfile",
        ),
        (ran(stderr="x", code=-9), "killed.*memory"),
        (
            ran(stderr="F0000 check failed: no layout", code=-6),
            "does not run.* F0000 check failed: no layout",
        ),
        (ran(stderr="OSError: wrong ELF class"), "does not run.* OSError: wrong ELF class.*Linux on x86-64"),
        (
            ran(
                json.dumps(
                    dict(
                        error='UNIMPLEMENTED: no backward of this pool\nmetadata={op_name="reduce-window.5"}'
                    )
                ),
                code=0,
            ),
            "refuses.* UNIMPLEMENTED: no backward of this pool.*reduce-window.5",
        ),
        (
            ran(json.dumps(dict(error="INTERNAL: bad\n  %fusion.3 = f32[8] fusion(x)")), code=0),
            "refuses.*%fusion.3 = f32",
        ),
    ],
)
def test_a_failure_of_the_compiler_is_explained(result, words, tmp_path):
    with pytest.raises(TpukitError, match=words):
        tool._read_answer(result, tmp_path)


def test_a_compiler_that_cannot_be_installed_is_explained_and_leaves_nothing(tmp_path, monkeypatch, quiet):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path))
    stderr = "WARNING: x\nERROR: No matching distribution found for libtpu==0.0.21\n"
    monkeypatch.setattr(tool, "run_python", lambda *_, **__: ran(stderr=stderr))
    with pytest.raises(TpukitError, match=r"ERROR: No matching distribution.*tpukit\[plan\]"):
        tool.install_compiler(quiet)
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".lock"]


def test_an_answer_is_cached(tmp_path, monkeypatch, quiet):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(tool, "install_compiler", lambda log, backend: tmp_path)
    calls = []
    answer = dict(peak_bytes=1, flops=1.0, hlo="HloModule x")
    monkeypatch.setattr(
        tool, "run_python", lambda *a, **_: calls.append(a) or ran(json.dumps(answer), code=0)
    )
    path = tmp_path / "0.mlirbc"
    path.write_bytes(b"a graph")
    graph = dict(path=path, digest="one")
    first = tool._compile(graph, MACHINES["v5e-1"], "processes", quiet)
    assert tool._compile(graph, MACHINES["v5e-1"], "processes", quiet) == first and len(calls) == 1
    graph["digest"] = "another"
    tool._compile(graph, MACHINES["v5e-1"], "processes", quiet)
    tool._compile(graph, MACHINES["v6e-1"], "processes", quiet)
    tool._compile(graph, MACHINES["v6e-1"], "spmd", quiet)
    assert len(calls) == 4


def test_a_task_is_compiled_with_its_own_flags_and_not_with_those_of_this_process(
    tmp_path, monkeypatch, quiet
):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--of_this_process=1")
    monkeypatch.setattr(tool, "install_compiler", lambda log, backend: tmp_path)
    given = []
    answer = json.dumps(dict(peak_bytes=1, flops=1.0, hlo="HloModule x"))
    monkeypatch.setattr(
        tool, "run_python", lambda *_, variables: given.append(variables) or ran(answer, code=0)
    )
    path = tmp_path / "0.mlirbc"
    path.write_bytes(b"a graph")
    for flags in ("", "--of_the_task=2", "--of_the_task=3"):
        graph = dict(path=path, digest="one", libtpu_args=flags)
        tool._compile(graph, MACHINES["v5e-1"], "processes", quiet)
    assert [variables["LIBTPU_INIT_ARGS"] for variables in given] == [
        None,
        "--of_the_task=2",
        "--of_the_task=3",
    ]


def test_the_compilers_script_imports_nothing_of_tpukit():
    text = (ROOT / "tpukit/tools/tpu_compiler.py").read_text()
    assert (
        "import tpukit" not in text
        and "from tpukit" not in text
        and "torch" not in text.replace("torch_xla", "")
    )


@pytest.mark.slow
def test_the_same_step_is_traced_into_the_same_graph_every_time(needs_xla, tmp_path):
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (graph,), _ = tool._trace(TINY, "train", 32, MACHINES["v5e-1"], tmp_path / name)
        texts.append(graph["path"].read_bytes())
    assert texts[0] == texts[1]


def test_help_names_the_chips_and_the_parts():
    shown = subprocess.run(
        [sys.executable, "-m", "tpukit", "plan", "mshnet", "--help"], capture_output=True, text=True
    ).stdout
    assert "{v5e-1,v5e-8,v6e-1}" in shown and "{train,evaluate,session}" in shown and "--find-batch" in shown
