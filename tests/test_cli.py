"""The command line, as a user types it."""

import json
import os
import subprocess
import sys

import pytest
import torch

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
    for score in ("iou", "niou", "pixel_accuracy", "pd", "fa", "as the published code counts"):
        assert score in out
    assert cli.main(["show", "run"]) == 0
    assert "It ran on cpu" in capsys.readouterr().out and (tmp_path / "run/pictures/curves.png").exists()


def test_published_weights_as_a_pickled_state_dict_are_tested(infrared, tmp_path, capsys):
    from tpukit.workloads.mshnet.model import MSHNetModel

    torch.manual_seed(0)
    torch.save({"state_dict": MSHNetModel().state_dict(), "epoch": 7}, "published.tar")
    assert cli.main(["test", "mshnet", "--weights", "published.tar", "--dataset-dir", str(infrared), *TINY]) == 0
    assert ": 4 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["fly"], "no command 'fly'; there are: doctor, train, test, show, plan, simulate, cloud"),
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
        (["plan", "mshnet", "--chip", "v5e-8", "--batch-sizes", "12"], "a multiple of its 8 cores"),
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
    from tpukit import training

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted)
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
    """The same timesteps and the same noise for every sample, the same scores: by the command line, in processes of their own."""
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


# Rented machines: what is written, run against recording stand-ins


def written(capsys, *argv):
    assert cli.main(["cloud", *argv]) == 0
    return capsys.readouterr().out


def test_the_gcloud_script_requests_waits_trains_on_every_host_and_always_deletes(tmp_path, capsys):
    options = ["--accelerator", "v5litepod-16", "--name", "mine", "--zone", "us-west4-a", "--source", "tpukit==0.1"]
    script = written(capsys, "gcloud", *options, "--", "train", "mshnet", "--dataset-dir", "my data", "--epochs", "3")
    log = tmp_path / "log"
    (tmp_path / "gcloud").write_text(
        f"#!/bin/bash\nprintf '%s|' \"$@\" >> {log}; echo >> {log}\n"
        "[[ $* == *describe* ]] && echo ACTIVE\n[[ $* == *tpukit-python/bin/tpukit* ]] && exit $FAIL\ntrue\n"
    )
    (tmp_path / "gcloud").chmod(0o755)
    for fail in ("0", "7"):
        log.write_text("")
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAIL": fail}
        ran = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
        calls = [line.rstrip("|").split("|") for line in log.read_text().splitlines()]
        assert ran.returncode == int(fail), ran.stderr
        assert (
            calls[0]
            == (
                "compute tpus queued-resources create mine --node-id mine --zone us-west4-a --accelerator-type v5litepod-16 "
                "--runtime-version v2-alpha-tpuv5-lite --labels made-by=tpukit --spot"
            ).split()
        )
        ssh = [call for call in calls if "ssh" in call]
        assert all(
            call[:7] == "compute tpus tpu-vm ssh mine --zone us-west4-a".split() and "--worker=all" in call for call in ssh
        )
        assert "torch_xla[tpu]==2.9.0" in ssh[0][-1] and "tpukit==0.1" in ssh[0][-1]
        assert ssh[1][-1].endswith("tpukit train mshnet --dataset-dir 'my data' --epochs 3")
        assert calls[-1] == "compute tpus queued-resources delete mine --zone us-west4-a --force --quiet".split()


def test_the_skypilot_task_recovers_spot_machines_and_stops_idle_ones(capsys):
    import yaml

    task = yaml.safe_load(written(capsys, "skypilot", "--accelerator", "v6e-8", "--bucket", "gs://b", "--", "train", "mnist"))
    resources = task["resources"]
    assert resources["accelerators"] == "tpu-v6e-8" and resources["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv6e"}
    assert resources["use_spot"] and resources["job_recovery"] == "EAGER_NEXT_REGION"
    assert resources["autostop"] == {"idle_minutes": 10, "down": True}
    assert task["file_mounts"]["/run-copy"]["source"] == "gs://b" and "--backup /run-copy/tpukit" in task["run"]
    assert "torchrun" not in task["run"]
    task = yaml.safe_load(
        written(capsys, "skypilot", "--accelerator", "T4:2", "--nodes", "2", "--no-spot", "--", "train", "mnist")
    )
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "T4:2" and not task["resources"]["use_spot"]
    assert "--node-rank $SKYPILOT_NODE_RANK" in task["run"] and "-m -- tpukit train mnist" in task["run"]
    environ = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": os.environ["PATH"],
    }
    environ["SKYPILOT_NUM_GPUS_PER_NODE"] = "2"
    ran = subprocess.run(["bash", "-c", "echo " + task["run"]], env=environ, capture_output=True, text=True)
    assert "--nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 -m -- tpukit" in ran.stdout


@pytest.mark.parametrize(
    "argv, words",
    [
        (["sky"], "tpukit cloud gcloud"),
        (["gcloud", "--", "test", "mnist"], "train WORKLOAD"),
        (["gcloud", "--accelerator", "T4:2"], "'T4:2' is no TPU type that is known here: v6e-CORES"),
    ],
)
def test_impossible_rentals_are_refused(argv, words, capsys):
    assert cli.main(["cloud", *argv]) == 1
    assert words in capsys.readouterr().err
