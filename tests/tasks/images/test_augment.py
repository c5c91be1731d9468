"""The augmentation against slow, plain ones, and the pairs of a mixture on several cores."""

import numpy as np
import pytest
import torch
from torch.nn.functional import affine_grid, grid_sample

from tests.conftest import refuses
from tpukit import ImageClassifier
from tpukit.tasks.images.augment import NUM_UNIFORMS, Augmentation, normalise, partners

IMAGES = torch.randint(60, 180, (4, 3, 20, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
NUMBERS = np.random.default_rng(1).random((4, NUM_UNIFORMS))


def augmented(numbers=NUMBERS, images=IMAGES, **fields):
    augmentation = Augmentation(**fields)
    return augmentation.apply(images, torch.from_numpy(augmentation.parameters(numbers)))


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


@pytest.mark.parametrize("name, column", [("brightness", 4), ("contrast", 5), ("saturation", 6)])
def test_colours_change_as_torchvision_changes_them(name, column):
    functional = pytest.importorskip("torchvision.transforms.functional")
    factors = 1 + 0.2 * (2 * NUMBERS[:, column] - 1)
    change = getattr(functional, f"adjust_{name}")
    wanted = torch.stack(
        [255 * change(image.float() / 255, factor) for image, factor in zip(IMAGES, factors)]
    )
    torch.testing.assert_close(augmented(**{name: 0.2}), wanted, atol=0.1, rtol=0)


def test_what_leaves_the_range_of_a_pixel_is_cut_off():
    found = augmented(brightness=1.0, contrast=1.0, saturation=1.0)
    assert found.min() >= 0 and found.max() <= 255


def test_without_augmentation_no_number_is_drawn_and_the_graph_has_no_part_of_it(shapes):
    off = dict(flip=0, crop=1, brightness=0, contrast=0, saturation=0)
    data, _ = ImageClassifier(dataset_dir=shapes, image_size=16, pretrained="no", **off).datasets()
    assert data.num_uniforms == 0 and set(data.batch([0], np.zeros((1, 0)))) == {"image", "label"}
    data, _ = ImageClassifier(dataset_dir=shapes, image_size=16, pretrained="no").datasets()
    assert data.batch([0, 1], NUMBERS[:2])["augment"].shape == (2, NUM_UNIFORMS)


def test_shares_of_a_mixture_are_of_the_beta_distribution():
    from scipy import stats

    numbers = np.random.default_rng(0).random((4000, NUM_UNIFORMS))
    own = Augmentation(mixup=0.4).parameters(numbers)[:, -1]
    assert stats.kstest(own, stats.beta(0.4, 0.4).cdf).pvalue > 0.01


def test_images_are_mixed_in_pairs_with_their_own_shares():
    own = torch.from_numpy(Augmentation(mixup=0.4).parameters(NUMBERS)[:, -1])
    found = augmented(mixup=0.4)
    for index, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        wanted = own[index] * IMAGES[index].float() + (1 - own[index]) * IMAGES[other].float()
        torch.testing.assert_close(found[index], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cores", [2, 4, 8])
def test_any_number_of_cores_mixes_the_same_images(cores):
    batch = torch.arange(16)
    assert torch.equal(torch.cat([partners(part) for part in batch.chunk(cores)]), partners(batch))
    assert not (partners(batch) == batch).any()


def test_one_image_on_a_core_cannot_be_mixed():
    with refuses("mixup", 1):
        partners(torch.arange(1))


def test_normalising_takes_out_mean_and_deviation():
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    wanted = (IMAGES.double() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normalise(IMAGES, mean, std).double(), wanted, atol=1e-5, rtol=0)
