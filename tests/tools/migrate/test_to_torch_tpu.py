"""`tpukit migrate --to torch_tpu`: what is torch_xla's in a script, and what is rewritten."""

import ast

from tests.tools.migrate.helpers import written
from tpukit import cli
from tpukit.tools.migrate.__main__ import check_safely

CODE = """import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import runtime as xr

torch_xla.backends.set_mat_mul_precision("highest")
device = torch_xla.device()
other = xm.xla_device()
model = torch.nn.Linear(2, 2).to("xla")
word = "xla"
with torch.autocast("xla", dtype=torch.bfloat16):
    loss = model(torch.ones(1, 2, device="xla")).sum()
loss.backward()
xm.optimizer_step(optimizer)
torch_xla.sync()
print(xr.world_size(), xm.xla_device(3))
"""


def test_names_of_torch_xla_are_found_and_what_is_safe_is_rewritten(tmp_path):
    findings, fixed = check_safely(str(written(tmp_path, CODE)), "torch_tpu")
    at = {finding.line: finding.fixable for finding in sorted(findings) if finding.rule == "torch-xla"}
    fixable = {6, 7, 8, 9, 11, 12}
    assert at == {line: line in fixable for line in (2, 3, 4, 6, 7, 8, 9, 11, 12, 14, 15, 16)}
    ast.parse(fixed)
    changed = {old: new for old, new in zip(CODE.splitlines(), fixed.splitlines()) if old != new}
    assert changed["device = torch_xla.device()"] == 'device = torch.device("tpu")'
    assert changed["other = xm.xla_device()"] == 'other = torch.device("tpu")'
    assert changed['torch_xla.backends.set_mat_mul_precision("highest")'] == 'torch.set_float32_matmul_precision("highest")'
    assert len(changed) == len(fixable) and sum('"tpu"' in line for line in fixed.splitlines()) == 5
    assert 'word = "xla"' in fixed and "xm.xla_device(3)" in fixed
    again, same = check_safely(str(written(tmp_path, fixed)), "torch_tpu")
    assert same == fixed and not any(finding.fixable for finding in again)


def test_the_command_says_what_is_left_and_clean_code_passes(tmp_path, capsys):
    path = written(tmp_path, CODE)
    assert cli.main(["migrate", str(path), "--to", "torch_tpu", "--fix"]) == 1
    shown = capsys.readouterr().out
    assert "torch.accelerator.synchronize()" in shown and '+device = torch.device("tpu")' in shown
    clean = written(tmp_path, 'import torch\ndevice = torch.device("tpu")\n', "clean.py")
    assert cli.main(["migrate", str(clean), "--to", "torch_tpu"]) == 0
