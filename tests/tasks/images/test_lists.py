"""Images and classes that a CSV or JSON list names."""

import shutil

import pytest
from PIL import Image

from tests.conftest import refuses
from tests.tasks.images.small import check_colours, grey, make, task, write_list
from tpukit.tasks.images.samples import find_samples


@pytest.mark.parametrize(
    "name, delimiter, ending, is_of_windows",
    [("list.csv", ",", ".png", False), ("Labels.CSV", ";", "", True), ("list.tsv", "\t", ".png", True)],
)
def test_a_list_or_the_folder_that_holds_it_gives_the_images_that_it_lists(
    name, delimiter, ending, is_of_windows, tmp_path
):
    path = tmp_path / name
    write_list(path, tmp_path / "images", delimiter, ending)
    if is_of_windows:
        path.write_text(path.read_text("utf-8").replace("/", "\\").replace("\n", "\r\n"), "utf-8")
    (tmp_path / f"._{name}").write_bytes(b"\0\5\x16\7\xff")  # of macOS
    (tmp_path / "sample_submission.csv").write_text("id,probability\n1,0.5\n")
    check_colours(*task(path).datasets())
    train, test = task(tmp_path).datasets()
    check_colours(train, test)
    assert (len(train), len(test)) == (12, 12)
    shutil.copy(path, tmp_path / "more.csv")
    with refuses(f"{name}, more.csv"):
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
    found = find_samples(tmp_path / "list.csv")
    assert found.classes == ["2", "9", "10"]
    names = {split: {sample.name for sample in samples} for split, samples in found.samples.items()}
    assert not names["train"] & names["test"]


LEAVE = [
    "../secret.png",
    "{}/secret.png",
    "link.png",
    "folder/../../secret.png",
    "..\\secret.png",
    "C:\\a.png",
]


@pytest.mark.parametrize("leave", LEAVE)
def test_a_path_of_a_csv_may_not_leave_its_folder(leave, tmp_path):
    (tmp_path / "set/folder").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    (tmp_path / "set/link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "set/list.csv").write_text(f"path,label\n{leave.format(tmp_path)},a\n")
    with refuses("row 2", "images_dir"):
        find_samples(tmp_path / "set/list.csv")


LINE = '{"file_name": "a.png", "label": "a"}\n'
REFUSED = [  # in Latin-1
    ("list.csv", "path,label\na.png,\n", "row 2"),
    ("list.csv", "path,label\n\0\n", "row 2"),
    ("list.csv", "path,label\n", "no images"),
    ("list.csv", "path,label\n0.png,a\n1.png,cat, dog\n", "row 3"),
    ("list.csv", "path,label\n0.png,a\n1.png\n", "row 3"),
    ("list.csv", "p\xe4th,label\n", "UTF-8"),
    ("list.csv", "f,y2\na.png,1\n", "f, y2: rename those of images and labels"),
    ("list.csv", "image,a,b\n0.png,1,0\n1.png,0,1\n2.png,1,1\n", "row 4: a, b are 1"),
    ("list.csv", "image,a,b\n0.png,1,0\n1.png,0,0\n", "row 3: none of a, b is 1"),
    ("list.csv", "image,labels\n0.png,[0]\n1.png,[0 1]\n", "row 2: the label [0] is a list"),
    ("list.csv", "image,label,Usage\n0,a,Training\n1,b,PublicTest\n2,b,extra\n", "has extra in 1 rows"),
    ("list.csv", "image,label,split\n0,a,train\n1,b,test\n2,b,\n", "has nothing in 1 rows"),
    ("metadata.jsonl", LINE + '{"file_name": "b.png"}', "row 3"),
    ("metadata.jsonl", LINE + '{"file_name": "b.png", "label": null}', "row 3"),
    ("metadata.jsonl", LINE + "[1]", "does not hold a JSON object"),
]


@pytest.mark.parametrize("name, content, told", REFUSED)
def test_a_list_that_does_not_give_each_image_one_class_and_split_is_refused(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with refuses(name, told):
        find_samples(tmp_path / name)


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
        (["a,0", "b,0", "a,1", "b,1"], "image,label,split", "the column split names no splits (0 in 2 rows"),
        (["a", "b", "a|b"] * 2, "image,label", "1 classes look like several at once, such as a|b"),
        (["a", "b", "a", "b\n0.png,a"], "image,label", "1 images (0.png) are listed more than once"),
        (["a", "b", "a", "b"], "image,label", "1 images are not used, because"),
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
