"""Images and their classes from folders; their splits, and what cannot be used."""

import itertools
import os
import shutil
import time
import unicodedata
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tests.tasks.images.small import COLOURS, check_colours, grey, make, paint, task
from tpukit_tasks.images.samples import find_samples


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

    def names_of(folder):
        splits = find_samples(tmp_path / folder).samples
        return {split: {sample.name for sample in samples} for split, samples in splits.items()}

    one, other = names_of("a"), names_of("other")
    names = [[f"{colour}/{number}.png" for number in range(10)] for colour in COLOURS]
    by_hash = [sorted(of_class, key=lambda name: sha256(name.encode()).hexdigest()) for of_class in names]
    assert one["test"] == {name for of_class in by_hash for name in of_class[:2]}
    assert one == other and len(one["train"]) == 24
    check_colours(task(tmp_path / "a").datasets()[1])


@pytest.mark.parametrize("name", ["data/train-00000-of-00001.parquet", "train/data-00000-of-00001.arrow"])
def test_a_hugging_face_dataset_is_answered_with_the_page_that_turns_it_into_folders(name, tmp_path):
    path = tmp_path / "hf" / name
    path.parent.mkdir(parents=True)
    path.touch()
    with refuses(f"left out: 1 {path.suffix}", "docs/YOUR_DATA.md"):
        find_samples(tmp_path / "hf")
    with refuses(path.name, "call that of paths image"):
        find_samples(path)


def of_one_image_each(folder):
    shutil.rmtree(folder)
    paint(folder, 1, ("",))


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").touch()


def like_coco(folder):
    shutil.rmtree(folder)
    make(folder, "train2017", "val2017")
    (folder / "annotations").mkdir()
    (folder / "annotations/instances.json").touch()


BAD = "train/red/2.png"
NAMED = ["1 of 15", BAD, "skip_bad"]
LINE = "train/red/a\nall is well.png"
SPOILED = {
    "empty folder": (empty, ["notes.txt"]),
    "no folder": (shutil.rmtree, ["does not exist"]),
    "one class": (lambda folder: [shutil.rmtree(f) for f in folder.glob("*/[gr]*")], ["blue"]),
    "a class only in test": (lambda folder: shutil.rmtree(folder / "train/red"), ["train", "red", "1 of 3"]),
    "images of splits without classes": (like_coco, ["annotations, train2017, val2017"]),
    "one image of each class": (of_one_image_each, ["3 of 3", "two images"]),
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
    assert len(train) == 13 and "2 of 15 train images cannot be read" in train.notes
    assert "red/2.png" in train.notes
    assert not {"train/red/2.png", "train/blue/0.png"} & set(train.names)
    check_colours(train)


@pytest.mark.parametrize(
    "places, tested, unused",
    [
        (("seg_train/seg_train/{}", "seg_test/seg_test/{}", "seg_pred/other"), "seg_test", "seg_pred/other"),
        (("训练集/{}", "测试集/{}"), "测试集", None),
        (("top/train_images/{}", "top/val_images/{}"), "val_images", None),
        (("TrainSet/{}", "TestSet/{}"), "TestSet", None),
        (("train/{}", "val/images"), None, "val/images"),
        (("trn/{}", "eval/{}"), "eval", None),
        (("Train/{}", "Test"), None, "Test"),
        (("train_images/{}", "test_images"), None, "test_images"),
        (("train_images/{}", "test_images", "extra"), None, "test_images"),
        (("train/{}", "test/{}", "extra/a"), "test", "extra/a"),
        (("train/{}", "test/{}", "train"), "test", "train"),
        (("{}", "."), None, "."),
    ],
)
def test_split_folders_of_usual_names_are_splits_and_what_is_not_used_is_counted(
    places, tested, unused, tmp_path
):
    names = [place.format(name) for place in places for name in "ab"]
    train, test = task(make(tmp_path, *dict.fromkeys(names))).datasets()
    assert train.classes == ["a", "b"] and (tested is None or test.names[0].startswith(tested))
    told = [notice for notice in train.notices if "not used" in notice]
    assert len(told) == bool(unused) and (unused is None or f"4 in {unused}/" in told[0])


@pytest.mark.parametrize("names", [("bus", "car", "train"), ("train_station", "test_tube", "bus")])
def test_a_class_may_have_the_name_of_a_split(names, tmp_path):
    assert task(make(tmp_path, *names)).datasets()[0].classes == sorted(names)


def test_flat_train_and_test_are_no_classes_though_there_is_another_folder(tmp_path):
    with refuses("only of none", "extra, test, train"):
        find_samples(make(tmp_path, "train", "test", "extra"))


def test_a_split_that_lacks_a_class_is_scored_and_that_is_told(tmp_path):
    train, test = task(make(tmp_path, "train/a", "train/b", "train/c", "val/a", "val/c")).datasets()
    assert [train.classes[label] for label in test.labels] == ["a"] * 4 + ["c"] * 4
    assert any("the val split has no image of 1 of 3 classes (b)" in notice for notice in train.notices)


def test_files_that_are_not_read_and_folders_without_images_are_counted_and_all_kinds_of_jpeg_read(tmp_path):
    make(tmp_path, "a", "b")
    for name, ending in itertools.product("ab", (".jfif", ".jpe", ".pgm", ".ppm")):
        path = tmp_path / name / f"more{ending}"
        kind = "PPM" if "p" == ending[1] else "JPEG"
        Image.new("RGB" if ending == ".ppm" else "L", (8, 8), 99 if name == "a" else 200).save(path, kind)
    for name in ("a/x.heic", "a/notes.txt", "README"):
        (tmp_path / name).touch()
    (tmp_path / "c").mkdir()
    shutil.copy(tmp_path / "a/0.png", tmp_path / "c/photo")
    shutil.copytree(tmp_path / "a", tmp_path / "a/.ipynb_checkpoints")
    train, test = task(tmp_path).datasets()
    assert len(train) + len(test) == 16
    assert [each for each in train.notices if "left out: 1 .heic, 1 without an ending (" in each]
    assert any("1 folders have no images, so they are not classes (c)" in each for each in train.notices)


def test_copies_in_both_splits_and_in_two_classes_are_told(tmp_path):
    make(tmp_path, "train/a", "train/b", "test/a", "test/b")
    shutil.copy(tmp_path / "train/a/0.png", tmp_path / "test/a/other.png")
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "train/b/other.png")
    told = task(tmp_path).datasets()[0].notices
    assert any("1 of 9 test images are training images, too (test/a/other.png)" in notice for notice in told)
    assert any("1 images are in more than one class (train/a/1.png = train/b/other.png)" in n for n in told)


@pytest.mark.parametrize(
    "places, told",
    [
        (("images", "annotations/trimaps"), "annotations, images"),
        (("JPEGImages", "SegmentationClass"), "JPEGImages, SegmentationClass"),
        (("train/images", "train/masks", "test/images", "test/masks"), "images, masks"),
        (("train/a", "train/b", "val/images"), None),
        (("a", "b"), None),
    ],
)
def test_folders_of_images_and_of_what_belongs_to_them_are_told_from_classes(places, told, tmp_path):
    notices = task(make(tmp_path, *places)).datasets()[0].notices
    found = [notice for notice in notices if "their masks or annotations" in notice]
    assert len(found) == (told is not None) and all(told in notice for notice in found)


def test_classes_that_differ_only_in_case_or_in_the_width_of_letters_are_told(tmp_path):
    names = "Cat", "cat", "dog", "Straße", "STRASSE", "dog ", "A1", "\uff21\uff11"
    told = find_samples(make(tmp_path, *names)).notices
    alike = "A1, \uff21\uff11; Cat, cat; STRASSE, Straße; dog, dog "
    assert f"different classes whose names differ only in case, width or blanks: {alike}" in told
    assert "case" not in str(find_samples(make(tmp_path / "other", "cat", "cats")).notices)


def test_linked_folders_are_searched_and_one_that_leads_back_is_not(tmp_path):
    make(tmp_path / "elsewhere", "more")
    make(tmp_path / "set", "a", "b", start=1)
    (tmp_path / "set/a/linked").symlink_to(tmp_path / "elsewhere/more")
    (tmp_path / "set/a/back").symlink_to(tmp_path / "set")
    train, test = task(tmp_path / "set").datasets()
    assert np.bincount([*train.labels, *test.labels]).tolist() == [8, 4]
    assert sum("linked" in name for name in train.names + test.names) == 4


def test_a_link_to_the_folder_of_another_class_is_a_class_and_one_to_itself_ends_the_search(tmp_path):
    make(tmp_path / "set", "a", "b")
    (tmp_path / "set/c").symlink_to(tmp_path / "set/b")
    found = find_samples(tmp_path / "set")
    assert found.classes == ["a", "b", "c"] and sum(map(len, found.samples.values())) == 12
    (tmp_path / "loop/only").mkdir(parents=True)
    (tmp_path / "loop/only/back").symlink_to(tmp_path / "loop/only")
    with refuses("no images"):
        find_samples(tmp_path / "loop")


@pytest.mark.parametrize("age_s, is_trusted", [(-9, False), (9, True)])
def test_a_folder_that_says_it_is_unchanged_is_believed_unless_its_time_is_young(age_s, is_trusted, tmp_path):
    folders = [tmp_path / "set", *(make(tmp_path / "set", "a", "b") / name for name in "ab")]
    times = dict(ns=2 * (time.time_ns() - age_s * 10**9,))
    for folder in folders:
        os.utime(folder, **times)
    before = find_samples(tmp_path / "set")
    grey(tmp_path / "set/a/new.png", 99)
    os.utime(tmp_path / "set/a", **times)  # as a clock that ticks every few milliseconds does
    after = find_samples(tmp_path / "set")
    assert (after is before) is is_trusted
    assert ("a/new.png" in [one.name for split in after.samples.values() for one in split]) is not is_trusted
    assert find_samples(tmp_path / "set", is_new_search=True) is not before


@pytest.mark.parametrize("change", ["list.csv", "more/new.png"])
def test_a_set_of_a_list_is_searched_again_once_the_list_or_the_folder_of_its_images_changes(
    change, tmp_path
):
    for number in range(4):
        grey(tmp_path / f"more/{number}.png", number)
    rows = [f"more/{number}.png,{'ab'[number % 2]}\n" for number in range(4)]
    (tmp_path / "list.csv").write_text("image,label\n" + "".join(rows))
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.utime(path, ns=(10**18, 10**18))
    before = find_samples(tmp_path / "list.csv")
    assert find_samples(tmp_path / "list.csv") is before
    if change == "list.csv":
        (tmp_path / change).write_text("image,label\n" + "".join(rows[::-1]))
    else:
        grey(tmp_path / change, 99)
    assert find_samples(tmp_path / "list.csv") is not before


def test_a_test_on_a_folder_without_splits_says_how_many_of_its_images_it_scores(tmp_path):
    make(tmp_path / "whole", "a", "b", count=10)
    make(tmp_path / "split", "train/a", "train/b", "test/a", "test/b")
    data = task(tmp_path / "whole").test_set()
    assert len(data) == 4 and any("4 of its 20 images" in notice for notice in data.notices)
    assert not any("held out" in notice for notice in task(tmp_path / "split").test_set().notices)


@pytest.mark.parametrize("above", ["", "train/"])
@pytest.mark.parametrize(
    "outer, inner",
    [
        (("color", "grayscale", "segmented"), ("apple", "corn")),
        (("COVID", "Normal"), ("images", "masks")),
        (("cat", "dog"), ("test", "train")),
        (("color", "gray"), ("train/apple", "train/corn")),
    ],
)
def test_classes_that_hold_the_same_folders_are_refused_by_their_names(outer, inner, above, tmp_path):
    make(tmp_path, *(f"{above}{one}/{two}" for one in outer for two in inner))
    with refuses(f"{', '.join(outer)} hold the same folders ({', '.join(inner)})", "give one of them"):
        find_samples(tmp_path)


@pytest.mark.parametrize("above", ["", "train/"])
def test_variants_that_share_one_class_beside_others_are_refused_by_their_names(above, tmp_path):
    make(tmp_path, *(above + place for place in ("leaf_rgb/x", "leaf_nir/x", "leaf_rgb/y", "leaf_nir/z")))
    with refuses("leaf_nir, leaf_rgb hold the same folders (x)", "give one of them as dataset_dir"):
        find_samples(tmp_path)


@pytest.mark.parametrize(
    "places, is_told",
    [
        (("cam1/x", "cam2/x", "cam2/y"), True),
        (("cam1/x", "cam2/x", "other/y"), True),
        (("cat/images", "dog/images", "dog/more"), False),
        (("cat/day1", "dog/day1"), False),
        (("cat/day1", "cat/day2", "dog/day3"), False),
        (("color", "gray"), False),
        (("train/cat/images", "train/dog/images", "test/cat/images", "test/dog/images"), False),
    ],
)
def test_one_folder_that_several_classes_hold_beside_others_is_told(places, is_told, tmp_path):
    told = [text for text in find_samples(make(tmp_path, *places)).notices if "hold the same folders" in text]
    assert bool(told) == is_told
    assert not told or "cam1, cam2 hold the same folders (x)" in told[0]


@pytest.mark.parametrize("inner", ["", "leaf/"])
@pytest.mark.parametrize(
    "names, is_told",
    [
        (["3fa9c", "b07de", "c55e1", "d9f00"], True),
        (["image_0001", "image_0002", "image_0003", "image_0004"], False),
        (["1", "2", "3", "4"], False),
    ],
)
def test_pictures_in_two_classes_under_one_name_are_told_if_the_names_do_not_count(
    names, is_told, inner, tmp_path
):
    for number, name in enumerate(names):
        grey(tmp_path / "one" / inner / f"{name}.png", number)
        grey(tmp_path / "other" / inner / f"{name}.jpg", 20 + number)
        grey(tmp_path / "third" / inner / f"third-{name}.jpg", 40 + number)
    told = [text for text in find_samples(tmp_path).notices if "have the same names" in text]
    assert bool(told) == is_told
    assert not told or "4 of one and other (3fa9c, b07de, c55e1, ...)" in told[0]


def test_classes_that_each_hold_their_images_in_a_folder_are_classes(tmp_path):
    found = find_samples(make(tmp_path, "a/images", "b/images", "b/more"))
    assert found.classes == ["a", "b"]
    told = (
        "1 classes hold their images in several folders, which are no classes of their own (b: images, more)"
    )
    assert told in found.notices


def test_folders_in_two_unicode_forms_are_one_class_and_are_split_alike(tmp_path):
    names = {form: unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")}
    assert task(make(tmp_path / "both", *names.values(), "tea")).datasets()[0].classes == [
        names["NFC"],
        "tea",
    ]
    make(tmp_path / "splits", f"train/{names['NFC']}", "train/tea", f"val/{names['NFD']}", "val/tea")
    assert not find_samples(tmp_path / "splits").notices
    for form, name in names.items():
        for number in range(10):
            grey(tmp_path / form / name / f"{name}{number}.png", number)
            grey(tmp_path / form / "tea" / f"{number}.png", 99 + number)
    one, other = ({s.name for s in find_samples(tmp_path / form).samples["test"]} for form in names)
    assert one == other


def test_class_folders_below_a_set_are_named_where_its_list_cannot_be_used(tmp_path):
    root = "ILSVRC/Data/CLS-LOC"
    make(tmp_path, f"{root}/train/n01", f"{root}/train/n02", f"{root}/val")
    (tmp_path / "ILSVRC/Annotations").mkdir()
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\na,n01 1 2 3 4\n")
    with refuses(f"{root} has train/ with 2 folders of images (n01, n02): give it as dataset_dir"):
        find_samples(tmp_path)
    (tmp_path / "LOC_train.csv").touch()
    with refuses(f"{root} has train/ with 2 folders of images"):
        find_samples(tmp_path)


@pytest.mark.parametrize(
    "name, content, told",
    [
        (
            "annotations/instances.json",
            '{"images": [], "annotations": [{"bbox": [1, 2]}]}',
            "1 .json (instances",
        ),
        ("labels/a.txt", "0 0.5 0.5 0.25 0.1\n", "1 .txt (a.txt"),
        ("annotations/a.xml", "<annotation><bndbox></bndbox></annotation>", "1 .xml (a.xml"),
        ("train/metadata.csv", "file_name,label\n0.png,a\n", "1 CSV files (train/metadata.csv)"),
    ],
)
def test_annotations_of_other_kinds_are_named_where_no_classes_are_found(name, content, told, tmp_path):
    make(tmp_path, "images", "train")
    shutil.move(tmp_path / "train", tmp_path / "images/train")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with refuses("only of", told):
        find_samples(tmp_path)
