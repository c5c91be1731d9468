"""Images and their classes from folders and CSV lists; their splits; bad ones; and the decoded pixels."""

import contextlib
import dataclasses
import itertools
import shutil
import struct
import zlib
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tpukit import ImageClassifier
from tpukit.runs.weights import serialize
from tpukit.tasks.images import data
from tpukit.tasks.images.data import find_samples, read_image

COLOURS = dict(blue=(0, 0, 200), green=(0, 200, 0), red=(200, 0, 0))


def paint(folder, count=5, splits=("train", "test")):
    """Class folders of small images, each of its class's colour but for the number of the image in one
    channel."""
    for split in splits:
        for name, colour in COLOURS.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (9, 7), tuple(max(c, number) for c in colour))
                image.save(folder / split / name / f"{number}.png")
    return folder


def task(folder, **settings):
    settings |= dict(image_size=8, model_name="test_resnet", pretrained="no")
    return ImageClassifier(dataset_dir=folder, **settings)


def check_colours(*datasets):
    """Each image has the colour of its label's class."""
    for dataset in datasets:
        batch = dataset.batch(np.arange(len(dataset)))
        for image, label in zip(batch["image"], batch["label"]):
            assert COLOURS[dataset.classes[label]] == tuple(np.where(image[:, 3, 3] > 100, 200, 0))


def test_class_folders_in_split_folders_give_each_image_its_class(tmp_path):
    train, test = task(paint(tmp_path)).datasets()
    assert train.classes == ["blue", "green", "red"] and (len(train), len(test)) == (15, 15)
    check_colours(train, test)
    batch = train.batch([0, 14])
    assert batch["image"].shape == (2, 3, 8, 8) and batch["image"].dtype == np.uint8
    assert batch["label"].tolist() == [0, 2]


def test_a_training_is_scored_on_val_and_tested_on_test(tmp_path):
    paint(tmp_path, 1, ("Train", "valid", "TEST"))
    assert sorted(find_samples(tmp_path).samples) == ["test", "train", "val"]
    assert task(tmp_path).datasets()[1].names[0] == "valid/blue/0.png"
    assert task(tmp_path).test_set().names[0] == "TEST/blue/0.png"


def test_a_tree_without_splits_is_split_by_its_names_alone_and_every_class_is_in_both(tmp_path):
    paint(tmp_path / "a", 10, ("",))
    shutil.copytree(tmp_path / "a", tmp_path / "other/place")

    def names_of(folder, **options):
        splits = find_samples(tmp_path / folder, **options).samples
        return {split: {sample.name for sample in samples} for split, samples in splits.items()}

    one, other = names_of("a"), names_of("other")
    names = [[f"{colour}/{number}.png" for number in range(10)] for colour in COLOURS]
    by_hash = [sorted(of_class, key=lambda name: sha256(name.encode()).hexdigest()) for of_class in names]
    assert one["test"] == {name for of_class in by_hash for name in of_class[:2]}
    assert one == other and len(one["train"]) == 24
    more = names_of("a", test_share=0.5)["test"]
    assert len(more) == 15 and one["test"] < more
    check_colours(task(tmp_path / "a").datasets()[1])


# CSV files


def write_list(path, images, delimiter=",", ending=".png"):
    """A CSV file of images that lie in a folder, not in folders of their classes."""
    images.mkdir(parents=True)
    lines = ["Image_ID,species,split"]
    for split, name, number in itertools.product(("train", "test"), COLOURS, range(4)):
        Image.new("RGB", (9, 7), COLOURS[name]).save(images / f"{split}-{name}-{number}.png")
        lines.append(f"{images.name}/{split}-{name}-{number}{ending},{name},{split}")
    path.write_text("\n".join(lines).replace(",", delimiter), "utf-8-sig")


@pytest.mark.parametrize(
    "place, delimiter, ending", [("list.csv", ",", ".png"), ("list.csv", ";", ""), (".", "\t", ".png")]
)
def test_a_csv_or_the_folder_that_holds_it_gives_the_images_that_it_lists(place, delimiter, ending, tmp_path):
    write_list(tmp_path / "list.csv", tmp_path / "images", delimiter, ending)
    (tmp_path / "sample_submission.csv").write_text("id,probability\n1,0.5\n")
    train, test = task(tmp_path / place).datasets()
    check_colours(train, test)
    assert (len(train), len(test)) == (12, 12)
    shutil.copy(tmp_path / "list.csv", tmp_path / "more.csv")
    with refuses("list.csv, more.csv"):
        find_samples(tmp_path)


def test_the_folder_of_a_csvs_images_can_be_named(tmp_path):
    (tmp_path / "lists").mkdir()
    write_list(tmp_path / "lists/list.csv", tmp_path / "elsewhere/images")
    check_colours(task(tmp_path / "lists", images_dir=tmp_path / "elsewhere").datasets()[0])
    with refuses("12 of 12", "No such file", "skip_bad"):
        task(tmp_path / "lists").datasets()


def test_classes_that_are_numbers_are_sorted_as_numbers_and_an_image_listed_twice_is_in_one_split(tmp_path):
    rows = [f"{n}-{k}.png,{n}\n" for n in (10, 9, 2) for k in (0, 1, 1)]
    (tmp_path / "list.csv").write_text("img,y\n" + "".join(rows))
    classes, splits, _ = find_samples(tmp_path / "list.csv")
    assert classes == ["2", "9", "10"]
    assert not {sample.name for sample in splits["train"]} & {sample.name for sample in splits["test"]}


@pytest.mark.parametrize("leave", ["../secret.png", "{}/secret.png", "link.png", "folder/../../secret.png"])
def test_a_path_of_a_csv_may_not_leave_its_folder(leave, tmp_path):
    (tmp_path / "set/folder").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    (tmp_path / "set/link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "set/list.csv").write_text(f"path,label\n{leave.format(tmp_path)},a\n")
    with refuses("row 2", "images_dir"):
        find_samples(tmp_path / "set/list.csv")


@pytest.mark.parametrize(
    "content, told",
    [
        (b"path,label\na.png,\n", ["row 2"]),
        (b"path,label\n\x00\n", ["row 2"]),
        (b"path,label\n", ["no images"]),
        (b"p\xe4th,label\n", ["UTF-8"]),
        (b"f,y2\na.png,1\n", ["f, y2", "rename", "label"]),
    ],
)
def test_a_csv_that_lists_no_images_is_refused_by_what_is_wrong(content, told, tmp_path):
    (tmp_path / "list.csv").write_bytes(content)
    with refuses("list.csv", *told):
        find_samples(tmp_path / "list.csv")


# Hugging Face datasets


@pytest.mark.parametrize("name", ["data/train-00000-of-00001.parquet", "train/data-00000-of-00001.arrow"])
def test_a_hugging_face_dataset_is_answered_with_the_page_that_turns_it_into_folders(name, tmp_path):
    path = tmp_path / "hf" / name
    path.parent.mkdir(parents=True)
    path.touch()
    for place in (tmp_path / "hf", path):
        with refuses("1 in all", path.name, "docs/YOUR_DATA.md"):
            find_samples(place)


# What cannot be trained on


def without_splits(count, red):
    """Spoil a set by one without splits, of `count` images in each class, of `red` in one."""

    def spoil(folder):
        shutil.rmtree(folder)
        paint(folder, count, ("",))
        for number in range(red, count):
            (folder / f"red/{number}.png").unlink()

    return spoil


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").touch()


BAD = "train/red/2.png"
NAMED = ["1 of 15", BAD, "skip_bad"]
LINE = "train/red/a\nall is well.png"
SPOILED = {
    "empty folder": (empty, ["notes.txt"]),
    "no folder": (shutil.rmtree, ["does not exist"]),
    "one class": (lambda folder: [shutil.rmtree(f) for f in folder.glob("*/[gr]*")], ["blue"]),
    "a class only in test": (lambda folder: shutil.rmtree(folder / "train/red"), ["train", "red", "1 of 3"]),
    "one image of each class": (without_splits(1, red=1), ["3 of 3", "two images"]),
    "a class of one image": (without_splits(3, red=1), ["red", "two images"]),
    "a broken image": (lambda folder: (folder / BAD).write_bytes(b"no image"), NAMED),
    "a cut image": (lambda folder: (folder / BAD).write_bytes((folder / BAD).read_bytes()[:40]), NAMED),
    "a format that is not read": (lambda folder: Image.new("RGB", (4, 4)).save(folder / BAD, "TGA"), NAMED),
    "a name of two lines": (lambda folder: (folder / LINE).write_bytes(b""), [r"red/a\nall is well.png: "]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_set_that_cannot_be_trained_on_is_refused_by_what_is_wrong(name, tmp_path):
    spoil, told = SPOILED[name]
    spoil(paint(tmp_path / "set"))
    with refuses(*told):
        task(tmp_path / "set").datasets()


def test_bad_images_are_left_out_where_that_is_asked_for_and_the_log_names_them(tmp_path):
    paint(tmp_path)
    for broken in ("red/2.png", "blue/0.png"):
        (tmp_path / "train" / broken).write_bytes(b"no image")
    train, _ = task(tmp_path, skip_bad=True).datasets()
    assert len(train) == 13 and "left out 2 of 15" in train.notes and "red/2.png" in train.notes
    assert not {"train/red/2.png", "train/blue/0.png"} & set(train.names)
    check_colours(train)


def test_more_pixels_than_the_disk_holds_are_refused_before_decoding(tmp_path, monkeypatch):
    paint(tmp_path)
    monkeypatch.setattr(data.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(100, 90, 10))
    with refuses("image_size"):
        task(tmp_path, skip_bad=True).datasets()


# Pixels


def test_an_image_that_claims_a_billion_pixels_is_not_decoded(tmp_path, monkeypatch):
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    Image.init()  # whose plugins load a picture of their own
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with refuses("9000x9000"):
        read_image(tmp_path / "bomb.png", 8)


def test_images_of_every_kind_become_rgb_of_the_wanted_size(tmp_path):
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(grey).convert("P").save(tmp_path / "palette.gif")
    Image.fromarray(np.dstack([grey] * 3 + [grey // 2])).save(tmp_path / "alpha.png")
    for path in tmp_path.iterdir():
        image = read_image(path, 16)
        assert image.dtype == np.uint8 and np.array_equal(image, np.dstack([grey] * 3)), path.name


def test_the_middle_of_an_image_is_kept_and_a_photo_is_turned_upright(tmp_path):
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, :12] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    for name, how in dict(wide={}, turned=dict(exif=exif)).items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.png", **how)
    middle, upright = read_image(tmp_path / "wide.png", 8), read_image(tmp_path / "turned.png", 8)
    assert middle[:, :4].min() == 255 and middle[:, 4:].max() == 0
    assert upright[:4].min() == 255 and upright[4:].max() == 0


def test_a_large_jpeg_is_close_to_what_decoding_it_whole_gives(tmp_path):
    y, x = np.mgrid[:900, :1200]
    pixels = np.stack([x / 5, y / 4, 128 + 100 * np.sin((x + y) / 90)], 2).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.jpg", quality=95)
    with Image.open(tmp_path / "large.jpg") as whole:
        middle = whole.crop((150, 0, 1050, 900)).resize((64, 64), Image.Resampling.BICUBIC)
    assert abs(read_image(tmp_path / "large.jpg", 64) - np.asarray(middle).astype(float)).max() < 6


def test_a_changed_image_is_decoded_again(tmp_path):
    paint(tmp_path)
    before = task(tmp_path).datasets()[0].batch([0])["image"]
    Image.new("RGB", (30, 30), (255, 255, 255)).save(tmp_path / "train/blue/0.png")
    assert (task(tmp_path).datasets()[0].batch([0])["image"] != before).any()


# Splits by the names that published sets have


def grey(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), value).save(path)


def make(folder, *places, count=4, start=0):
    """`count` images in each place, all different."""
    for number, place in enumerate(places, start):
        for index in range(count):
            grey(folder / place / f"{index}.png", 10 * number + index)
    return folder


@pytest.mark.parametrize(
    "places, tested, left_out",
    [
        (
            ("seg_train/seg_train/{}", "seg_test/seg_test/{}", "seg_pred/seg_pred"),
            "seg_test",
            "seg_pred/ with 4",
        ),
        (("训练集/{}", "测试集/{}"), "测试集", None),
        (("top/train_images/{}", "top/val_images/{}"), "val_images", None),
        (("TrainSet/{}", "TestSet/{}"), "TestSet", None),
        (("train/{}", "val/images"), None, "val: 4 images, all of images"),
        (("trn/{}", "eval/{}"), "eval", None),
        (("Train/{}", "Test"), None, "Test/ with 4 images is not used"),
        (("train_images/{}", "test_images"), None, "test_images/ with 4 images is not used"),
        (
            ("train/{}", "test/{}", "extra/{}"),
            "test",
            "extra/ with 8 images is not used: its name is no split",
        ),
    ],
)
def test_split_folders_of_usual_names_are_splits_and_what_is_not_used_is_counted(
    places, tested, left_out, tmp_path
):
    names = [place.format(name) for place in places for name in "ab"]
    train, test = task(make(tmp_path, *dict.fromkeys(names))).datasets()
    assert train.classes == ["a", "b"] and (tested is None or test.names[0].startswith(tested))
    told = [notice for notice in train.notices if "not used" in notice]
    assert len(told) == bool(left_out) and (left_out is None or left_out in told[0])


@pytest.mark.parametrize("names", [("bus", "car", "train"), ("train_station", "test_tube", "bus")])
def test_a_class_may_have_the_name_of_a_split(names, tmp_path):
    assert task(make(tmp_path, *names)).datasets()[0].classes == sorted(names)


def test_a_split_that_lacks_a_class_is_scored_and_that_is_told(tmp_path):
    train, test = task(make(tmp_path, "train/a", "train/b", "train/c", "val/a", "val/c")).datasets()
    assert [train.classes[label] for label in test.labels] == ["a"] * 4 + ["c"] * 4
    assert any("the val split has no image of 1 of 3 classes (b)" in notice for notice in train.notices)


def test_folders_of_equal_names_in_all_classes_are_told(tmp_path):
    train, _ = task(make(tmp_path, "learn/a", "learn/b", "check/a", "check/b")).datasets()
    assert any(
        "learn" in notice and "call the folders above them train" in notice for notice in train.notices
    )


def test_files_of_other_endings_are_counted_and_those_of_jpeg_read(tmp_path):
    make(tmp_path, "a", "b")
    for name, ending in itertools.product("ab", (".jfif", ".jpe", ".pgm", ".ppm")):
        path = tmp_path / name / f"more{ending}"
        kind = "PPM" if "p" == ending[1] else "JPEG"
        Image.new("RGB" if ending == ".ppm" else "L", (8, 8), 99 if name == "a" else 200).save(path, kind)
    (tmp_path / "a/x.heic").touch()
    (tmp_path / "a/notes.txt").touch()
    train, test = task(tmp_path).datasets()
    assert len(train) + len(test) == 16
    assert [notice for notice in train.notices if "1 .heic" in notice and "txt" not in notice]


def test_copies_in_both_splits_and_in_two_classes_are_told(tmp_path):
    make(tmp_path, "train/a", "train/b", "test/a", "test/b")
    shutil.copy(tmp_path / "train/a/0.png", tmp_path / "test/a/other.png")
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "train/b/other.png")
    told = task(tmp_path).datasets()[0].notices
    assert any("1 of 9 test images are training images, too (test/a/other.png)" in notice for notice in told)
    assert any("1 images are in more than one class (train/a/1.png = train/b/other.png)" in n for n in told)


@pytest.mark.parametrize("name", ["labels.csv", "train/metadata.csv", "train/metadata.jsonl"])
def test_a_list_beside_or_in_the_folder_of_its_images_finds_them(name, tmp_path):
    make(tmp_path, "train", "test", count=8)
    rows = [(f"{number}{'' if name == 'labels.csv' else '.png'}", "ab"[number % 2]) for number in range(8)]
    if name == "labels.csv":
        shutil.rmtree(tmp_path / "test")
    text = "file_name,breed\n" + "".join(f"{file},{label}\n" for file, label in rows)
    if name.endswith("jsonl"):
        text = "".join(f'{{"file_name": "{file}", "label": "{label}"}}\n' for file, label in rows)
    (tmp_path / name).write_text(text)
    train, test = task(tmp_path).datasets()
    assert train.classes == ["a", "b"] and len(train) + len(test) == 8
    for split in (train, test):
        for file, label in zip(split.names, split.labels):
            assert label == int(file[0]) % 2


def test_a_list_without_the_usual_columns_is_named_with_those_it_has(tmp_path):
    make(tmp_path, "train", "test")
    (tmp_path / "train.csv").write_text("image_id,weight,height\n0,7,5\n")
    with refuses("train.csv has the columns image_id, weight, height"):
        find_samples(tmp_path)


def listed(folder, *rows, header="image,label"):
    """list.csv of rows, each with an image of its own: *rows are texts after its name."""
    for number, row in enumerate(rows):
        grey(folder / f"{number}.png", number)
    lines = [header, *(f"{number}.png,{row}" for number, row in enumerate(rows))]
    (folder / "list.csv").write_text("\n".join(lines))
    return folder


def test_columns_of_0_and_1_name_the_class_of_each_image(tmp_path):
    listed(tmp_path, *["7,1,0,0", "7,0,1.0,0", "7,0,0,1"] * 3, header="image_id,age,healthy,rust,scab")
    train, test = task(tmp_path).datasets()
    assert train.classes == ["healthy", "rust", "scab"] and len(train) + len(test) == 9
    for split in (train, test):
        assert [int(name[0]) % 3 for name in split.names] == split.labels.tolist()


@pytest.mark.parametrize(
    "rows, header, told",
    [
        (["1,0", "0,1", "1,1"], "image,a,b", "row 4: a, b are 1"),
        (["1,0", "0,0"], "image,a,b", "row 3: none of a, b is 1"),
        (["[0]", "[0 1]"], "image,labels", "row 2: the label [0] is a list"),
        (["a,Training", "b,PublicTest", "b,extra"], "image,label,Usage", "has extra in 1 rows"),
        (["a,train", "b,test", "b,"], "image,label,split", "has nothing in 1 rows"),
    ],
)
def test_a_list_whose_classes_or_splits_are_not_one_for_each_image_is_refused(rows, header, told, tmp_path):
    with refuses("list.csv", told):
        find_samples(listed(tmp_path, *rows, header=header))


@pytest.mark.parametrize("wrong", ['{"file_name": "b.png"}', '{"file_name": "b.png", "label": null}', "[1]"])
def test_a_line_of_json_without_a_label_is_refused(wrong, tmp_path):
    (tmp_path / "metadata.jsonl").write_text(f'{{"file_name": "a.png", "label": "a"}}\n{wrong}\n')
    with refuses("metadata.jsonl"):
        find_samples(tmp_path)


@pytest.mark.parametrize(
    "rows, header, told",
    [
        (["a,0", "b,0", "a,1", "b,1"], "image,label,split", "the column split names no splits (0 in 2 rows"),
        (["a", "b", "a|b"] * 2, "image,label", "1 classes look like several at once, as a|b"),
        (["a", "b", "a", "b\n0.png,a"], "image,label", "1 images (0.png, ...) are listed more than once"),
        (["a", "b", "a", "b"], "image,label", "1 images are in no list, and not used (unlisted.png)"),
        (["a", "b", "a", "b"], "image,label", "1 .heic"),
    ],
)
def test_what_a_list_may_not_mean_and_what_it_leaves_out_is_told(rows, header, told, tmp_path):
    listed(tmp_path, *rows, header=header)
    grey(tmp_path / "unlisted.png", 99)
    (tmp_path / "photo.heic").touch()
    (tmp_path / "folder").mkdir()
    for place in (tmp_path, tmp_path / "list.csv"):
        notices = find_samples(place).notices
        assert any(told in notice for notice in notices)
        assert not any("without an ending" in notice for notice in notices)


def test_folders_without_images_and_files_without_an_ending_are_counted(tmp_path):
    make(tmp_path, "a", "b")
    (tmp_path / "c").mkdir()
    shutil.copy(tmp_path / "a/0.png", tmp_path / "c/photo")
    (tmp_path / "README").touch()
    told = find_samples(tmp_path).notices
    assert any("1 folders have no images, and so are no classes (c)" in notice for notice in told)
    assert any("1 without an ending" in notice for notice in told)


def test_images_of_which_a_part_is_read_are_told(tmp_path):
    make(tmp_path, "a", "b")
    pages = [Image.new("L", (8, 8), value) for value in (60, 70)]
    pages[0].save(tmp_path / "a/pages.tif", save_all=True, append_images=pages[1:])
    icon = np.zeros((8, 8, 4), np.uint8)
    icon[2:5, 2:5, 3] = 255
    Image.fromarray(icon).save(tmp_path / "b/icon.png")
    notes = "\n".join(split.notes for split in task(tmp_path).datasets())
    assert "have several pages" in notes and "a/pages.tif" in notes
    assert "one colour" in notes and "b/icon.png" in notes


def deep_png(path, pixels):
    """A PNG of 16 bits in each channel; Pillow writes none. pixels: (H, W, C)."""
    height, width, channels = pixels.shape
    kind = {2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
            file.write(struct.pack(">I", len(content)) + name + content)
            file.write(struct.pack(">I", zlib.crc32(name + content)))


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colours_of_16_bits_are_read_by_their_whole_range_or_refused(channels, tmp_path):
    """Pillow keeps the upper 8 bits, which of counts of 12 bits are 16 levels."""
    pixels = np.random.default_rng(0).integers(0, 2**16, (16, 16, channels))
    deep_png(tmp_path / "whole.png", pixels)
    image = read_image(tmp_path / "whole.png", 16)
    assert np.array_equal(image[..., 0], pixels[..., 0] >> 8)
    pixels[..., : 3 if channels > 2 else 1] >>= 4
    deep_png(tmp_path / "narrow.png", pixels)
    with refuses("16 of the 256 levels"):
        read_image(tmp_path / "narrow.png", 16)


@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_deep_grey_is_scaled_by_the_training_set_and_the_weights_keep_how(kind, tmp_path):
    """Counts around 21,000, and floats from 0 to 1, get the contrast of the same pictures in 8 bits."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8, 8, 8))
    for number, image in enumerate(pixels):
        path = tmp_path / "ab"[number % 2] / f"{number}.tif"
        path.parent.mkdir(exist_ok=True)
        values = 21000 + image if kind == "uint16" else image / 255
        Image.fromarray(values.astype(kind)).save(path)
    one = task(tmp_path)
    train, test = one.datasets()
    for split in (train, test):
        for name, image in zip(split.names, split.images):
            expected = pixels[int(name[2])]
            assert abs(image.astype(int) - expected).max() <= 3
    assert "deeper than 8 bits" in train.notes
    kept = one.metadata(train)["grey_levels"]
    assert np.allclose(list(map(float, kept.split())), train.levels)
    weights = tmp_path / "best.safetensors"
    about = dict(task=one.name) | {name: str(value) for name, value in one.metadata(train).items()}
    weights.write_bytes(serialize({}, about))
    trained = dataclasses.replace(one, weights=weights, dataset_dir=None)
    batch, _ = trained.read_files([tmp_path / name for name in test.names], weights)
    assert np.array_equal(batch["image"], test.images), "a prediction sees what the evaluation does"
    assert f"{train.levels[0]:g} to {train.levels[1]:g} becomes 0 to 255" in trained.export_preprocessing
    with refuses("its grey values are", "the training set's"):
        read_image(path, 16, (train.levels[0] - 1000, train.levels[0] - 500))
    with refuses("deeper than 8 bits") if kind == "uint16" else contextlib.nullcontext():
        read_image(path, 16)
