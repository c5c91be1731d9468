"""The network of CDEIT: attention, checkpointing, sizes."""

import pytest
import torch
from torch.nn import functional as F

from tests.tasks.cdeit.small import TINY
from tpukit import CDEIT, TpukitError
from tpukit_tasks.cdeit.model import Attention, CDEITModel, Norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [torch.float32, "half"])
def test_a_norm_is_the_published_one_under_autocast_in_half_precision_but_its_sum_of_squares(dtype, residual):
    torch.manual_seed(0)
    norm = Norm(512).to(torch.promote_types(dtype, torch.float32))
    torch.nn.init.normal_(norm.g)
    x = 100 * torch.randn(2, 64, 512)  # whose squares add up to 5e6: fp16 ends at 65504
    x[0, 0] = 0
    x = x.to(dtype if residual == "half" or dtype == torch.float64 else residual)
    shift, scale = (torch.randn(2, 1, 512).to(dtype) for _ in range(2))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float64):
        found = norm(x, shift, scale)
    assert found.dtype == dtype and torch.equal(found[0, 0], shift[0, 0])
    x, shift, scale, g = (value.double() for value in (x, shift, scale, norm.g))
    wanted = (1 + scale) * F.normalize(x, dim=-1) * g * x.shape[-1] ** 0.5 + shift  # as published
    # Rounded are the token, its normalised value, g * (1 + scale), and the sum: four times half a unit in the
    # last place each.
    parts = wanted.abs() + 2 * (wanted - shift).abs()
    assert ((found.double() - wanted).abs() <= 2 * torch.finfo(dtype).eps * parts).all()


def test_under_autocast_the_table_of_positions_takes_no_block_out_of_half_precision():
    model, found = CDEITModel(image_size=64, **TINY), []
    for name, block in model.blocks.named_children():
        if name.startswith("swin"):
            block.register_forward_hook(lambda block, arguments, result: found.append(result.dtype))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 1, 64, 64), torch.tensor([0, 5]), torch.randn(2, 1, 16, 16))
    assert found == [torch.bfloat16] * 4


def test_window_attention_adds_the_bias_of_every_offset_by_a_mask_that_torchs_kernels_for_gpus_take(
    monkeypatch,
):
    torch.manual_seed(0)
    attention, masks, compute = Attention(8, 2, 3), [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *q, attn_mask: masks.append(attn_mask) or compute(*q, attn_mask),
    )
    attention(torch.rand(4, 9, 8))
    assert masks[0].shape == (1, 2, 9, 9) and masks[0].stride()[-1] == 1
    for head in range(2):
        for i in range(9):
            for j in range(9):
                offset = (i // 3 - j // 3 + 2) * 5 + i % 3 - j % 3 + 2
                assert masks[0][0, head, i, j] == attention.relative_position_bias_table[offset, head]


def test_the_small_network_has_the_parameters_that_the_help_says():
    assert sum(parameter.numel() for parameter in CDEIT(network="small").model().parameters()) == 5_542_096


@pytest.mark.parametrize(
    "settings, told",
    [
        (dict(network="tiny"), "network='tiny'.*published, small"),
        (dict(sampling_steps=0), "sampling_steps=0.*1000"),
    ],
)
def test_another_network_and_no_sampling_steps_are_refused_with_the_choices(settings, told):
    with pytest.raises(TpukitError, match=told):
        CDEIT(**settings)
