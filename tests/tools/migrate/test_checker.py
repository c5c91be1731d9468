"""Every rule on code that breaks it, and on code that only looks as if it did (cases.txt)."""

import re
from pathlib import Path

import pytest

from tests.tools.migrate.helpers import written
from tpukit.host.language import translate
from tpukit_tools import migrate
from tpukit_tools.migrate.checker import Checker
from tpukit_tools.migrate.findings import TABLES
from tpukit_tools.migrate.surroundings import Surroundings

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
    "<UPDATE>\n": """
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
    """[(rules, none for sound code; code)]"""
    cases = re.split("^### ", Path(__file__).with_name("cases.txt").read_text(), flags=re.MULTILINE)[1:]
    for case in cases:
        rules, _, code = re.split(r"( \| |\n)", case, maxsplit=1)
        code = re.sub("<(STEP|UPDATE|FORWARD)>\n", lambda match: TEXTS[match[0]], code)
        yield set(rules.split()) - {"sound"}, IMPORTS + code


CASES = list(read_cases())


@pytest.mark.parametrize("rules, code", [case for case in CASES if case[0]])
def test_code_that_breaks_a_rule_is_named_with_its_line_and_once_fixed_stays_as_it_is(rules, code, tmp_path):
    examined = migrate.examine(written(tmp_path, code))
    findings, fixed = examined.findings, examined.fixed.decode()
    assert {f.rule for f in findings} == rules, migrate.as_text(findings)
    lines = code.splitlines()
    assert all(f.line > IMPORTS.count("\n") and lines[f.line - 1].strip() for f in findings)
    assert len({(f.line, f.column) for f in findings}) == len(findings)
    assert (fixed != code) == any(f.fixable for f in findings)
    if rules != {"unreadable"}:
        compile(fixed, "fixed", "exec")
        again = migrate.examine(written(tmp_path, fixed))
        assert again.fixed.decode() == fixed and not any(f.fixable for f in again.findings)


@pytest.mark.parametrize("code", [code for rules, code in CASES if not rules])
def test_code_that_only_looks_like_trouble_is_left_alone(code, tmp_path):
    examined = migrate.examine(written(tmp_path, code))
    assert examined.findings == [] and examined.fixed.decode() == code


def test_every_rule_has_an_example_and_every_entry_a_rule_and_a_condition_that_exist():
    seen = set().union(*(rules for rules, _ in CASES))
    # test_notebook.py has installs; every case here imports torch_xla
    assert seen | {"install", "no-device", "device-elsewhere"} == set(migrate.RULES)
    entries = [
        *TABLES["names"].values(),
        *(entry for table in TABLES["patterns"].values() for entry in table),
    ]
    assert {entry["rule"] for entry in entries if entry} <= set(migrate.RULES)
    conditions = {name for entry in entries for name in entry.get("where", "").split()}
    assert conditions and all(hasattr(Surroundings, name) for name in conditions)


def test_what_a_rule_advises_has_words_for_a_chinese_notebook_and_none_left_in_english(monkeypatch):
    monkeypatch.setenv("TPUKIT_LANGUAGE", "zh")
    patterns = [entry for table in TABLES["patterns"].values() for entry in table]
    entries = [TABLES["chooses_cpu"], *TABLES["names"].values(), *patterns]
    advices = [entry["advice"] for entry in entries if "advice" in entry]
    advices += [f"use {entry['use']}" for entry in entries if "use" in entry]
    for text in [*(message for _, message in migrate.RULES.values()), *advices]:
        chinese = translate(text)
        assert re.search(r"[\u4e00-\u9fff]", chinese) and not re.search("[a-z]{3} [a-z]{2}", chinese), text


SILENT = {
    "mps": "device = 'mps' if torch.backends.mps.is_available() else 'cpu'\nmodel = net.to(device)\n",
    "by number": "model = net.to(0)\n",
    "no device": "optimizer = torch.optim.SGD(net.parameters(), 0.1)\nlose(net(x)).backward()\n",
    "elsewhere": "from utils import train\ntrainer = MyTrainer(net)\ntrainer.train()\n",
    "of a library": "from utils import Runner\nrunner = Runner(net)\nrunner.train(epochs=3)\n",
    "prediction": "model.eval()\nwith torch.no_grad():\n    print(model(x))\n",
}


@pytest.mark.parametrize("name", SILENT)
def test_a_file_that_runs_a_model_on_no_xla_device_is_never_told_that_nothing_was_found(name):
    code = f"import torch\n{SILENT[name]}"
    assert [rule for _, _, rule, *_ in Checker(code).findings] == ["no-device"]
    assert Checker(f"import torch_xla\n{code}").findings == []


# A line as a page shows it, without the imports above it: what a guide's reader pastes.
PIECES = {
    "xmp.spawn(main, nprocs=8)": ("gone", "xmp.spawn(main, nprocs=None)"),
    "device = xm.xla_device()": ("deprecated", "device = torch_xla.device()"),
    "xm.mark_step()": ("deprecated", "torch_xla.sync()"),
    "print(xm.xrt_world_size())": ("gone", "print(torch_xla.runtime.world_size())"),
    "model = dp.DataParallel(Net, device_ids=devices)": ("deprecated", ""),
    "model = DDP(nn.Linear(2, 2))": ("data-parallel", ""),
    "loader = DataLoader(data, batch_size=8, shuffle=True)": ("ragged-batch", ""),
    "print(xr.world_size())\nxmp.spawn(main)": ("launch", ""),
    "loader = pl.MpDeviceLoader(data, device)\nxmp.spawn(main)": ("no-shard", ""),
    "trainer = pl.Trainer(accelerator='gpu')": ("cuda", ""),
    "for x in loader:\n    net(x).backward()\n    xm.optimizer_step(opt)": (
        "no-sync",
        "    torch_xla.sync()",
    ),
}


@pytest.mark.parametrize("piece", PIECES)
def test_a_pasted_piece_of_code_means_by_xm_and_xmp_what_pages_mean(piece):
    rule, fixed = PIECES[piece]
    checker = Checker(f"{piece}\n")
    assert rule in {rule for _, _, rule, *_ in checker.findings}
    assert not fixed or checker.fixed.splitlines()[-1] == fixed


def test_a_name_that_the_code_binds_is_its_own():
    for own in ("import mine as xm", "xm = Mine()", "def f(xm): pass", "for xm in things: pass"):
        assert Checker(f"import torch_xla\n{own}\nxm.mark_step()\nxm.xrt_world_size()\n").findings == []


def test_a_model_that_other_files_train_is_no_error_until_its_file_runs_it():
    model = (
        "import torch\nclass Net:\n    def optimizer(self):\n        return torch.optim.SGD(self.p, 0.1)\n"
    )
    levels = [migrate.RULES[rule][0] for _, _, rule, *_ in Checker(model).findings]
    levels += [migrate.RULES[rule][0] for _, _, rule, *_ in Checker(f"{model}Net().optimizer()\n").findings]
    assert levels == ["warning", "error"]


def test_a_file_that_runs_no_model_needs_no_device():
    module = "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x.to(x)\n"
    assert Checker(module).findings == []
    assert Checker("from sklearn.svm import SVC\nSVC().fit(x, y)\n").findings == []


def test_an_argument_is_shown_with_its_name():
    [finding] = Checker("import torch_xla\nsettings = dict(fp16=True)\n").findings
    assert finding[3] == "`fp16=True`"


def test_a_slice_by_numbers_is_compiled_anew_in_each_step_and_what_is_advised_is_not(xla):
    """As torch_xla 2.9 has it, which the rule slice-in-loop is about."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as met

    data = torch.arange(400.0)
    moved = data.to("xla")

    def compilations(part):
        counts = []
        for i in (3, 11, 20, 32, 43, 58):
            torch.testing.assert_close((part(i) * 2).cpu(), data[i : i + 8] * 2)
            torch_xla.sync()
            counts.append((met.metric_data("CompileTime") or (0,))[0])
        return counts[-1] - counts[0]

    assert compilations(lambda i: moved[i : i + 8]) == 5
    assert compilations(lambda i: moved[torch.arange(i, i + 8)]) == 0
    assert compilations(lambda i: data[i : i + 8].to("xla")) == 0
