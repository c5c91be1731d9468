"""The network and the settings that shape it."""

import pytest
import torch

from tpukit import MSHNet, TpukitError


def test_the_output_after_the_warm_up_starts_as_what_the_warm_up_trained(infrared):
    model = MSHNet(dataset_dir=infrared).model().eval()
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(image)[0], model(image, warm_up=True)[0])
    assert MSHNet(dataset_dir=infrared, final_init="random").model().final.weight.std() > 0.05


def test_sizes_that_the_network_cannot_halve_are_refused(infrared):
    with pytest.raises(TpukitError, match="crop_size=100.*16"):
        MSHNet(dataset_dir=infrared, crop_size=100)
