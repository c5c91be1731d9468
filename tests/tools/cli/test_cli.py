"""The command line, as a user types it."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from typing import get_args

import pytest
import torch
from PIL import Image

import tpukit
from tests.conftest import ROOT
from tpukit import MNIST, Run
from tpukit.leaves import find, tasks
from tpukit.runs import weights
from tpukit_tools import cli
from tpukit_tools.cli.commands import COMMANDS, WITH_TASK, todays


def test_a_run_is_resumed_and_test_and_show_agree_with_it(digits, tmp_path, capsys):
    train = f"train mnist --dataset-dir {digits} --run run --batch-size 50 --channels 4 --epochs".split()
    assert cli.main([*train, "1"]) == 0
    assert "dataset mnist" in capsys.readouterr().out
    assert cli.main([*train, "2"]) == 0
    assert "resuming at step 4 of 8" in capsys.readouterr().out
    best = max(r["scores"]["accuracy"] for r in Run.find("run").records("evaluation"))
    for source in ("run", "run/best.safetensors"):  # both know the dataset's sizes and the task
        assert cli.main(["test", source, "--dataset-dir", str(digits)]) == 0
        assert f"{best:.4f}" in capsys.readouterr().out
    assert cli.main(["show", "run"]) == 0
    assert "Scores after epoch 2" in capsys.readouterr().out
    assert (tmp_path / "run/pictures/curves.png").exists()


def test_the_last_lines_of_a_training_give_the_kept_scores_beside_the_last_ones(digits, monkeypatch, capsys):
    accuracies = iter((0.75, 0.25))
    monkeypatch.setattr(MNIST, "evaluate", lambda self, predictions: dict(accuracy=next(accuracies)))
    train = f"train mnist --dataset-dir {digits} --epochs 2 --channels 4 --run run"
    assert cli.main(train.split()) == 0
    end = capsys.readouterr().out.partition("Scores after epoch 2")[2]
    assert "0.2500" in end and "0.7500" in end.partition("epoch 1")[2]


def test_a_weights_file_of_a_run_or_a_published_one_is_tested_in_a_folder_of_its_own(trained, digits):
    best = trained[1].path / "best.safetensors"
    shutil.copy(best, "mine.safetensors")
    torch.save({"state_dict": weights.read(best), "epoch": 7}, "published.tar")
    outputs = tpukit.detect().outputs
    mine, published = "test mine.safetensors", f"test published.tar --task mnist --dataset-dir {digits}"
    for line in (f"{mine} --precision fp32", published):  # the second in the folder that the first one made
        assert cli.main(line.split()) == 0
    assert not (outputs / "mnist-test/records.jsonl").exists()
    assert cli.main([*mine.split(), "--batch-size", "0"]) == 1  # and not the size of the training
    (outputs / "mnist-test/config.json").write_text("{}")  # a run of this name has other weights
    assert cli.main(mine.split()) == 1


def test_the_demos_scores_are_not_those_on_a_synthetic_set(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["test", "demo"]) == 1
    error = capsys.readouterr().err
    assert "IRSTD-1k" in error and "its IoU is 0.601" in error and "--dataset-dir demo" in error
    assert not list(tmp_path.glob("outputs/mshnet-test"))


def test_a_score_on_a_synthetic_set_says_so_in_its_title(tmp_path, capsys, digits):
    other = shutil.copytree(digits, tmp_path / "other")
    (other / "README.txt").unlink()  # as of anybody's own
    said = "on synthetic data (they say nothing about real data)"
    for place in (digits, other):
        train = f"train mnist --dataset-dir {place} --epochs 1 --channels 1 --run of-{place.name}"
        assert cli.main(train.split()) == 0
        for command in ("test", "show"):
            assert cli.main([command, f"of-{place.name}"]) == 0
        titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Scores")]
        assert [said in title for title in titles] == [place == digits] * 3


def test_a_weights_file_is_tested_as_the_network_that_is_named(tmp_path, shapes, capsys):
    timm = pytest.importorskip("timm")
    state = timm.create_model("test_vit", num_classes=6).state_dict()
    torch.save(state, tmp_path / "vit.pth")
    words = ["test", str(tmp_path / "vit.pth"), "--task", "images", "--dataset-dir", str(shapes)]
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert "belong to another model" in error and "--model-name" in error
    assert cli.main([*words, "--model-name", "test_vit"]) == 0
    assert cli.main([*words, "--network", "small"]) == 1
    assert "images has no setting network (--network)" in capsys.readouterr().err


def test_a_weights_file_of_another_number_of_classes_is_refused_with_both_numbers(tmp_path, shapes, capsys):
    timm = pytest.importorskip("timm")
    torch.save(timm.create_model("test_vit", num_classes=9).state_dict(), tmp_path / "vit.pth")
    words = ["test", str(tmp_path / "vit.pth"), "--task", "images", "--dataset-dir", str(shapes)]
    assert cli.main([*words, "--model-name", "test_vit"]) == 1
    error = capsys.readouterr().err
    for told in ("a network of 9 classes", "has 6 classes (", "pretrained=PATH (--pretrained PATH)"):
        assert told in error
    assert "another model" not in error


# Command line -> what must stand in its explanation: what was wrong, and the choices or the command that
# helps.
EXPLAINED = [
    ("train mshnet --dataset-dir /nowhere", ["/nowhere"]),
    ("compare --epochs 9", ["tpukit compare TASK"]),
    ("migrate", ["scripts"]),
    ("plan mshnet --chip v5e-8 --batch-sizes 12", ["8 cores", "12"]),
    ("compare t4.json", ["t4.json", "tpukit compare TASK"]),
    ("show nothing-here", ["nothing-here"]),
    ("train images", ["--dataset-dir FOLDER", "--dataset-dir demo"]),
    ("test none.pth", ["none.pth", "the folder of a run, or a weights file"]),
]
# Command line -> what the parser must name: the wrong word, or the choices.
WRONG = [
    ("", list(COMMANDS)),
    ("-- train", list(COMMANDS)),
    ("train", ["mnist", "mshnet", "cdeit"]),
    ("train resnet", ["resnet", "mnist", "mshnet"]),
    ("train mshnet --no-tpu", ["--no-tpu"]),
    ("train mshnet --batch-size 0", ["batch_size=0"]),
    ("train mshnet --epochs many", ["--epochs", "many"]),
    ("train mnist --parallel spmd", ["--parallel"]),
    ("plan mnist --chip v3-8", ["v3-8", "v5e-1", "v5e-8", "v6e-1"]),
    ("show", ["RUN"]),
]


# Command line -> what was probably meant.
MISSPELT = [
    ("trian mnist", "did you mean train?"),
    ("compare mnits", "did you mean mnist?"),
    ("train images --image-sizes 64", "--image-size"),
    ("predict run photos --out new --batch 3", "--batch-size"),
    ("doctor --hardwear", "--hardware"),
    ("doctor --json", "has no option --json"),
]


def test_a_weights_file_of_few_classes_predicts_as_the_network_that_is_named(tmp_path, capsys):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=5)
    inside = {f"model.{name}": value for name, value in network.state_dict().items()}
    torch.save({"state_dict": inside | {"accuracy.total": torch.zeros(1)}}, tmp_path / "w.ckpt")
    picture = torch.arange(160 * 160 * 3).reshape(160, 160, 3).remainder(251).byte()
    Image.fromarray(picture.numpy()).save(tmp_path / "one.png")
    line = ["predict", str(tmp_path / "w.ckpt"), str(tmp_path / "one.png"), "--task", "images", "--out"]
    assert cli.main([*line, str(tmp_path / "other")]) == 1
    assert "(see --model-name, --network)" in capsys.readouterr().err
    assert cli.main([*line, str(tmp_path / "out"), "--model-name", "test_vit"]) == 0
    told = capsys.readouterr().out
    assert "w.ckpt does not name its classes: they are called class 0 to class 4" in told
    values = picture.permute(2, 0, 1)[None].float() / 255
    mean, std = (torch.tensor(network.default_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        expected = network.eval()((values - mean) / std).softmax(1)
    assert f"one.png: class class {int(expected.argmax())}, probability {float(expected.max()):.3g}" in told


@pytest.mark.parametrize("line, meant", MISSPELT, ids=[line for line, _ in MISSPELT])
def test_a_misspelt_word_gets_one_line_with_one_suggestion(line, meant, capsys):
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert meant in err and len(err.splitlines()) == 1


def test_the_demo_is_a_synthetic_set_and_a_folder_of_that_name_is_that_folder(here, tmp_path):
    from tpukit import TpukitError, find_dataset
    from tpukit.data.datasets import is_synthetic

    drawn = find_dataset("my-images", "demo", size=12, env=here)
    assert drawn.name == "my-images-synthetic-12" and is_synthetic(drawn)
    with pytest.raises(TpukitError, match="--dataset-dir demo"):
        find_dataset("my-images", demo=False, env=here)
    (tmp_path / "demo").mkdir()
    assert find_dataset("my-images", "demo", env=here).resolve() == tmp_path / "demo"
    assert not is_synthetic(tmp_path / "demo")


@pytest.mark.parametrize("line, words", EXPLAINED, ids=[line for line, _ in EXPLAINED])
def test_an_error_is_explained_without_a_traceback(line, words, capsys):
    assert cli.main(line.split()) == 1
    message = capsys.readouterr().err
    assert message.startswith("tpukit: ") and all(word in message for word in words), message


@pytest.mark.parametrize("line, words", WRONG, ids=[line for line, _ in WRONG])
def test_wrong_usage_ends_with_2_and_names_the_choices(line, words, capsys):
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert all(word in out + err for word in words), out + err


HELPS = [[], *([name] for name in COMMANDS if name != "simulate"), ["simulate", "eit"]]
HELPS += [[name, task] for name in WITH_TASK for task in tasks()]
# Prints the exit code and what was loaded after a help text, for many command lines in one process.
PROGRAM = """
import contextlib, io, json, sys
from tpukit_tools import cli
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = cli.main([*argv, "--help"])
    loaded = sorted({"torch", "torch_xla", "matplotlib", "skimage", "scipy"} & set(sys.modules))
    print(json.dumps([code, text.getvalue(), loaded]))
"""


@pytest.fixture(scope="module")
def helps():
    """Words of a command line -> (exit code, help text, heavy packages that were loaded)."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(HELPS)]
    wide = os.environ | dict(COLUMNS="400")
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, env=wide)
    answers = map(json.loads, ran.stdout.splitlines())
    return {" ".join(argv): answer for argv, answer in zip(HELPS, answers, strict=True)}


@pytest.mark.parametrize("name", tasks())
def test_no_default_is_of_a_type_which_the_parser_would_take_for_another_of_equal_value(name):
    """tyro's cache asks for equality alone: 16 and an int's subclass that is 16 are one to it."""
    for field in dataclasses.fields(find(name)):
        assert type(field.default) in (bool, int, float, str, tuple, type(None))


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_every_command_has_help_which_loads_no_torch(words, helps):
    code, text, loaded = helps[" ".join(words)]
    assert code == 0 and loaded == [] and text.startswith(" ".join(["usage: tpukit", *words[:1]]))


def test_help_lists_commands_tasks_and_settings_with_their_explanations(helps):
    assert all(f" {name} " in helps[""][1] for name in COMMANDS)
    for name in WITH_TASK:
        assert all(f" {task} " in helps[name][1] for task in tasks())
    text = helps["train mshnet"][1]
    flags = "--dataset-dir --base-size --crop-size --warm-epoch --batch-size --epochs --lr --run"
    assert all(f" {flag} " in text for flag in flags.split())
    assert "Learning rate of Adagrad" in text and "(default: 0.05)" in text
    assert " mshnet options " in text
    # The source breaks this line after "about a sixteenth of the".
    assert "None: about a sixteenth of the training images, from 8 to 64." in helps["train images"][1]
    assert not any("{None}" in text for _, text, _ in helps.values())


def test_the_choices_of_the_command_line_are_those_of_the_library():
    from tpukit_tools.plan.compiler import MACHINES

    assert get_args(COMMANDS["plan"].__annotations__["chip"]) == tuple(MACHINES)


def test_options_of_published_scripts_are_taken_as_todays():
    line = "--data_path=a --model x --global-batch-size 8 --num-cores 8"
    wanted = "--dataset-dir=a --model-name x --batch-size 8 --cores 8"
    assert list(map(todays, line.split())) == wanted.split()


@pytest.mark.parametrize(
    "line",
    [
        "train mshnet --batch-size 32 --mode train --use-tpu",
        "train cdeit --mode=test",
        "test outputs/cdeit --data simulated",
        "train mshnet --use_tpu",
        "main_tpu.py --dataset-dir ./datasets/IRSTD-1k",
    ],
)
def test_commands_of_the_old_guides_are_answered_with_todays(line, capsys):
    assert cli.main(line.split()) == 1
    error = capsys.readouterr().err
    assert "from the old guides" in error and ("tpukit train" in error or "leave it out" in error)


def test_a_script_of_the_users_own_may_have_the_name_of_one_of_the_old_guides(tmp_path, capsys):
    (tmp_path / "main.py").write_text("model.cuda()\n")
    assert cli.main(["migrate", "main.py"]) == 1
    assert "main.py:1" in capsys.readouterr().out


def in_a_shell(code, *args, **environ):
    ran = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environ,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


HELP_IN_A_TERMINAL = """
import sys
sys.stdout.isatty = lambda: True
from tpukit_tools import cli
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", [["train", "text", "--help"], ["test", "--help"], ["--help"]], ids=" ".join)
def test_help_fits_60_columns_and_has_colours_unless_no_color_is_set(words):
    look = dict(COLUMNS="60", TERM="xterm")
    plain = in_a_shell(HELP_IN_A_TERMINAL, *words, **look, NO_COLOR="1")
    assert "\x1b" not in plain and max(map(len, plain.splitlines())) <= 60
    if words != ["--help"]:
        assert "\x1b" in in_a_shell(HELP_IN_A_TERMINAL, *words, **look, NO_COLOR="")


def test_the_help_names_every_option_that_a_page_uses(helps):
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md") if path.name != "OLD_GUIDES.md"]
    lines = [line for page in pages for line in page.replace("\\\n", " ").splitlines()]
    used = [line.split("#")[0].split() for line in lines if line.startswith(("tpukit ", "    tpukit "))]
    looked = 0
    for _, command, *words in used:
        key = " ".join([command, *words[:1]]) if command in (*WITH_TASK, "simulate") else command
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            if key in helps:
                assert f" {option.replace('--no-', '--')}" in helps[key][1].replace("--no-", "--"), option
                looked += 1
    assert looked > 50
    for command in ("train text", "test"):
        assert all(f" {name} " in helps[command][1] for name in ("--model", "--data-path", "--batch-size"))


COMPLETE = """
source <(cat)
name=$(complete -p tpukit | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$name
echo "${COMPREPLY[*]}"
"""


@pytest.mark.slow
def test_a_shell_completes_commands_tasks_and_options(capsys):
    assert cli.main(["--tyro-print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    for line, wanted in (
        ("tpukit tr", "train"),
        ("tpukit train ms", "mshnet"),
        ("tpukit train mshnet --ru", "--run"),
        ("tpukit train mshnet --base", "--base-size"),
        ("tpukit predict --batch", "--batch-size"),
    ):
        command = ["bash", "-c", COMPLETE, "bash", *line.split()]
        ran = subprocess.run(command, input=script, capture_output=True, text=True)
        assert ran.stdout.split() == [wanted], line + ran.stderr


def test_a_log_gets_no_line_for_each_step(digits, tmp_path):
    words = f"train mnist --dataset-dir {digits} --run {tmp_path / 'run'} --epochs 1 --batch-size 16".split()
    with open(tmp_path / "log", "w") as log:
        ran = subprocess.run([sys.executable, "-m", "tpukit", *words], cwd=ROOT, stdout=log, stderr=log)
    text = (tmp_path / "log").read_bytes()
    assert ran.returncode == 0 and b"\r" not in text and b"step/s" not in text
    assert b"Scores" in text


def test_a_table_fits_the_terminal(monkeypatch):
    from tpukit.host.tables import Table

    for columns, widest in (("60", 60), ("300", 118)):
        monkeypatch.setenv("COLUMNS", columns)
        lines = str(Table("A title", ["a", "b"], [["many words " * 20, "more of them " * 20]])).splitlines()
        assert widest - 5 < max(map(len, lines)) <= widest
