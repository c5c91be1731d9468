"""What an editor tells somebody who writes a script with tpukit."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """import tpukit
import torch

env = tpukit.detect().require("tpu", coers=8)  # mistake
task = tpukit.MSHNet(epochs="four")  # mistake
run = tpukit.Run.open(env.outputs / "mine")  # mistake
scores = tpukit.launch(tpukit.train, task, run, core=8)  # mistake
tpukit.launch(tpukit.train, task, "outputs/mine")  # mistake
accuracy = tpukit.launch(tpukit.train, task, run, cores=8)["accuracy"]
state = tpukit.Checkpoints("outputs/mine").restore()
with tpukit.metrics_report() as report:
    print(report.compilations + 1, tpukit.core().rank)


def main(epochs: int, lr: float = 0.1) -> float:
    core, model = tpukit.core(), torch.nn.Linear(2, 1)
    core.average_gradients(torch.optim.SGD(model.parameters(), lr=lr))
    core.average_gradients()  # mistake
    return float(core.rank * epochs) / core.world_size  # mistake


half: float = tpukit.launch(main, 10) / 2
tpukit.launch(main, 10, 0.1, cores=2)
tpukit.launch(lambda: None, hang_timeout_s=5)
tpukit.launch(main, "10")  # mistake
tpukit.launch(main)  # mistake
tpukit.launch(main(10))  # mistake
words: str = tpukit.launch(main, 10)  # mistake
"""
MISTAKES = [number for number, line in enumerate(SCRIPT.splitlines()) if line.endswith("# mistake")]


@pytest.mark.slow
def test_an_editor_finds_the_mistakes_of_a_script_and_no_more(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(dict(extraPaths=[str(ROOT)])))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run(
        [*command, "--project", str(tmp_path)], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    told = json.loads(ran.stdout)["generalDiagnostics"]
    assert [mistake["range"]["start"]["line"] for mistake in told] == MISTAKES, ran.stdout
