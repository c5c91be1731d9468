"""What changed between two calls of a compiled function."""

import torch

from tpukit.devices import recompiles


def test_what_changed_between_two_calls_is_said_by_name_with_old_and_new():
    step = ("batch", "epoch", "sums")
    image = torch.zeros(16, 3, 8, 8)
    before = recompiles.signature(step, (dict(image=image, mask=image.byte()), 5, torch.zeros(5)))
    same = recompiles.signature(step, (dict(image=image + 1, mask=image.byte()), 5, torch.ones(5)))
    assert recompiles.differences(before, same) == []
    changed = (dict(image=image[:7], index=image.long()), (0.9, 0.5), torch.zeros(5).double())
    after = recompiles.signature(step, changed)
    assert recompiles.differences(before, after) == [
        "index is new: (16, 3, 8, 8) int64",
        "epoch[0] is new: 0.9",
        "epoch[1] is new: 0.5",
        "mask is missing",
        "epoch is missing",
        "image went from (16, 3, 8, 8) to (7, 3, 8, 8): the last batch is ragged",
        "sums went from (5,) float32 to (5,) float64",
    ]
    back = recompiles.differences(after, before)
    assert "image went from (7, 3, 8, 8) to (16, 3, 8, 8)" in back  # which is not ragged
    assert recompiles.differences(dict(epoch=5), dict(epoch=6)) == ["epoch went from 5 to 6"]
