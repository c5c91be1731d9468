"""What `--fix` writes: code that runs, imports where they hold, and everything else as it was."""

import ast
import re
import runpy

import pytest

from tests.tools.migrate.helpers import written
from tpukit_tools import cli, migrate
from tpukit_tools.migrate.checker import Checker

# What the findings of the example tell to write, which is left to its author.
BY_HAND = {
    "shuffle=True": "shuffle=True, drop_last=True",
    "loss.item()": "loss.detach()",
    "model.state_dict()": "{name: value.cpu() for name, value in model.state_dict().items()}",
}


@pytest.mark.slow
def test_the_fixed_example_trains_on_the_xla_device_and_saves_what_a_cpu_loads(
    xla, digits, tmp_path, capsys, monkeypatch
):
    import torch

    path = migrate.copy_example(tmp_path)
    before = path.read_text()
    assert cli.main(["migrate", str(path)]) == 1 and path.read_text() == before
    assert cli.main(["migrate", "--fix", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "+    device = torch_xla.device()" in shown and "-    model = Net().cuda()" in shown
    assert "errors: 0, warnings: 3" in shown
    code = path.read_text()
    for old, new in BY_HAND.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    path.write_text(code)
    assert cli.main(["migrate", str(path)]) == 0 and "nothing found" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [str(path), str(digits / "mnist.npz"), str(tmp_path / "digits.pt")])
    runpy.run_path(str(path), run_name="__main__")
    found = re.findall(r"loss ([\d.]+) on xla:0", capsys.readouterr().out)
    assert len(found) == 4 and float(found[-1]) < 0.85 * float(found[0])
    state = torch.load(tmp_path / "digits.pt", weights_only=True)
    assert {value.device.type for value in state.values()} == {"cpu"}


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
def test_a_fixed_device_is_that_of_xla(code, xla):
    names = {}
    exec(Checker(f"import torch\n{code}\n").fixed, names)
    assert names["x"].device.type == "xla"


@pytest.mark.parametrize("place", ["Trainer(accelerator={})", "parser.add_argument('--device', default={})"])
def test_a_word_that_no_device_can_replace_is_found_and_left(place):
    code = "import torch\n" + place.format("'cuda' if torch.cuda.is_available() else 'cpu'") + "\n"
    checker = Checker(code)
    assert [rule for _, _, rule, *_ in checker.findings] == ["cuda"] and checker.fixed == code


@pytest.mark.parametrize(
    "line, fixed",
    [
        (
            "load(map_location=lambda storage, loc: storage.cuda(0))",
            "load(map_location=lambda storage, loc: storage)",
        ),
        ("torch.load(path, map_location=self.device)", 'torch.load(path, map_location="cpu")'),
        ("places = {'cuda:%d' % 0: 'cuda:%d' % rank}", "places = {'cuda:%d' % 0: \"cpu\"}"),
        ("torch.utils.checkpoint.checkpoint(f, x)", "torch_xla.utils.checkpoint.checkpoint(f, x)"),
        ("xm.get_ordinal(defval=-1)", "xm.get_ordinal(defval=-1)"),  # the new name has no defval
        ("torch.Generator(device=device).manual_seed(0)", "torch.Generator().manual_seed(0)"),
    ],
)
def test_a_fix_calls_what_there_is_with_arguments_that_it_takes(line, fixed):
    checker = Checker(f"import torch\nimport torch_xla.core.xla_model as xm\n{line}\n")
    assert checker.findings and checker.fixed.splitlines()[-1] == fixed


# Files of which a GPU still trains a part in fp16 once all is fixed, and files of which none does.
KEPT = [
    "with torch.autocast('cuda', dtype=kind): pass\nscaler = GradScaler() if kind == torch.float16 else None",
    "with autocast(): pass\nscaler = GradScaler(enabled=(args.dtype == 'float16'))",
    "kind = {'bf16': torch.bfloat16, 'fp16': torch.float16}\nwith autocast(): pass\nscaler = GradScaler()",
    "with torch.autocast(device.type): pass\nx = torch.zeros(2, dtype=torch.float16)\nscaler = GradScaler()",
    "with torch.autocast(device_type=device.type, dtype=amp_dtype): pass\nscaler = GradScaler()",
    "scaler = GradScaler()",  # who knows what the file that it is for does
]
OFF = [
    "with autocast(): pass\nscaler = GradScaler()",
    "with torch.autocast('cuda', dtype=torch.float16): pass\nscaler = GradScaler(enabled=args.amp)",
    "with torch.autocast(device.type, dtype=torch.half): pass\nscaler = torch.amp.GradScaler('cuda')",
]


@pytest.mark.parametrize("code", [*KEPT, *OFF])
def test_a_loss_scaler_is_switched_off_only_if_nothing_trains_in_fp16_any_more(code):
    checker = Checker(f"import torch\nfrom torch.cuda.amp import GradScaler, autocast\n{code}\n")
    [fixable] = [one[5] for one in checker.findings if "GradScaler" in one[3]]
    assert fixable == ("GradScaler(enabled=False)" in checker.fixed) == (code in OFF)


LAUNCHED = """import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp


def train(index):
    device = xm.xla_device()
    optimizer = torch.optim.SGD(make().to(device).parameters(), 0.1)
    for x, y in loader:
        with torch.cuda.amp.autocast(use_amp):
            lose(model(x), y).backward()
        optimizer.step()


xmp.spawn(train, args=(), nprocs=8, start_method='fork')
"""


def test_a_launched_script_gets_todays_names_and_is_told_what_to_write_by_hand():
    checker = Checker(LAUNCHED)
    assert "device = torch_xla.device()" in checker.fixed and "nprocs=None" in checker.fixed
    assert "torch.autocast('xla', dtype=torch.bfloat16, enabled=use_amp)" in checker.fixed
    assert "import torch_xla\n" in checker.fixed
    left = {rule for _, _, rule, _, _, fixable in checker.findings if not fixable}
    assert left == {"gradient-sum"}
    assert "        optimizer.step()\n        torch_xla.sync()\n" in checker.fixed


# The end of the body of a loop over batches, as it is and once it is fixed.
SYNCED = {
    "optimizer.step()  # now\n    decay.step()": "optimizer.step()  # now\n    <SYNC>\n    decay.step()",
    "if step % 4 == 0:\n     scaler.step(optimizer); scaler.update()": "<SAME>\n     <SYNC>",
    "for each in optimizers:\n        each.step()\n        seen += 1": "<SAME>\n    <SYNC>",
    "optD.step()\n    optG.step()\n    seen += 1": "optD.step()\n    optG.step()\n    <SYNC>\n    seen += 1",
    "xm.optimizer_step(\n  optimizer)": "<SAME>\n    <SYNC>",
    "optD.step()\n    loss.backward()\n    optG.step()": (
        "optD.step()\n    <SYNC>\n    loss.backward()\n    optG.step()\n    <SYNC>"
    ),
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("body", SYNCED)
def test_a_step_that_lacks_a_sync_gets_it_below_the_last_update_of_its_weights(body, line_end):
    start = (
        "import torch_xla\nimport torch_xla.core.xla_model as xm\nfor x in loader:\n    loss.backward()\n    "
    )
    fixed = SYNCED[body].replace("<SAME>", body).replace("<SYNC>", "torch_xla.sync()")
    for last in ("", line_end):  # a file whose last line has an end, and one whose has none
        checker = Checker(f"{start}{body}".replace("\n", line_end) + last)
        assert checker.fixed == f"{start}{fixed}".replace("\n", line_end) + last
        assert {(one[2], one[5]) for one in checker.findings} == {("no-sync", True)}
        assert Checker(checker.fixed).findings == []


def test_tabs_of_a_step_stay_tabs():
    loop = "for x in loader:\n\tloss.backward()\n\tif step % 4 == 0:\n\t\toptimizer.step()\n"
    assert Checker(f"import torch_xla\n{loop}").fixed == f"import torch_xla\n{loop}\t\ttorch_xla.sync()\n"


UNSURE = {
    "one line": "if step % 4 == 0: optimizer.step()",
    "a result": "seen.append(optimizer.step())",
    "another loop": "for part in parts:\n        optimizer.step()",
    "one of two": "optimizer.step()\n    if late: optimizer.step()",
}


@pytest.mark.parametrize("name", UNSURE)
def test_a_step_whose_end_is_not_sure_keeps_the_advice_alone(name):
    code = f"import torch_xla\nfor x in loader:\n    lose(net(x)).backward()\n    {UNSURE[name]}\n"
    checker = Checker(code)
    assert {(one[2], one[5]) for one in checker.findings} == {("no-sync", False)} and checker.fixed == code


@pytest.mark.parametrize(
    "start",
    [
        "try:\n    import torch_xla\nexcept ImportError:\n    torch_xla = None\n",  # runs without it, too
        "import torch\nmodel.to(torch.device('mps'))\n",  # trains on no XLA device
        "parser.add_argument('--device', default='cuda')\n",
        "import torch_xla\n@torch.compile(backend='openxla')\ndef train(loader):\n  ",
    ],
)
def test_a_step_that_may_run_on_no_xla_device_gets_no_sync(start):
    loop = "for x in loader:\n        lose(net(x)).backward()\n        optimizer.step()\n"
    assert "sync()" not in Checker(start + loop).fixed


@pytest.mark.parametrize(
    "above",
    [
        '"""About.\n\nfrom the paper of X.\n"""\nimport torch\n',
        '#!/usr/bin/env python\n"""About."""\nfrom __future__ import annotations\n',
        "def other():\n    import torch_xla\n",
        "",
    ],
)
def test_an_import_that_a_fix_needs_stands_where_it_holds(above):
    code = above + "model = model.cuda()\n"
    fixed = Checker(code).fixed
    assert ast.get_docstring(ast.parse(fixed)) == ast.get_docstring(ast.parse(code))
    compile(fixed, "fixed", "exec")
    lines = fixed.splitlines()
    assert lines.index("import torch_xla") < lines.index("model = model.to(torch_xla.device())")


def test_comments_line_ends_modes_and_links_of_a_fixed_file_stay(tmp_path):
    text = "import torch_xla\r\nname = 'Jürgen'\r\nmodel = (\r\n    net.cuda()  # all\r\n)\r\n"
    path, link = tmp_path / "real.py", tmp_path / "link.py"
    path.write_bytes(text.encode())
    path.chmod(0o755)
    link.symlink_to(path)
    assert cli.main(["migrate", "--fix", str(link)]) == 0
    assert path.read_bytes() == text.replace("cuda()", "to(torch_xla.device())").encode()
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o755


def test_the_text_of_findings_names_the_place_the_level_the_rule_and_whether_fix_mends_it(tmp_path):
    path = written(tmp_path, "model = model.cuda()\nimport os\nos.environ['XLA_USE_BF16'] = '1'\n")
    cuda, variable, summary = migrate.as_text(migrate.examine(path).findings).splitlines()
    assert cuda.startswith(f"{path}:1:9: error [cuda]") and cuda.endswith("(--fix)")
    assert variable.startswith(f"{path}:3:12: warning [old-variable]") and not variable.endswith("(--fix)")
    assert summary.startswith("errors: 1, warnings: 1")
