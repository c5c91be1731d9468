"""Infrared sets on disk: their lists, their images, what is wrong with them, and the synthetic one."""

import shutil
import unicodedata

import numpy as np
import pytest
from PIL import ExifTags, Image

from tests.conftest import refuses
from tpukit import MSHNet
from tpukit.runs import weights
from tpukit_tasks import pictures
from tpukit_tasks.mshnet import labels
from tpukit_tasks.mshnet.data import InfraredSet, read_image, read_mask
from tpukit_tasks.mshnet.lists import read_list
from tpukit_tasks.mshnet.scores import regions

BOTH = ("trainval.txt", "test.txt")


def write_set(folder, names, *, lists=BOTH):
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name in names:
            image = Image.new("L", (32, 32), 0 if kind == "masks" else len(name))
            image.putpixel((5, 5), 255)
            path = folder / kind / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            image.save(path)
    for name in lists:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(names) + "\n")
    return folder


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "LA", "1"])
def test_a_grey_image_of_every_mode_is_read_to_the_same_grey(tmp_path, mode):
    path, grey = tmp_path / "image.png", 255 if mode == "1" else 102
    Image.new("RGB", (8, 8), (grey,) * 3).convert(mode).save(path)
    planes = read_image(path)
    assert planes.dtype == np.uint8 and (planes == grey).all() and planes.shape == (1, 8, 8)


@pytest.mark.parametrize("apart, channels", [(1, 1), (2, 3)])
def test_colours_that_differ_by_more_than_rounding_are_kept(tmp_path, apart, channels):
    colours = np.full((8, 8, 3), 100, np.uint8)
    colours[2, 3, 1] += apart
    Image.fromarray(colours).save(tmp_path / "image.png")
    planes = read_image(tmp_path / "image.png")
    difference = np.abs(planes.transpose(1, 2, 0) - colours.astype(int)).max()
    assert planes.shape == (channels, 8, 8) and difference <= (apart == 1)


def test_a_list_that_names_an_image_outside_of_the_set_is_refused(tmp_path):
    write_set(tmp_path / "set", ["a"])
    (tmp_path / "private").mkdir()
    Image.new("L", (32, 32), 50).save(tmp_path / "private/passport.png")  # where its mask would be, too
    (tmp_path / "set/test.txt").write_text("a\n../../private/passport\n")
    with refuses("line 2", "../../private/passport", "images/"):
        InfraredSet(tmp_path / "set", "test")


def test_a_folder_without_lists_is_split_by_name_always_alike_and_leaves_none_out(tmp_path):
    names = [f"frame{number}" for number in range(12)]
    write_set(tmp_path, names, lists=())
    (tmp_path / "images/frame3.png").rename(tmp_path / "images/frame3.PNG")
    (tmp_path / "images/notes.txt").write_text("not an image")
    train, test = (InfraredSet(tmp_path, split).names for split in ("train", "test"))
    assert len(test) == 2 and sorted(path.split(".")[0] for path in train + test) == sorted(names)
    assert test != sorted(train + test)[:2]  # such as the first ones of a film
    for path in (tmp_path / "images").glob("frame1*"):
        path.touch()
    assert InfraredSet(tmp_path, "test").names == test


def as_well(name):
    """An image of this name, in another format."""
    return lambda folder: Image.new("L", (32, 32)).save(folder / name)


def masks_called(*names):
    """The mask of each image under other names."""

    def rename(folder):
        for path in list((folder / "masks").iterdir()):
            for name in names:
                shutil.copy(path, path.with_name(name.format(path.stem)))
            path.unlink()

    return rename


REFUSED = {  # lists of two images, what is changed, what is told
    "no folder": (BOTH, shutil.rmtree, "images/"),
    "one image": ((), lambda folder: (folder / "images/b.png").unlink(), "1 images"),
    "one list": (("test.txt",), lambda folder: None, "trainval.txt"),
    "an empty list": (BOTH, lambda folder: (folder / "trainval.txt").write_text("\n"), "empty"),
    "a list in another encoding": (
        BOTH,
        lambda folder: (folder / "trainval.txt").write_text("a\nb\n", encoding="utf-16"),
        "trainval.txt is not in UTF-8",
    ),
    "two training lists": (
        ("img_idx/train_A.txt", "img_idx/train_B.txt", "img_idx/test_A.txt"),
        lambda folder: None,
        "train_A.txt, train_B.txt",
    ),
    "two formats of an image": (BOTH, as_well("images/a.bmp"), "a.bmp, a.png"),
    "two formats of an image, no list": ((), as_well("images/a.bmp"), "a.bmp, a.png"),
    "two formats of a mask": (BOTH, as_well("masks/a.bmp"), "a.bmp, a.png"),
    "masks of other names": (
        BOTH,
        masks_called("{}_other.png"),
        "line 1: a: no image masks/a; masks/ has a_other.png, b_other.png",
    ),
}


@pytest.mark.parametrize("lists, change, told", REFUSED.values(), ids=REFUSED)
def test_a_set_that_cannot_be_split_or_leaves_a_choice_is_refused_with_what_to_do(
    lists, change, told, tmp_path
):
    folder = write_set(tmp_path / "set", "ab", lists=lists)
    change(folder)
    with refuses(told):
        MSHNet(dataset_dir=folder).datasets()


def test_all_bad_pairs_are_listed_with_their_line_before_training(tmp_path):
    write_set(tmp_path, ["good", "noimage", "nomask", "othersize", "damaged", "huge", "turned", "turnedmask"])
    (tmp_path / "images/noimage.png").unlink()
    (tmp_path / "masks/nomask.png").unlink()
    Image.new("L", (16, 32)).save(tmp_path / "masks/othersize.png")
    data = (tmp_path / "images/damaged.png").read_bytes()
    (tmp_path / "images/damaged.png").write_bytes(data[: len(data) // 2])
    Image.new("1", (9000, 9000)).save(tmp_path / "images/huge.png")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for path in (tmp_path / "images/turned.png", tmp_path / "masks/turnedmask.png"):
        Image.open(path).save(path, exif=exif)
    with refuses(
        "7 of 8 names",
        "line 2: noimage: no image images/noimage",
        "line 3: nomask: no image masks/nomask",
        "line 4: othersize: image is 32x32, mask is 16x32",
        "line 5: damaged: images/damaged.png is unreadable",
        "line 6: huge: images/huge.png is unreadable (its header declares 9000x9000 pixels",
        "line 7: turned: images/turned.png is unreadable (its EXIF orientation turns it",
        "line 8: turnedmask: masks/turnedmask.png is unreadable (its EXIF orientation turns it",
        "--skip-bad",
    ):
        MSHNet(dataset_dir=tmp_path).datasets()
    data, _ = MSHNet(dataset_dir=tmp_path, skip_bad=True).datasets()
    assert data.names == ["good"] and "7 of 8 names" in data.notes


@pytest.mark.slow
def test_real_irstd1k_is_read_whole_and_its_masks_are_right(real_data):
    _, names = read_list(real_data / "IRSTD-1k", "train")
    test = InfraredSet(real_data / "IRSTD-1k", "test", base_size=64, crop_size=64)
    assert (len(names), len(test)) == (800, 201)
    assert test.colours == 1  # one of its images is stored in colour, and grey to within a level
    batch = test.batch([0, 1], np.random.default_rng(0).random((2, 6)))
    assert batch["image"].shape == batch["mask"].shape == (2, 1, 64, 64)
    sentences, indices = MSHNet().check_labels(test)
    assert "201 training images of 512x512" in sentences[0] and len(set(indices)) == len(indices) >= 3
    assert not [notice for notice in labels.notices(test) if "128 or more" in notice or "white" in notice]


def test_synthetic_scenes_have_small_targets_warmer_than_what_is_around_them(infrared):
    train, test = InfraredSet(infrared, "train"), InfraredSet(infrared, "test")
    assert (len(train), len(test)) == (16, 4) and not set(train.names) & set(test.names)
    for image, mask in train.samples:
        targets = regions(mask == 255)
        assert 1 <= len(targets) <= 3 and sum(area for area, _ in targets) < 3 * np.pi * 4.5**2 + 20
        assert set(np.unique(mask)) == {0, 255} and image[mask == 255].mean() > image[mask == 0].mean() + 20


def test_deep_grey_keeps_its_contrast_in_spite_of_broken_pixels_and_the_weights_keep_its_levels(
    infrared, tmp_path
):
    """The same scenes as counts of 14 bits, as uint16 and as float32, are what they are in 8 bits."""
    from tpukit_tasks.mshnet.synthetic import infrared_scene

    scenes = [infrared_scene(np.random.default_rng(seed), 64) for seed in range(4)]
    for kind, scale in (("uint16", (14000, 1)), ("float32", (0, 1 / 255)), ("uint8", (0, 1))):
        write_set(tmp_path / kind, "abcd", lists=())
        for name, (image, mask) in zip("abcd", scenes):
            pixels = (scale[0] + scale[1] * image.astype(np.float64)).astype(kind)
            if kind == "uint16":
                pixels[0, 0] = 0
                pixels[0, 1] = 65535
            (tmp_path / kind / f"images/{name}.png").unlink()
            Image.fromarray(pixels).save(tmp_path / kind / f"images/{name}.tif")
            Image.fromarray(mask).save(tmp_path / kind / f"masks/{name}.png")
    plain = InfraredSet(tmp_path / "uint8", "train")
    for kind in ("uint16", "float32"):
        task = MSHNet(dataset_dir=tmp_path / kind)
        train, test = task.datasets()
        assert train.levels == test.levels and "deeper than 8 bits" in train.notes
        for sample, twin in zip(train.samples, plain.samples):
            pairs = np.stack([sample[0, 1:].ravel(), twin[0, 1:].ravel()]).astype(float)
            assert np.corrcoef(pairs)[0, 1] > 0.999 and np.ptp(sample[0, 1:]) > 64
        trained = tmp_path / f"{kind}.safetensors"
        trained.write_bytes(b"".join(weights.serialize({}, task.metadata(train))))
        assert pictures.kept_levels(trained) == train.levels
        said = MSHNet(weights=trained).export_preprocessing
        assert f"grey from {train.levels[0]:g} to {train.levels[1]:g}" in said
    said = MSHNet(base_size=128).export_preprocessing  # as `split` scales what a user predicts
    assert "grey from" not in said and "128 pixels or, if that is more, to 0.5 times its length" in said
    with refuses("deeper than 8 bits"):
        read_image(tmp_path / "uint16/images/a.tif")  # by weights that learned from 8 bits


@pytest.mark.parametrize(
    "image, mask, folders, lists, listed",
    [
        ("{}.png", "{}_pixels0.png", "images masks", "trainval.txt test.txt", "{}"),
        ("{}_img.png", "{}_mask.png", "images masks", "img_idx/train_A.txt img_idx/test_A.txt", "{}_img"),
        ("{}_img.png", "{}_mask.png", "images masks", "50_50/train.txt 50_50/test.txt", "{}"),
        ("{}.png", "{}_mask.png", "Images Masks", "idx_427/trainval.txt idx_427/test.txt", "{}.png"),
        ("seq/{}.png", "seq/{}.png", "IRSTD1k_Img IRSTD1k_Label", "train.txt test.txt", "seq\\{}.png"),
    ],
)
def test_pairs_and_lists_of_usual_names_are_found_also_as_windows_writes_them(
    image, mask, folders, lists, listed, tmp_path
):
    target = Image.new("L", (32, 32))
    target.putpixel((5, 5), 255)
    names = [listed.format(name) for name in "ab"]
    for folder, pattern in zip(folders.split(), (image, mask)):
        for name in "ab":
            path = tmp_path / folder / pattern.format(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            target.save(path)
    for path, encoding in zip(lists.split(), ("utf-8-sig", "utf-8")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("\r\n".join(names), encoding)
    train, test = MSHNet(dataset_dir=tmp_path).datasets()
    names = [name.replace("\\", "/") for name in names]
    assert train.names == test.names == names and (train.targets[:, 0] == 255).all()


def test_folders_of_splits_in_images_are_the_splits(tmp_path):
    write_set(tmp_path, [f"{split}/{number}" for split in ("train", "test") for number in range(6)], lists=())
    for split in ("train", "test"):
        assert InfraredSet(tmp_path, split).names == [f"{split}/{number}.png" for number in range(6)]


@pytest.mark.parametrize("layout", ["{split}/{kind}", "{split}_{kind}"])
def test_test_images_without_masks_are_named_and_without_them_the_set_is_read(layout, tmp_path):
    place = tmp_path / "set"
    for split, kinds in dict(train=("images", "masks"), test=("images",)).items():
        write_set(tmp_path / split, [f"{split}{number}" for number in range(6)], lists=())
        for kind in kinds:
            (place / layout.format(split=split, kind=kind)).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(tmp_path / split / kind, place / layout.format(split=split, kind=kind))
    images, masks = (
        layout.format(split=split, kind=kind) for split, kind in (("test", "images"), ("train", "masks"))
    )
    with refuses(f"masks of the images in {images}/; masks are in {masks}/ alone", f"move {images}/ out of"):
        InfraredSet(place, "train")
    shutil.move(place / images, tmp_path / "elsewhere")
    counts = [len(InfraredSet(place, split)) for split in ("train", "test")]
    assert sum(counts) == 6 and min(counts) > 0


@pytest.mark.parametrize("layout", ["{split}/{kind}", "{split}_{kind}", "Set_{split}/IRSTD_{kind}"])
def test_folders_of_splits_above_images_and_masks_are_the_splits(layout, tmp_path):
    for split, start in (("train", 0), ("test", 6)):
        write_set(tmp_path / split, [str(number) for number in range(start, start + 6)], lists=())
        for kind in ("images", "masks"):
            place = tmp_path / "set" / layout.format(split=split, kind=kind)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(tmp_path / split / kind, place)
    for split, start in (("train", 0), ("test", 6)):
        data = InfraredSet(tmp_path / "set", split)
        assert [name.split("/")[-1] for name in data.names] == sorted(f"{start + n}.png" for n in range(6))
        assert (data.targets[:, 0] == 255).all() and not data.notices


@pytest.mark.parametrize("layout", ["{split}_images", "{split}/images", "images/{split}"])
def test_one_folder_of_masks_serves_the_images_of_all_splits_unless_two_would_share_a_mask(layout, tmp_path):
    write_set(tmp_path / "all", [*"abcdef"], lists=())
    place = tmp_path / "set"
    for split, names in dict(train="abcd", test="ef").items():
        (place / layout.format(split=split)).mkdir(parents=True)
        for name in names:
            shutil.move(tmp_path / f"all/images/{name}.png", place / layout.format(split=split))
    shutil.move(tmp_path / "all/masks", place / "masks")
    for split, names in dict(train="abcd", test="ef").items():
        data = InfraredSet(place, split)
        assert [name.split("/")[-1] for name in data.names] == [f"{name}.png" for name in names]
        assert (data.targets[:, 0] == 255).all() and not data.notices
    shutil.copy(place / layout.format(split="train") / "a.png", place / layout.format(split="test"))
    with refuses("masks/a.png would be the mask of an image in", "give each split a folder of masks"):
        InfraredSet(place, "train")


def test_masks_in_folders_of_splits_for_images_in_one_folder_are_refused_with_both_places(tmp_path):
    write_set(tmp_path, [*"abcd"], lists=())
    for split, names in dict(train="abc", test="d").items():
        (tmp_path / f"{split}_masks").mkdir()
        for name in names:
            shutil.move(tmp_path / f"masks/{name}.png", tmp_path / f"{split}_masks")
    (tmp_path / "masks").rmdir()
    with refuses(
        "masks are in test_masks/, train_masks/ and all images in images/", "or all masks into masks/"
    ):
        InfraredSet(tmp_path, "train")


def test_names_in_two_unicode_forms_are_one_in_lists_images_and_masks_and_are_split_alike(tmp_path):
    nfc, nfd = ([unicodedata.normalize(form, f"caf\u00e9{n}") for n in range(8)] for form in ("NFC", "NFD"))
    splits = {}
    for form, images, masks in (("NFC", nfc, nfc), ("NFD", nfd, nfc)):
        write_set(tmp_path / form, images, lists=())
        shutil.rmtree(tmp_path / form / "masks")
        write_set(tmp_path / "of_masks" / form, masks, lists=())
        shutil.move(tmp_path / "of_masks" / form / "masks", tmp_path / form)
        splits[form] = [InfraredSet(tmp_path / form, split).names for split in ("train", "test")]
    assert splits["NFC"] == splits["NFD"] and len(sum(splits["NFD"], [])) == 8
    (tmp_path / "NFD/trainval.txt").write_text("\n".join([*nfc, nfd[0]]))
    (tmp_path / "NFD/test.txt").write_text("\n".join(nfd))
    train, test = (InfraredSet(tmp_path / "NFD", split) for split in ("train", "test"))
    assert train.names == test.names == nfc
    assert train.notices == [f"1 names are in a list more than once, and count once ({nfc[0]})"]


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda folder: (folder / "val.txt").touch(), "1 lists are not used (val.txt)"),
        (
            lambda folder: (folder / "trainval.txt").write_text("a\n./a.PNG\n"),
            "1 names are in a list more than once, and count once (a.PNG)",
        ),
        (
            lambda folder: (folder / "trainval.txt").write_text("b\n"),
            "1 images are in no list, and not used (a.png)",
        ),
        (
            lambda folder: shutil.copy(folder / "masks/a.png", folder / "masks/a_1.png"),
            "1 masks belong to no image, and are not used (a_1.png)",
        ),
        (
            lambda folder: (folder / "images/c.heic").touch(),
            "files that are not read, and so left out: 1 .heic (convert images to PNG)",
        ),
    ],
)
def test_what_is_in_no_split_is_counted_and_named(change, told, tmp_path):
    write_set(tmp_path, "ab")
    (tmp_path / "test.txt").write_text("b\n")
    (tmp_path / "trainval.txt").write_text("a\n")
    assert not InfraredSet(tmp_path, "train").notices
    change(tmp_path)
    data = InfraredSet(tmp_path, "train")
    assert told in data.notices


def test_frames_of_one_sequence_in_both_splits_are_told(tmp_path):
    write_set(tmp_path, [f"seq/{number}" for number in range(6)], lists=())
    assert any("1 folders are in training and test" in n for n in InfraredSet(tmp_path, "train").notices)


@pytest.mark.parametrize("orientation, turned", [(1, (0, 0)), (3, (7, 9)), (6, (0, 7)), (8, (9, 0))])
def test_an_image_of_a_user_is_turned_upright(orientation, turned, tmp_path):
    """turned: where the pixel at the upper left is in the picture that a viewer shows."""
    pixels, exif = np.zeros((8, 10), np.uint8), Image.Exif()
    pixels[0, 0], exif[ExifTags.Base.Orientation] = 255, orientation
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    assert np.argwhere(read_image(tmp_path / "a.png")[0] > 128).tolist() == [[*turned]]


@pytest.mark.parametrize(
    "colours, is_good",
    [
        ([(255, 255, 255), (100, 100, 100)], True),
        ([(255, 0, 0)], True),
        ([(255, 0, 0), (0, 255, 0)], False),
        ([(255, 255, 255), (255, 0, 0)], False),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
def test_a_mask_of_several_colours_is_refused_however_it_is_stored(colours, is_good, mode, tmp_path):
    pixels = np.zeros((16, 16, 3), np.uint8)
    for row, colour in enumerate(colours):
        pixels[2 * row, 3] = colour
    Image.fromarray(pixels).convert(mode, palette=Image.Palette.ADAPTIVE).save(tmp_path / "a.png")
    if is_good:
        assert np.argwhere(read_mask(tmp_path / "a.png")[0] == 255).tolist() == [[0, 3]]
        return
    with refuses("3 colours", "white"):
        read_mask(tmp_path / "a.png")


def test_linked_folders_are_searched_and_hidden_ones_are_not(tmp_path):
    write_set(tmp_path / "set", ["a", "b", ".ipynb_checkpoints/a-checkpoint"], lists=())
    write_set(tmp_path / "elsewhere", "cd", lists=())
    for kind in ("images", "masks"):
        (tmp_path / "set" / kind / "seq").symlink_to(tmp_path / "elsewhere" / kind)
    found = [InfraredSet(tmp_path / "set", split) for split in ("train", "test")]
    assert sorted(found[0].names + found[1].names) == ["a.png", "b.png", "seq/c.png", "seq/d.png"]
    assert "test: 1 names" in found[1].notes and "images, which has 4" in found[1].notes


def test_boxes_in_place_of_masks_are_refused_with_what_is_needed(tmp_path):
    write_set(tmp_path, "ab", lists=())
    shutil.rmtree(tmp_path / "masks")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/a.txt").write_text("0 0.5 0.5 0.1 0.1")
    with refuses("no masks in", "labels", "white", "boxes", "1 .txt (a.txt)"):
        MSHNet(dataset_dir=tmp_path, skip_bad=True).datasets()
