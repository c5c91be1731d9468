"""The network and the settings that shape it."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tasks.mshnet.small import Narrow
from tpukit import MSHNet, TpukitError
from tpukit.runs import weights
from tpukit.training import batch_norm, layers
from tpukit_tasks.mshnet import model as network


def test_the_output_after_the_warm_up_starts_as_what_the_warm_up_trained(infrared):
    model = MSHNet(dataset_dir=infrared).model().eval()
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(image)[0], model(image, warm_up=True)[0])


def test_a_frozen_backbone_leaves_the_outputs_of_both_phases_to_train():
    task = Narrow(base_size=32, crop_size=32)
    layers.freeze(model := task.model(), ["backbone"], task.head)
    batch = {name: torch.as_tensor(values) for name, values in task.example(2).items()}
    for epoch, moved in ((0, 2), (task.warm_epoch + 1, 10)):  # weights and biases: of one output, of all
        task.loss(model, batch, epoch).backward()
        assert sum(parameter.grad is not None for parameter in model.parameters()) == moved


def test_the_small_network_computes_on_xla_what_it_computes_on_the_cpu(infrared, xla):
    task = MSHNet(dataset_dir=infrared, network="small", crop_size=32)
    model = task.model().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 174_537  # as the help says
    image = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        plain = network.predict(model, image, warm_up=False)
        on_xla = task.predict(model.to(xla.device), dict(image=image.to(xla.device))).cpu()
    torch.testing.assert_close(on_xla, plain, rtol=1e-4, atol=1e-4)


def test_sizes_that_the_network_cannot_halve_are_refused(infrared):
    with pytest.raises(TpukitError, match="crop_size=100.*16"):
        MSHNet(dataset_dir=infrared, crop_size=100)


WINDOWS = {  # image_side of the weights, the size of an image, its windows of 256 pixels
    "half of it fits": (None, (512, 512), 1),
    "half of it is more": (None, (600, 400), 2),
    "as in training": ("1024", (1024, 1024), 1),
    "no side": ("0", (1024, 1024), 9),
    "no number": ("9" * 5000, (1024, 1024), 9),
}


@pytest.mark.parametrize("side, size, windows", WINDOWS.values(), ids=WINDOWS)
def test_your_images_shrink_as_those_of_the_training_run_or_to_a_half_if_the_weights_do_not_say(
    side, size, windows, tmp_path
):
    metadata = dict(image_side=side) if side else {}
    (tmp_path / "a.safetensors").write_bytes(
        b"".join(weights.serialize(Narrow().model().state_dict(), metadata))
    )
    task = MSHNet(weights=tmp_path / "a.safetensors")
    rows, join = task.split(dict(image=np.zeros((1, 3, *size), np.uint8)))
    assert len(rows) == windows
    assert join([np.zeros((1, 256, 256), np.float32)] * windows).shape == (1, 1, *size)


@pytest.mark.parametrize("variant", ["per-core", "frozen"])
def test_biases_before_batch_statistics_are_left_out_of_all_but_the_running_means(variant, monkeypatch):
    image = torch.randn(3, 3, 32, 32, dtype=torch.float64)

    def trained():
        torch.manual_seed(0)
        model = Narrow().model().double().train()
        if variant == "frozen":
            batch_norm.freeze(model)
        for _ in range(2):
            outputs = model(image)[0].square().mean(), *model(image)[1]
            sum(output.mean() for output in outputs).backward()
        return model, outputs

    model, found = trained()
    monkeypatch.setattr(network, "takes_batch_statistics", lambda norm: False)
    plain, wanted = trained()
    mine, theirs = [*found, *model.buffers()], [*wanted, *plain.buffers()]
    torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-9)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if variant == "per-core" and name.endswith((".conv1.bias", ".conv2.bias", ".shortcut.0.bias")):
            assert mine.grad is None and theirs.grad.abs().max() < 1e-10
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-11, rtol=1e-8)


@pytest.fixture
def step(cpu):
    """Compute a loss and its gradients: step()."""
    task = Narrow(base_size=32, crop_size=32)
    model = cpu.to_device(task.model().train())
    return lambda: task.loss(model, cpu.put(task.example(2)), epoch=9).backward()


def test_no_convolution_of_more_than_three_channels_gets_maps_that_are_not_channels_last(step, monkeypatch):
    inputs, conv2d = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *more, **named: inputs.append(x) or conv2d(x, *more, **named))
    step()
    copied = [tuple(x.shape) for x in inputs if not x.is_contiguous(memory_format=torch.channels_last)]
    assert len(inputs) > 30 and all(channels <= 3 for _, channels, *_ in copied), copied


class Additions(TorchDispatchMode):
    """Counts the additions of two maps, and those of which the maps lie in two layouts."""

    all = mixed = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.add.Tensor and all(torch.is_tensor(x) and x.dim() == 4 for x in args):
            a, b = args
            if a.shape == b.shape and min(a.shape[1:]) > 1:
                self.all += 1
                self.mixed += (a.stride(1) == 1) != (b.stride(1) == 1)
        return function(*args, **kwargs or {})


def test_gradients_of_maps_that_are_added_lie_in_one_layout(step):
    with Additions() as additions:
        step()
    assert additions.all > 30 and additions.mixed == 0
