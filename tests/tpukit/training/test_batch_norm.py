"""Batch norm with frozen statistics, and on several cores."""

import copy

import pytest
import torch

from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.training import batch_norm


def test_a_frozen_batch_norm_keeps_the_dtype_under_autocast_and_learns_as_on_xla(cpu, xla):
    found = []
    for runtime in (cpu, xla):
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(3)
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
        batch_norm.freeze(norm.train())
        norm = runtime.to_device(copy.deepcopy(norm))
        made = norm(runtime.put(torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)))
        made.square().sum().backward()
        found.append(runtime.to_cpu([made, norm.weight.grad, norm.bias.grad, norm.running_mean]))
    for here, there in zip(*found):
        torch.testing.assert_close(here, there)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3))
    batch_norm.freeze(layers)
    with Runtime("cpu", "bf16").autocast():
        assert layers(torch.ones(1, 3, 4, 4)).dtype == torch.bfloat16


def test_a_batch_norm_of_timm_keeps_its_activation():
    norm = pytest.importorskip("timm.layers").BatchNormAct2d(3).eval()
    wanted = norm(x := torch.randn(2, 3, 4, 4))
    batch_norm.freeze(norm)
    assert torch.equal(norm(x), wanted)


@pytest.mark.parametrize(
    "kind, size, share",
    [
        (torch.nn.BatchNorm2d, 2, "3 of 12 samples"),
        (torch.nn.BatchNorm2d, 1, None),
        (torch.nn.SyncBatchNorm, 2, None),
        (batch_norm.FrozenBatchNorm, 2, None),
        (torch.nn.Conv2d, 2, None),
    ],
)
def test_the_share_of_a_batch_that_batch_norm_sees_is_said_where_it_is_not_all(kind, size, share):
    model = torch.nn.Sequential(kind(3, 3, 1) if kind is torch.nn.Conv2d else kind(3))
    note = batch_norm.note(model, 12, 2, Runtime("cpu", world=World(0, size)))
    assert share in note if share else note == ""
