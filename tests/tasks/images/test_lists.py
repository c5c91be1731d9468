"""Images and classes that a CSV file names."""

import unicodedata

import pytest
from PIL import Image

from tests.conftest import refuses
from tests.tasks.images.small import check_colours, grey, make, task, write_list
from tpukit_tasks.images.samples import find_samples


@pytest.mark.parametrize("name, ending", [("list.csv", ".png"), ("Labels.CSV", "")])
def test_a_list_or_the_folder_that_holds_it_gives_the_images_that_it_lists(name, ending, tmp_path):
    path = tmp_path / name
    write_list(path, tmp_path / "images", ending)
    (tmp_path / f"._{name}").write_bytes(b"\0\5\x16\7\xff")  # of macOS
    check_colours(*task(path).datasets())
    train, test = task(tmp_path).datasets()
    check_colours(train, test)
    assert (len(train), len(test)) == (12, 12)
    (tmp_path / "sample_submission.csv").write_text("id,probability\n1,0.5\n")
    with refuses(f"2 CSV files ({name}, sample_submission.csv)", "give one as dataset_dir"):
        find_samples(tmp_path)
    check_colours(*task(path).datasets())


def test_the_folder_of_a_csvs_images_can_be_named(tmp_path):
    (tmp_path / "lists").mkdir()
    write_list(tmp_path / "lists/list.csv", tmp_path / "elsewhere/images")
    check_colours(task(tmp_path / "lists", images_dir=tmp_path / "elsewhere").datasets()[0])
    with refuses("list.csv", "train-blue-0", "--images-dir"):
        task(tmp_path / "lists").datasets()


def test_classes_that_are_numbers_are_sorted_as_numbers_and_an_image_listed_twice_is_in_one_split(tmp_path):
    rows = [f"{n}-{k}.png,{n}\n" for n in (10, 9, 2) for k in (0, 1, 1)]
    (tmp_path / "list.csv").write_text("img,y\n" + "".join(rows))
    grey(tmp_path / "9-0.png", 9)
    found = find_samples(tmp_path / "list.csv")
    assert found.classes == ["2", "9", "10"]
    names = {split: {sample.name for sample in samples} for split, samples in found.samples.items()}
    assert not names["train"] & names["test"]


LEAVE = ["../secret.png", "{}/secret.png", "link.png", "folder/../../secret.png"]


@pytest.mark.parametrize("leave", LEAVE)
def test_a_path_of_a_csv_may_not_leave_its_folder(leave, tmp_path):
    (tmp_path / "set/folder").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    (tmp_path / "set/link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "set/list.csv").write_text(f"path,label\n{leave.format(tmp_path)},a\n")
    with refuses("row 2", "images_dir"):
        find_samples(tmp_path / "set/list.csv")


REFUSED = [  # in Latin-1
    ("list.csv", "path,label\na.png,\n", "row 2"),
    ("list.csv", "path,label\n\0\n", "row 2"),
    ("list.csv", "path,label\n", "no images"),
    ("list.csv", "path,label\n0.png,a\n1.png,cat, dog\n", "row 3"),
    ("list.csv", "path,label\n0.png,a\n1.png\n", "row 3"),
    ("list.csv", "p\xe4th,label\n", "UTF-8"),
    ("list.csv", "f,y2\na.png,1\n", "the columns f, y2: call that of paths image"),
    ("list.csv", "image,a,b\n0.png,1,0\n1.png,0,1\n", "the columns image, a, b: call that of"),
    ("list.csv", "image;label\n0.png;a\n1.png;b\n", "the columns image;label: call that of"),
    ("list.csv", "image,labels\n0.png,[0]\n1.png,[0 1]\n", "row 2: it must have a path, one label"),
    (
        "list.csv",
        "image,label,Usage\n0,a,Training\n1,b,PublicTest\n2,b,extra\n",
        "row 4: its Usage is 'extra'",
    ),
    ("list.csv", "image,label,split\n0,a,train\n1,b,test\n2,b,\n", "row 4: its split is ''"),
    ("list.csv", "image,label,split\n0,a,0\n1,b,1\n", "row 2: its split is '0'"),
    ("list.csv", "image,label\n0,a\n1,b\n0,b\n", "row 4: 0 is b here and a in row 2"),
    ("list.csv", "image,label\na/0.png,a\n1,b\na\\0.png,b\n", "is b here and a in row 2"),
    ("list.csv", "image,label,label\n0,a,b\n1,b,a\n", "several columns label: rename all but one"),
    ("list.csv", "image,label\nhttps://x.org/0.png,a\n", "row 2: https://x.org/0.png is an address"),
    (
        "list.csv",
        "image,target\n" + "".join(f"{n}.png,{n / 7:.3f}\n" for n in range(12)),
        "target holds quantities",
    ),
    (
        "list.csv",
        "image,target\n" + "".join(f"{n}.png,{n + 20}\n" for n in range(12)),
        "holds quantities (20",
    ),
    ("list.tsv", "image\tlabel\n0.png\ta\n", "separate columns by commas"),
    ("metadata.jsonl", '{"file_name": "a.png", "label": "a"}\n', "the columns {"),
]


@pytest.mark.parametrize("name, content, told", REFUSED)
def test_a_list_that_does_not_give_each_image_one_class_and_split_is_refused(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with refuses(name, told):
        find_samples(tmp_path / name)


@pytest.mark.parametrize("name", ["train/metadata.csv", "labels.tsv", "metadata.jsonl"])
def test_a_list_in_another_place_or_format_is_not_taken_for_class_folders(name, tmp_path):
    make(tmp_path, "train", "test")
    (tmp_path / name).write_text("image,label\n0.png,a\n1.png,b\n")
    with refuses("a CSV file with paths and labels", name.split("/")[0]):
        find_samples(tmp_path)


def test_a_list_without_the_usual_columns_is_named_with_those_it_has(tmp_path):
    make(tmp_path, "train", "test")
    (tmp_path / "train.csv").write_text("image_id,weight,height\n0,7,5\n")
    with refuses("train.csv has the columns image_id, weight, height"):
        find_samples(tmp_path)


def test_which_of_several_columns_has_the_classes_is_told(tmp_path):
    for number in range(4):
        grey(tmp_path / f"{number}.png", number)
    rows = [f"{number}.png,{number},{'ab'[number % 2]},{number % 2}" for number in range(4)]
    (tmp_path / "list.csv").write_text("\n".join(["image,id,class, label", *rows]))
    found = find_samples(tmp_path)
    assert found.classes == ["0", "1"]
    assert found.notices[0] == "list.csv: its column label has the classes, as is usual, not class"


@pytest.mark.parametrize("told", ["1 images are not used, because", "1 .heic"])
def test_what_a_list_leaves_out_is_told(told, tmp_path):
    for number in range(4):
        grey(tmp_path / f"{number}.png", number)
    (tmp_path / "list.csv").write_text("image,label\n0.png,a\n1.png,b\n2.png,a\n3.png,b\n")
    grey(tmp_path / "unlisted.png", 99)
    (tmp_path / "photo.heic").touch()
    (tmp_path / "folder").mkdir()
    for place in (tmp_path, tmp_path / "list.csv"):
        notices = find_samples(place).notices
        assert any(told in notice for notice in notices)
        assert not any("without an ending" in notice for notice in notices)


@pytest.mark.parametrize(
    "missing", ["nan", "NaN", "None", "null", "NULL", "<NA>", "NA", "N/A", "#N/A", "NaT"]
)
@pytest.mark.parametrize("column", ["path", "label"])
def test_what_pandas_writes_for_a_missing_value_is_no_class_and_no_path(column, missing, tmp_path):
    rows = ["0.png,a", f"1.png,{missing}" if column == "label" else f"{missing},b", "2.png,b"]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    with refuses(f"list.csv, row 3: its {column} is {missing}", "pandas"):
        find_samples(tmp_path)


NFC, NFD = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))


def test_names_in_two_unicode_forms_are_one_in_a_list_and_lead_to_the_files(tmp_path):
    for number in range(8):
        grey(tmp_path / (NFD if number % 2 else NFC) / f"{NFD}{number}.png", number)
    rows = [
        f"{(NFC, NFD)[number % 2]}/{NFC}{number}.png,{(NFD, NFC, 'tea')[number % 3]}" for number in range(8)
    ]
    (tmp_path / "list.csv").write_text("\n".join(["image,label", *rows]))
    train, test = task(tmp_path / "list.csv").datasets()
    assert train.classes == [NFC, "tea"] and len(train) + len(test) == 8
    assert any("8 paths are written otherwise than their files" in notice for notice in train.notices)


@pytest.mark.parametrize(
    "written, is_told",
    [
        ("photos/img_{}.JPG", True),
        ("Photos/IMG_{}", False),
        ("Photos/IMG_{}.jpg", False),
        ("Photos\\IMG_{}.jpg", False),
        ("./Photos/IMG_{}", False),
        ("PHOTOS\\img_{}", True),
    ],
)
def test_paths_of_windows_in_another_case_or_without_an_ending_lead_to_their_files(
    written, is_told, tmp_path
):
    for number in range(4):
        grey(tmp_path / f"Photos/IMG_{number}.jpg", 60 * number)
    rows = [f"{written.format(number)},{'ab'[number % 2]}" for number in range(4)]
    (tmp_path / "list.csv").write_text("\n".join(["image,label", *rows]))
    train, test = task(tmp_path).datasets()
    assert len(train) + len(test) == 4
    assert any("4 paths are written otherwise" in notice for notice in train.notices) == is_told


def test_of_two_files_that_differ_in_case_a_path_means_its_own_and_no_other(tmp_path):
    for number, name in enumerate(("a.png", "A.png", "b.png")):
        grey(tmp_path / name, number)
    (tmp_path / "list.csv").write_text("image,label\na.png,x\nA.PNG,y\nb.png,x\nA.png,y\n")
    with refuses("A.PNG", "--skip-bad"):
        task(tmp_path).datasets()


@pytest.mark.parametrize(
    "header, told",
    [
        ("id,img_path,label", "its column img_path has the paths, as its files are there, not id"),
        ("image,file_path,label", "its column file_path has the paths, as its files are there, not image"),
        ("where,image,label", None),
        ("Image-ID,nothing,label", None),
        ("x,there,label", "its column there has the paths, as its files are there, not one of a usual name"),
        (",filepaths,labels", None),
    ],
)
def test_the_column_of_paths_is_the_one_whose_files_are_there_and_that_is_told(header, told, tmp_path):
    for number in range(4):
        grey(tmp_path / f"{number}.png", number)
    names = [f"{number}.png" for number in range(4)]
    others = [f"of{number}" for number in range(4)]
    columns = (names, others) if header.startswith("Image-ID") else (others, names)
    rows = [f"{one},{two},{'ab'[n % 2]}" for n, (one, two) in enumerate(zip(*columns))]
    (tmp_path / "list.csv").write_text("\n".join([header, *rows]))
    found = find_samples(tmp_path)
    assert {sample.name for split in found.samples.values() for sample in split} == {*names}
    assert [notice for notice in found.notices if "has the paths" in notice] == (
        [f"list.csv: {told}"] if told else []
    )


def test_a_list_whose_images_are_elsewhere_is_told_its_column_and_two_images_that_are_there(tmp_path):
    for number in range(4):
        grey(tmp_path / f"train_images/{number}.png", number)
    (tmp_path / "train.csv").write_text("id_code,diagnosis\n0,a\n1,b\n2,a\n3,b\n")
    with refuses(
        "its column id_code are not in", "has train_images/0.png, train_images/1.png", "--images-dir"
    ):
        find_samples(tmp_path)


@pytest.mark.parametrize("again", ["0.png", "./0.png", "x\\..\\0.png", "0"])
def test_a_file_that_is_listed_twice_counts_once_and_that_is_told(again, tmp_path):
    for number in range(4):
        grey(tmp_path / f"{number}.png", number)
    (tmp_path / "list.csv").write_text(f"image,label\n0.png,a\n1.png,b\n2.png,a\n3.png,b\n{again},a\n")
    found = find_samples(tmp_path)
    assert sum(map(len, found.samples.values())) == 4
    assert any(
        "list.csv: 1 rows name a file again, which counts once (" in notice for notice in found.notices
    )


@pytest.mark.parametrize(
    "labels, told",
    [
        (("cat|dog", "cat", "dog", "cat"), "1 labels look like several in one cell (cat|dog)"),
        (("cat dog", "cat", "dog", "cat"), "1 labels look like several in one cell (cat dog)"),
        (('"cat, dog"', "cat", "dog", "cat"), "1 labels look like several in one cell (cat, dog)"),
        (("a;b", "b;c", "a;b", "c"), "2 labels look like several in one cell (a;b, b;c)"),
        (("New York", "York", "Rome", "New York"), None),
        (("0.5", "1.0", "0.5", "1.0"), "each of the 2 numbers of its column label (0.5 to 1)"),
        (("1", "01", "2", "2"), "different classes whose names are the same number: 01, 1"),
        (("1_2", "12", "1_2", "12"), None),
        (("0", "1", "0", "1"), None),
        (("0", "-1", "0", "1"), "the label -1 is learned as a class"),
        (("a", "-", "a", "b"), "the label - is learned as a class"),
        (("a", "Unknown", "?", "b"), "the label ?, Unknown is learned as a class"),
        (("0", "inf", "0", "1"), "the label inf is learned as a class"),
    ],
)
def test_labels_that_may_be_several_or_quantities_are_told(labels, told, tmp_path):
    for number in range(20):
        grey(tmp_path / f"{number}.png", number)
    rows = [f"{number}.png,{labels[number % 4]}" for number in range(20)]
    (tmp_path / "list.csv").write_text("\n".join(["image,label", *rows]))
    notices = find_samples(tmp_path).notices
    found = [notice for notice in notices if "held out" not in notice]
    assert len(found) == bool(told) and (not told or told in found[0])


@pytest.mark.parametrize("column", ["is_valid", "Fold", "split"])
def test_splits_in_a_column_that_is_not_read_are_told(column, tmp_path):
    for number in range(8):
        grey(tmp_path / f"{number}.png", number)
    parts = ("train", "test") if column == "split" else ("False", "True")
    rows = [f"{number}.png,{'ab'[number % 2]},{parts[number > 5]}" for number in range(8)]
    (tmp_path / "list.csv").write_text("\n".join([f"image,label,{column}", *rows]))
    told = f"list.csv: the splits in its column {column} are not used: for that, call a column split"
    assert any(told in notice for notice in find_samples(tmp_path).notices) == (column != "split")


def test_boxes_in_columns_are_told_not_to_be_read(tmp_path):
    for number in range(4):
        grey(tmp_path / f"{number}.png", number)
    rows = [f"{number}.png,{'ab'[number % 2]},1,2,5,6" for number in (0, 1, 1, 2, 3)]
    (tmp_path / "list.csv").write_text("\n".join(["filename,class,xmin,ymin,xmax,ymax", *rows]))
    notices = find_samples(tmp_path).notices
    assert "list.csv: boxes and outlines are not read (xmin): an image has a class" in notices
    assert any("1 rows name a file again" in notice for notice in notices)


def test_whole_numbers_with_gaps_are_told_to_be_learned_as_classes(tmp_path):
    rows = [f"{number}.png,{number // 4 * 3}\n" for number in range(100)]
    grey(tmp_path / "0.png", 0)
    (tmp_path / "list.csv").write_text("image,label\n" + "".join(rows))
    assert any("each of the 25 numbers" in notice for notice in find_samples(tmp_path).notices)
