"""Working on a rented machine: the scripts that run on it, run here; what a dry run prints; its own end."""

import os
import re
import shlex
import signal
import subprocess
import time

import pytest

from tests.tools.cloud import stand_in
from tests.tools.cloud.conftest import OURS, PLACE, as_in_a_terminal, ours, refused, rent, verbs, write_program
from tpukit import cli
from tpukit.tools.cloud import running
from tpukit.tools.cloud.guard import GUARD

# Working on a machine

FROM = ["--source", "tpukit==0.1"]


def test_run_installs_and_starts_on_every_host_then_watch_and_fetch_show_it(hosts, capsys, tmp_path):
    command = ["train", "mnist", "--dataset-dir", "my data", "--epochs", "3"]
    assert cli.main(["cloud", "run", "mine", "--source", "tpukit==0.1", "--", *command]) == 0
    said = capsys.readouterr().out
    assert said.count("tpukit train mnist --dataset-dir my data --epochs 3") == 2 and "started: tpukit cloud watch mine" in said
    assert "no word from what deletes this machine in the end" in said
    ssh = [call for call in stand_in.calls(hosts) if "ssh" in call]
    assert [call[:-2] for call in ssh] == [["compute", "tpus", "tpu-vm", "ssh", "mine", *PLACE, "--worker=all"]] * 2
    install, started = (call[-2].removeprefix("--command=") for call in ssh)
    assert "'torch_xla[tpu]==2.9.0' tpukit==0.1" in install and "nohup setsid" in started
    for host in (0, 1):
        assert "pip install --quiet --user uv" in (hosts / f"host-{host}/installed").read_text()
        log = hosts / f"host-{host}/tpukit-job/log.txt"
        assert log.read_text() == "tpukit train mnist --dataset-dir my data --epochs 3\nthe training ended with exit code 0\n"
    assert cli.main(["cloud", "watch", "mine"]) == 0
    said = capsys.readouterr().out
    assert "tpukit watch outputs/mnist --once" in said and "the training ended with exit code 0" in said
    assert cli.main(["cloud", "fetch", "mine"]) == 0 and cli.main(["cloud", "fetch", "mine", "--to", "here"]) == 0
    scp = [call for call in stand_in.calls(hosts) if "scp" in call]
    assert scp[0] == [
        "compute",
        "tpus",
        "tpu-vm",
        "scp",
        "--recurse",
        *PLACE,
        "mine:outputs/mnist",
        "outputs/mine",
        "--worker=0",
        "--quiet",
    ]
    assert (tmp_path / "outputs/mine/mnist/config.json").exists() and (tmp_path / "here/mnist/config.json").exists()


def test_a_training_outlives_the_connection_and_a_second_one_is_refused(hosts, monkeypatch, capfd):
    monkeypatch.setenv("NAP", "4")
    home = hosts / "host-0"
    script = running.start_script(["train", "mnist"], pause_s=0.2)
    environ = {**os.environ, "HOME": str(home)}
    # The shell is that of an ssh connection: it ends, and everything in its session is told to hang up.
    shell = subprocess.Popen(
        ["bash", "-c", script + "; sleep 60"],
        env=environ,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=as_in_a_terminal,
    )
    deadline = time.monotonic() + 30
    while not (home / "tpukit-job/log.txt").exists() or "tpukit train" not in (home / "tpukit-job/log.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(shell.pid, signal.SIGHUP)
    shell.wait()
    again = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    assert again.returncode == 3 and "a training runs here already" in again.stdout
    assert cli.main(["cloud", "run", "mine", *FROM, "--", "train", "mnist"]) == 1
    assert "a training runs here already" in capfd.readouterr().out
    assert not (home / "installed").exists()  # what it uses is not changed under it
    assert cli.main(["cloud", "watch", "mine"]) == 0  # follows it to its end
    assert "the training ended with exit code 0" in capfd.readouterr().out


def test_a_training_that_fails_at_once_shows_its_words(hosts, capsys):
    write_program(hosts / "host-0/tpukit-python/bin/tpukit", "echo 'tpukit: no data'; exit 1")
    stand_in.write(hosts, hosts=1)
    assert cli.main(["cloud", "run", "mine", *FROM, "--", "train", "mnist", "--run=runs/one"]) == 0
    assert "tpukit: no data\nthe training ended with exit code 1" in capsys.readouterr().out
    assert (hosts / "host-0/tpukit-job/run").read_text() == "runs/one\n"


def test_open_gives_the_terminal_to_ssh(hosts, capfd):
    assert cli.main(["cloud", "open", "mine", "--worker", "1"]) == 0
    assert capfd.readouterr().out == "a shell on host 1\n"
    assert stand_in.calls(hosts)[-1] == ["compute", "tpus", "tpu-vm", "ssh", "mine", *PLACE, "--worker=1"]


def test_delete_can_bring_the_run_back_first_and_deletes_nothing_where_that_fails(hosts, capsys, tmp_path):
    stand_in.write(hosts, refuse={"tpu-vm scp": [None, "[/usr/bin/ssh] exited with return code [255]."]})
    for host in (0, 1):
        (hosts / f"host-{host}/outputs/mnist").mkdir(parents=True)
        (hosts / f"host-{host}/tpukit-job").mkdir()
        (hosts / f"host-{host}/tpukit-job/run").write_text("outputs/mnist\n")
    assert cli.main(["cloud", "fetch", "mine"]) == 0
    assert "the machine is not reached over ssh" in refused(capsys, "delete", "mine", "--fetch", "--yes")
    assert "queued-resources delete" not in verbs(hosts)
    assert cli.main(["cloud", "delete", "mine", "--fetch", "--yes"]) == 0
    assert (
        verbs(hosts).index("tpu-vm scp") < verbs(hosts).index("queued-resources delete")
        and (tmp_path / "outputs/mine/mnist").is_dir()
    )


def test_nothing_is_installed_from_a_home_that_is_not_named(hosts, capsys):
    said = refused(capsys, "run", "mine", "--source", "git+https://github.com/NOBODY", "--", "train", "mnist")
    assert "names no repository, OWNER/NAME" in said and not (hosts / "host-0/installed").exists()


@pytest.mark.parametrize("argv", [["open"], ["watch"], ["fetch"], ["run"]])
def test_nothing_is_done_on_a_machine_that_is_not_there_or_not_ours(argv, google, capsys):
    argv = [*argv, "mine", *(["--", "train", "mnist"] if argv == ["run"] else [])]
    rent(google, stand_in.request("mine", state="WAITING_FOR_RESOURCES", labels=OURS))
    assert "no machine yet, or no more. Its request is WAITING_FOR_RESOURCES: in the queue" in refused(capsys, *argv)
    rent(google, *ours("mine", labels={}))
    assert "tpukit did not make it" in refused(capsys, *argv)
    assert not any("ssh" in call or "scp" in call for call in stand_in.calls(google))


@pytest.mark.parametrize("evil", ["../../etc", "a b", "$(touch x)", "-rf", ""])
def test_a_run_folder_is_not_taken_from_the_machine_as_it_comes(evil, hosts, capsys):
    (hosts / "host-0/tpukit-job").mkdir()
    (hosts / "host-0/tpukit-job/run").write_text(evil + "\n")
    assert "run folder" in refused(capsys, "fetch", "mine") and not any("scp" in call for call in stand_in.calls(hosts))


# What would be done


def without_chance(words):
    return [re.sub(r"tpukit-request=\w+", "", word) for word in words]


@pytest.mark.parametrize(
    "argv",
    [
        ["create", "mine", "--project", "mine", "--accelerator", "v6e-8", "--spot"],
        ["list", "--project", "mine"],
        ["open", "there", "--project", "mine", "--zone", "us-central1-a"],
        ["run", "there", *FROM, "--project=mine", "--zone=us-central1-a", "--", "train", "mnist", "--dataset-dir", "it's mine"],
        ["watch", "there", "--project", "mine", "--zone", "us-central1-a"],
        ["delete", "there", "--project", "mine", "--zone", "us-central1-a"],
        ["delete", "there", "--fetch", "--project", "mine", "--zone", "us-central1-a"],
    ],
    ids=lambda argv: " ".join(argv[:3]),
)
def test_a_dry_run_prints_exactly_the_commands_and_runs_none(argv, hosts, capsys):
    rent(hosts, *ours("there"))
    (hosts / "host-0/RUN").mkdir()
    if argv[0] != "run":
        (hosts / "host-0/tpukit-job").mkdir()
        for name, content in {"run": "RUN", "pid": "4194305", "log.txt": ""}.items():
            (hosts / "host-0/tpukit-job" / name).write_text(content)
    at = argv.index("--") if "--" in argv else len(argv)
    assert cli.main(["cloud", *argv[:at], "--dry-run", *argv[at:]]) == 0
    assert stand_in.calls(hosts) == []
    printed = shlex.split(
        re.sub(r"(?m)^#(?! By|!).*$", "", capsys.readouterr().out).partition("gcloud config")[2].join(["gcloud config", ""])
    )
    starts = [n for n, word in enumerate(printed) if word == "gcloud" and printed[n + 1] in ("config", "compute")]
    commands = [printed[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(printed)])]
    yes = ["--yes"] * (argv[0] in ("create", "delete"))
    assert cli.main(["cloud", *argv[:at], *yes, *argv[at:]]) == 0
    assert [without_chance(c) for c in commands] == [without_chance(c) for c in stand_in.calls(hosts)]


def test_a_dry_run_needs_no_gcloud_and_says_what_it_does_not_know(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    for argv in (["create"], ["list"], ["delete", "mine"], ["delete", "--expired"], ["fetch", "mine"], ["open", "mine"]):
        assert cli.main(["cloud", *argv, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "--project=PROJECT" in said and "# PROJECT is yours" in said
        assert argv[0] in ("create", "list") or "--zone=ZONE" in said


# What deletes the machine when nobody looks any more


def within(seconds, condition):
    """Wait until something is so. Returns whether it came so far."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def guard(google, minutes, patience_s, tmp_path):
    """The machine's own script with a stand-in gcloud; ends when it has asked for its end, or after a while."""
    script = GUARD.format(
        name="mine", zone="us-central1-a", project="mine", minutes=minutes, patience_s=patience_s,
        log=tmp_path / "guard.txt", end=tmp_path / "end",
    )  # fmt: skip
    write_program(tmp_path / "clock/sleep", "exec /bin/sleep 0.05")
    process = subprocess.Popen(
        ["bash", "-c", script], env={**os.environ, "PATH": f"{tmp_path}/clock:{os.environ['PATH']}"}, start_new_session=True
    )
    log = tmp_path / "guard.txt"
    assert within(60, lambda: log.exists() and "its" in log.read_text())  # it has looked at its request
    if within(1, lambda: "time is up" in log.read_text()):
        assert within(60, lambda: not stand_in.read(google)["nodes"])
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return [call for call in stand_in.calls(google) if "delete" in call]


def test_the_machine_deletes_itself_when_its_time_is_up_and_a_restart_gives_it_no_more(google, tmp_path):
    rent(google, *ours("mine"))  # asked for an hour ago
    assert guard(google, 60, 4200, tmp_path) == []
    end = int((tmp_path / "end").read_text())
    assert abs(end - time.time() - 3600) < 60 and "whether it may delete shows then" in (tmp_path / "guard.txt").read_text()
    assert guard(google, 60, 4200, tmp_path) == [] and int((tmp_path / "end").read_text()) == end
    (tmp_path / "end").write_text(str(int(time.time()) - 1))
    deletes = guard(google, 60, 4200, tmp_path)
    assert deletes[0] == ["compute", "tpus", "queued-resources", "delete", "mine", *PLACE, "--force", "--quiet", "--async"]
    assert stand_in.read(google)["nodes"] == []


def test_a_machine_that_comes_when_nobody_waits_any_more_goes_at_once(google, tmp_path):
    rent(google, *ours("mine"))
    assert guard(google, 60, 3500, tmp_path)


def test_a_machine_that_may_not_delete_itself_says_so(google, tmp_path):
    stand_in.write(
        google, refuse={"queued-resources describe": "PERMISSION_DENIED: Permission 'tpu.queuedResources.get' denied"}
    )
    guard(google, 60, 600, tmp_path)
    assert "NOT SAFE: its service account cannot even look" in (tmp_path / "guard.txt").read_text()
