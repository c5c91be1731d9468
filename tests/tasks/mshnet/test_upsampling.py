"""Upsampling of tiles: the numbers of torch's own on whole images."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tpukit.tasks.mshnet import tiling, upsampling


@pytest.fixture(params=[1, 2], ids=["one core", "two share the batch"], autouse=True)
def cores(request, monkeypatch):
    monkeypatch.setattr(tiling, "cores_sharing", lambda tensor: request.param)


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_upsampling_tiles_equals_bilinear_interpolation_with_aligned_corners_and_so_does_its_gradient(
    factor, tiles
):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 12, 20, dtype=torch.float64, generator=generator, requires_grad=True)
    wanted = upsampling.upsample(x, factor, None)
    torch.testing.assert_close(
        wanted, F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=True)
    )
    found = tiling.merge(upsampling.upsample(tiling.split(x, tiles), factor, tiles), tiles)
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=0)
    weight = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
    ours, theirs = (torch.autograd.grad((result * weight).sum(), x)[0] for result in (found, wanted))
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


def test_doubling_in_bfloat16_keeps_the_mean_of_a_constant_image_whose_weights_it_has_to_round():
    x = torch.full((2, 3, 16, 128), 1.3, dtype=torch.bfloat16)
    error = upsampling.upsample2x(x, 1).double() / x[0, 0, 0, 0].double() - 1
    assert error.mean().abs() < 2**-10 and error.abs().max() < 2**-6  # a rounding is up to 2**-8


def test_under_a_gpus_autocast_what_is_upsampled_stays_in_half_precision():
    torch.set_autocast_dtype("cuda", torch.float16)
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():  # knows a GPU's rules without one
            x = torch.empty(1, 2, 4, 4, dtype=torch.float16, device="cuda")
            assert F.interpolate(x, scale_factor=2, mode="bilinear").dtype == torch.float32
            assert upsampling.upsample(x, 2, None).dtype == torch.float16
    finally:
        torch.set_autocast_enabled("cuda", False)
