"""The command line, as a user types it."""

import json
import os
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
import torch

from tests.conftest import ROOT
from tpukit import MNIST, Run, cli
from tpukit.cli.commands import COMMANDS, WITH_TASK
from tpukit.cli.options import CoreOptions, resolve_aliases
from tpukit.cli.tools import PlanOptions
from tpukit.tasks import TASKS, find


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test in its own folder, on the plain CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


TINY = [
    "--base-size",
    "32",
    "--crop-size",
    "32",
    "--batch-size",
    "4",
    "--warm-epoch",
    "0",
    "--eval-every",
    "1",
]


@pytest.mark.slow
def test_a_run_is_resumed_and_test_and_show_agree_with_it(infrared, tmp_path, capsys):
    train = ["train", "mshnet", "--dataset-dir", str(infrared), "--run", "run", "--lr", "0.05", *TINY]
    assert cli.main([*train, "--epochs", "1"]) == 0
    assert "dataset IRSTD-1k" in capsys.readouterr().out
    assert cli.main([*train, "--epochs", "2"]) == 0
    assert "resuming at step 4 of 8" in capsys.readouterr().out
    best = max(r["scores"]["iou"] for r in Run.find("run").records("evaluation"))
    assert (
        cli.main(
            ["test", "mshnet", "--weights", "run/best.safetensors", "--dataset-dir", str(infrared), *TINY]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert f"{best:.4f}" in out or f"{best:.3e}" in out
    for score in ("iou", "niou", "pixel_recall", "pd", "fa"):
        assert score in out
    assert cli.main(["show", "run"]) == 0
    assert (
        "Scores after epoch 2" in capsys.readouterr().out and (tmp_path / "run/pictures/curves.png").exists()
    )


def test_the_last_lines_of_a_training_give_the_kept_scores_beside_the_last_ones(digits, monkeypatch, capsys):
    accuracies = iter((0.75, 0.25))
    monkeypatch.setattr(MNIST, "evaluate", lambda self, predictions: dict(accuracy=next(accuracies)))
    assert (
        cli.main(
            [
                "train",
                "mnist",
                "--dataset-dir",
                str(digits),
                "--epochs",
                "2",
                "--channels",
                "4",
                "--run",
                "run",
            ]
        )
        == 0
    )
    end = capsys.readouterr().out.partition("Scores after epoch 2")[2]
    assert "0.2500" in end and "0.7500" in end.partition("epoch 1")[2]


def test_published_weights_as_a_pickled_state_dict_are_tested(infrared, tmp_path, capsys):
    from tpukit.tasks.mshnet.model import MSHNetModel

    torch.manual_seed(0)
    torch.save({"state_dict": MSHNetModel().state_dict(), "epoch": 7}, "published.tar")
    assert (
        cli.main(["test", "mshnet", "--weights", "published.tar", "--dataset-dir", str(infrared), *TINY]) == 0
    )
    assert ": 4 samples" in capsys.readouterr().out


@pytest.mark.parametrize("task, data", [("images", "shapes"), ("cdeit", "tank")])
def test_weights_are_tested_in_a_folder_of_their_own_with_a_picture_of_the_predictions(
    task, data, request, tmp_path
):
    torch.manual_seed(0)
    if task == "images":
        pytest.importorskip("timm")
        settings = dict(model_name="test_resnet", image_size=32, pretrained="no")
    else:
        settings = dict(patch=16, width=16, heads=2, window=4, levels=1)
    folder = request.getfixturevalue(data)
    model = find(task)(dataset_dir=folder, **settings).model()
    torch.save(model.state_dict(), "weights.pth")
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    test = [
        "test",
        task,
        "--weights",
        "weights.pth",
        "--dataset-dir",
        str(folder),
        "--run",
        "scored",
        *options,
    ]
    for _ in range(2):  # the second time in the folder that the first one made
        assert cli.main(test) == 0
    assert (tmp_path / "scored/pictures/predictions.png").read_bytes().startswith(b"\x89PNG")


# Command line -> what must stand in its explanation: what was wrong, and the choices or the command that
# helps.
EXPLAINED = [
    ("train mshnet --dataset-dir /nowhere", ["/nowhere"]),
    ("train mshnet --batch-size 0", ["batch_size=0"]),
    ("simulate eit --workers 0", ["workers=0"]),
    ("simulate eit --seed -1", ["seed=-1"]),
    ("simulate eit --snr-db nan", ["snr_db=nan"]),
    ("simulate eit --mismatch -1", ["mismatch=-1"]),
    ("doctor --weights none.pth", ["none.pth", "--model"]),
    ("compare merge --epochs 0", ["epochs=0"]),
    ("migrate", ["scripts"]),
    ("rent v5litepod-8 --spot -- train mnist", ["sky", "docs/RENTING.md"]),
    ("plan mshnet --chip v5e-8 --batch-sizes 12", ["v5e-8", "12"]),
    ("plan mnist --find-batch", ["--batch-sizes 16 32 64"]),
    ("doctor --model resnet", ["'resnet'", "mnist, mshnet, cdeit, images"]),
    ("compare resnet", ["'resnet'", "mnist, mshnet, cdeit, images"]),
    ("show nothing-here", ["nothing-here"]),
    ("test mnist --weights none.pth", ["none.pth"]),
    ("test mnist", ["best.safetensors"]),
]
# Command line -> what the parser must name: the wrong word, or the choices.
WRONG = [
    ("", list(COMMANDS)),
    ("fly", ["fly", *COMMANDS]),
    ("train", ["mnist", "mshnet", "cdeit"]),
    ("train resnet", ["resnet", "mnist", "mshnet"]),
    ("train mshnet --use-tpu", ["--use-tpu"]),
    ("train mshnet --epochs many", ["--epochs", "many"]),
    ("train mnist --parallel threads", ["threads", "spmd"]),
    ("simulate mri", ["mri", "eit"]),
    ("plan mnist --chip v3-8", ["v3-8", "v5e-1", "v5e-8", "v6e-1"]),
    ("migrate . --format xml", ["xml", "json"]),
    ("show", ["RUN"]),
]


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


HELPS = [[], *([name] for name in COMMANDS if name != "simulate"), ["simulate", "eit"], ["compare", "merge"]]
HELPS += [[name, task] for name in WITH_TASK for task in TASKS]
# Prints the exit code and what was loaded after a help text, for many command lines in one process.
PROGRAM = """
import contextlib, io, json, sys
from tpukit import cli
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = cli.main([*argv, "--help"])
    loaded = sorted({"torch", "torch_xla", "matplotlib", "skimage", "scipy"} & set(sys.modules))
    print(json.dumps([code, text.getvalue(), loaded]))
"""


@pytest.fixture(scope="module")
def helps():
    """Words of a command line -> (exit code, help text, heavy packages that were loaded)."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(HELPS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return {
        " ".join(argv): json.loads(line) for argv, line in zip(HELPS, ran.stdout.splitlines(), strict=True)
    }


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_every_command_has_help_which_loads_no_torch(words, helps):
    code, text, loaded = helps[" ".join(words)]
    assert code == 0 and loaded == [] and text.startswith(" ".join(["usage: tpukit", *words[:1]]))


def test_help_lists_commands_tasks_and_settings_with_their_explanations(helps):
    assert all(f" {name} " in helps[""][1] for name in COMMANDS)
    for name in WITH_TASK:
        assert all(f" {task} " in helps[name][1] for task in TASKS)
    text = helps["train mshnet"][1]
    for flag in (
        "--dataset-dir",
        "--base-size",
        "--crop-size",
        "--warm-epoch",
        "--batch-size",
        "--epochs",
        "--lr",
        "--run",
    ):
        assert f" {flag} " in text
    assert "Learning rate of Adagrad" in text and "(default: 0.05)" in text


def test_the_choices_of_the_command_line_are_those_of_the_library():
    from tpukit.devices.chips import MACHINES
    from tpukit.launching.launcher import PARALLEL
    from tpukit.tools import migrate, plan

    choices = {name: get_args(hint) for name, hint in get_type_hints(PlanOptions).items()}
    assert choices["chip"] == tuple(MACHINES) and choices["part"] == tuple(plan.PARTS)
    assert get_args(get_type_hints(CoreOptions)["parallel"]) == tuple(PARALLEL)
    assert get_args(get_type_hints(COMMANDS["migrate"])["output"]) == tuple(migrate.FORMATS)


@pytest.mark.parametrize(
    "line, todays, noted",
    [
        ("predict w.pt --workload=mnist", "predict w.pt --task=mnist", "--task"),
        ("watch run", "report run --follow", "report --follow"),
        ("watch run --once", "report run --follow", "report --follow"),
    ],
)
def test_a_word_of_the_release_before_is_accepted_with_a_note(line, todays, noted, capsys):
    assert resolve_aliases(line.split()) == todays.split()
    assert noted in capsys.readouterr().err


def test_older_names_of_options_become_todays_up_to_a_double_dash():
    given = ["train", "--data_path=a", "--global-batch-size", "8", "--", "--data-path", "--use-tpu"]
    assert resolve_aliases(given) == [
        "train",
        "--dataset-dir=a",
        "--batch-size",
        "8",
        "--",
        "--data-path",
        "--use-tpu",
    ]


def test_doctor_reports_the_same_as_json_and_as_a_table(capsys, monkeypatch):
    from tpukit.tools import doctor

    monkeypatch.setattr(doctor, "import_packages", lambda packages, environ: (dict.fromkeys(packages), None))
    code = cli.main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == int(told["blocked"])
    assert {"host", "accelerator", "versions", "checks"} <= set(told) and told["checks"][0]["what"]
    assert cli.main(["doctor"]) == code
    assert told["python"] in capsys.readouterr().out


def test_ctrl_c_ends_with_130(infrared, monkeypatch):
    from tpukit.training import loop

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupted)
    assert cli.main(["train", "mshnet", "--dataset-dir", str(infrared), *TINY]) == 130


def test_the_installed_command_runs_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "tpukit", "--version"], env=environ, capture_output=True, text=True
    )
    assert ran.returncode == 0 and ran.stdout.strip()


@pytest.mark.slow
def test_simulate_train_and_test_cdeit_as_the_readme_says(real_data, tmp_path, capsys):
    assert cli.main("simulate eit --samples 16 --test-samples 3 --workers 1 --out data --seed 5".split()) == 0
    assert len(list((tmp_path / "data/train").glob("*.npz"))) == 16
    sizes = "--patch 16 --width 16 --heads 2 --window 4 --levels 1".split()
    command = (
        "train cdeit --data-path gone --global-batch-size 8 --epochs 2 --log-every 1 --num-workers 2"
        " --run run".split()
    )
    assert cli.main([*command, *sizes]) == 0
    out = capsys.readouterr().out
    assert "because gone does not exist" in out and "batch 8, 4 steps" in out and "Tikhonov" in out
    assert [r["step"] for r in Run.find("run").records("train")] == [1, 2, 3, 4]
    (tmp_path / "data/data2017").symlink_to(real_data / "eit-uef2017/test")
    # The sizes are the run's own; they need not be said again.
    assert cli.main("test cdeit --data uef2017 --sampling-steps 2 --run run".split()) == 0
    out = capsys.readouterr().out
    assert ": 22 samples" in out and "all zero" in out
    for name in ("predictions/uef2017.npz", "pictures/predictions.png"):
        assert (tmp_path / "run" / name).stat().st_size > 500, name


@pytest.mark.slow
def test_cdeit_on_two_processes_and_as_one_program_on_four_devices_equals_one(tank, tmp_path, xla):
    """The same timesteps and the same noise for every sample, the same scores: by the command line, each in a
    process."""
    both = "--batch-size 8 --sampling-steps 2".split()
    options = "--epochs 2 --log-every 1 --lr 1e-3 --objective l2 --eval-every 2".split()
    sizes = "--patch 16 --width 16 --heads 2 --window 4 --levels 1".split()

    def ran(*commands, **variables):
        """What the last of these commands printed, all run by one process."""
        program = (
            "import json, sys; from tpukit import cli\nfor c in json.loads(sys.argv[1]): print('NEXT');"
            " assert cli.main(c) == 0"
        )
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(commands)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split("NEXT")[-1]

    losses, scores = {}, {}
    for name, cores, variables in (
        ("one", ["--cores", "1"], {}),
        ("two", ["--cores", "2"], {}),
        ("spmd", ["--cores", "4", "--parallel", "spmd"], {"PJRT_DEVICE": "CPU"}),
    ):
        place = ["cdeit", "--data-path", str(tank), "--run", name, *cores, *both]
        tested = ran(["train", *place, *options, *sizes], ["test", *place], **variables)
        run = Run.find(name)
        losses[name] = [r["loss"] for r in run.records("train")]
        scores[name] = run.records("evaluation")[-1]["scores"]
        assert f"{scores[name]['rmse']:.4f}" in tested
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4) and losses["spmd"] == pytest.approx(
        losses["one"], rel=1e-3
    )
    assert scores["one"]["cc"] != 0
    assert all(
        s["images"] == 5 and s["rmse"] == pytest.approx(scores["one"]["rmse"], rel=1e-3)
        for s in scores.values()
    )


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--error", "Unsupported nprocs (8)"]])
def test_a_reader_that_goes_away_gives_no_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "tpukit", *words], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert ran.returncode == 1 and ran.stderr == ""


@pytest.mark.slow
def test_a_training_whose_reader_goes_away_is_trained_to_its_end(digits, tmp_path):
    words = f"train mnist --dataset-dir {digits} --run {tmp_path / 'run'} --epochs 1 --batch-size 16".split()
    ran = subprocess.Popen(
        [sys.executable, "-u", "-m", "tpukit", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ran.stdout.readline().startswith("dataset mnist")
    ran.stdout.close()
    assert "Traceback" not in ran.stderr.read() and ran.wait() == 1
    assert Run(tmp_path / "run").records("evaluation")[-1]["step"] == 12


@pytest.fixture
def without_torch(tmp_path):
    """Runs the command line in a process that finds a broken torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    return lambda *argv: subprocess.run(
        [sys.executable, "-m", "tpukit", *argv], env=environ, capture_output=True, text=True
    )


@pytest.mark.parametrize("command", ["train", "plan", "test"])
def test_where_torch_is_broken_doctor_is_named_instead_of_a_traceback(command, without_torch):
    ran = without_torch(command, "mnist")
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert ran.stderr.startswith("tpukit: torch is broken") and "tpukit doctor" in ran.stderr


def test_merging_measurements_needs_no_torch(without_torch):
    ran = without_torch("compare")
    assert ran.returncode == 0 and "Published, not measured" in ran.stdout, ran.stderr


LEAVING = """
import atexit, os, sys, types
torch_version, cudnn_version, used, *sys.argv = sys.argv[1:]
cudnn = types.SimpleNamespace(version=lambda: int(cudnn_version))
cuda = types.SimpleNamespace(is_initialized=lambda: used == "used")
backends = types.SimpleNamespace(cudnn=cudnn)
sys.modules["torch"] = types.SimpleNamespace(__version__=torch_version, cuda=cuda, backends=backends)
atexit.register(os._exit, 99)  # in place of the libraries' end, which comes after what a command registers
from tpukit import cli
def command(argv):
    atexit.register(print, "saved")
    if argv == ["stopped"]:
        sys.exit(143)
    return 2
cli._run = command
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    "versions, use, command, code",
    [
        (("2.9.0+cu128", "91002"), "used", "finished", 2),
        (("2.9.1", "91002"), "used", "stopped", 143),
        (("2.9.0", "91002"), "unused", "finished", 99),
        (("2.9.0", "90900"), "used", "finished", 99),
        (("2.10.0", "91002"), "used", "finished", 99),
    ],
)
def test_a_command_ends_before_cudnn_does_where_that_crashes_and_after_all_else(versions, use, command, code):
    """99: the process ended as usual."""
    words = [sys.executable, "-c", LEAVING, *versions, use, "tpukit", command]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr
    assert code == 99 or "saved" in ran.stdout
