"""`tpukit migrate --to torch_tpu`: what is torch_xla's in a script, and what is rewritten."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.devices.torch_tpu_calls import in_the_real_package
from tests.tools.migrate.helpers import written
from tpukit import cli
from tpukit.tools.migrate import examine
from tpukit.tools.migrate.findings import TABLES

SCRIPT = Path(__file__).with_name("xla_script.py")
OF_TORCH_XLA = re.compile(
    r"\b(torch_xla|tx|xm|xr|xs|xmp|pl|met|Mesh|runtime|syncfree|mark_step|xla_device)\b|autocast\(device\)|[\"\']xla"
)

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
    findings, fixed = examine(written(tmp_path, CODE), "torch_tpu")
    at = {finding.line: finding.fixable for finding in sorted(findings) if finding.rule == "torch-xla"}
    fixable = {7, 8, 9, 11, 12}
    assert at == {line: line in fixable for line in (2, 3, 4, 6, 7, 8, 9, 11, 12, 14, 15, 16)}
    ast.parse(fixed)
    changed = {old: new for old, new in zip(CODE.splitlines(), fixed.splitlines()) if old != new}
    assert changed["device = torch_xla.device()"] == 'device = torch.device("tpu")'
    assert changed["other = xm.xla_device()"] == 'other = torch.device("tpu")'
    assert len(changed) == len(fixable) and sum('"tpu"' in line for line in fixed.splitlines()) == 5
    assert 'word = "xla"' in fixed and "xm.xla_device(3)" in fixed
    again, same = examine(written(tmp_path, fixed), "torch_tpu")
    assert same == fixed and not any(finding.fixable for finding in again)


def test_what_torch_tpu_does_not_take_of_torch_is_found(tmp_path):
    code = """import torch
with torch.inference_mode():
    model = torch.compile(net, dynamic=True)
other = torch.compile(net, mode="max-autotune", dynamic=False)
with torch.inference_mode(mode=asked), torch.no_grad():
    again = torch.compile(net)
"""
    findings, fixed = examine(written(tmp_path, code), "torch_tpu")
    found = sorted((f.line, f.fixable) for f in findings if f.rule == "torch-tpu")
    assert found == [(2, True), (3, False), (4, False), (5, False)]
    assert fixed == code.replace("torch.inference_mode():", "torch.no_grad():")


def test_the_command_says_what_is_left_and_clean_code_passes(tmp_path, capsys):
    path = written(tmp_path, CODE)
    assert cli.main(["migrate", str(path), "--to", "torch_tpu", "--fix"]) == 1
    shown = capsys.readouterr().out
    assert "torch.accelerator.synchronize()" in shown and '+device = torch.device("tpu")' in shown
    clean = written(tmp_path, 'import torch\ndevice = torch.device("tpu")\n', "clean.py")
    assert cli.main(["migrate", str(clean), "--to", "torch_tpu"]) == 0


def test_in_a_whole_script_every_line_of_torch_xla_is_found_with_what_takes_its_place(tmp_path):
    code = SCRIPT.read_text()
    findings, fixed = examine(written(tmp_path, code), "torch_tpu")
    found = {finding.line: finding for finding in findings if finding.rule == "torch-xla"}
    assert found.keys() == {
        number for number, line in enumerate(code.splitlines(), 1) if OF_TORCH_XLA.search(line)
    }
    unknown = [finding for finding in findings if "no known equivalent" in finding.advice]
    assert all(finding.found.startswith("`import ") for finding in unknown)
    ast.parse(fixed)
    changed = [
        line for line, before in zip(fixed.splitlines(), code.splitlines(), strict=True) if line != before
    ]
    assert changed and not [line for line in changed if OF_TORCH_XLA.search(line)]


@pytest.mark.nightly
def test_what_is_written_and_advised_is_in_the_real_package(tmp_path):
    entries = TABLES["torch_tpu"].values()
    texts = " ".join([*(entry["advice"] + entry.get("use", "") for entry in entries), *INSERTED])
    names = sorted(set(re.findall(r"\btorch\.[a-z_.]*[a-z_]\b", texts)))
    assert {
        "torch.tpu.distributed.set_tpu_launch_env",
        "torch.accelerator.synchronize",
        "torch.autocast",
    } <= set(names)
    uses = [("advice", name, None, None) for name in [*names, "torch.tpu.not_there"]]
    ran = in_the_real_package(tmp_path, "-m", "tests.devices.torch_tpu_calls", text=json.dumps(uses))
    assert [name for _, name, _ in json.loads(ran.stdout.split("FAULTS")[1])] == ["torch.tpu.not_there"], (
        ran.stdout
    )
    program = (
        "from tpukit.devices import torch_tpu_private; torch_tpu_private.load(); import torch\n"
        + "\n".join(INSERTED)
    )
    ran = in_the_real_package(tmp_path, "-c", f"{program}\nprint('RAN')")
    assert "RAN" in ran.stdout, ran.stderr[-2000:]


# What --fix writes, in a form that needs no chip.
INSERTED = (
    (
        'torch.device("tpu"), torch.set_float32_matmul_precision("highest"),'
        ' torch.set_float32_matmul_precision("high")'
    ),
    (
        'with torch.autocast(device_type="tpu", dtype=torch.bfloat16), torch.amp.autocast("tpu",'
        " torch.bfloat16): pass"
    ),
    'assert torch.accelerator.current_accelerator().type == "tpu"',
)
