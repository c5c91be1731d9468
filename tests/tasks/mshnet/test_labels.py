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
    "NaN": lambda mask: Image.fromarray(np.where(mask, 1, np.nan).astype(np.float32)),
    "red": lambda mask: Image.fromarray(np.dstack([mask * 128, mask * 0, mask * 0]).astype(np.uint8)),
    "palette": lambda mask: KINDS["red"](mask).convert("P", palette=Image.Palette.ADAPTIVE, colors=2),
    "1 bit": lambda mask: Image.fromarray(mask),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_black_and_one_other_value_labels_that_value(kind, tmp_path):
    mask = square(2) > 0
    KINDS[kind](mask).save(tmp_path / "mask.tif")
    assert np.array_equal(read_mask(tmp_path / "mask.tif")[0], np.where(mask, 255, 0))


def test_a_mask_with_infinite_values_and_an_image_with_nan_are_named(tmp_path):
    task = write(tmp_path, dict(a=square(2), b=square(2)))
    values = np.full((64, 64), 0.5, np.float32)
    values[:2, :2], values[5, 5] = np.nan, 1
    (tmp_path / "images/b.png").unlink()
    Image.fromarray(values).save(tmp_path / "images/b.tif")
    train, _ = task.datasets()
    assert "1 of 2 images have pixels that are NaN or infinite (4 in b)" in train.notes
    (tmp_path / "masks/b.png").unlink()
    Image.fromarray(np.where(square(2), np.inf, 0).astype(np.float32)).save(tmp_path / "masks/b.tif")
    with refuses("masks/b.tif", "infinite values"):
        task.datasets()


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


def squares(*values):
    """A mask (64, 64) with a square of four pixels of each value."""
    mask = np.zeros((64, 64))
    for number, value in enumerate(values):
        mask[4 + 8 * number :][:2, 4:6] = value
    return mask


@pytest.mark.parametrize("step", [1, 60])
def test_numbered_targets_are_all_targets_if_the_masks_of_the_whole_set_number_them(step, tmp_path):
    task = write(tmp_path, {name: step * squares(*range(1, 1 + n)) for name, n in zip("abcd", (1, 2, 3, 4))})
    (tmp_path / "trainval.txt").write_text("a\nb\n")
    (tmp_path / "test.txt").write_text("c\nd\n")
    data = task.datasets()
    for split, counts in zip(data, ((4, 8), (12, 16))):
        assert [(mask == 255).sum() for mask in split.masks] == [*counts]
        assert not [notice for notice in split.notices if "masks hold" in notice or "darker" in notice]
        assert "number their targets" in split.notes


def test_numbers_of_16_bits_are_targets_if_none_of_the_set_is_in_the_upper_half(tmp_path):
    task = write(tmp_path, {name: square(2) for name in "abc"})
    for name, number in zip("abc", (256, 300, 770)):
        mask = np.where(squares(1, 2) > 0, squares(number, number + 1), 0)
        Image.fromarray(mask.astype(np.uint16)).save(tmp_path / f"masks/{name}.png")
    train, _ = task.datasets()
    assert all((mask == 255).sum() == 8 for mask in train.masks) and "number their targets" in train.notes
    Image.fromarray((square(2) * 257).astype(np.uint16)).save(tmp_path / "masks/c.png")
    train, _ = task.datasets()
    assert "number their targets" not in train.notes


OTHERWISE = {  # the dark square of `a` is no target if there is such a mask, too
    "white": squares(255),
    "soft": np.where(squares(90) > 0, 90, np.roll(squares(200), 2, 1)),
    "of two kinds": squares(100, 255),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_dark_regions_are_no_targets_but_told_if_a_mask_of_the_set_has_brighter_ones(kind, tmp_path):
    task = write(tmp_path, dict(a=squares(1, 2), b=OTHERWISE[kind], c=squares(255)))
    train, _ = task.datasets()
    assert (train.masks[0] < 128).all() and "number their targets" not in train.notes
    assert [
        notice for notice in train.notices if "hold no value of 128 or more" in notice and "(a)" in notice
    ]


def bordered(label, border, shape):
    mask = np.zeros((64, 64))
    mask[20:27, 20:27] = border
    mask[22:25, 22:25] = label
    if shape == "round":
        mask[20:27, 20:27] = np.where(np.hypot(*np.mgrid[-3:4, -3:4]) < 3.5, mask[20:27, 20:27], 0)
    if shape == "of one pixel":
        mask[:] = 0
        mask[19:22, 20] = mask[20, 19:22] = border
        mask[20, 20] = label
    if shape == "at one side":
        mask[20:27, 20:22] = 0
    return mask


@pytest.mark.parametrize("label, border", [(1, 255), (15, 255), (38, 220)])
@pytest.mark.parametrize("shape", ["square", "round", "of one pixel", "at one side"])
def test_a_border_that_is_to_be_ignored_is_not_taken_for_the_target_within_it(label, border, shape, tmp_path):
    task = write(tmp_path, dict(a=squares(1), b=bordered(label, border, shape)))
    with refuses("1 of 2 training masks have labels within a border", "VOC", "(b)"):
        task.datasets()


def test_a_border_in_the_test_masks_alone_is_refused_too_and_a_soft_edge_is_none(tmp_path):
    soft = square(4)
    soft[8, 8:12], soft[9, 12], soft[10, 8] = 64, 3, 100
    task = write(tmp_path, dict(a=soft, b=bordered(1, 255, "square")))
    (tmp_path / "trainval.txt").write_text("a\n")
    (tmp_path / "test.txt").write_text("b\n")
    with refuses("1 of 1 test masks have labels within a border", "(b)"):
        task.datasets()


def ringed(label, border):
    return np.roll(bordered(label, border, "square"), 3, 0)


CODED = {  # masks in which one of the two values may be ignored, and what is said of it
    "a border of 2": ([squares(1), ringed(1, 2)], "2 mostly lies beside another"),
    "a border of 1": ([squares(2), ringed(2, 1)], "1 mostly lies beside another"),
    "a border at one side": ([squares(1), bordered(1, 2, "at one side")], "2 mostly lies beside another"),
    "several ignored": ([squares(1), squares(1, 2, 2)], "2 has several regions in b.png"),
    "ignored alone": ([squares(1), squares(2)], "b.png has 2 without 1"),
    "ignored beside none": ([squares(1, 3), squares(1, 2)], "a.png has 3 without 2"),
    "grey and white": ([squares(255), squares(128, 255)], "not both be targets (b)"),
    "a white border": ([squares(100, 255), ringed(128, 255)], "labels within a border"),
}


@pytest.mark.parametrize("kind", CODED)
def test_a_value_that_may_be_ignored_is_not_trained_on_as_a_target(kind, tmp_path):
    masks, told = CODED[kind]
    task = write(tmp_path, dict(zip("ab", masks)))
    with refuses(told, "255"):
        task.datasets()


def test_the_values_that_may_not_all_be_targets_are_named_with_their_shares(tmp_path):
    task = write(tmp_path, dict(a=squares(1), b=squares(1, 2, 2)))  # of 8192 pixels 8 and 8
    with refuses(
        "masks hold the values 1 (0.10% of all pixels), 2 (0.10% of all pixels)", "make targets 255"
    ):
        task.datasets()


def test_numbered_targets_of_which_two_touch_or_one_has_two_parts_among_many_are_targets(tmp_path):
    touching = squares(1, 2, 3, 4)
    touching[20:22, 6:8] = 4  # beside 3, and a second part of 4
    task = write(tmp_path, dict(a=squares(1, 2, 3, 4), b=touching, c=squares(1, 2, 3)))
    train, _ = task.datasets()
    assert [(mask == 255).sum() for mask in train.masks] == [16, 20, 12]


@pytest.mark.parametrize("below", [0, 90, 255])
def test_what_is_transparent_in_a_mask_is_no_target_whatever_is_below(below, tmp_path):
    values, mask = np.full((64, 64), below, np.uint8), square(2) > 0
    values[mask] = 255
    for mode, planes in (("RGBA", [values] * 3), ("LA", [values])):
        Image.fromarray(np.dstack([*planes, mask * np.uint8(255)]), mode).save(tmp_path / "mask.png")
        assert np.array_equal(read_mask(tmp_path / "mask.png")[0] == 255, mask)


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
