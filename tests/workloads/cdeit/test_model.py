"""The network of CDEIT: attention, checkpointing, sizes."""

import copy

import pytest
import torch

from tests.workloads.cdeit.small import TINY
from tpukit import CDEIT, TpukitError
from tpukit.workloads.cdeit.model import Attention, CDEITModel, RelativeAttention


@pytest.mark.parametrize("trains", [True, False])
def test_attention_by_some_queries_at_a_time_is_attention(trains, xla, monkeypatch):
    for name in ("MAX_PAIRS", "MAX_PAIRS_INFERENCE"):
        monkeypatch.setattr(f"tpukit.workloads.cdeit.model.{name}", 6 * 3 * 2 * 16)  # 6 of the 16 queries
    torch.manual_seed(0)
    plain, x = Attention(16, 2), torch.randn(3, 16, 16)
    wanted = plain(x)
    wanted.square().sum().backward()
    ours = xla.place(copy.deepcopy(plain))
    with torch.set_grad_enabled(trains):
        found = ours(x.to(xla.device))
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), atol=1e-6, rtol=1e-5)
    if trains:
        found.square().sum().backward()
        for a, b in zip(ours.parameters(), plain.parameters()):
            torch.testing.assert_close(a.grad.cpu(), b.grad, atol=1e-5, rtol=1e-5)


def test_window_attention_adds_the_bias_of_every_offset():
    torch.manual_seed(0)
    attention = RelativeAttention(8, 2, 3)
    x = torch.randn(1, 9, 8)
    query, key, value = attention.qkv(x).view(9, 3, 2, 4).permute(1, 2, 0, 3)
    out = torch.zeros(9, 2, 4)
    for head in range(2):
        for i in range(9):
            logits = [
                float(query[head, i].detach() @ key[head, j].detach()) / 2
                + float(attention.relative_position_bias_table[(i // 3 - j // 3 + 2) * 5 + i % 3 - j % 3 + 2, head])
                for j in range(9)
            ]
            out[i, head] = torch.softmax(torch.tensor(logits), 0) @ value[head]
    assert torch.allclose(attention(x)[0], attention.proj(out.reshape(9, 8)), atol=1e-5)


def test_sizes_that_do_not_fit_are_refused_with_all_of_them():
    with pytest.raises(TpukitError, match="window=5"):
        CDEIT(patch=8, window=5).model()
    with pytest.raises(TpukitError, match="patch=0"):
        CDEIT(patch=0).model()
    with pytest.raises(TpukitError, match="sampling_steps=0.*1000"):
        CDEIT(sampling_steps=0)
    with pytest.raises(TpukitError, match="eta=1.2"):
        CDEIT(eta=1.2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_checkpointing_changes_no_gradient(device, request):
    runtime, gradients = request.getfixturevalue(device), []
    inputs = (torch.randn(2, 1, 128, 128), torch.tensor([3, 900]), torch.randn(2, 1, 16, 16))
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = CDEITModel(**TINY, checkpointing=checkpointing)
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
        model = runtime.place(model)

        def step(image, t, voltages):
            model(image, t, voltages).square().mean().backward()

        runtime.compile(step)(*runtime.put(dict(enumerate(inputs))).values())
        gradients.append(runtime.host([p.grad for p in model.parameters() if p.requires_grad]))
    assert all(g.any() for g in gradients[0])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients))
