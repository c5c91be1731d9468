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
    r"\b(torch_xla|tx|xm|xr|xs|xmp|pl|met|runtime|syncfree|mark_step|xla_device)\b|autocast\(device\)|[\"\']xla"
)


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


def test_in_a_whole_script_every_line_of_torch_xla_is_found_with_what_takes_its_place(tmp_path, capsys):
    code, path = SCRIPT.read_text(), tmp_path / "script.py"
    path.write_text(code)
    findings, _ = examine(path, "torch_tpu")
    found = {finding.line for finding in findings if finding.rule == "torch-xla"}
    assert found == {number for number, line in enumerate(code.splitlines(), 1) if OF_TORCH_XLA.search(line)}
    unknown = [finding for finding in findings if "no known equivalent" in finding.advice]
    assert all(finding.found.startswith("`import ") for finding in unknown)
    assert cli.main(["migrate", str(path), "--to", "torch_tpu", "--fix"]) == 1  # the rest is by hand
    shown, fixed = capsys.readouterr().out, path.read_text()
    assert "torch.accelerator.synchronize()" in shown and '+    device = torch.device("tpu")' in shown
    ast.parse(fixed)
    lines = zip(code.splitlines(), fixed.splitlines(), strict=True)
    changed = [new for old, new in lines if old != new]
    assert len(changed) == 6 and not [line for line in changed if OF_TORCH_XLA.search(line)]
    assert 'print("xla' in fixed and "xm.xla_device(3)" in fixed  # not surely a device; takes a number
    again, same = examine(path, "torch_tpu")
    assert same == fixed and not any(finding.fixable for finding in again)
    path.write_text('import torch\ndevice = torch.device("tpu")\n')
    assert cli.main(["migrate", str(path), "--to", "torch_tpu"]) == 0


# What --fix writes, in a form that needs no chip.
INSERTED = """
torch.device("tpu")
with torch.autocast(device_type="tpu", dtype=torch.bfloat16), torch.amp.autocast("tpu", torch.bfloat16): pass
assert torch.accelerator.current_accelerator().type == "tpu"
"""


@pytest.mark.nightly
def test_what_is_written_and_advised_is_in_the_real_package(tmp_path):
    entries = TABLES["torch_tpu"].values()
    texts = " ".join([*(entry["advice"] + entry.get("use", "") for entry in entries), INSERTED])
    names = sorted(set(re.findall(r"\btorch\.[a-z_.]*[a-z_]\b", texts)))
    assert {"torch.tpu.distributed.set_tpu_launch_env", "torch.autocast"} <= set(names)
    uses = [("advice", name, None, None) for name in [*names, "torch.tpu.not_there"]]
    ran = in_the_real_package(tmp_path, "-m", "tests.devices.torch_tpu_calls", text=json.dumps(uses))
    faults = json.loads(ran.stdout.split("FAULTS")[1])
    assert [name for _, name, _ in faults] == ["torch.tpu.not_there"], ran.stdout
    program = (
        f"from tpukit.devices import torch_tpu_private; torch_tpu_private.load(); import torch{INSERTED}"
    )
    ran = in_the_real_package(tmp_path, "-c", f"{program}print('RAN')")
    assert "RAN" in ran.stdout, ran.stderr[-2000:]
