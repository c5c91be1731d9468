"""Bad input to commands: one sentence that names it, neither a traceback nor an endless wait. One test for
each kind of error."""

import contextlib
import io
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tpukit_tools import cli

TRAIN_MNIST = "train mnist --epochs 1 --batch-size 8 --channels 1 --run new --dataset-dir".split()
TRAIN_IMAGES = "train images --model-name test_resnet --pretrained no --image-size 32 --batch-size 2".split()
TRAIN_IMAGES += "--epochs 0 --run new --dataset-dir".split()


@pytest.fixture
def whole(trained):
    """The folder of a finished run of MNIST."""
    return trained[1].path


@pytest.fixture
def call(capsys):
    """call(*words) -> (exit code, what was printed) of a command line; whatever is raised fails the test."""

    def run(*words):
        code = cli.main([str(word) for word in words])
        return code, "".join(capsys.readouterr())

    return run


def refused(answer, *data):
    code, printed = answer
    assert code in (1, 2) and "Traceback" not in printed, printed
    assert all(str(word) in printed for word in data), printed


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(path, "PNG")


def class_folders(folder, *classes):
    for name in classes or ("cat", "dog"):
        for number in range(4):
            picture(folder / name / f"{number}.png")
    return folder


# Paths


def test_a_folder_in_the_place_of_a_file_is_not_read_as_one(call, tmp_path):
    # how Kaggle shows a CSV file that was uploaded as a zip
    (tmp_path / "labels/train.csv").mkdir(parents=True)
    refused(call(*TRAIN_IMAGES, "labels"), "no images in labels")


def test_a_backup_that_cannot_be_made_is_refused_before_the_training(digits, call, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(call(*TRAIN_MNIST, digits, "--backup", "file"), "file")
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "new/records.jsonl").exists()


def test_weights_that_are_missing_are_named_before_any_data_is_made(call, tmp_path):
    for words in ("train mshnet --weights none.pt", "train mnist --weights here"):
        (tmp_path / "here").mkdir(exist_ok=True)
        refused(call(*words.split()), words.split()[-1], "no such file" if "none" in words else "a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@contextlib.contextmanager
def as_nobody(folder):
    """Context manager: without root's right to every file, in a folder."""
    here = os.getcwd()
    is_root = os.geteuid() == 0
    os.chdir(folder)
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)
        os.chdir(here)


@pytest.fixture
def public():
    """A folder that every user reads and writes."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def test_what_may_not_be_read_or_written_is_one_sentence(call, public):
    (public / "private").mkdir(mode=0)
    with as_nobody(public):
        for words in ("show private/run", "train mnist --run private/run", "migrate private/a.py"):
            code, printed = call(*words.split())
            refused((code, printed.lower()), "private", "permission denied")


def test_no_part_of_a_dataset_that_may_not_be_read_is_left_out_silently(call, public):
    folder = class_folders(public / "set", "bird", "cat", "dog")
    (folder / "dog").chmod(0)
    with as_nobody(public):
        answer = call(*TRAIN_IMAGES, "set")
    (folder / "dog").chmod(0o755)
    refused(answer, "set/dog", "permission denied")


# Data


def test_names_that_are_not_utf_8_are_trained_on_and_predicted(whole, call, tmp_path):
    cafe = os.fsdecode(b"caf\xe9")
    try:
        class_folders(tmp_path / "set", cafe, "dog")
    except OSError:
        pytest.skip("this disk takes names in UTF-8 alone")
    code, printed = call(*[cafe if word == "new" else word for word in TRAIN_IMAGES], "set")
    assert code == 0, printed
    picture(tmp_path / f"{cafe}.png")
    code, printed = call("predict", whole, f"{cafe}.png", "--out", "out")
    assert code == 0 and r"caf\udce9.png" in (tmp_path / "out/predictions.csv").read_text(), printed


# The terminal and the environment


def test_a_terminal_that_has_not_every_character_gets_the_others(whole, monkeypatch):
    for command in ("show", "report"):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
        assert cli.main([command, str(whole)]) == 0
        assert b"epoch" in written.getvalue() or b"step" in written.getvalue()


def test_an_error_of_tpukits_own_keeps_its_traceback(call, monkeypatch):
    from tpukit.reporting import display

    inner = FileNotFoundError(2, "No such file", "inner.txt")
    for error in (inner, PermissionError(1, "Not permitted"), KeyError("x")):
        monkeypatch.setattr(display, "show", lambda _, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            call("show", "run")


def test_a_name_that_would_colour_the_terminal_is_shown_as_text_by_the_parser_too(tmp_path, capfd):
    folder = tmp_path / "red\x1b[31m"
    (folder / "train/a").mkdir(parents=True)
    assert cli.main(["train", "images", "--dataset-dir", str(folder), "--run", str(tmp_path / "run")]) != 0
    shown = capfd.readouterr()
    assert "\x1b[31m" not in shown.out + shown.err
    assert "no images" in shown.out + shown.err
