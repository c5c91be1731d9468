"""Synthetic infrared scenes."""

import numpy as np

from tpukit.tasks.mshnet.data import InfraredSet
from tpukit.tasks.mshnet.scores import regions
from tpukit.tasks.mshnet.synthetic import infrared_scene


def test_a_synthetic_set_is_split_into_training_and_test_images_of_one_size(infrared):
    train, test = InfraredSet(infrared, "train"), InfraredSet(infrared, "test")
    assert (len(train), len(test)) == (16, 4) and not set(train.names) & set(test.names)
    assert {image.shape for image in (*train.images, *test.masks)} == {(256, 256)}


def test_a_scene_has_small_targets_warmer_than_what_is_around_them():
    for seed in range(20):
        image, mask = infrared_scene(np.random.default_rng(seed))
        targets = regions(mask == 255)
        assert 1 <= len(targets) <= 3 and sum(area for area, _ in targets) < 3 * np.pi * 4.5**2 + 20
        assert set(np.unique(mask)) == {0, 255} and image[mask == 255].mean() > image[mask == 0].mean() + 20
