"""Tiles of images: the same outputs and gradients as whole images and torch's own layers."""

import pytest
import torch
from torch.nn import functional as F

from tpukit.tasks.mshnet import MSHNet, tiling
from tpukit.tasks.mshnet.loss import multiscale_loss


@pytest.fixture(params=[1, 2], ids=["one core", "two share the batch"], autouse=True)
def cores(request, monkeypatch):
    monkeypatch.setattr(tiling, "cores_sharing", lambda tensor: request.param)
    return request.param


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_a_network_on_tiles_has_the_outputs_gradients_and_statistics_of_the_plain_one(tiles, train):
    torch.manual_seed(0)
    plain = MSHNet(final_init="random").model().double().train(train)
    with torch.no_grad():
        for parameter in plain.parameters():  # batch norms that turn round the order, and biases before them
            parameter += 0.5 * torch.randn_like(parameter) * (parameter.dim() == 1)
    tiled = MSHNet().model().double().train(train)
    tiled.load_state_dict(plain.state_dict())
    image, target = torch.randn(2, 3, 64, 64).double(), (torch.rand(2, 1, 64, 64) > 0.9).double()

    def outcome(model, tiles):
        logits, masks = model(tiling.split(image, tiles), tiles=tiles)
        loss = multiscale_loss(logits, masks, tiling.split(target, tiles), warm_up=False, tiles=tiles)
        (loss + sum((mask**2).mean() for mask in [logits, *masks])).backward()
        outputs = [tiling.merge(x, tiles) for x in [logits, *masks]]
        # A bias before a batch norm with the batch's statistics has no gradient.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return [loss, *outputs, *model.buffers(), *gradients]

    for a, b in zip(outcome(tiled, tiles), outcome(plain, None), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("tiles", [2, 4])
def test_the_tiles_of_an_image_stay_on_the_core_that_has_the_image(cores, tiles):
    image = torch.arange(4.0)[:, None, None, None].expand(4, 1, 32, 2)
    on_core = tiling.split(image, tiles)[:, 0, 0, 0].view(cores, -1)
    assert [sorted(set(found.tolist())) for found in on_core] == torch.arange(4.0).view(cores, -1).tolist()


def test_tiles_fill_the_lanes_of_an_xla_core_and_no_other_device_has_them(xla, cores):
    def tiles(batch, size):
        return tiling.num_tiles(torch.zeros(cores * batch, 3, size, size).to(xla.device))

    assert [tiles(32, 256), tiles(4, 256), tiles(128, 256), tiles(16, 64), tiles(1, 48), tiles(1, 16)] == [
        4,
        16,
        1,
        4,
        2,
        1,
    ]
    assert tiling.num_tiles(torch.zeros(32, 3, 256, 256)) is None


def test_the_gradient_that_the_convolutions_of_a_backward_pass_read_is_computed_once(xla):
    import torch_xla

    layer = torch.nn.Conv2d(2, 3, 3).to(xla.device)
    x = torch.ones(4, 2, 8, 8).to(xla.device).requires_grad_()
    y = F.relu(tiling.conv2d([layer], x, 2))
    graph = torch_xla._XLAC._get_xla_tensors_hlo(list(torch.autograd.grad(y.sum(), (x, layer.weight))))
    assert graph.count(" opt-barrier(") == 1
