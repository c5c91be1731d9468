"""The task files of docs/sky/, as YAML, bash and SkyPilot's own parser read them; the notebook of renting."""

import importlib.util
import os
import re
import subprocess
import sys

import papermill
import pytest
import yaml

from tests.conftest import ROOT
from tests.test_notebooks import run_notebook, text
from tpukit.devices.chips import find_chip
from tpukit.tools.measure import read_prices

FILES = sorted((ROOT / "docs/sky").glob("*.yaml"))
# The keys of SkyPilot's task file that these use (docs.skypilot.co, "SkyPilot YAML").
KEYS = {"name", "envs", "resources", "file_mounts", "setup", "run"}
RESOURCES = {"infra", "accelerators", "accelerator_args", "use_spot", "autostop"}


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A `sky` on PATH that records how it was called. Returns a function that lists the calls."""
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path / "bin/sky", 'echo "$@" >> "$SKY_CALLS"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SKY_CALLS", str(tmp_path / "calls"))
    return lambda: (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


# Of a TPU VM for PyTorch, by the name in an accelerator type (Google Cloud's list of runtime versions).
RUNTIMES = dict(v5litepod="v2-alpha-tpuv5-lite", v6e="v2-alpha-tpuv6e")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_task_deletes_its_machine_when_idle_keeps_the_run_in_a_bucket_and_says_its_price(path):
    task = yaml.safe_load(path.read_text())
    resources = task["resources"]
    assert set(task) <= KEYS and set(resources) <= RESOURCES
    assert resources["autostop"] == dict(idle_minutes=10, wait_for="jobs", down=True)
    assert task["file_mounts"] == {"/backup": dict(source="${BUCKET}", mode="MOUNT")}
    assert task["envs"]["BUCKET"] is None  # SkyPilot asks for it
    name, count = re.fullmatch(r"(?:tpu-)?(\w+)[-:](\d)", resources["accelerators"]).groups()
    chip = find_chip(name)
    assert resources.get("accelerator_args") == (chip and dict(runtime_version=RUNTIMES[name]))
    prices = {price.hardware: price for price in read_prices() if price.place == "Google Cloud"}
    price = prices[chip.name if chip else name]
    usd, spot = (price.per_hour(chips=int(count), spot=spot) for spot in (False, True))
    assert f"{usd:.2f} USD an hour, {spot:.3g} on spot" in path.read_text().splitlines()[0]


def test_the_files_are_those_that_the_pages_name():
    assert [path.stem for path in FILES] == ["gpu", "v5e-1", "v5e-8", "v6e-1"]
    for page in ("docs/RENTING.md", "docs/RENTING.zh-CN.md"):
        named = set(re.findall(r"docs/sky/([\w-]+)\.yaml", (ROOT / page).read_text()))
        assert "v5e-8" in named and named <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_scripts_install_tpukit_and_train_with_the_bucket_as_backup(path, tmp_path):
    task = yaml.safe_load(path.read_text())
    record = "printf '%s\\0' \"$@\" > ~/args"
    write_program(tmp_path / "tpukit-python/bin/tpukit", record)
    write_program(tmp_path / ".local/bin/uv", record)
    environ = {name: str(value) for name, value in task["envs"].items()} | dict(
        HOME=str(tmp_path), HOURS="1.5"
    )
    for script, expected in (
        ("setup", ["git+https://github.com/" + "TPUKIT_SOURCE"]),
        ("run", ["train", "mnist", "--epochs", "4", "--backup", "/backup/tpukit"]),
    ):
        subprocess.run(["bash", "-c", task[script]], env=dict(os.environ, **environ), check=True)
        words = (tmp_path / "args").read_bytes().decode().split("\0")[:-1]
        assert words[-len(expected) :] == expected
        assert script == "run" or ("torch_xla[tpu]==2.9.0" in words) == (path.stem != "gpu")


PARSE = """
import sys, sky
from sky.utils import yaml_utils
for path in sys.argv[1:]:
    config = yaml_utils.read_yaml(path)
    task = sky.Task.from_yaml_config(config, env_overrides=[("BUCKET", "gs://my-runs")])
    (r,) = task.resources
    stop = r.autostop_config
    print(r.accelerators, r.accelerator_args, r.use_spot, stop.idle_minutes, stop.down)
"""


@pytest.mark.skipif(
    not importlib.util.find_spec("sky"), reason="SkyPilot is not installed: pip install 'skypilot[gcp]'"
)
def test_skypilots_own_parser_reads_the_tasks(tmp_path):
    words = [sys.executable, "-c", PARSE, *map(str, FILES)]
    environ = dict(os.environ, HOME=str(tmp_path))
    ran = subprocess.run(words, capture_output=True, text=True, env=environ, check=True)
    assert ran.stdout.splitlines() == [
        "{'T4': 1} None False 10 True",
        "{'tpu-v5litepod-1': 1} {'runtime_version': 'v2-alpha-tpuv5-lite'} False 10 True",
        "{'tpu-v5litepod-8': 1} {'runtime_version': 'v2-alpha-tpuv5-lite'} False 10 True",
        "{'tpu-v6e-1': 1} {'runtime_version': 'v2-alpha-tpuv6e'} False 10 True",
    ]


NOTEBOOK = "cloud_tpu_vm.ipynb"


@pytest.mark.slow
def test_the_notebook_shows_cost_and_task_and_starts_nothing_unless_told_to(calls, tmp_path):
    output = text(run_notebook(NOTEBOOK, tmp_path))
    for words in ("2.40", "19.20", "down: true", "tpu-v5litepod-1", "sky launch -c tpukit"):
        assert words in output, words
    assert calls() == []


@pytest.mark.slow
def test_the_notebook_starts_nothing_before_it_knows_where_the_machine_gets_tpukit(calls, tmp_path):
    with pytest.raises(papermill.PapermillExecutionError, match="set BUCKET and SOURCE first"):
        run_notebook(NOTEBOOK, tmp_path, GO=True)
    assert calls() == []


@pytest.mark.slow
def test_the_notebook_starts_a_managed_job_when_told_to(calls, tmp_path):
    source = "git+https://github.com/me/tpukit"
    settings = dict(GO=True, SPOT=True, JOBS=True, NAME="mine", BUCKET="gs://my-runs", SOURCE=source)
    run_notebook(NOTEBOOK, tmp_path, MACHINE="v5e-8", **settings)
    launch, status = calls()
    assert launch.startswith("jobs launch -n mine v5e-8.yaml -d --yes --use-spot --env BUCKET=gs://my-runs")
    assert f"--env SOURCE={source}" in launch and "--env RUN=mine" in launch
    assert status == "status -u --refresh"
