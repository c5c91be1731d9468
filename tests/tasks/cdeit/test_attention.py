"""Attention on XLA: its kernels, interpreted on the CPU; attention in slices; which of the two is used, and
what is said."""

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("torch_xla")
from release import twins
from tests.conftest import ROOT
from tests.tasks.cdeit.small import Windowed
from tpukit.devices import xla_private
from tpukit_tasks import kernel_counts
from tpukit_tasks.cdeit.tpu import attention as module
from tpukit_tasks.cdeit.tpu.attention import attention
from tpukit_tools.plan.compiler import (
    COMPILER,
    MACHINES,
    compile_graph,
    install_compiler,
    read_answer,
    run_compiler,
)
from tpukit_tools.plan.trace import trace_step

INTERPRETER = Path(__file__).with_name("kernel_interpreter.py")
COMPILER_PACKAGES = ("jax", "jaxlib", "libtpu")
PACKAGES = {  # of what `tpukit plan` installs, and of each image with a TPU, as in release/images.toml
    "plan": COMPILER,
    **{image: about["packages"] for image, about in twins.IMAGES.items() if image.endswith("TPU")},
}


@pytest.fixture(scope="session", params=[pytest.param(one, marks=pytest.mark.nightly) for one in PACKAGES])
def compiler(request):
    """A folder with jax and libtpu."""
    wanted = [one for one in PACKAGES[request.param] if one.partition("==")[0] in COMPILER_PACKAGES]
    return install_compiler(lambda text: None, tuple(wanted))


@pytest.fixture
def jax(compiler):
    """Run the interpreter's script, where jax is: jax(*arguments)."""

    def run(*arguments):
        command = [sys.executable, "-s", INTERPRETER, *map(str, arguments)]
        environ = {**os.environ, "PYTHONPATH": str(compiler), "JAX_PLATFORMS": "cpu"}
        ran = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr

    return run


@pytest.fixture
def use(monkeypatch):
    """Use the kernels on the CPU XLA device: use(what computes their results in the place of the real call).
    Its second argument, the payload, is (kind, heads, biased)."""

    def payloads(shape, *others):
        return {kind: (kind, *others) for kind in ("forward", "backward")}

    def install(custom_call):
        monkeypatch.setattr(xla_private, "tpu_custom_call", custom_call)
        monkeypatch.setattr(module, "kernel_payloads", payloads)
        monkeypatch.setattr(module, "_disabled_reason", None)

    return install


@pytest.fixture
def kernels(jax, use, tmp_path):
    """The kernels in use, interpreted, with the operands and for the results of the real call."""
    calls = []

    def custom_call(operands, payload, shapes, dtypes):
        kind, heads, biased = payload
        calls.append(kind)
        query, key, value, *others = operands
        assert query is key is value and len(others) == biased + (kind == "backward")
        arrays = [x.detach().cpu() for x in (query, *others)]
        arrays = [x.view(torch.uint16) if x.dtype == torch.bfloat16 else x for x in arrays]
        np.savez(tmp_path / "in.npz", **{chr(97 + i): x.numpy() for i, x in enumerate(arrays)})
        jax(kind, heads, tmp_path / "in.npz", tmp_path / "out.npz")
        found = np.load(tmp_path / "out.npz")
        results = [torch.tensor(found[name]).to(dtype).to(query.device) for name, dtype in zip(found, dtypes)]
        assert [x.shape for x in results] == [torch.Size(shape) for shape in shapes]
        return results

    use(custom_call)
    return calls


def wanted(qkv, heads, bias=None):
    """Attention in float64, and its gradients for a fixed gradient of the result."""
    inputs = [x.double().requires_grad_() for x in (qkv, bias) if x is not None]
    batch, tokens, width = qkv.shape
    query, key, value = inputs[0].view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=inputs[1] if bias is not None else None)
    return with_gradients(out.transpose(1, 2).reshape(batch, tokens, width // 3), inputs)


def with_gradients(out, inputs):
    torch.manual_seed(1)
    direction = torch.randn(out.shape).to(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


@pytest.mark.parametrize(
    "heads, tokens, biased", [(8, 256, True), (4, 128, False), (2, 1024, False), (1, 4096, False)]
)
def test_the_kernels_are_attention_forward_and_backward_to_the_rounding_of_bf16(
    heads, tokens, biased, kernels, xla
):
    torch.manual_seed(0)
    batch, width = (2 if tokens < 4096 else 1), (256 if heads == 8 else 128)
    qkv = torch.randn(batch, tokens, 3 * width).bfloat16()
    inputs = [qkv, torch.randn(1, heads, tokens, tokens)][: 1 + biased]
    on_xla = [x.to(xla.device).requires_grad_() for x in inputs]
    found = with_gradients(attention(on_xla[0], heads, *on_xla[1:]), on_xla)
    assert kernels == ["forward", "backward"]
    # Weights, the gradients of the logits and every result are rounded to bf16 once, to 8 bits: each number
    # is wrong by 2^-9 at most. Along a chain of three roundings a whole array can be wrong by three times
    # that.
    for a, b in zip(found, wanted(qkv, heads, *inputs[1:])):
        assert a.shape == b.shape and (a.cpu().double() - b).norm() < 3 * 2**-9 * b.norm()


def test_a_kernel_is_the_same_wherever_tpukit_is_installed(compiler, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(compiler))
    code = module.kernel_payloads((2, 128, 384), 4, False)
    assert code["forward"] != code["backward"] and str(ROOT) not in str(code)


TRACER = """
import os, sys
from pathlib import Path
import torch
from tpukit_tools.plan.xla_export import ExportRuntime
from tpukit_tasks.cdeit.tpu import attention as module

runtime = ExportRuntime("bf16")
module.choose(runtime)
assert module._disabled_reason is None, module._disabled_reason
inputs = [torch.zeros(1, int(sys.argv[2]), 3 * 128, dtype=torch.bfloat16, device=runtime.device)]
if sys.argv[3] == "True":
    inputs.append(torch.zeros(1, 4, 256, 256, device=runtime.device))
runtime.sync()
runtime.compile(lambda *inputs: module.output_and_gradients(list(inputs)))(*inputs)
Path(sys.argv[1]).write_bytes(runtime.graphs[0]["stablehlo"])
os._exit(0)  # else the graph, which is for a TPU, would run
"""


@pytest.mark.parametrize("tokens, biased", [(4096, False), (256, True)])
def test_the_kernels_that_this_jax_lowers_are_compiled_by_this_libtpu(tokens, biased, compiler, tmp_path):
    graph = tmp_path / "graph.mlirbc"
    trace = [sys.executable, "-c", TRACER, str(graph), str(tokens), str(biased)]
    environ = {**os.environ, "PYTHONPATH": str(compiler)}
    traced = subprocess.run(trace, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert traced.returncode == 0, traced.stderr
    for chip in ("v5e-1", "v6e-1"):
        answer = read_answer(run_compiler(graph, MACHINES[chip], compiler), compiler)
        assert answer["hlo"].count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.nightly
@pytest.mark.long
def test_the_tpu_compiler_takes_a_training_step_with_the_kernels_whose_arithmetic_is_counted(tmp_path):
    batch, width = 2, 128
    task = Windowed(batch_size=batch)
    install_compiler(lambda text: None)
    graph = trace_step(task, batch, MACHINES["v5e-1"], tmp_path)
    # Four blocks attend in 4 windows of 16 x 16 tokens; three to all 256 tokens, and two to all 1024.
    attending = [(4 * batch, 256)] * 4 + [(batch, 256)] * 3 + [(batch, 1024)] * 2
    assert len(graph["kernels"]) == 2 * len(attending)
    assert sum(call["flops"] for call in graph["kernels"]) == sum(14 * b * t**2 * width for b, t in attending)
    assert "error" not in compile_graph(graph, MACHINES["v5e-1"], lambda text: None)


@pytest.mark.parametrize("biased", [False, True])
def test_attention_in_slices_is_attention_forward_and_backward(biased, xla, monkeypatch):
    monkeypatch.setattr(module, "MAX_PAIRS", 2 * 4 * 24**2)  # 2 of 3 images
    torch.manual_seed(0)
    inputs = [torch.randn(3, 24, 3 * 32).double(), torch.randn(1, 4, 24, 24).double()][: 1 + biased]
    on_xla = [x.to(xla.device).requires_grad_() for x in inputs]
    found = with_gradients(attention(on_xla[0], 4, *on_xla[1:]), on_xla)
    for a, b in zip(found, wanted(inputs[0], 4, *inputs[1:])):
        torch.testing.assert_close(a.cpu(), b, atol=1e-11, rtol=1e-11)


BF16 = torch.bfloat16
CALLS = [
    ((2, 128, 384), 4, BF16, False, True),
    ((1, 256, 384), 4, BF16, True, True),
    ((1, 512, 384), 4, BF16, True, False),  # with a bias more than fast memory holds
    ((1, 256, 384), 4, torch.float32, False, False),
    ((1, 8192, 384), 1, BF16, False, False),  # more than fast memory holds
    ((1, 256, 3 * 64), 2, BF16, False, False),  # heads do not fill the lanes
    ((1, 256, 3 * 384), 8, BF16, False, False),  # a head of 48 channels lies across two registers
]


@pytest.mark.parametrize("shape, heads, dtype, biased, uses_kernel", CALLS)
def test_what_a_kernel_cannot_take_is_computed_in_slices_and_of_the_others_a_plan_counts_the_arithmetic(
    shape, heads, dtype, biased, uses_kernel, use, xla
):
    def empty(operands, payload, *outputs):
        return [torch.zeros(size, dtype=kind, device=xla.device) for size, kind in zip(*outputs)]

    use(empty)
    batch, tokens, width = shape
    qkv = torch.zeros(shape, dtype=dtype, device=xla.device, requires_grad=True)
    bias = torch.zeros(1, heads, tokens, tokens, device=xla.device) if biased else None
    with kernel_counts.recorded() as found:
        attention(qkv, heads, bias).sum().backward()
    # By hand: all pairs of tokens and the channels of all heads, 2 products forward, 5 backward.
    product = 2 * batch * tokens**2 * (width // 3)
    assert [call["flops"] for call in found] == ([2 * product, 5 * product] if uses_kernel else [])


def runtime_of(accelerator="tpu", precision="bf16", error=None, others=()):
    """error: what the trial raises on this rank. others: whether the other ranks can use the kernels."""
    world = types.SimpleNamespace(all_gather=lambda values: [list(values), *([works] for works in others)])
    return types.SimpleNamespace(
        accelerator=accelerator, precision=precision, world=world, runs_graphs=True, device=error
    )


OLD_LIBTPU = RuntimeError("Unsupported version: expected <= 3 but got 4\nmore")
CHOICES = [
    (runtime_of(), None),
    (runtime_of(others=[1.0, 1.0]), None),
    (runtime_of(others=[1.0, 0.0, 0.0]), "on rank 2, 3"),
    (runtime_of("xla"), "for TPUs"),
    (runtime_of(precision="fp32"), "fp32"),
    (runtime_of(error=OLD_LIBTPU, others=[1.0]), "expected <= 3"),
]


@pytest.mark.parametrize("runtime, datum", CHOICES)
def test_the_kernels_are_used_where_they_work_and_else_the_log_says_why_not(runtime, datum, monkeypatch):
    def trial(error):
        assert module._disabled_reason is None
        if error:
            raise error

    monkeypatch.setattr(module, "_disabled_reason", "not asked yet")
    monkeypatch.setattr(module, "try_kernels", trial)
    sentence = module.choose(runtime)
    assert bool(module._disabled_reason) == (datum is not None) == ("slices" in sentence)
    assert (datum or "Pallas") in sentence and "\n" not in sentence


def test_a_device_whose_kernels_compute_something_else_is_found_out(kernels, xla, monkeypatch):
    monkeypatch.setattr(module, "KERNEL_TOKENS", (128, 256, 1024))
    module.try_kernels(xla.device)
    assert kernels == 2 * ["forward", "backward"]
    right = xla_private.tpu_custom_call

    def wrong(operands, payload, shapes, dtypes):
        return [1.05 * x if payload[0] == "backward" else x for x in right(operands, payload, shapes, dtypes)]

    monkeypatch.setattr(xla_private, "tpu_custom_call", wrong)
    with pytest.raises(ArithmeticError, match="5.0%.*1024"):
        module.try_kernels(xla.device)


def test_the_kernels_are_lowered_in_a_process_without_this_ones_flags_whose_last_words_are_the_reason(
    monkeypatch, tmp_path
):
    script = tmp_path / "kernels.py"
    monkeypatch.setattr(module, "KERNEL_SCRIPT", script)
    monkeypatch.setenv("XLA_FLAGS", "--xla_tpu_a_flag_that_no_cpu_knows=true")
    script.write_text(
        "import json, os, sys; print('a library speaks')\n"
        "print(json.dumps([os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'], json.loads(sys.argv[1])]))"
    )
    request = dict(shape=[1, 9, 384], heads=4, biased=True)
    assert module.kernel_payloads((1, 9, 384), 4, True) == ["", "cpu", request]
    script.write_text("import nothing_of_this_name")
    with pytest.raises(RuntimeError, match="nothing_of_this_name"):
        module.kernel_payloads((2, 9, 384), 4, True)
