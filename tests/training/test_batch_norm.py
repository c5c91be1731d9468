"""Batch norm with frozen statistics."""

import copy

import torch

from tpukit.devices.runtime import Runtime


def test_a_frozen_batch_norm_keeps_the_dtype_under_autocast_and_learns_as_on_xla(cpu, xla):
    from tpukit.training.batch_norm import freeze

    found = []
    for runtime in (cpu, xla):
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(3)
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
        freeze(norm.train())
        norm = runtime.place(copy.deepcopy(norm))
        made = norm(runtime.put({"x": torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)})["x"])
        made.square().sum().backward()
        found.append(runtime.host([made, norm.weight.grad, norm.bias.grad, norm.running_mean]))
    for here, there in zip(*found):
        torch.testing.assert_close(here, there)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3))
    freeze(layers)
    with Runtime("cpu", "bf16").autocast():
        assert layers(torch.ones(1, 3, 4, 4)).dtype == torch.bfloat16
