"""Augmentation on a device against that of PIL on the host; tests/test_reference.py holds both against the
published one."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

from tpukit_tasks.mshnet import augment
from tpukit_tasks.mshnet.data import InfraredSet


@pytest.fixture
def many_kinds(tmp_path):
    """The training set of a folder with grey and colour images of four sizes, one of them a single row."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    for number, (width, height) in enumerate([(64, 48), (40, 90), (200, 200), (300, 1)]):
        shape = (height // 4 + 1, width // 4 + 1, *([3] if number % 2 else []))
        image = Image.fromarray(rng.integers(0, 255, shape, np.uint8))
        image.resize((width, height), Image.Resampling.BICUBIC).save(tmp_path / f"images/{number}.png")
        mask = Image.fromarray(255 * (rng.random((height, width)) > 0.9).astype(np.uint8))
        mask.save(tmp_path / f"masks/{number}.png")
    for name in ("trainval.txt", "test.txt"):
        (tmp_path / name).write_text("0\n1\n2\n3\n")
    return InfraredSet(tmp_path, "train", base_size=64, crop_size=48)


def on_device(data, indices, numbers):
    """The arguments of `augment.on_device`."""
    rows = [torch.as_tensor(values[indices]) for values in data.device_arrays().values()]
    parameters = data.sample_parameters(indices, numbers)
    return *rows, {name: torch.as_tensor(values) for name, values in parameters.items()}


@pytest.mark.parametrize("augmented, size", [(True, 48), (False, 64)])
def test_images_of_many_sizes_and_modes_are_on_a_device_what_pil_makes_of_them(many_kinds, augmented, size):
    data, rng = many_kinds, np.random.default_rng(1)
    indices, numbers = rng.integers(0, 4, 40), rng.random((40, 6)) if augmented else None
    host, batch = data.batch(indices, numbers), on_device(data, indices, numbers)
    assert data.device_nbytes() == sum(a.nbytes for a in data.device_arrays().values()) == 4 * 4 * 200 * 300
    for in_bfloat16 in (False, True):
        image, mask = augment.on_device(*batch, in_bfloat16=in_bfloat16)
        assert host["image"].shape == image.shape == (40, 3, size, size)
        difference = np.abs(image.numpy() - host["image"])
        assert difference.max() <= (3.5 if augmented else 1.5) and difference.mean() < 0.8  # PIL rounds
        np.testing.assert_array_equal(mask, host["mask"])
    assert host["mask"].max() == 255


class Products(TorchFunctionMode):
    """Context manager: counts products of matrices. in_bfloat16: taken as by a TPU, factors rounded to it,
    sums in float32."""

    def __init__(self, *, in_bfloat16):
        super().__init__()
        self.in_bfloat16, self.count = in_bfloat16, 0

    def __torch_function__(self, function, types, arguments=(), settings=None):
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            self.count += 1
            arguments = [factor.bfloat16().float() for factor in arguments] if self.in_bfloat16 else arguments
        return function(*arguments, **(settings or {}))


def test_an_image_is_two_exact_products_and_those_in_bfloat16_as_of_a_tpu_move_no_grey_level(infrared):
    data, rng = InfraredSet(infrared, "train", base_size=64, crop_size=64), np.random.default_rng(0)
    indices, numbers = rng.integers(0, len(data), 8), rng.random((8, 6))
    batch = on_device(data, indices, numbers)
    with Products(in_bfloat16=False) as products:
        image, mask = augment.on_device(*batch)
    assert products.count == 2
    with Products(in_bfloat16=True):
        found_image, found_mask = augment.on_device(*batch, in_bfloat16=True)
    assert 0 < (found_image - image).abs().max() < 0.05 and torch.equal(found_mask, mask)


def test_crops_cover_their_whole_range_and_nothing_beyond():
    rng = np.random.default_rng(0)
    crops = [augment.random_crop(rng.random(6), (512, 400), 64, 64) for _ in range(4000)]
    widths = {crop.scaled[0] for crop in crops}
    assert (min(widths), max(widths)) == (32, 128)
    assert abs(np.mean([crop.flip for crop in crops]) - 0.5) < 0.03
    for crop in crops:
        width, height = crop.scaled
        assert 0 <= crop.x1 <= max(width - 64, 0) and 0 <= crop.y1 <= max(height - 64, 0)
    largest = augment.random_crop((0, 1 - 1e-12, 1 - 1e-12, 1 - 1e-12, 0.9, 0), (512, 400), 64, 64)
    assert largest.x1 == 128 - 64 and largest.y1 == 100 - 64
