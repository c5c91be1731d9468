"""The task files of docs/sky/, as YAML and bash read them."""

import os
import re
import subprocess

import pytest
import yaml

from tests.conftest import ROOT

FILES = sorted((ROOT / "docs/sky").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_task_deletes_its_idle_machine_keeps_the_run_in_a_bucket_and_states_its_price(path):
    task = yaml.safe_load(path.read_text())
    assert set(task) <= {"name", "envs", "resources", "file_mounts", "setup", "run"}
    assert task["resources"]["autostop"] == dict(idle_minutes=10, wait_for="jobs", down=True)
    assert task["file_mounts"] == {"/backup": dict(source="${BUCKET}", mode="MOUNT")}
    assert task["envs"]["BUCKET"] is None  # SkyPilot asks for it
    assert re.search(r"\d\.\d\d USD an hour, \d\.\d+ on spot", path.read_text().splitlines()[0])
    assert f"docs/sky/{path.name}" in (ROOT / "docs/TRAINING_COMPARISON.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_scripts_install_tpukit_and_train_with_the_bucket_as_backup(path, tmp_path):
    for name in ("tpukit-python/bin/tpukit", ".local/bin/uv"):
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\" > ~/arguments\n")
        program.chmod(0o755)
    task = yaml.safe_load(path.read_text())
    settings = {name: str(value) for name, value in task["envs"].items()}
    environ = os.environ | settings | dict(HOME=str(tmp_path), HOURS="1.5")
    subprocess.run(["bash", "-c", task["setup"]], env=environ, check=True, timeout=60)
    installed = (tmp_path / "arguments").read_text().splitlines()
    assert installed[-1] == "tpukit[standard] @ git+https://github.com/" + "TPUKIT_SOURCE"
    assert ("torch_xla[tpu]==2.9.0" in installed) == (path.stem != "gpu")
    subprocess.run(["bash", "-c", task["run"]], env=environ, check=True, timeout=60)
    trained = (tmp_path / "arguments").read_text().split()
    assert trained[-6:] == ["train", "mnist", "--epochs", "4", "--backup", "/backup/tpukit"]
