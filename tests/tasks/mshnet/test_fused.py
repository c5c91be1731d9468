"""The passes of the block for XLA, where the network's parity does not reach: equal values, statistics that
stay."""

import pytest
import torch

from tpukit.tasks.mshnet import fused, tiling
from tpukit.tasks.mshnet.model import Block
from tpukit.training import batch_norm


@pytest.fixture
def whole_numbers():
    """(2, 4, 3, 5), many of them equal."""
    return (
        torch.randint(-2, 3, (2, 4, 3, 5), generator=torch.Generator().manual_seed(3))
        .double()
        .requires_grad_()
    )


def test_equal_largest_pixels_share_the_gradient_as_in_amax(whole_numbers):
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    weight = torch.arange(8.0).double().view(2, 4)
    found = fused._TileMax.apply(whole_numbers, sign)
    wanted = (sign[:, None, None] * whole_numbers).amax((2, 3))
    assert torch.equal(found, wanted)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), whole_numbers)[0] for y in (found, wanted))
    assert torch.allclose(ours, theirs, atol=1e-14)


def test_equal_largest_channels_share_the_gradient_as_in_amax(whole_numbers):
    scale, shift = (torch.full((2, 4), value).double().requires_grad_() for value in (2.0, 1.0))
    weight = torch.arange(60.0).double().view(2, 2, 3, 5)
    found = fused._PoolChannels.apply(whole_numbers, scale, shift)
    y = whole_numbers * scale[..., None, None] + shift[..., None, None]
    wanted = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)
    assert torch.equal(found, wanted)
    inputs = (whole_numbers, scale, shift)
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (found, wanted))):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_a_largest_value_that_none_reaches_when_computed_again_gets_no_gradient_rather_than_nan():
    x = torch.tensor([[1.0, 2.0, 2.0], [1.0, 4.0, 4.0]])
    to_x = fused._split_grad_among_maxima(torch.tensor([[6.0], [6.0]]), x, torch.tensor([[2.5], [3.5]]), 1)
    assert torch.equal(to_x, torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, 3.0]]))


@pytest.mark.parametrize("channels_in", [16, 8])  # without and with a shortcut
def test_a_block_with_frozen_batch_norms_trains_as_the_plain_one_and_leaves_their_statistics(channels_in):
    torch.manual_seed(0)
    block = Block(channels_in, 16).double()
    batch_norm.freeze(block)
    x = torch.randn(4, channels_in, 8, 6).double().requires_grad_()
    before = [buffer.clone() for buffer in block.buffers()]
    inputs = (x, *block.parameters())

    def gradients(y):
        return torch.autograd.grad((y * torch.arange(y.numel()).double().view_as(y)).sum() / 1e3, inputs)

    wanted, found = block(x), tiling.merge(block(tiling.split(x, 2), 2), 2)
    for a, b in zip([found, *gradients(found)], [wanted, *gradients(wanted)], strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(block.buffers(), before))
