"""Images and their classes from folders and CSV lists; their splits; bad ones; and the decoded pixels."""

import itertools
import shutil
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tpukit import ImageClassifier
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
    assert sorted(find_samples(tmp_path)[1]) == ["test", "train", "val"]
    assert task(tmp_path).datasets()[1].names[0] == "valid/blue/0.png"
    assert task(tmp_path).test_set().names[0] == "TEST/blue/0.png"


def test_a_tree_without_splits_is_split_by_its_names_alone_and_every_class_is_in_both(tmp_path):
    paint(tmp_path / "a", 10, ("",))
    shutil.copytree(tmp_path / "a", tmp_path / "other/place")

    def names_of(folder, **options):
        _, splits = find_samples(tmp_path / folder, **options)
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
    classes, splits = find_samples(tmp_path / "list.csv")
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
    "a class missing in test": (lambda folder: shutil.rmtree(folder / "test/red"), ["test", "red", "1 of 3"]),
    "a class only in test": (lambda folder: shutil.rmtree(folder / "train/red"), ["train", "red", "1 of 3"]),
    "one image of each class": (without_splits(1, red=1), ["3 of 3", "two images"]),
    "a class of one image": (without_splits(3, red=1), ["red", "two images"]),
    "a broken image": (lambda folder: (folder / BAD).write_bytes(b"no image"), NAMED),
    "a cut image": (lambda folder: (folder / BAD).write_bytes((folder / BAD).read_bytes()[:40]), NAMED),
    "a format that is not read": (lambda folder: Image.new("RGB", (4, 4)).save(folder / BAD, "PPM"), NAMED),
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
