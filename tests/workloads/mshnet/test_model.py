"""The network and the settings that shape it."""

import pytest
import torch
from torch.nn import functional as F

from tpukit import MSHNet, TpukitError
from tpukit.workloads.mshnet.model import upsample


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_upsampling_equals_bilinear_interpolation_with_aligned_corners(factor):
    x = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=True)
    torch.testing.assert_close(upsample(x, factor), wanted, atol=1e-5, rtol=0)
    weight = torch.randn_like(wanted)
    ours = torch.autograd.grad((upsample(x, factor) * weight).sum(), x)[0]
    theirs = torch.autograd.grad((wanted * weight).sum(), x)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_output_after_the_warm_up_starts_as_what_the_warm_up_trained(infrared):
    model = MSHNet(dataset_dir=infrared).model().eval()
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(image)[0], model(image, warm_up=True)[0])
    assert MSHNet(dataset_dir=infrared, final_init="random").model().final.weight.std() > 0.05


def test_sizes_that_the_network_cannot_halve_are_refused(infrared):
    with pytest.raises(TpukitError, match="crop_size=100.*16"):
        MSHNet(dataset_dir=infrared, crop_size=100)
