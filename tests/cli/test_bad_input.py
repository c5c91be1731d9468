"""Bad input to every command: one sentence that names it, and neither a traceback nor an endless wait."""

import contextlib
import csv
import io
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tpukit import MNIST, cli

LONG = "n" * 300
TRAIN_MNIST = "train mnist --epochs 1 --batch-size 8 --channels 1 --run new --dataset-dir".split()
TRAIN_IMAGES = "train images --model-name test_resnet --pretrained no --image-size 32 --batch-size 2".split()
TRAIN_IMAGES += "--epochs 0 --run new --dataset-dir".split()


@pytest.fixture
def whole(trained):
    """The folder of a finished run of MNIST."""
    return trained[1].path


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """call(*words) -> (exit code, what was printed) of a command line in tmp_path; whatever is raised fails
    the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)

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


def listed(folder, text):
    for number in range(4):
        picture(folder / f"{number}.png")
    (folder / "labels.csv").write_text(text)
    return folder


def infrared(folder):
    for number in range(4):
        picture(folder / f"images/{number}.png")
        picture(folder / f"masks/{number}.png")
    return folder


# Paths that no system takes, or not as what they are


@pytest.mark.parametrize(
    "words",
    [
        "show LONG",
        "test LONG",
        "migrate LONG.py",
        "train mnist --run LONG",
        "train images --run run --dataset-dir LONG",
    ],
)
def test_a_name_that_is_too_long_is_one_sentence(words, call):
    refused(call(*words.replace("LONG", LONG).split()), "too long")


def test_a_name_that_is_too_long_for_the_files_of_a_run_is_one_sentence(whole, digits, call):
    picture(Path("a.png"))
    refused(call("predict", whole, LONG, "--out", "out"), "too long")
    refused(call(*TRAIN_MNIST, digits, "--backup", LONG), "too long")


def test_a_folder_in_the_place_of_a_file_is_not_read_as_one(call, tmp_path):
    # how Kaggle shows a CSV file that was uploaded as a zip
    (tmp_path / "labels/train.csv").mkdir(parents=True)
    refused(call(*TRAIN_IMAGES, "labels"), "no images in labels")
    (infrared(tmp_path / "infrared") / "trainval.txt").mkdir()
    (tmp_path / "infrared/test.txt").write_text("0\n")
    refused(call("train", "mshnet", "--dataset-dir", "infrared", "--run", "other"), "no train list")


def test_a_backup_that_cannot_be_made_is_refused_before_the_training(digits, call, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in ("file", "/proc/backup"):
        refused(call(*TRAIN_MNIST, digits, "--backup", place), place)
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "new/records.jsonl").exists()


# What another user owns


@pytest.fixture
def public():
    """A folder that every user reads and writes."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


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


def test_what_may_not_be_read_or_written_is_one_sentence(call, public, whole):
    shutil.copytree(whole, public / "run")
    (public / "private").mkdir(mode=0)
    picture(public / "a.png")
    with as_nobody(public):
        for words in (
            "show private/run",
            "train mnist --run private/run",
            "predict private/run a.png --out out",
            "predict run a.png --out private/out",
            "predict run private/a.png --out out",
            "export run --to onnx --out private/run.onnx",
            "migrate private/a.py",
        ):
            refused(call(*words.split()), "private", "permission denied")


def test_no_part_of_a_dataset_that_may_not_be_read_is_left_out_silently(call, public):
    for number, closed in enumerate(("dog", "cat/inside", "labels.csv")):
        folder = class_folders(public / f"set{number}", "bird", "cat", "dog", "cat/inside")
        if closed == "labels.csv":
            shutil.rmtree(folder)
            listed(folder, "path,label\n0.png,a\n1.png,b\n")
        (folder / closed).chmod(0)
        with as_nobody(public):
            answer = call(*TRAIN_IMAGES, folder.name)
        (folder / closed).chmod(0o755)
        refused(answer, f"set{number}/{closed}", "permission denied")
    folder = infrared(public / "infrared")
    (folder / "images/1.png").chmod(0)
    with as_nobody(public):
        answer = call(*"train mshnet --dataset-dir infrared --run other".split())
    refused(answer, "1.png", "Permission denied")


# Datasets


@pytest.mark.parametrize(
    "text, what",
    [
        (f"path,label,{'z' * 200_000}\n0.png,a,1\n1.png,b,1\n", "field larger"),
        ("path,label\n0.png,a\n1.png,cat, dog\n", "row 3"),
        ("path,label\n0.png,a\n1.png\n", "row 3"),
    ],
    ids=["long header", "a comma more", "a comma less"],
)
def test_a_csv_that_is_not_a_table_is_named(text, what, call, tmp_path):
    listed(tmp_path / "set", text)
    refused(call(*TRAIN_IMAGES, "set"), "labels.csv", what)


def test_names_that_are_not_utf_8_are_trained_on_and_predicted(whole, call, tmp_path):
    cafe = os.fsdecode(b"caf\xe9")
    try:
        class_folders(tmp_path / "set", cafe, "dog")
    except OSError:
        pytest.skip("this disk takes names in UTF-8 alone")
    code, printed = call(*[cafe if word == "new" else word for word in TRAIN_IMAGES], "set")
    assert code == 0, printed
    picture(tmp_path / f"{cafe}.png")
    code, printed = call("predict", whole, f"{cafe}.png", f"set/{cafe}/1.png", "--out", "out")
    assert code == 0 and r"caf\udce9.png" in (tmp_path / "out/predictions.csv").read_text(), printed


@pytest.mark.parametrize("option", ["--base-size", "--crop-size"])
def test_images_larger_than_any_that_is_read_are_refused(option, call):
    refused(call("train", "mshnet", option, "100000", "--run", "run"), "=100000", "8192")


# Weights, names of models


NOT_PLAIN = {
    "sparse": lambda value: value.to_sparse(),
    "meta": lambda value: value.to("meta"),
    "quantized": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what is in beta
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_tensor_that_is_not_a_plain_one_is_named(kind, call, digits):
    state = MNIST(channels=1).model().state_dict()
    state["9.weight"] = NOT_PLAIN[kind](state["9.weight"])
    torch.save(state, "odd.pth")
    refused(call(*TRAIN_MNIST, digits, "--weights", "odd.pth"), "odd.pth", "9.weight is no plain tensor")


def test_weights_that_no_network_has_are_named_with_the_nearest(call, tmp_path):
    pytest.importorskip("timm")
    class_folders(tmp_path / "set")
    name = "resnet18.a1_in2k"
    wrong = f"train images --dataset-dir set --run run --model-name {name}"
    refused(call(*wrong.split()), name, "resnet18.a1_in1k")


# Names of files to predict


def test_a_long_name_among_the_files_to_predict_loses_no_result(whole, call, tmp_path):
    long = [f"{'m' * 240}{number}.png" for number in range(2)]
    for name in (*long, "a.png"):
        picture(tmp_path / name)
    code, printed = call("predict", whole, *long, "a.png", "--out", "out")
    assert code == 0, printed
    rows = list(csv.DictReader(Path("out/predictions.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == [*long, "a.png"]
    assert len({row["picture"] for row in rows if Path("out", row["picture"]).is_file()}) == 3


# The terminal and the environment


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_has_not_every_character_gets_the_others(encoding, whole, monkeypatch):
    for words in (["show", whole], ["report", whole]):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
        assert cli.main([str(word) for word in words]) == 0
        assert b"epoch" in written.getvalue() or b"step" in written.getvalue()


def test_a_rank_that_is_not_a_number_is_named(call, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "abc")
    refused(call("train", "mnist", "--run", "run"), "RANK=abc")


def test_an_error_of_tpukits_own_keeps_its_traceback(call, monkeypatch):
    from tpukit.reporting import display

    inner = FileNotFoundError(2, "No such file", "inner.txt")
    for error in (inner, PermissionError(1, "Not permitted"), KeyError("x")):
        monkeypatch.setattr(display, "show", lambda _, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            call("show", "run")
