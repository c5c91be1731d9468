"""Every rule on code that breaks it, and on code that only looks as if it did (cases.txt)."""

import re
from pathlib import Path

import pytest

from tests.tools.migrate.helpers import written
from tpukit.tools import migrate
from tpukit.tools.migrate import examine

IMPORTS = """
import logging
import os
import subprocess
import numpy as np
import torch
import torch.nn as nn
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
"""
TEXTS = {
    "<STEP>\n": """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
""",
    "<FORWARD>\n": """
class Net(nn.Module):
    def forward(self, x, y):
        keep = y > 0
""",
}


def read_cases():
    """[(rule or "sound", code)]"""
    cases = re.split("^### ", Path(__file__).with_name("cases.txt").read_text(), flags=re.MULTILINE)[1:]
    for case in cases:
        rule, _, code = case.partition("\n")
        yield rule, re.sub("<(STEP|FORWARD)>\n", lambda match: TEXTS[match[0]], code)


CASES = list(read_cases())
BROKEN = [case for case in CASES if case[0] != "sound"]


@pytest.mark.parametrize("rule, code", BROKEN)
def test_code_that_breaks_a_rule_is_named_with_its_line_and_once_fixed_stays_as_it_is(rule, code, tmp_path):
    code = IMPORTS + code
    findings, fixed = examine(written(tmp_path, code))
    assert {f.rule for f in findings} == {rule}, migrate.as_text(findings)
    lines = code.splitlines()
    assert all(f.line > IMPORTS.count("\n") and lines[f.line - 1].strip() for f in findings)
    assert f"[{rule}]" in migrate.as_text(findings) and len({f.line for f in findings}) == len(findings)
    assert (fixed != code) == any(f.fixable for f in findings)
    if rule != "unreadable":
        compile(fixed, "fixed", "exec")
        again, same = examine(written(tmp_path, fixed))
        assert same == fixed and not any(f.fixable for f in again)


@pytest.mark.parametrize("code", [code for rule, code in CASES if rule == "sound"])
def test_code_that_only_looks_like_trouble_is_left_alone(code, tmp_path):
    findings, fixed = examine(written(tmp_path, IMPORTS + code))
    assert findings == [] and fixed == IMPORTS + code


def test_every_rule_has_an_example():
    elsewhere = {"install", "torch-xla", "torch-tpu"}  # test_notebook.py, test_to_torch_tpu.py
    assert {rule for rule, _ in BROKEN} | elsewhere == set(migrate.RULES)


def test_names_mean_what_the_imports_say(tmp_path):
    code = "from torch.nn import DataParallel as Both\nfrom torch import save as keep\n"
    code += "model = Both(model)\nkeep(model.state_dict(), 'a')\n"
    findings, _ = examine(written(tmp_path, code))
    assert [(f.rule, f.line) for f in findings] == [("data-parallel", 3), ("save", 4)]
    own = "from mine import DataParallel, autocast\nmodel = DataParallel(autocast())\n"
    assert examine(written(tmp_path, own))[0] == []
