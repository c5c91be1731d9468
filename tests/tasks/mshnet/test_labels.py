"""What is said about masks before training: each mistake by its number and names, and the images to look
at."""

import numpy as np
import pytest
from PIL import Image

from tests.tasks.mshnet.test_data import write_set
from tpukit import MSHNet, show_labels
from tpukit.tasks.mshnet.data import InfraredSet


def write(folder, masks):
    """A task of square masks, by name, all in both lists."""
    write_set(folder, masks)
    for name, mask in masks.items():
        Image.new("L", mask.shape, 50).save(folder / f"images/{name}.png")
        Image.fromarray(mask.astype(np.uint8)).save(folder / f"masks/{name}.png")
    return MSHNet(dataset_dir=folder, base_size=64, crop_size=64)


def square(side, value=255, size=64):
    mask = np.zeros((size, size))
    mask[8 : 8 + side, 8 : 8 + side] = value
    return mask


WRONG = dict(dim=square(2, 1), white=255 - square(2), large=square(5), black=square(0))
WRONG |= dict(tiny=square(3, size=256))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mask_is_named_and_shown_and_a_right_one_is_not(name, tmp_path):
    task = write(tmp_path, {"right": square(2), "aswell": square(2), name: WRONG[name]})
    sentences, indices = task.check_labels(task.datasets()[0])
    about = [sentence for sentence in sentences[1:] if "1 of 3" in sentence]
    assert len(about) == 1 and name in about[0] and "right" not in about[0] and indices[0] == 2


def test_right_masks_are_counted_with_their_targets_and_sizes(tmp_path, capsys):
    two = square(2)
    two[40:43, 40] = 255
    task = write(tmp_path, dict(one=square(2), two=two, three=square(4, size=128)))
    show_labels(task)
    said = capsys.readouterr().out
    for datum in ("3 training images", "64x64 to 128x128", "4 targets", "3 to 16 pixels"):
        assert datum in said
    assert "of 3 masks" not in said


def test_the_masks_of_a_real_set_are_right(real_data):
    sentences, indices = MSHNet().check_labels(InfraredSet(real_data / "IRSTD-1k", "test"))
    assert "201 training images of 512x512" in sentences[0]
    assert not [line for line in sentences if "128 or more" in line or "white" in line]
    assert len(set(indices)) == len(indices) >= 3
