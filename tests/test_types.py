"""What an editor tells somebody who writes a script with tpukit."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """import tpukit

env = tpukit.detect().require("tpu", coers=8)
task = tpukit.MSHNet(epochs="four")
run = tpukit.Run.open(env.outputs / "mine")
scores = tpukit.launch(tpukit.train, task, run, core=8)
state = tpukit.Checkpoints("outputs/mine").restore()
with tpukit.metrics_report() as report:
    print(report.compilations + 1, tpukit.core().rank)
"""
MISTAKES = [2, 3, 4, 5]  # lines, from 0


@pytest.mark.slow
def test_an_editor_finds_the_four_mistakes_of_a_script_and_no_more(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(dict(extraPaths=[str(ROOT)])))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run(
        [*command, "--project", str(tmp_path)], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    told = json.loads(ran.stdout)["generalDiagnostics"]
    assert [mistake["range"]["start"]["line"] for mistake in told] == MISTAKES, ran.stdout
