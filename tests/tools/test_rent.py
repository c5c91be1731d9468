"""Renting through SkyPilot: the cost, the task file as YAML, a shell and SkyPilot's parser read it, a
recording `sky`."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import papermill
import pytest
import yaml

from tests.test_notebooks import run_notebook, text
from tpukit import cli
from tpukit.host.errors import TpukitError
from tpukit.tools import prices
from tpukit.tools import rent as tool

SOURCE = "git+https://github.com/me/tpukit"
TRAIN = ("train", "mnist", "--epochs", "3")


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def task(accelerator="v5litepod-8", command=TRAIN, **options):
    given = dict(name="tpukit", spot=False, zone="", hours=4, data="", bucket="", source=SOURCE)
    return tool.task_yaml(accelerator, command, **given | options)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A `sky` on PATH that records how it was called, prints $SKY_SAYS and ends with $SKY_CODE. Returns the
    list of calls."""
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path / "bin/sky", 'echo "$@" >> "$SKY_CALLS"; echo "$SKY_SAYS"; exec $SKY_THEN')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SKY_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("SKY_THEN", "true")

    def read():
        return (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []

    return read


# The cost


@pytest.mark.parametrize(
    "accelerator, hardware, count",
    [
        ("v5litepod-8", "TPU v5e", 8),
        ("v6e-4", "TPU v6e", 4),
        ("v5p-8", "TPU v5p", 4),
        ("v4-16", "TPU v4", 8),
        ("T4:2", "T4", 2),
    ],
)
def test_the_cost_is_the_list_price_of_all_chips_for_all_hours(accelerator, hardware, count):
    (price,) = [
        price for price in prices.read() if (price.hardware, price.place) == (hardware, "Google Cloud")
    ]
    assert f"${count * price.usd_per_hour * 3:.2f} for 3 h" in tool.describe_cost(accelerator, hours=3)
    assert f"${count * price.spot_usd_per_hour:.2f} per hour" in tool.describe_cost(accelerator, spot=True)


@pytest.mark.parametrize("accelerator", ["H100:8", "B200:1"])  # a row without a figure, and none
def test_an_unknown_price_is_not_a_number(accelerator):
    sentence = tool.describe_cost(accelerator, hours=3)
    assert "$" not in sentence and f"sky gpus list {accelerator[:-2]}" in sentence


class Terminal:
    """Standard input of a terminal with one answer; `shown`: what was printed before it."""

    def __init__(self, answer, capsys):
        self.answer, self.capsys = answer, capsys

    def isatty(self):
        return True

    def readline(self):
        self.shown = self.capsys.readouterr().out
        return self.answer


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "yes\n"])  # "": Ctrl-D
def test_the_cost_is_shown_before_the_question_and_only_a_yes_starts_it(answer, calls, monkeypatch, capsys):
    terminal = Terminal(answer, capsys)
    monkeypatch.setattr(sys, "stdin", terminal)
    started = cli.main(["rent", "v5litepod-8", "--spot", "--source", SOURCE, "--start", "--", *TRAIN]) == 0
    assert "$7.84" in terminal.shown and started == (answer == "yes\n") == (len(calls()) == 1)


def test_nothing_starts_where_nobody_can_be_asked(calls, capsys):
    assert cli.main(["rent", "v5litepod-8", "--source", SOURCE, "--start", "--", *TRAIN]) == 1
    assert "--yes" in capsys.readouterr().err and calls() == []


# The task file


@pytest.mark.parametrize("accelerator", ["v5litepod-1", "v6e-8", "v4-16", "T4:1"])
@pytest.mark.parametrize(
    "options", [{}, dict(spot=True, bucket="gs://my-runs"), dict(zone="us-east5-a", data="gs://my-data")]
)
def test_every_task_deletes_its_machine_when_idle(accelerator, options):
    assert yaml.safe_load(task(accelerator, **options))["resources"]["autostop"] == dict(
        idle_minutes=10, wait_for="jobs", down=True
    )


def test_the_options_are_in_the_task():
    plain = yaml.safe_load(task("T4:2"))
    assert plain["resources"]["accelerators"] == "T4:2" and plain["resources"]["use_spot"] is False
    assert (
        "file_mounts" not in plain
        and "accelerator_args" not in plain["resources"]
        and "torch_xla" not in plain["setup"]
    )
    full = yaml.safe_load(
        task(
            "v6e-8",
            name="no",
            spot=True,
            zone="us-east5-a",
            hours=1.5,
            data="gs://my-data",
            bucket="gs://my-runs",
        )
    )
    assert full["name"] == "no"  # a string, not YAML's false
    resources = full["resources"]
    assert resources["accelerators"] == "tpu-v6e-8" and resources["accelerator_args"] == dict(
        runtime_version="v2-alpha-tpuv6e"
    )
    assert resources["use_spot"] is True and resources["infra"] == "gcp/us-east5/us-east5-a"
    assert full["file_mounts"] == {
        "/data": "gs://my-data",
        "/backup": dict(source="gs://my-runs", mode="MOUNT"),
    }
    assert "timeout --kill-after=10m 5400s" in full["run"] and full["run"].endswith(
        "--epochs 3 --backup /backup/no\n"
    )


HOSTILE = [
    "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"', "\\", "a b", "# x", ": y", "- z", "${HOME}", "{{x}}", "{x}",
    "%s", "|", "&& touch pwned", "", "*", "中文", "\N{GRINNING FACE}", "key: [1, 2]", "!!python/object:os.system", "--", "~",
]  # fmt: skip


def test_hostile_words_reach_the_training_as_they_are_and_run_nothing(tmp_path):
    command = ("train", "mnist", *HOSTILE)
    source = "git+https://github.com/me/x'; touch pwned; echo '$(touch pwned)"
    written = yaml.safe_load(task(command=command, source=source, bucket="gs://my-runs"))
    record = "printf '%s\\0' \"$@\" > ~/args"
    write_program(tmp_path / "tpukit-python/bin/tpukit", record)
    write_program(tmp_path / ".local/bin/uv", record)
    for script, expected in (("run", [*command, "--backup", "/backup/tpukit"]), ("setup", None)):
        subprocess.run(
            ["bash", "-c", written[script]],
            env=dict(os.environ, HOME=str(tmp_path)),
            cwd=tmp_path,
            check=True,
        )
        got = (tmp_path / "args").read_bytes().decode().split("\0")[:-1]
        assert got == expected if expected else got[-1] == source
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "refused",
    [
        *[
            dict(command=(*TRAIN, word))
            for word in ("a\nb", "\r", "\0", "\x7f", "\x85", "\u2028", "\ud800", "\t")
        ],
        *[dict(command=command) for command in ((), ("train",), ("doctor",), ("train", "rm"))],
        *[dict(name=name) for name in ("", "A", "a b", "-a", "a-", "a" * 31, "../a", "a\n", "ä")],
        *[
            dict(bucket=bucket)
            for bucket in (
                "b",
                "s3://bbb",
                "gs://",
                "gs://a b",
                "gs://bbb\n",
                "gs://bbb}, x: {",
                "gs://bbb/x",
            )
        ],
        *[dict(data=data) for data in ("/home", "gs://b;x", "gs://bbb\nx: y")],
        *[dict(zone=zone) for zone in ("us-central1", "us-central1-a/x", "us-central1-a\n", "*")],
        *[dict(hours=hours) for hours in (0, -1, float("nan"), float("inf"), 169)],
        *[dict(source=source) for source in ("", "-r/etc/passwd", "a\nb", tool.SOURCE)],
        *[
            dict(accelerator=name)
            for name in ("", "v5e-8", "v5litepod", "v4-3", "v6e-0", "v6e-８", "T4", "T4:0", "T4:1\n", "a b:1")
        ],
    ],
    ids=repr,
)
def test_what_cannot_be_used_is_refused_before_a_file_is_written(refused, calls, tmp_path):
    options = dict(accelerator="v5litepod-8", command=TRAIN, source=SOURCE) | refused
    with pytest.raises(TpukitError):
        tool.rent(options.pop("accelerator"), options.pop("command"), **options, start=True, yes=True)
    assert calls() == [] and not list(tmp_path.glob("*.yaml"))


def test_an_unfilled_repository_is_refused_and_the_message_names_the_option(calls, capsys):
    assert cli.main(["rent", "v5litepod-8", "--start", "--yes", "--", *TRAIN]) == 1
    assert "--source" in capsys.readouterr().err and calls() == []


def test_an_edited_task_file_is_not_overwritten(calls, tmp_path):
    for _ in range(2):
        assert tool.rent("v5litepod-8", TRAIN, source=SOURCE).read_text() == task()
    (tmp_path / "tpukit.yaml").write_text("mine")
    with pytest.raises(TpukitError, match="tpukit.yaml"):
        tool.rent("v5litepod-8", TRAIN, source=SOURCE)
    assert (tmp_path / "tpukit.yaml").read_text() == "mine"
    for out in (tmp_path, tmp_path / "tpukit.yaml/below"):
        with pytest.raises(TpukitError):
            tool.rent("v5litepod-8", TRAIN, source=SOURCE, out=out)


PARSE = """
import sys, sky
for path in sys.argv[1:]:
    (r,) = sky.Task.from_yaml(path).resources
    print(r.accelerators, r.accelerator_args, r.use_spot, r.infra.zone, r.autostop_config.idle_minutes, r.autostop_config.down)
"""


@pytest.mark.skipif(
    not importlib.util.find_spec("sky"), reason="SkyPilot is not installed: pip install 'skypilot[gcp]'"
)
def test_skypilots_own_parser_reads_the_tasks(tmp_path):
    written = {
        "v5litepod-8": task(spot=True, bucket="gs://my-runs", data="gs://my-data"),
        "v6e-4": task("v6e-4", zone="us-east5-a", command=("train", "mnist", *HOSTILE)),
        "v4-16": task("v4-16"),
        "T4:2": task("T4:2"),
    }
    for number, content in enumerate(written.values()):
        (tmp_path / f"{number}.yaml").write_text(content)
    words = [sys.executable, "-c", PARSE, *sorted(map(str, tmp_path.glob("*.yaml")))]
    ran = subprocess.run(
        words, capture_output=True, text=True, env=dict(os.environ, HOME=str(tmp_path)), check=True
    )
    assert ran.stdout.splitlines() == [
        "{'tpu-v5litepod-8': 1} {'runtime_version': 'v2-alpha-tpuv5-lite'} True None 10 True",
        "{'tpu-v6e-4': 1} {'runtime_version': 'v2-alpha-tpuv6e'} False us-east5-a 10 True",
        "{'tpu-v4-16': 1} {'runtime_version': 'tpu-ubuntu2204-base'} False None 10 True",
        "{'T4': 2} None False None 10 True",
    ]


@pytest.mark.parametrize("accepts", [True, False])
def test_skypilots_parser_is_asked_where_it_is_installed(accepts, calls, tmp_path, monkeypatch):
    (tmp_path / "sky.py").write_text(
        f"class Task:\n    from_yaml = {{'{tmp_path}/{accepts}.yaml': None}}.__getitem__\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sky", raising=False)
    path = tmp_path / "True.yaml"  # the one that this parser knows
    if accepts:
        assert tool.rent("v5litepod-8", TRAIN, source=SOURCE, out=path) == path
    else:
        with pytest.raises(tool.RentError) as error:
            tool.rent("v5litepod-8", TRAIN, source=SOURCE, out=path, start=True, yes=True)
        assert error.value.code == "invalid-task" and calls() == []
    assert sys.modules.pop("sky")


# Starting it


def test_a_start_hands_the_file_to_sky_and_names_the_commands_that_follow(calls, tmp_path, capsys):
    given = ["rent", "v5litepod-8", "--name", "mine", "--source", SOURCE, "--start", "--yes"]
    assert cli.main([*given, "--", *TRAIN]) == 0
    assert "sky down mine" in capsys.readouterr().out
    assert (
        cli.main([*given, "--jobs", "--spot", "--bucket", "gs://my-runs", "--out", "jobs.yaml", "--", *TRAIN])
        == 0
    )
    assert "sky jobs cancel -n mine" in capsys.readouterr().out
    assert calls() == [
        f"launch --cluster mine --detach-run --yes {tmp_path}/mine.yaml",
        f"jobs launch --name mine --detach-run --yes {tmp_path}/jobs.yaml",
    ]


def test_a_managed_job_without_a_bucket_is_refused(calls):
    with pytest.raises(TpukitError, match="--bucket"):
        tool.rent("v5litepod-8", TRAIN, source=SOURCE, jobs=True, start=True, yes=True)
    assert calls() == []


# What SkyPilot 0.14.1 printed here, without an account or network, or has in its source -> the code.
REFUSALS = {
    "sky.exceptions.NoCloudAccessError: Cloud access is not set up. Run: sky check": "access",
    "ResourcesUnavailableError: Storage 'store: gcs' specified, but GCP access is disabled. To fix, enable": (
        "access"
    ),
    "NotSupportedError: Cloud-based file_mounts are specified, but no cloud storage is available. Please": (
        "access"
    ),
    "Task 'tpukit' requires GCP which is not enabled. To enable access, change the task cloud requirement": (
        "access"
    ),
    "google.auth.exceptions.RefreshError: ('invalid_grant: Bad Request', {'error': 'invalid_grant'})": (
        "access"
    ),
    "google.auth.exceptions.RefreshError: Reauthentication is needed. Please run `gcloud auth": "access",
    "Found no quota for tpu-v6e-8 (Spot) in region us-east5. To request quotas, check the instruction": (
        "quota"
    ),
    "Quota 'TPUV2sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted. Limit 32 in region europe-west4": (
        "quota"
    ),
    "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-central1-a.": (
        "quota"
    ),
    'There is no more capacity in the zone "europe-west4-a"; you can try in another zone': "capacity",
    "code ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": "capacity",
    "Location us-east1-d is not found or access is unauthorized.": "permission",
    "No resource satisfying the request. Try a different zone": "not-offered",
    "ResourcesMismatchError: Requested resources do not match the existing cluster.": "name-taken",
    "a new kind of failure": "unknown",
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_refusal_of_sky_is_explained_with_how_to_delete_what_it_made(message, calls, monkeypatch, capsys):
    monkeypatch.setenv("SKY_SAYS", message)
    monkeypatch.setenv("SKY_THEN", "false")
    with pytest.raises(tool.RentError) as error:
        tool.rent("v5litepod-8", TRAIN, source=SOURCE, start=True, yes=True)
    assert error.value.code == REFUSALS[message] and "sky down tpukit" in str(error.value)
    assert message in capsys.readouterr().out


def test_a_missing_sky_is_told_how_to_install_before_anything_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tool.RentError, match="pip install") as error:
        tool.rent("v5litepod-8", TRAIN, source=SOURCE, start=True)
    assert error.value.code == "not-installed"


def test_an_interrupt_tells_that_skypilot_continues_and_how_to_delete(calls, monkeypatch):
    monkeypatch.setenv("SKY_THEN", "sleep 60")
    words = [
        sys.executable,
        "-m",
        "tpukit",
        "rent",
        "v5litepod-8",
        "--source",
        SOURCE,
        "--start",
        "--yes",
        "--",
        *TRAIN,
    ]

    def as_in_a_terminal():
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal)
    deadline = time.monotonic() + 30
    while not calls() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert "sky down tpukit" in process.communicate(timeout=30)[1] and process.returncode == 130


# The pages and the notebook


def test_every_rent_command_of_the_pages_is_accepted_by_a_recording_sky(calls, tmp_path):
    from tests.test_docs import ENGLISH, commands

    found = {c for path in ENGLISH for c in commands(path) if c.startswith("tpukit rent ")}
    assert len(found) >= 3
    for command in found:
        own, _, training = command.removeprefix("tpukit ").partition(" -- ")
        (tmp_path / "tpukit.yaml").unlink(missing_ok=True)
        assert cli.main([*own.split(), "--source", SOURCE, "--yes", "--", *training.split()]) == 0, command
    assert len(calls()) == sum("--start" in command for command in found) > 0


NOTEBOOK = "cloud_tpu_vm.ipynb"


def test_the_notebook_shows_cost_and_task_and_starts_nothing_unless_told_to(calls, tmp_path):
    notebook = run_notebook(NOTEBOOK, tmp_path)
    output = text(notebook)
    for words in ("$2.40", "$19.20", "down: true", "tpu-v5litepod-1", "sky launch --cluster tpukit"):
        assert words in output, words
    assert calls() == []


def test_the_notebook_starts_nothing_before_it_knows_where_the_machine_gets_tpukit(calls, tmp_path):
    with pytest.raises(papermill.PapermillExecutionError, match="--source"):
        run_notebook(NOTEBOOK, tmp_path, GO=True)
    assert calls() == []


def test_the_notebook_starts_a_managed_job_when_told_to(calls, tmp_path):
    run_notebook(
        NOTEBOOK, tmp_path, GO=True, SPOT=True, JOBS=True, NAME="mine", BUCKET="gs://my-runs", SOURCE=SOURCE
    )
    assert calls() == [
        f"jobs launch --name mine --detach-run --yes {tmp_path}/mine.yaml",
        "status -u --refresh",
    ]
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["resources"]["use_spot"] is True
