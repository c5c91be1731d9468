"""The run directory: settings, records, progress, locks, and what is refused."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch

from tests.conftest import SMALL, best_weights, exact, refuses, same
from tests.tpukit.runs.store import content
from tpukit import MNIST, MSHNet, Run, launch, train
from tpukit.devices.runtime import Runtime
from tpukit.reporting import display

WRONG = ["{", "[]", '{"id": "1", "task": "mnist", "settings": 3}', '{"task": "mnist", "settings": {}}']


@pytest.mark.parametrize("content", WRONG)
def test_a_damaged_config_is_named_whoever_reads_it(content, tmp_path):
    run = Run.open(tmp_path / "run", MNIST())
    (run.path / "config.json").write_text(content)
    for read in (lambda: Run.find(run.path).config, lambda: Run.open(run.path, MNIST())):
        with refuses(run.path / "config.json"):
            read()


def test_a_run_that_cannot_be_written_in_is_shown_all_the_same(trained, capsys):
    _, run = trained
    (run.path / "pictures").touch()  # no folder can be made there
    display.show(run)
    shown = capsys.readouterr().out
    assert "Scores after epoch" in shown and "picture not saved at" in shown and "picture:" not in shown


def test_no_control_character_reaches_the_log_or_the_console(tmp_path, capsys):
    Run(tmp_path).print("class \x1b]0;title\x07 and caf\udce9")
    shown = (tmp_path / "log.txt").read_text() + "".join(capsys.readouterr())
    assert shown.count("class \\x1b]0;title\\x07 and caf\\udce9") == 2 and "\x1b" not in shown


@pytest.mark.parametrize("damage", ['{"kind": "no', "[" * 100_000 + "\n"], ids=["cut short", "too deep"])
def test_a_damaged_record_is_left_out_and_the_next_one_stands_on_a_line_of_its_own(damage, tmp_path):
    run = Run.open(tmp_path / "run", MNIST())
    run.log("note", 1, value=1)
    with open(run.path / "records.jsonl", "a") as file:
        file.write(damage)
    run.log("note", 2, value=2)
    with pytest.warns(UserWarning, match="line 2 "):
        assert [r["value"] for r in run.records()] == [1, 2]


@pytest.mark.parametrize("call, untouched", [("builtins.open", open), ("os.replace", os.replace)])
def test_a_run_folder_that_became_read_only_is_explained(call, untouched, trained, monkeypatch):
    task, run = trained

    def refusing(path, *arguments, **options):
        if str(path).startswith(str(run.path)) and arguments != ("rb",):  # what is read is there
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return untouched(path, *arguments, **options)

    monkeypatch.setattr(call, refusing)
    with refuses(run.path, "read-only file system"):
        Run.open(run.path, task)


def test_what_tpukit_did_not_write_stays(trained, cpu):
    task, run = trained
    own = [
        "checkpoints/step-best.pt",
        "checkpoints/step-1.pt",
        "checkpoints/.step-notes.partial",
        f"checkpoints/.step-00000001.pt.{os.getppid()}.partial",  # of a process that lives
        "notes.txt",
    ]
    for name in own:
        (run.path / name).write_text("mine")
    left = run.path / "checkpoints/.step-00000001.pt.999999999.partial"  # of a process that was killed
    left.write_text("half")
    more = dataclasses.replace(task, epochs=3)
    train(more, Run.open(run.path, more), runtime=cpu, progress=False)
    assert [(run.path / name).read_text() for name in own] == ["mine"] * len(own) and not left.exists()


def test_a_run_does_not_start_and_is_not_backed_up_among_other_files(tmp_path):
    for name in ("project/train.py", "strange/cores/rank-00.log", "looked at/.ipynb_checkpoints/a"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("theirs")
    before = sorted(tmp_path.rglob("*"))
    with refuses(tmp_path / "project", "train.py"):
        Run.open(tmp_path / "project", MNIST())
    with refuses(tmp_path / "strange", "cores"):
        Run.open(tmp_path / "strange", MNIST())
    assert sorted(tmp_path.rglob("*")) == before
    with refuses(tmp_path / "project", "train.py"):
        Run.open(tmp_path / "run", MNIST(), backup=tmp_path / "project")
    assert not (tmp_path / "run/config.json").exists()
    assert Run.open(tmp_path / "looked at", MNIST()).checkpoints() == []


HOLDS = """
import sys
from pathlib import Path
from tpukit.runs.folder_lock import exclusive_lock

with exclusive_lock(Path(sys.argv[1])):
    print(flush=True)
    input()
"""


@contextlib.contextmanager
def holding(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_training_in_a_run_folder_is_refused_with_host_and_pid_until_the_first_ends(trained, cpu):
    task, run = trained
    before = (run.path / "config.json").read_bytes()
    with holding(run.path / ".lock") as first:
        with refuses(first.pid, socket.gethostname(), run.path):
            train(task, run, runtime=cpu, progress=False)
        with refuses(first.pid):
            Run.open(run.path, dataclasses.replace(task, epochs=99))
        assert (run.path / "config.json").read_bytes() == before
        assert Run.find(run.path).records()  # a reader needs no lock
    assert (run.path / ".lock").read_text()  # the first was killed
    train(task, run, runtime=cpu, progress=False)
    assert (run.path / ".lock").read_text() == ""


def test_where_a_disk_has_no_locks_the_one_that_came_first_ends_at_its_next_save(tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    first, second = (Run.open(tmp_path / "run", MNIST()) for _ in range(2))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with contextlib.ExitStack() as others:
        with first.lock():
            first.save(dict(a=1), 1)
            monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
            others.enter_context(second.lock())
            with refuses(f"process {os.getpid()} on elsewhere", first.path):
                first.save(dict(a=2), 2)
        second.save(dict(a=3), 3)
        assert [entry["step"] for entry in second.checkpoints()] == [3, 1]
    assert (tmp_path / "run/.lock").read_bytes() == b""


@pytest.mark.parametrize("lock", [".lock", ".launch.lock"])
def test_a_second_launch_is_refused_and_leaves_what_the_first_wrote(lock, digits, tmp_path, monkeypatch):
    # Other tests have opened the device.
    monkeypatch.setattr("tpukit.launching.launcher.runtime_class", lambda env: Runtime)
    task = MNIST(dataset_dir=digits, epochs=1, **SMALL)
    run = Run.open(tmp_path / "run", task)
    (run.path / "cores").mkdir()
    kept = [run.path / name for name in ("cores/rank-00.log", "cores/rank-00.step", "progress.json")]
    for path in kept:
        path.write_text("{}")
    with holding(run.path / lock) as first, refuses(first.pid):
        launch(train, task, run, cores=2)
    assert all(path.read_text() == "{}" for path in kept)


def test_what_a_lost_process_of_another_host_left_keeps_nobody_out(tmp_path):
    run = Run.open(tmp_path / "run", MNIST())
    (run.path / ".lock").write_text("process 7 on elsewhere")
    (run.path / "progress.json").touch()
    with run.lock():
        assert str(os.getpid()) in (run.path / ".lock").read_text()


def test_progress_is_written_twice_a_second_at_most_and_at_the_end(tmp_path, monkeypatch):
    run, now = Run.open(tmp_path / "run", MNIST()), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seen = []
    for now[0], step in ((100.0, 1), (100.4, 2), (100.6, 3), (100.7, 4), (100.8, 9)):
        run.write_progress(step=step, total=9)
        seen.append(run.read_progress()["step"])
    assert seen == [1, 1, 3, 3, 9]


def test_a_run_of_other_settings_or_of_another_task_is_refused_naming_them(trained, infrared):
    task, run = trained
    with refuses("batch_size", 8, 16):
        Run.open(run.path, dataclasses.replace(task, batch_size=16))
    with refuses("mnist", "mshnet"):
        Run.open(run.path, MSHNet(dataset_dir=infrared))
    Run.open(run.path, dataclasses.replace(task, epochs=9, num_workers=0))
    with refuses(run.path.parent, run.path):
        Run.find(run.path.parent)
    config = json.loads((run.path / "config.json").read_text())
    config["settings"]["dropout"] = 0.5  # of a class from which the user has removed it since
    (run.path / "config.json").write_text(json.dumps(config))
    with refuses("dropout", 0.5, "no such setting"):
        Run.open(run.path, task)


@pytest.mark.parametrize("gone", ["records.jsonl", "best.safetensors"])
def test_results_whose_checkpoints_are_gone_are_not_trained_over(gone, trained):
    task, run = trained
    shutil.rmtree(run.path / "checkpoints")
    (run.path / gone).unlink()
    before = content(run.path)
    for use in (lambda: Run.open(run.path, task), run.restore):
        with refuses(run.path):
            use()
    assert content(run.path) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_though_it_has_best_weights(
    digits, tmp_path, cpu
):
    task = MNIST(dataset_dir=digits, epochs=1, batch_size=50)
    run = Run.open(tmp_path / "run", task)
    run.log("train", 3)
    run.save_best(dict(weight=torch.ones(1)), epoch=0)
    with refuses("seed", 7):
        Run.open(run.path, dataclasses.replace(task, seed=7))
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    straight = Run.open(tmp_path / "straight", task)
    train(task, straight, runtime=cpu, progress=False)
    assert exact(run) == exact(straight) and same(best_weights(run), best_weights(straight))


def test_after_an_error_before_the_first_step_the_same_folder_takes_other_settings(digits, tmp_path, cpu):
    task = MNIST(dataset_dir=digits, batch_size=300)
    run = Run.open(tmp_path / "run", task)
    with refuses(300, 200):
        train(task, run, runtime=cpu, progress=False)
    task = MNIST(dataset_dir=digits, batch_size=100, epochs=1)
    train(task, Run.open(run.path, task), runtime=cpu, progress=False)
    with refuses("batch_size", 100, 50):  # a run that was trained keeps its settings
        Run.open(run.path, MNIST(dataset_dir=digits, batch_size=50))
