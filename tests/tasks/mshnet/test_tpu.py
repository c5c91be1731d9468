"""The network for TPUs, on tiles of images: the outputs, gradients and statistics of the plain one."""

import pytest
import torch
from torch.nn import functional as F

from tests.tasks.mshnet.small import Narrow
from tpukit.training import batch_norm
from tpukit_tasks.mshnet import model, network_for
from tpukit_tasks.mshnet.loss import loss_of_sums, sums_of_scales
from tpukit_tasks.mshnet.tpu import block, network, tiling, upsampling


def test_xla_alone_takes_the_way_for_tpus(xla):
    image = torch.zeros(2, 1, 32, 32)
    assert network_for(image) is model and network_for(image.to(xla.device)) is network


@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_a_network_on_tiles_has_the_outputs_gradients_and_statistics_of_the_plain_one(tiles, mode):
    torch.manual_seed(0)
    plain, tiled = (Narrow().model().double().train(mode != "eval") for _ in range(2))
    if mode == "frozen":
        batch_norm.freeze(plain)
        batch_norm.freeze(tiled)
    with torch.no_grad():
        for parameter in plain.parameters():  # batch norms that turn round the order, and biases before them
            parameter += 0.5 * torch.randn_like(parameter) * (parameter.dim() == 1)
    tiled.load_state_dict(plain.state_dict())
    image, target = torch.randn(2, 3, 64, 48).double(), (torch.rand(2, 1, 64, 48) > 0.9).double()

    def outcome(network, outputs, sums):
        loss = loss_of_sums(sums, warm_up=False)
        parameters = list(network.parameters())  # a bias before the batch's statistics has no gradient
        total = loss + sum((output**2).mean() for output in outputs)
        gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        return [loss, *outputs, *network.buffers(), *gradients]

    logits, masks = plain(image)
    wanted = outcome(plain, [logits, *masks], sums_of_scales(logits, masks, target))
    logits, masks = network.forward(tiled, tiling.split(image, tiles), False, tiles)
    sums = network.sums_of_tiles(logits, masks, tiling.split(target, tiles), tiles)
    found = outcome(tiled, [tiling.merge(output, tiles) for output in (logits, *masks)], sums)
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize(
    "batch, size, tiles", [(32, 256, 4), (4, 256, 32), (128, 256, 1), (16, 64, 8), (1, 48, 4), (1, 16, 2)]
)
def test_tiles_fill_the_lanes_of_a_core(batch, size, tiles):
    assert tiling.num_tiles(torch.zeros(batch, 3, size, size)) == tiles


@pytest.mark.parametrize("height, tiles, halo", [(12, 3, 1), (12, 6, 3), (4, 2, 3), (2, 2, 5)])
def test_a_halo_is_the_rows_of_the_image_around_a_tile_or_zeros(height, tiles, halo):
    image = torch.randn(2, 3, height, 5)
    around, size = F.pad(image, (0, 0, halo, halo)), height // tiles
    wanted = [around[:, :, start : start + size + 2 * halo] for start in range(0, height, size)]
    assert torch.equal(tiling.exchange_halo(tiling.split(image, tiles), tiles, halo), torch.cat(wanted))


def test_the_gradient_that_the_convolutions_of_a_backward_pass_read_is_computed_once(xla):
    import torch_xla

    layer = torch.nn.Conv2d(2, 3, 3).to(xla.device)
    x = torch.ones(4, 2, 8, 8).to(xla.device).requires_grad_()
    y = F.relu(tiling.conv2d([layer], [x], 2))
    graph = torch_xla._XLAC._get_xla_tensors_hlo(list(torch.autograd.grad(y.sum(), (x, layer.weight))))
    assert graph.count(" opt-barrier(") == 1


def test_doubling_in_bfloat16_keeps_the_mean_of_a_constant_image_whose_weights_it_has_to_round():
    x = torch.full((2, 3, 16, 128), 1.3, dtype=torch.bfloat16)
    error = upsampling.upsample(x, 2, 1).double() / x[0, 0, 0, 0].double() - 1
    assert error.mean().abs() < 2**-10 and error.abs().max() < 2**-6  # a rounding is up to 2**-8


# The passes of a block, where the network's parity does not reach: equal values, statistics that stay


SIGN, ONES = torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), torch.ones(2, 4).double()
PASSES = {  # ours, and the same by torch
    "pixels": (lambda x: block._TileMax.apply(x, SIGN), lambda x: (SIGN[:, None, None] * x).amax((2, 3))),
    "channels": (
        lambda x: block._PoolChannels.apply(x, 2 * ONES, ONES),
        lambda x: torch.stack([(2 * x + 1).mean(1), (2 * x + 1).amax(1)], 1),
    ),
}


@pytest.mark.parametrize("kind", PASSES)
def test_equal_largest_values_share_the_gradient_as_in_amax(kind):
    x = torch.randint(-2, 3, (2, 4, 3, 5), generator=torch.Generator().manual_seed(3)).double()
    x.requires_grad_()
    found, wanted = (function(x) for function in PASSES[kind])
    weight = torch.arange(found.numel()).view_as(found)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, wanted))
    assert torch.equal(found, wanted) and torch.allclose(ours, theirs, atol=1e-12)


def test_a_largest_value_that_none_reaches_when_computed_again_gets_no_gradient_rather_than_nan():
    x, bound = torch.tensor([[1.0, 2.0, 2.0], [1.0, 4.0, 4.0]]), torch.tensor([[2.5], [3.5]])
    grad_x = block._split_grad_among_maxima(torch.tensor([[6.0], [6.0]]), x, bound, 1)
    assert grad_x.tolist() == [[0, 0, 0], [0, 3, 3]]
