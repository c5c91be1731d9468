"""What `--fix` writes: code that runs, imports where they hold, and everything else as it was."""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.tools.migrate.helpers import written
from tpukit import cli
from tpukit.tools import migrate
from tpukit.tools.migrate import examine


@pytest.mark.slow
def test_the_fixed_example_trains_on_the_xla_device_and_saves_what_a_cpu_loads(xla, digits, tmp_path, capsys):
    import torch

    path = migrate.copy_example(tmp_path)
    before = path.read_text()
    assert cli.main(["migrate", str(path)]) == 1 and path.read_text() == before
    assert cli.main(["migrate", "--fix", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "+    device = torch_xla.device()" in shown and "-    model = Net().cuda()" in shown
    assert "1 that will be slow" in shown  # what reads the loss in every step is left to its author
    environ = {**os.environ, "PJRT_DEVICE": "CPU"}
    command = [sys.executable, path, digits / "mnist.npz", tmp_path / "digits.pt"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = re.findall(r"loss ([\d.]+) on xla:0", ran.stdout)
    assert len(found) == 4 and float(found[-1]) < 0.85 * float(found[0])
    state = torch.load(tmp_path / "digits.pt", weights_only=True)
    assert {value.device.type for value in state.values()} == {"cpu"}
    # Once fixed, nothing is left to fix.
    assert examine(path)[1] == path.read_text()


@pytest.mark.parametrize(
    "code",
    [
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nx = torch.zeros(2).to(device)",
        "x = torch.zeros(2).to(torch.device('cuda' if torch.cuda.is_available() else 'cpu'))",
        "device = 'cuda:0'\nx = torch.zeros(2, device=device)",
        "device = f'cuda:{0}'\nx = torch.zeros(2).to(torch.device(device))",
        "x = torch.zeros(2).to('cuda:' + str(0))",
        "x = torch.zeros(2, device='cuda')",
        "x = torch.zeros(2).cuda(non_blocking=True)",
    ],
)
def test_a_fixed_device_is_that_of_xla(code, xla, tmp_path):
    _, fixed = examine(written(tmp_path, f"import torch\n{code}\n"))
    names = {}
    exec(fixed, names)
    assert names["x"].device.type == "xla"


@pytest.mark.parametrize("place", ["Trainer(accelerator={})", "parser.add_argument('--device', default={})"])
def test_a_word_that_no_device_can_replace_is_found_and_left(place, tmp_path):
    code = "import torch\n" + place.format("'cuda' if torch.cuda.is_available() else 'cpu'") + "\n"
    findings, fixed = examine(written(tmp_path, code))
    assert [f.rule for f in findings] == ["cuda"] and fixed == code


def test_an_optimizers_state_beside_a_copied_model_is_still_a_warning(tmp_path):
    code = "import torch\ntorch.save({'model': model.state_dict(), 'opt': opt.state_dict()}, 'a.pt')\n"
    findings, fixed = examine(written(tmp_path, code))
    assert [(f.rule, f.fixable) for f in findings] == [("save", True), ("save", False)]
    assert "model.state_dict().items()" in fixed and "'opt': opt.state_dict()" in fixed
    findings, again = examine(written(tmp_path, fixed))
    assert [(f.rule, f.fixable) for f in findings] == [("save", False)] and again == fixed


LAUNCHED = """import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp


def train(index):
    device = xm.xla_device()
    optimizer = torch.optim.SGD(make().to(device).parameters(), 0.1)
    for x, y in loader:
        lose(model(x), y).backward()
        optimizer.step()


xmp.spawn(train, args=(), nprocs=8, start_method='fork')
"""


def test_a_launched_script_gets_the_gradient_sum_and_todays_names(tmp_path):
    _, fixed = examine(written(tmp_path, LAUNCHED))
    assert "torch_xla.core.xla_model.optimizer_step(optimizer)\n        torch_xla.sync()\n" in fixed
    assert "device = torch_xla.device()" in fixed and "nprocs=None" in fixed
    assert "import torch_xla\n" in fixed
    compile(fixed, "fixed", "exec")


@pytest.mark.parametrize(
    "above",
    [
        '"""About.\n\nfrom the paper of X.\n"""\nimport torch\n',
        '#!/usr/bin/env python\n"""About."""\nfrom __future__ import annotations\n',
        "def other():\n    import torch_xla\n",
        "",
    ],
)
def test_an_import_that_a_fix_needs_stands_where_it_holds(above, tmp_path):
    _, fixed = examine(written(tmp_path, above + "x = x.to('cuda')\n"))
    tree = ast.parse(fixed)
    names = [[alias.name for alias in node.names] for node in tree.body if isinstance(node, ast.Import)]
    assert ["torch_xla"] in names and ast.get_docstring(tree) == ast.get_docstring(ast.parse(above))
    assert fixed.startswith("#!") == above.startswith("#!")


LINE_ENDS = "\ufefffrom torch.utils.data import DataLoader\r\nloader = DataLoader(\r\n    data,  # all\r\n"
LINE_ENDS += "    batch_size=8,\r\n    shuffle=True,  # mix\r\n)\r\n"
LATIN = "# -*- coding: latin-1 -*-\nimport torch_xla\nname = 'Jürgen'\nmodel.cuda()\n"


@pytest.mark.parametrize(
    "text, encoding, old, new",
    [
        (LINE_ENDS, "utf-8", "batch_size", "drop_last=True, batch_size"),
        (LATIN, "latin-1", "cuda()", "to(torch_xla.device())"),
    ],
)
def test_comments_line_ends_encodings_modes_and_links_of_a_fixed_file_stay(
    text, encoding, old, new, tmp_path
):
    path, link = tmp_path / "real.py", tmp_path / "link.py"
    path.write_bytes(text.encode(encoding))
    path.chmod(0o755)
    link.symlink_to(path)
    assert cli.main(["migrate", "--fix", str(link)]) == 0
    assert path.read_bytes() == text.replace(old, new).encode(encoding)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o755
