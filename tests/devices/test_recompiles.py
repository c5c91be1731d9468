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


def test_the_first_new_operation_of_a_trace_is_named_with_its_line_whatever_the_numbering():
    old = [
        "%0 = f32[] xla::device_data(), location=loss@mine.py:6",
        "%1 = f32[8] aten::mul(%0), location=loss@mine.py:6, ROOT=0",
    ]
    new = [
        "%0 = f32[] xla::device_data(), location=loss@mine.py:9",
        "%1 = f32[] xla::device_data(), location=loss@mine.py:6",
        "%2 = f32[8] aten::mul(%1), scope=aten::mul.2, location=loss@mine.py:6",
        "%3 = f32[8] aten::relu(%2)",
        "%4 = f32[8] aten::exp(%3), location=loss@mine.py:9, ROOT=0",
    ]
    assert recompiles.new_operation("\n".join(old), "\n".join(new)) == "aten::exp in loss, mine.py line 9"
    assert recompiles.new_operation("\n".join(new), "\n".join(old)) is None
