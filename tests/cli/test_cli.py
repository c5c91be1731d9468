"""The command line, as a user types it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tpukit import Run, cli


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test in its own folder, on the plain CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


TINY = ["--base-size", "32", "--crop-size", "32", "--batch-size", "4", "--warm-epoch", "0", "--eval-every", "1"]


def test_train_goes_on_then_test_and_show_agree_with_it(infrared, tmp_path, capsys):
    train = ["train", "mshnet", "--dataset-dir", str(infrared), "--run", "run", "--lr", "0.05", *TINY]
    assert cli.main([*train, "--epochs", "1"]) == 0
    assert "dataset IRSTD-1k" in capsys.readouterr().out
    assert cli.main([*train, "--epochs", "2"]) == 0
    assert "resuming at step 4 of 8" in capsys.readouterr().out
    best = max(r["scores"]["iou"] for r in Run.find("run").records("evaluation"))
    assert cli.main(["test", "mshnet", "--weights", "run/best.safetensors", "--dataset-dir", str(infrared), *TINY]) == 0
    out = capsys.readouterr().out
    assert f"{best:.4f}" in out or f"{best:.3e}" in out
    for score in ("iou", "niou", "pixel_accuracy", "pd", "fa"):
        assert score in out
    assert cli.main(["show", "run"]) == 0
    assert "Scores after epoch 2" in capsys.readouterr().out and (tmp_path / "run/pictures/curves.png").exists()


def test_published_weights_as_a_pickled_state_dict_are_tested(infrared, tmp_path, capsys):
    from tpukit.workloads.mshnet.model import MSHNetModel

    torch.manual_seed(0)
    torch.save({"state_dict": MSHNetModel().state_dict(), "epoch": 7}, "published.tar")
    assert cli.main(["test", "mshnet", "--weights", "published.tar", "--dataset-dir", str(infrared), *TINY]) == 0
    assert ": 4 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        (
            ["fly"],
            "no command 'fly'; there are: doctor, train, test, show, report, watch, plan, compare, migrate, simulate, rent",
        ),
        (["train"], "needs a workload: mnist, mshnet"),
        (["train", "resnet"], "no workload 'resnet'; there are: mnist, mshnet"),
        (["train", "mshnet", "--use-tpu"], "--use-tpu is gone: tpukit takes the TPU when the session has one"),
        (["train", "mshnet", "--num-cores", "8"], "--num-cores is gone"),
        (["train", "mshnet", "--mode=train"], "two commands now"),
        (["train", "mshnet", "--dataset-dir", "/nowhere"], "dataset path /nowhere does not exist"),
        (["simulate", "mri"], "`tpukit simulate` knows one thing to simulate: eit"),
        (["simulate", "eit", "--workers", "0"], "workers=0"),
        (["simulate", "eit", "--check", "."], "no npz files in ."),
        (["simulate", "eit", "--seed", "-1"], "seed=-1"),
        (["plan", "mnist", "--chip", "v3-8"], "no chip 'v3-8'; there are: v5e-1, v5e-8, v6e-1"),
        (["plan", "mshnet", "--chip", "v5e-8", "--batch-sizes", "12"], "8 cores of v5e-8 cannot share it evenly: use 8 or 16"),
        (["doctor", "--model", "resnet"], "no workload 'resnet'"),
        (["show", "nothing-here"], "nothing-here is not a run directory"),
        (["test", "mnist", "--weights", "none.pth"], "weights none.pth: no such file"),
        (["test", "mnist"], "best.safetensors: no such file"),
    ],
)
def test_wrong_usage_is_explained_without_a_traceback(argv, words, capsys):
    assert cli.main(argv) == 1
    assert words in capsys.readouterr().err


def test_a_bad_value_is_explained_by_the_parser(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", "mshnet", "--epochs", "many"])
    assert exit.value.code == 2 and "epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["doctor", "--help"],
        ["train", "mshnet", "--help"],
        ["test", "mnist", "--help"],
        ["simulate", "eit", "--help"],
        ["plan", "cdeit", "--help"],
    ],
)
def test_every_command_has_help(argv):
    ran = subprocess.run([sys.executable, "-m", "tpukit", *argv], capture_output=True, text=True)
    assert ran.returncode == 0 and len(ran.stdout) > 200
    if "mshnet" in argv:
        for flag in ("--dataset-dir", "--base-size", "--crop-size", "--warm-epoch", "--batch-size", "--epochs", "--lr"):
            assert flag in ran.stdout
        assert "Learning rate of Adagrad" in ran.stdout


def test_the_usage_names_every_command():
    for name in cli.COMMANDS:
        assert f"\n  tpukit {name} " in cli.USAGE, name


def test_doctor_tells_machines_the_same_as_people(capsys, monkeypatch):
    from tpukit.tools import doctor

    monkeypatch.setattr(doctor, "import_problem", lambda package, environ: None)
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
    ran = subprocess.run([sys.executable, "-m", "tpukit", "--version"], env=environ, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.strip()


def test_simulate_train_and_test_cdeit_as_the_readme_says(real_data, tmp_path, capsys):
    assert cli.main("simulate eit --samples 16 --test-samples 3 --workers 1 --out data --seed 5".split()) == 0
    assert len(list((tmp_path / "data/train").glob("*.npz"))) == 16
    sizes = "--patch 16 --width 16 --heads 2 --window 4 --levels 1".split()
    command = "train cdeit --data-path gone --global-batch-size 8 --epochs 2 --log-every 1 --num-workers 2 --run run".split()
    assert cli.main([*command, *sizes]) == 0
    out = capsys.readouterr().out
    assert "because gone does not exist" in out and "batch 8, 4 steps" in out and "Tikhonov" in out
    assert [r["step"] for r in Run.find("run").records("train")] == [1, 2, 3, 4]
    (tmp_path / "data/data2017").symlink_to(real_data / "eit-uef2017/test")
    # The sizes are the run's own; they need not be said again.
    assert cli.main("test cdeit --data uef2017 --sampling-steps 2 --run run".split()) == 0
    out = capsys.readouterr().out
    assert ": 22 samples" in out and "all zero" in out
    for name in ("predictions/uef2017.npz", "predictions/uef2017.mat", "predictions/uef2017.csv", "pictures/predictions.png"):
        assert (tmp_path / "run" / name).stat().st_size > 500, name
    assert cli.main("simulate eit --check data/data2017".split()) == 0
    assert "on average over 22 samples" in capsys.readouterr().out


def test_cdeit_on_two_processes_and_as_one_program_on_four_devices_equals_one(tank, tmp_path, xla):
    """The same timesteps and the same noise for every sample, the same scores: by the command line, each in a process."""
    both = "--batch-size 8 --sampling-steps 2".split()
    options = "--epochs 2 --log-every 1 --lr 1e-3 --objective l2 --eval-every 2".split()
    sizes = "--patch 16 --width 16 --heads 2 --window 4 --levels 1".split()

    def ran(*command, **variables):
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
        done = subprocess.run(
            [sys.executable, "-m", "tpukit", *command], env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    losses, scores = {}, {}
    for name, cores, variables in (
        ("one", ["--cores", "1"], {}),
        ("two", ["--cores", "2"], {}),
        ("spmd", ["--cores", "4", "--parallel", "spmd"], {"PJRT_DEVICE": "CPU"}),
    ):
        place = ["cdeit", "--data-path", str(tank), "--run", name, *cores, *both]
        ran("train", *place, *options, *sizes, **variables)
        run = Run.find(name)
        losses[name] = [r["loss"] for r in run.records("train")]
        scores[name] = run.records("evaluation")[-1]["scores"]
        assert f"{scores[name]['rmse']:.4f}" in ran("test", *place, **variables)
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4) and losses["spmd"] == pytest.approx(losses["one"], rel=1e-3)
    assert scores["one"]["cc"] != 0
    assert all(s["images"] == 5 and s["rmse"] == pytest.approx(scores["one"]["rmse"], rel=1e-3) for s in scores.values())


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--error", "Unsupported nprocs (8)"]])
def test_a_reader_that_goes_away_gives_no_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run([sys.executable, "-m", "tpukit", *words], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ran.returncode == 1 and ran.stderr == ""


def test_a_training_whose_reader_goes_away_is_trained_to_its_end(digits, tmp_path):
    words = [
        "train",
        "mnist",
        "--dataset-dir",
        str(digits),
        "--run",
        str(tmp_path / "run"),
        "--epochs",
        "1",
        "--batch-size",
        "16",
    ]
    ran = subprocess.Popen(
        [sys.executable, "-u", "-m", "tpukit", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    return lambda *argv: subprocess.run([sys.executable, "-m", "tpukit", *argv], env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["train", "plan", "test"])
def test_where_torch_is_broken_doctor_is_named_instead_of_a_traceback(command, without_torch):
    ran = without_torch(command, "mnist")
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert "tpukit: torch is broken. `tpukit doctor` says what is missing" in ran.stderr


def test_merging_measurements_needs_no_torch(without_torch):
    ran = without_torch("compare")
    assert ran.returncode == 0 and "Published, not measured" in ran.stdout, ran.stderr
