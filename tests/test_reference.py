"""MSHNet and CDEIT against values computed with the published code. All seeds and cases come from the
reference folder."""

import functools
import json

import numpy as np
import pytest
import torch

from tests.tasks.mshnet.published import published_scores
from tpukit_tasks.cdeit import diffusion
from tpukit_tasks.cdeit.data import CONVENTIONS, voltage_map
from tpukit_tasks.cdeit.model import CDEITModel
from tpukit_tasks.mshnet import augment, scores
from tpukit_tasks.mshnet.data import read_image, read_mask
from tpukit_tasks.mshnet.loss import location_loss, multiscale_loss, sums_over_images
from tpukit_tasks.mshnet.model import MSHNetModel


def tensors(file):
    return {k: torch.from_numpy(v) if v.ndim else v.item() for k, v in np.load(file).items()}


def published(kind, reference, name, count):
    """A network with so many parameters, of the published names and shapes, filled by the rule of the
    reference folder's README."""
    names = json.loads((reference / f"{name}_state_dict.json").read_text())
    model, random = kind(), np.random.RandomState(int(np.load(reference / f"{name}_forward.npz")["seed"]))
    assert sum(p.numel() for p in model.parameters()) == count
    state = model.state_dict()
    assert [(n, list(value.shape)) for n, value in state.items()] == list(names.items())
    for name, value in state.items():
        if name == "pos_embed" or not value.is_floating_point():
            continue
        values = random.randn(*value.shape)
        if value.ndim >= 2:
            values = values / np.sqrt(value[0].numel())
        elif name.endswith("running_var"):
            values = 1 + 0.1 * abs(values)
        else:
            values = 1 + 0.1 * values if name.endswith("weight") else 0.1 * values
        value.copy_(torch.from_numpy(np.asarray(values, np.float32)))
    return model


# MSHNet


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_forward_equals_the_published_network(reference, mode):
    wanted = tensors(reference / "mshnet_forward.npz")
    model = published(MSHNetModel, reference, "mshnet", 4_065_513).train(mode == "train")
    with torch.no_grad():
        logits, masks = model(wanted["x"])
        outputs = {"final": logits, **{f"mask{i}": m for i, m in enumerate(masks)}}
        if mode == "eval":
            outputs["warmup"], none = model(wanted["x"], warm_up=True)
            assert none == []
    outputs = {f"{mode}_{name}": output for name, output in outputs.items()}
    torch.testing.assert_close(outputs, {name: wanted[name] for name in outputs}, atol=1e-4, rtol=0)


def test_sls_loss_and_its_gradient_equal_the_published_ones(reference):
    wanted = tensors(reference / "sls_loss.npz")
    assert wanted["cases"] > 0
    for case in range(wanted["cases"]):
        names = ("epoch_warm_withshape", "logits", "target", "loss", "grad")
        epochs, logits, target, loss, gradient = (wanted[f"c{case}_{name}"] for name in names)
        epoch, warm_epoch, with_shape = epochs.tolist()
        found = multiscale_loss(logits.requires_grad_(), [], target, warm_up=epoch <= warm_epoch)
        if epoch > warm_epoch and not with_shape:
            found = found - location_loss(*sums_over_images(logits, target)[3:]).mean()
        found.backward()
        assert abs(found.item() - loss) < 1e-5, case
        torch.testing.assert_close(logits.grad, gradient, atol=1e-5, rtol=0)


def test_multiscale_loss_equals_the_published_one(reference):
    wanted = tensors(reference / "multiscale_loss.npz")
    masks, warm_up = [wanted[f"mask{i}"] for i in range(4)], wanted["epoch"] <= wanted["warm_epoch"]
    loss = multiscale_loss(wanted["final"], masks, wanted["target"], warm_up=warm_up)
    assert abs(loss.item() - wanted["loss"]) < 1e-5


def test_scores_equal_the_published_ones(reference):
    wanted = np.load(reference / "metrics.npz")
    logits, target = wanted["logits"], wanted["target"]
    ours = scores.summary([scores.count(*pair) for pair in zip(logits[:, 0], target[:, 0] >= 0.5)])
    published = published_scores(logits, target)
    # the one score in which ours differs, as the labels are not grey
    for found in (published, {**ours, **ours["roc"], "fa": published["fa"]}):
        assert found["fa"] == wanted["false_alarm_rate"]
        assert found["iou"] == wanted["iou"] and found["pd"] == wanted["detection_probability"]
        assert abs(found["pixel_recall"] - wanted["pixel_accuracy"]) < 1e-7  # published in float32
        for name in ("tpr", "fpr", "precision"):
            np.testing.assert_array_equal(found[name], wanted[name])


def on_host(image, mask, crop):
    return [array[0].astype(int) for array in augment.on_host(image[None], mask, crop)]


def on_device(image, mask, crop, in_bfloat16=False):
    """As on a device that holds the pixels, here the CPU; rounded, as images are."""
    pixels = (torch.as_tensor(array)[None, None] for array in (image, mask))
    parameters = augment.device_parameters(image.shape[::-1], crop)
    parameters = {name: torch.as_tensor(value)[None] for name, value in parameters.items()}
    made = augment.on_device(*pixels, parameters, in_bfloat16=in_bfloat16)
    return [array[0, 0].round().int().numpy() for array in made]


WAYS = [on_host, on_device, functools.partial(on_device, in_bfloat16=True)]


@pytest.mark.parametrize("way", WAYS)
def test_augmentation_equals_the_published_one(way, reference, real_data):
    wanted = np.load(reference / "augment.npz")
    assert wanted["cases"] > 0
    for case in range(int(wanted["cases"])):
        flip, long_size, x1, y1, blur = wanted[f"a{case}_params"].tolist()
        image, mask = pair(real_data, wanted[f"a{case}_name"])
        scaled = augment.scaled_size(image.shape[::-1], int(long_size))
        crop = augment.Crop(256, scaled, bool(flip), int(x1), int(y1), max(blur, 0.0))
        image, mask = way(image, mask, crop)
        difference = np.abs(image - wanted[f"a{case}_image"].astype(int))
        tolerated = 0 if way is on_host else 1 if blur < 0 else 3  # on the host it is PIL itself
        assert difference.max() <= tolerated and difference.mean() <= 0.7, case
        np.testing.assert_array_equal(mask, wanted[f"a{case}_mask"])


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_resize_equals_the_published_one(way, reference, real_data):
    wanted = np.load(reference / "augment.npz")
    image, mask = way(*pair(real_data, wanted["eval_name"]), augment.Crop(256, (256, 256)))
    assert np.abs(image - wanted["eval_image"]).max() <= (0 if way is on_host else 1)
    np.testing.assert_array_equal(mask, wanted["eval_mask"])


def pair(real_data, name):
    image, mask = (real_data / f"IRSTD-1k/{kind}/{name}.png" for kind in ("images", "masks"))
    return read_image(image)[0], read_mask(mask)[0]


# CDEIT


@pytest.mark.slow
def test_cdeit_forward_equals_the_published_network(reference):
    model = published(CDEITModel, reference, "cdeit", 109_719_108)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 107_621_956
    wanted = tensors(reference / "cdeit_forward.npz")
    # sines and cosines
    torch.testing.assert_close(model.pos_embed[0, 5], wanted["pos_embed_row_5"], atol=1e-6, rtol=0)
    with torch.no_grad():
        for t in (0, 417, 999):
            found, right = model(wanted["x"], torch.tensor([t]), wanted["y"]), wanted[f"out_t{t}"]
            assert float((found - right).abs().max() / right.abs().max()) < 2e-4


def toy(x, t, voltages):
    """The network of the reference's diffusion values."""
    large = torch.nn.functional.interpolate(voltages, scale_factor=8)
    return 0.3 * x + 0.1 * large + t.view(-1, 1, 1, 1) / 1000


def test_diffusion_and_ddim_equal_the_published_ones(reference):
    wanted = tensors(reference / "cdeit_diffusion.npz")
    np.testing.assert_allclose(diffusion.betas(), wanted["betas"], rtol=1e-5)
    np.testing.assert_allclose(diffusion.alphas_cumprod(), wanted["alphas_cumprod"], rtol=1e-5)
    table = torch.tensor(diffusion.alphas_cumprod(), dtype=torch.float32)
    x, t, noise, voltages = (wanted[name] for name in ("x_start", "t", "noise", "voltage_map"))
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(diffusion.add_noise(x, t, noise, table), wanted["q_sample"])
    assert float(diffusion.loss(toy, x, voltages, t, noise, table)) == pytest.approx(wanted["loss"], rel=1e-5)
    x, *noises = wanted["ddim_noises"]
    for row, noise in zip(diffusion.ddim_schedule(wanted["ddim_steps"]), [*noises, torch.zeros_like(x)]):
        x = diffusion.sampling_step(toy, x, voltages, torch.tensor(row, dtype=torch.float32), noise)
    close(x, wanted["ddim_out"])


def test_voltage_map_equals_the_published_one(reference, uef2017):
    wanted = tensors(reference / "voltage_map_test2017.npz")
    with np.load(uef2017 / "test" / str(wanted["sample"])) as sample:
        volts = sample["ys"].reshape(1, 208) / wanted["V"]
    statistics = (
        torch.load(uef2017 / f"{name}.pth", weights_only=True).numpy()[0] for name in ("mean", "std")
    )
    assert np.abs(voltage_map(volts, *statistics)[0] - wanted["voltage_map"].numpy()).max() < 1e-6
    convention = CONVENTIONS["uef2017"]
    assert (convention.volts, convention.unit) == (wanted["V"], wanted["I"] / wanted["V"])
