"""Tiles of images: the same outputs and gradients as whole images."""

import pytest
import torch
from torch.nn import functional as F

from tpukit.workloads.mshnet import MSHNet, tiling


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_upsampling_equals_bilinear_interpolation_with_aligned_corners(factor):
    x = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=True)
    torch.testing.assert_close(tiling.upsample(x, factor), wanted, atol=1e-5, rtol=0)
    weight = torch.randn_like(wanted)
    ours = torch.autograd.grad((tiling.upsample(x, factor) * weight).sum(), x)[0]
    theirs = torch.autograd.grad((wanted * weight).sum(), x)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_doubling_by_blending_equals_bilinear_interpolation_and_its_gradient_is_exact():
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    torch.testing.assert_close(tiling.upsample2x(x), wanted, atol=1e-6, rtol=0)  # its weights are float32
    assert torch.autograd.gradcheck(tiling.upsample2x, x[:1, :1])
    tall = torch.randn(1, 1, 6, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: tiling.upsample2x(tiling.split(x, 2), 2), tall)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_a_network_that_works_on_tiles_has_the_outputs_gradients_and_statistics_of_one_that_does_not(tiles, train, monkeypatch):
    torch.manual_seed(0)
    plain = MSHNet().model().double().train(train)
    tiled = MSHNet().model().double().train(train)
    tiled.load_state_dict(plain.state_dict())
    image = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def outcome(model):
        logits, masks = model(image)
        loss = (logits**2).mean() + sum((mask**2).mean() for mask in masks)
        loss.backward()
        return [logits, *masks, *model.buffers()], [p.grad for p in model.parameters()]

    def as_on_xla(layer, x, tiles):
        return tiling.split(tiling.conv2d_rows_as_channels(layer, tiling.merge(x, tiles)), tiles)

    wanted, wanted_gradients = outcome(plain)
    monkeypatch.setattr(tiling, "num_tiles", lambda image: tiles)
    monkeypatch.setattr(tiling, "conv2d_to_one_channel", as_on_xla)
    found, gradients = outcome(tiled)
    for a, b in zip([*found, *gradients], [*wanted, *wanted_gradients], strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


def test_tiles_fill_the_lanes_of_an_xla_core_and_no_other_device(xla):
    def tiles(batch, size):
        return tiling.num_tiles(torch.zeros(batch, 3, size, size).to(xla.device))

    assert [tiles(32, 256), tiles(4, 256), tiles(128, 256), tiles(16, 64), tiles(1, 48), tiles(1, 16)] == [4, 16, 1, 4, 2, 1]
    assert tiling.num_tiles(torch.zeros(32, 3, 256, 256)) == 1
