"""What is said about masks before training: each mistake by its number and names, and the images to look
at."""

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tests.tasks.mshnet.test_data import write_set
from tpukit import MSHNet, show_labels
from tpukit_tasks.mshnet.data import read_mask


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


NUMBERED = square(2, 1)  # each target by its own number
NUMBERED[40:42, 40:42] = 2
WRONG = dict(dim=NUMBERED, white=255 - square(2), large=square(5), black=square(0))
WRONG |= dict(tiny=square(3, size=256), half=square(2))
WRONG["half"][40:42, 40:42] = 100


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mask_is_named_and_shown_and_a_right_one_is_not(name, tmp_path):
    task = write(tmp_path, {"right": square(2), "aswell": square(2), name: WRONG[name]})
    data, _ = task.datasets()
    about = [notice for notice in data.notices if "1 of 3 training masks" in notice]
    _, indices = task.check_labels(data)
    assert len(about) == 1 and name in about[0] and "right" not in about[0] and indices[0] == 2


def test_right_masks_are_counted_with_their_targets_and_sizes(tmp_path, capsys):
    two = square(2)
    two[40:43, 40] = 255
    task = write(tmp_path, dict(one=square(2), two=two, three=square(4, size=128)))
    show_labels(task)
    said = capsys.readouterr().out
    for datum in ("3 training images", "64x64 to 128x128", "4 targets", "3 to 16 pixels"):
        assert datum in said
    assert "of 3 training masks" not in said


KINDS = {  # an image file of a mask (H, W) of bool
    "0 and 1": lambda mask: Image.fromarray(mask.astype(np.uint8)),
    "16 bits": lambda mask: Image.fromarray(mask.astype(np.uint16) * 3),
    "32 bits": lambda mask: Image.fromarray(mask.astype(np.int32) * 70000),
    "float": lambda mask: Image.fromarray(mask.astype(np.float32)),
    "red": lambda mask: Image.fromarray(np.dstack([mask * 128, mask * 0, mask * 0]).astype(np.uint8)),
    "palette": lambda mask: KINDS["red"](mask).convert("P", palette=Image.Palette.ADAPTIVE, colors=2),
    "1 bit": lambda mask: Image.fromarray(mask),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_black_and_one_other_value_labels_that_value(kind, tmp_path):
    mask = square(2) > 0
    KINDS[kind](mask).save(tmp_path / "mask.tif")
    assert np.array_equal(read_mask(tmp_path / "mask.tif")[0], np.where(mask, 255, 0))


def test_grey_between_the_two_values_and_the_noise_of_a_jpeg_are_no_targets(tmp_path):
    mask = square(4)
    mask[8, 8:12] = 64
    for values in (mask.astype(np.uint8), (mask * 257).astype(np.uint16), (mask / 255).astype(np.float32)):
        Image.fromarray(values).save(tmp_path / "soft.tif")
        assert (read_mask(tmp_path / "soft.tif")[0] >= 128).sum() == 12
    noise = np.zeros((64, 64), np.uint8)
    noise[:8, :8] = 1
    for target, labels in ((0, 0), (255, 64)):  # without and with a target
        noise[16:24, 16:24] = target
        Image.fromarray(noise).save(tmp_path / "noise.jpg", quality=100)
        found = read_mask(tmp_path / "noise.jpg")
        assert (found >= 128).sum() == labels and (not labels or not found[0, :8].any())


@pytest.mark.parametrize("wrong", ["black", "white"])
def test_a_training_set_without_any_target_is_refused_before_the_training(wrong, tmp_path):
    task = write(tmp_path, dict(a=WRONG[wrong], b=WRONG[wrong]))
    with refuses("no training image has a target", "2 of 2"):
        task.datasets()


def test_test_images_that_are_training_images_are_counted_also_under_another_name(tmp_path):
    task = write(tmp_path, {name: square(2) for name in "abcd"})
    rng = np.random.default_rng(0)
    for name in "abc":
        Image.fromarray(rng.integers(0, 255, (64, 64), np.uint8)).save(tmp_path / f"images/{name}.png")
    (tmp_path / "images/d.png").write_bytes((tmp_path / "images/a.png").read_bytes())
    (tmp_path / "trainval.txt").write_text("a\nb\n")
    (tmp_path / "test.txt").write_text("c\nd\n")
    train, _ = task.datasets()
    assert [notice for notice in train.notices if "1 of 2 test images are training images" in notice]
    (tmp_path / "test.txt").write_text("c\n")
    (tmp_path / "images/d.png").unlink()
    (tmp_path / "masks/d.png").unlink()
    assert not task.datasets()[0].notices


def test_equal_images_with_different_masks_are_told(tmp_path):
    train, _ = write(tmp_path, dict(a=square(2), b=square(3), c=square(2))).datasets()
    assert any(
        "1 of 3 training images equal another one, and their masks differ (b)" in n for n in train.notices
    )
