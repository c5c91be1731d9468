"""The augmentation against slow, plain ones."""

import numpy as np
import pytest
import torch
from torch.nn.functional import affine_grid, grid_sample

from tpukit_tasks.images import augment
from tpukit_tasks.images.augment import NUM_UNIFORMS, normalise

IMAGES = torch.randint(60, 180, (4, 3, 20, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
NUMBERS = np.random.default_rng(1).random((4, NUM_UNIFORMS))
OFF = dict(flip=0, crop=1, colour=0)


def augmented(**settings):
    settings = OFF | settings
    return augment.apply(IMAGES, torch.from_numpy(augment.draw(NUMBERS, **settings)), **settings)


def test_a_crop_is_the_bilinear_sampling_of_a_square_inside_the_image():
    found = augmented(crop=0.3)
    zoom = np.sqrt(0.3 + 0.7 * NUMBERS[:, 0])
    assert (zoom >= 0.3**0.5).all() and (zoom <= 1).all()
    x, y = (-1 + zoom + 2 * NUMBERS[:, k] * (1 - zoom) for k in (1, 2))  # the middle, in [-1, 1]
    assert (abs(x) + zoom <= 1 + 1e-12).all() and (abs(y) + zoom <= 1 + 1e-12).all()
    theta = torch.tensor(
        np.array([[zoom, 0 * zoom, x], [0 * zoom, zoom, y]]).transpose(2, 0, 1), dtype=torch.float32
    )
    grid = affine_grid(theta, IMAGES.shape, align_corners=False)
    wanted = grid_sample(IMAGES.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0)


def test_images_are_mirrored_as_often_as_asked_for():
    is_flipped = NUMBERS[:, 3] < 0.5
    assert 0 < is_flipped.sum() < 4
    wanted = torch.stack([i.flip(2) if flip else i for i, flip in zip(IMAGES, is_flipped)])
    assert torch.equal(augmented(flip=0.5), wanted.float())


def test_colours_change_as_torchvision_changes_them():
    functional = pytest.importorskip("torchvision.transforms.functional")
    wanted = []
    for image, numbers in zip(IMAGES.float() / 255, NUMBERS):
        factors = 1 + 0.2 * (2 * numbers[4:] - 1)
        for name, factor in zip(("brightness", "contrast", "saturation"), factors):
            image = getattr(functional, f"adjust_{name}")(image, factor)
        wanted.append(255 * image)
    torch.testing.assert_close(augmented(colour=0.2), torch.stack(wanted), atol=0.1, rtol=0)


def test_what_leaves_the_range_of_a_pixel_is_cut_off_and_without_augmentation_nothing_changes():
    found = augmented(colour=1.0)
    assert found.min() >= 0 and found.max() <= 255
    assert torch.equal(augmented(), IMAGES.float())


def test_normalising_takes_out_mean_and_deviation():
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    wanted = (IMAGES.double() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normalise(IMAGES, mean, std).double(), wanted, atol=1e-5, rtol=0)
