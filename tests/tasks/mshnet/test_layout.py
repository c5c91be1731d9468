"""MSHNet with its channels innermost in memory, off XLA."""

import torch
from torch.nn import functional as F

from tests.tasks.mshnet.small import Narrow


def test_no_convolution_of_more_than_three_channels_gets_maps_that_are_not_channels_last(cpu, monkeypatch):
    task = Narrow(base_size=32, crop_size=32)
    model = cpu.place(task.model().train(), channels_last="auto")
    inputs, conv2d = [], F.conv2d

    def noted(x, *arguments, **settings):
        inputs.append(x)
        return conv2d(x, *arguments, **settings)

    monkeypatch.setattr(F, "conv2d", noted)
    task.loss(model, cpu.put(task.example(2)), epoch=9).backward()
    copied = [tuple(x.shape) for x in inputs if not x.is_contiguous(memory_format=torch.channels_last)]
    assert len(inputs) > 30 and all(channels <= 3 for _, channels, *_ in copied), copied
