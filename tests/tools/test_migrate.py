"""`tpukit migrate`: every rule on code that breaks it and on code that does not, what it rewrites, and that this trains."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tpukit import TpukitError, cli
from tpukit.tools import migrate as tool
from tpukit.tools.migrate import isolated

ROOT = Path(__file__).parents[2]
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
STEP = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
"""

FORWARD = """
class Net(nn.Module):
    def forward(self, x, y):
        keep = y > 0
"""
LAUNCHED = STEP + "torch_xla.launch(train)"

# rule -> code that breaks it, each with the line of the finding within it
BROKEN = [
    ("cuda", "model = model.cuda()"),
    ("cuda", "x = x.to('cuda:0', non_blocking=True)"),
    ("cuda", "x = torch.zeros(3, device='cuda')"),
    ("cuda", "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')"),
    ("cuda", "device = 'cuda' if torch.cuda.is_available() else 'cpu'"),
    ("cuda", "device = f'cuda:{rank}'"),
    ("cuda", "state = torch.load('a.pt', map_location='cuda')"),
    ("cuda", "parser.add_argument('--device', default='cuda')"),
    ("cuda", "torch.cuda.set_device(0)"),
    ("cuda", "device: str = 'cuda'"),
    ("cuda", "def make(device='cuda'):\n    pass"),
    ("cuda", "def pick():\n    return('cuda' if torch.cuda.is_available() else 'cpu')"),
    ("cuda", "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nwith torch.autocast(device_type=device):\n    pass"),
    ("cuda", "torch.cuda.synchronize()"),
    ("cuda-check", "use_cuda = torch.cuda.is_available()"),
    ("cuda-check", "if torch.cuda.is_available():\n    torch.backends.cudnn.benchmark = True\n    workers = 8"),
    ("cuda-check", "count = torch.cuda.device_count() if torch.cuda.is_available() else 0"),
    ("fp16", "scaler = GradScaler()"),
    ("fp16", "with autocast():\n    pass"),
    ("fp16", "with autocast(use_amp):\n    pass"),
    ("fp16", "with torch.autocast('cuda', enabled=use_amp):\n    pass"),
    ("fp16", "x = x.half()"),
    ("fp16", "x = x.to(torch.float16)"),
    ("data-parallel", "model = nn.DataParallel(model)"),
    ("data-parallel", "model = torch.nn.parallel.DistributedDataParallel(model)"),
    ("ragged-batch", "loader = DataLoader(data, batch_size=8, shuffle=True)"),
    ("ragged-batch", "loader = DataLoader(data, batch_size=8, sampler=sampler)"),
    ("read-in-loop", STEP + "    total += loss.item()"),
    ("read-in-loop", STEP + "    right += model(x).argmax(1).eq(y).sum().item()".replace("model(x)", "y")),
    ("read-in-loop", STEP + "    print(float(loss.cpu().numpy()))"),
    ("read-in-loop", STEP + "    print(loss)"),
    ("read-in-loop", STEP + "    print(f'{step}: {loss:.3f}')"),
    ("read-in-loop", STEP + "    if loss > 3:\n        break"),
    ("read-in-loop", STEP + "    kept.append(float(loss))"),
    ("dynamic-shape", STEP + "    hard = x[y > 0]"),
    ("dynamic-shape", STEP + "    hard = torch.nonzero(y)"),
    ("dynamic-shape", "class Net(nn.Module):\n    def forward(self, x):\n        return torch.masked_select(x, x > 0)"),
    ("no-sync", STEP.replace("    torch_xla.sync()\n", "")),
    ("no-sync", STEP.replace("    torch_xla.sync()\n", "").replace("optimizer.step()", "if step % 4 == 0: optimizer.step()")),
    (
        "no-sync",
        "class Trainer:\n    def __init__(self):\n        self.scaler = torch.amp.GradScaler(enabled=False)\n"
        "    def train(self):\n        for x in self.loader:\n            self.scaler.scale(self.model(x)).backward()\n"
        "            self.scaler.step(self.optimizer)",
    ),
    ("save", "torch.save(model.state_dict(), 'model.pt')"),
    ("save", "state = {'net': model.state_dict(), 'epoch': 3}\ntorch.save(state, 'model.pt')"),
    ("save", "state = net.state_dict()\ntorch.save(state, 'model.pt')"),
    ("save-on-one", "if xm.is_master_ordinal():\n    xm.save(model.state_dict(), 'model.pt')"),
    ("optimizer-first", "optimizer = torch.optim.Adam(model.parameters())\nmodel = model.to(device)"),
    ("gradient-sum", STEP + "torch_xla.launch(train)"),
    ("deprecated", "device = xm.xla_device()"),
    ("gone", "count = xm.xrt_world_size()"),
    ("deprecated", "xm.mark_step()"),
    ("gone", "xmp.spawn(train, args=(), nprocs=8)"),
    ("gone", "from torch_xla.core.xla_model import xrt_world_size"),
    ("old-variable", "assert os.environ['COLAB_TPU_ADDR']"),
    ("old-variable", "os.environ['XLA_USE_BF16'] = '1'"),
    ("early-device", "device = torch_xla.device()\ntorch_xla.launch(train)"),
    ("torch-compile", "model = torch.compile(model)"),
    ("unreadable", "print 'epoch'"),
    # A branch that a TPU never comes to: the check is the error, and nothing in it is rewritten.
    ("cuda", "if torch.cuda.is_available():\n    device = torch.device('cuda')\nelse:\n    device = torch.device('cpu')"),
    (
        "cuda",
        "def pick():\n    if torch.cuda.is_available():\n        return torch.device('cuda')\n    return torch.device('cpu')",
    ),
    ("cuda", "if not torch.cuda.is_available():\n    device = 'cpu'\nelse:\n    device = 'cuda'"),
    ("cuda", "use_cuda = not args.no_cuda and torch.cuda.is_available()\nif use_cuda:\n    model = model.cuda()"),
    ("cuda", "args.cuda = torch.cuda.is_available()\nx = x.cuda() if args.cuda else x"),
    ("cuda", "device = 'cpu'\nif torch.cuda.is_available():\n    device = torch_xla.device()"),
    ("cuda", "device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')"),
    ("cuda", "with torch.autocast('cuda' if torch.cuda.is_available() else 'cpu'):\n    pass"),
    ("cuda", "torch.set_default_device('cuda')"),
    ("cuda", "x = x.type(torch.cuda.FloatTensor)"),
    ("cuda", "dev = 'cuda'\nx = x.to(dev)"),
    ("cuda", "dev = 'cuda:1'\nx = torch.zeros(3, device=dev)"),
    ("cuda", "generator = torch.Generator(device='cuda')"),
    ("fp16", "scaler = GradScaler(enabled=args.amp)"),
    ("ragged-batch", "loader = DataLoader(data, 32, True)"),
    ("ragged-batch", "loader = DataLoader(data, 32, True, None, None, 4)"),
    ("ragged-batch", "loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=False)"),
    ("ragged-batch", "loader = DataLoader(data, batch_size=8, shuffle=(sampler is None), sampler=sampler)"),
    ("read-in-loop", STEP + "    right += (model(x).argmax(1) == y).sum().item()"),
    ("read-in-loop", STEP + "    right += torch.sum(y == 3).item()"),
    ("read-in-loop", STEP + "    total += (loss * 2).item()"),
    ("read-in-loop", STEP + "    total += torch.norm(loss).item()"),
    ("read-in-loop", STEP + "    kept.append(loss.detach().cpu())"),
    ("read-in-loop", STEP + "    assert not torch.isnan(loss)"),
    ("read-in-loop", STEP + "    bar.set_description(f'{loss:.3f}')"),
    ("read-in-loop", STEP + "    text = f'{loss:.3f}'"),
    ("read-in-loop", STEP + "    logging.info('%s', loss)"),
    ("read-in-loop", STEP + "    best = min(best, loss)"),
    ("read-in-loop", STEP + "    if step > 0:\n        print(loss.item())"),
    ("dynamic-shape", STEP + "    out = model(x)\n    mask = y != 255\n    out = out[mask]"),
    ("dynamic-shape", STEP + "    out = model(x)\n    out = out[out > 0]"),
    ("dynamic-shape", STEP + "    mask = y != 255\n    places = mask.nonzero()"),
    ("dynamic-shape", STEP + "    out = model(x)[:, y > 0]"),
    ("dynamic-shape", FORWARD + "        return x[keep]"),
    ("dynamic-shape", FORWARD + "        return x[~keep.view(-1)]"),
    ("dynamic-shape", FORWARD + "        return x[(y > 0) & (y < 5)]"),
    ("dynamic-shape", FORWARD + "        return x[y.bool()]"),
    ("dynamic-shape", FORWARD + "        return x.unique()"),
    ("dynamic-shape", FORWARD + "        return y.argwhere()"),
    ("dynamic-shape", FORWARD.replace("y)", "mask=None)").replace("y > 0", "3") + "        return x[mask]"),
    ("no-sync", STEP.replace("    torch_xla.sync()\n", "") + "compiled = torch.compile(model, backend='openxla')"),
    ("gradient-sum", LAUNCHED.replace("loss.backward()", "shown = xm.all_reduce('sum', loss)\n    loss.backward()")),
    ("gone", "xmp.spawn(train, (), 8)"),
    ("gone", "from torch_xla.experimental import pjrt"),
    ("gone", "import torch_xla.experimental.pjrt as pjrt"),
    ("gone", "from torch_xla.experimental.xla_sharding import Mesh"),
    ("early-device", "def main():\n    device = torch_xla.device()\n    torch_xla.launch(train)"),
    ("early-device", "def main():\n    torch_xla.launch(train)\nprint(xr.is_bf16_supported())\nmain()"),
    ("early-device", "print(met.metrics_report())\ntorch_xla.launch(train)"),
    ("early-device", "def main():\n    if xr.world_size() > 1:\n        torch_xla.launch(train)"),
    ("install", "os.system('pip install torch_xla')"),
    ("install", "subprocess.check_call([sys.executable, '-m', 'pip', 'install', 'torch_xla==2.0'])"),
    ("install", "get_ipython().system(f'pip install torch=={version}')"),
    ("optimizer-first", "params = [p for p in model.parameters()]\noptimizer = torch.optim.Adam(params)\nmodel.to(device)"),
    (
        "optimizer-first",
        "class Trainer:\n    def __init__(self):\n        self.model = Net()\n"
        "        self.optimizer = torch.optim.Adam(self.model.parameters())\n        self.model.to(device)",
    ),
    (
        "optimizer-first",
        "def setup(net):\n    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n    net.cuda()\n".replace(
            "net.cuda()", "net.to(device)"
        ),
    ),
]

# Code that looks like trouble and is none.
SOUND = [
    "if torch.cuda.is_available():\n    torch.backends.cudnn.benchmark = True\n"
    "    torch.backends.cuda.matmul.allow_tf32 = True",
    "used = f'{torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0:.3g}G'",
    "model = model.to(torch_xla.device())",
    "x = torch.zeros(3, device='cpu')",
    "model.half().float()",
    "checkpoint = {'model': model.half(), 'epoch': 3}",
    "name = 'cuda'",
    "torch.cuda.manual_seed_all(0)",
    "with torch.autocast('xla', dtype=torch.bfloat16):\n    pass",
    "scaler = torch.amp.GradScaler(enabled=False)",
    "loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)",
    "loader = DataLoader(data, batch_size=8)",
    "loader = DataLoader(data, **settings)",
    STEP,
    STEP + "    if step % 100 == 0:\n        print(loss.item())",
    STEP + "    if step == args.log_interval:\n        print(loss.item())",
    STEP + "    if loss is None:\n        break",
    STEP + "    total += loss.detach()",
    STEP + "    x[y > 0] = 0",
    STEP + "print(loss.item())",
    "for x, y in loader:\n    correct += (model(x).argmax(1) == y).sum().item()",
    "picked = images[labels > 3]",
    "rows = np.nonzero(labels)",
    "torch.save({name: value.cpu() for name, value in model.state_dict().items()}, 'model.pt')",
    "torch.save(results, 'results.pt')",
    "xm.save(model.state_dict(), 'model.pt')",
    "model = model.to(device)\noptimizer = torch.optim.Adam(model.parameters())",
    STEP.replace("optimizer.step()", "xm.optimizer_step(optimizer, barrier=True)") + "torch_xla.launch(train)",
    "xmp.spawn(train, args=())",
    "torch.cuda.empty_cache()",
    "classifier = XGBClassifier(device='cuda')",
    "loader = pl.ParallelLoader(loader, [device]).per_device_loader(device)",
    "rank = xm.get_local_ordinal()",
    "dtype = {'bfloat16': torch.bfloat16, 'float16': torch.float16}[name]",
    "if x.dtype == torch.float16:\n    pass",
    "loader = DataLoader(data, sampler=None)",
    "loader = DataLoader(val, sampler=SequentialSampler(val), batch_size=8)",
    "torch.save(scheduler.state_dict(), 'scheduler.pt')",
    "torch.save(optimizer.state_dict(), 'optimizer.pt')",
    "torch.save(model.to('cpu').state_dict(), 'model.pt')",
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nmodel.to('cpu')",
    "def evaluate(model):\n    model.to(device)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)",
    "model.to(device)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\nmodel.to(device)",
    "torch.distributed.init_process_group('xla')\nmodel = nn.parallel.DistributedDataParallel(model)",
    "raise SystemExit('please pip install torch_xla')",
    STEP.replace("optimizer.step()", "xm.reduce_gradients(optimizer)\n    optimizer.step()") + "torch_xla.launch(train)",
    STEP.replace("loss.backward()", "(loss / args.steps).backward()") + "    if (step + 1) % args.steps == 0:\n        pass",
    STEP.replace("loss.backward()", "(loss / args.steps).backward()") + "    if args.fp16:\n        pass",
    STEP + "    print(loss.shape)",
    STEP + "    order = rng.permutation(9).tolist()",
    STEP + "    rows = frame[frame.size > 0]",
    STEP.replace("loss.backward()", "accelerator.backward(loss)") + "    if accelerator.sync_gradients:\n        print(loss)",
    "model = torch.compile(model, backend='openxla')",
    # Gradients that are summed otherwise, and steps that are compiled as a whole.
    LAUNCHED.replace(
        "loss.backward()", "loss.backward()\n    xm.all_reduce(xm.REDUCE_SUM, [p.grad for p in model.parameters()])"
    ),
    "torch.distributed.init_process_group('xla')\nmodel = nn.parallel.DistributedDataParallel(model)\n" + LAUNCHED,
    "from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP\nmodel = FSDP(model)\n" + LAUNCHED,
    "@torch_xla.compile\ndef step(x):\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n    return loss",
    # Code that knows of other devices than CUDA.
    "if device.type == 'cuda':\n    torch.cuda.synchronize()\nelif device.type == 'xla':\n    torch_xla.sync()",
    "if args.device == 'xla':\n    device = torch_xla.device()\nelif args.device == 'cuda':\n    device = torch.device('cuda')",
    "dtype = torch.float16 if device.type == 'cuda' else torch.bfloat16",
    "scaler = torch.amp.GradScaler('cuda', enabled=device.type == 'cuda')",
    "use_amp = device.type == 'cuda'\nwith torch.autocast('cuda', dtype=torch.float16, enabled=use_amp):\n    pass",
    "device_type = 'cuda' if 'cuda' in str(device) else 'cpu'",
    "device = torch.device('cuda' if args.device == 'cuda' else 'cpu')",
    "if device == torch.device('cuda') and torch.cuda.is_available():\n    model = nn.DataParallel(model).half()",
    "def wait(device):\n    if device.type != 'cuda':\n        return\n    torch.cuda.synchronize()",
    "if x.is_cuda:\n    torch.cuda.synchronize()",
    # What asks about a loss without its value, or rarely.
    *(
        STEP + f"    if {test}:\n        pass"
        for test in (
            "isinstance(loss, (list, tuple))",
            "loss.ndim > 0",
            "loss.dim() > 0",
            "loss.numel() > 1",
            "loss.size(0) > 3",
            "torch.is_tensor(loss)",
            "hasattr(loss, 'grad')",
            "callable(loss)",
            "args.loss == 'l1'",
        )
    ),
    *(
        STEP + f"    if {test}:\n        print(loss.item())"
        for test in ("step == 0", "step == len(loader) - 1", "step in (0, 10, 100)", "step < 3", "time.time() - last > 30")
    ),
    STEP + "    if step % 100:\n        continue\n    print(loss.item())",
    STEP + "    print(type(loss))\n    print(len(loss), f'{loss.shape}')",
    STEP + "    xm.add_step_closure(lambda value: print(value.item()), args=(loss,))",
    STEP + "    kept = {name: value.cpu() for name, value in states.items()}",
    STEP + "    log.update(dict(loss=3))\n    print(dict(loss=3))",
    # Indices that are no masks of tensors.
    STEP + "    seen = names[step == 0]",
    STEP + "    y = np.asarray(answers)\n    rows = y[y > 0]",
    STEP + "    picked = table[x.shape[0] > 3]",
    STEP + "    part = x[first]\n    other = words[mode == 'train']",
    FORWARD + "        return torch.where(keep, x, 0)",
    FORWARD + "        x[keep] = 0\n        return x[y]",
    FORWARD.replace("y)", "y: np.ndarray)") + "        return self.names[keep]",
    "class View:\n    def forward(self, order):\n        return order[order > 0]",
    # Batches of one shape, optimizers made after the move, launches that come first.
    "loader = DataLoader(data, shuffle=True)",
    "loader = DataLoader(data, batch_size=1, shuffle=True)",
    "loader = DataLoader(data, 8, True, None, None, 0, None, False, True)",
    "model = Net().to(device)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\nmodel = model.to(device)",
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nmodel.to(torch.bfloat16)",
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nif device.type == 'cuda':\n    model.cuda()",
    "xmp.spawn(train, (), None)",
    "def main():\n    torch_xla.launch(train)\n    print(xr.world_size())",
    "def main():\n    if args.one:\n        train(torch_xla.device())\n    else:\n        torch_xla.launch(train)",
    "def main():\n    if args.one:\n        train(torch_xla.device())\n        return\n    torch_xla.launch(train)",
    "os.system('pip install timm')",
    "os.system('echo pip install torch_xla')",
    "subprocess.run(['git', 'clone', 'https://github.com/pytorch/xla'])",
    "def train(index):\n    device = torch_xla.device()\ntorch_xla.launch(train)",
]


def written(folder, code, name="script.py"):
    path = folder / name
    path.write_text(code)
    return path


@pytest.mark.parametrize("rule, code", BROKEN, ids=lambda value: value if len(value) < 20 else None)
def test_code_that_breaks_a_rule_is_named_with_its_line(rule, code, tmp_path):
    findings, _ = tool.examine(written(tmp_path, IMPORTS + code))
    assert {f.rule for f in findings} == {rule}, tool.as_text(findings)
    lines = (IMPORTS + code).splitlines()
    assert all(f.line > IMPORTS.count("\n") and lines[f.line - 1].strip() for f in findings)
    assert f"[{rule}]" in tool.as_text(findings) and len({f.line for f in findings}) == len(findings)


@pytest.mark.parametrize("code", [code for rule, code in BROKEN if rule != "unreadable"])
def test_mended_code_is_python_and_once_mended_stays_as_it_is(code, tmp_path):
    path = written(tmp_path, IMPORTS + code)
    findings, fixed = tool.examine(path)
    compile(fixed, "fixed", "exec")
    assert (fixed != IMPORTS + code) == any(f.fixable for f in findings)
    again, same = tool.examine(written(tmp_path, fixed))
    assert same == fixed and not any(f.fixable for f in again)


@pytest.mark.parametrize("code", SOUND)
def test_code_that_only_looks_like_trouble_is_left_alone(code, tmp_path):
    path = written(tmp_path, IMPORTS + code)
    findings, fixed = tool.examine(path)
    assert findings == [] and fixed == path.read_text()


def test_every_rule_has_an_example():
    assert {rule for rule, _ in BROKEN} == set(tool.RULES)


def test_names_mean_what_the_imports_say(tmp_path):
    code = "from torch.nn import DataParallel as Both\nfrom torch import save as keep\n"
    code += "model = Both(model)\nkeep(model.state_dict(), 'a')\n"
    findings, _ = tool.examine(written(tmp_path, code))
    assert [(f.rule, f.line) for f in findings] == [("data-parallel", 3), ("save", 4)]
    findings, _ = tool.examine(written(tmp_path, "from mine import DataParallel, autocast\nmodel = DataParallel(autocast())\n"))
    assert findings == []


def test_the_mended_example_trains_on_the_xla_device_and_saves_what_a_cpu_loads(xla, digits, tmp_path, capsys):
    import torch

    path = tool.copy_example(tmp_path)
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
    assert tool.examine(path)[1] == path.read_text()


@pytest.mark.parametrize(
    "place", ["Trainer(accelerator={})", "parser.add_argument('--device', default={})", "torch.load(f, map_location={})"]
)
def test_a_word_that_no_device_can_replace_is_found_and_left(place, tmp_path):
    code = "import torch\n" + place.format("'cuda' if torch.cuda.is_available() else 'cpu'") + "\n"
    findings, fixed = tool.examine(written(tmp_path, code))
    assert [f.rule for f in findings] == ["cuda"] and fixed == code


def test_a_launched_script_gets_the_gradient_sum_and_todays_names(tmp_path):
    code = (
        "import torch\nimport torch_xla.core.xla_model as xm\nimport torch_xla.distributed.xla_multiprocessing as xmp\n\n\n"
        "def train(index):\n    device = xm.xla_device()\n    model = make().to(device)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n    for x, y in loader:\n"
        "        lose(model(x), y).backward()\n        optimizer.step()\n        xm.mark_step()\n\n\n"
        "xmp.spawn(train, args=(), nprocs=8, start_method='fork')\n"
    )
    _, fixed = tool.examine(written(tmp_path, code))
    assert "torch_xla.core.xla_model.optimizer_step(optimizer)\n        torch_xla.sync()" in fixed
    assert "device = torch_xla.device()" in fixed and "xmp.spawn(train, args=(), start_method='fork')" in fixed
    assert "import torch_xla\n" in fixed
    compile(fixed, "fixed", "exec")


@pytest.mark.parametrize(
    "above",
    [
        '"""About.\\n\\nfrom the paper of X.\\n"""\\nimport torch\\n',
        '#!/usr/bin/env python\\n"""About."""\\nfrom __future__ import annotations\\n',
        "def other():\\n    import torch_xla\\n",
        "",
    ],
)
def test_an_import_that_a_mend_needs_stands_where_it_holds(above, tmp_path):
    above = above.replace("\\n", "\n")
    _, fixed = tool.examine(written(tmp_path, above + "x = x.to('cuda')\n"))
    tree = ast.parse(fixed)
    names = [[alias.name for alias in node.names] for node in tree.body if isinstance(node, ast.Import)]
    assert ["torch_xla"] in names and ast.get_docstring(tree) == ast.get_docstring(ast.parse(above))
    assert fixed.startswith("#!") == above.startswith("#!")


def test_comments_line_ends_modes_and_links_of_a_mended_file_stay(tmp_path):
    code = "\ufeffloader = DataLoader(\r\n    data,  # all\r\n    batch_size=8,\r\n    shuffle=True,  # mix\r\n)\r\n"
    path, link = tmp_path / "real.py", tmp_path / "link.py"
    path.write_bytes(("\ufefffrom torch.utils.data import DataLoader\r\n" + code[1:]).encode())
    path.chmod(0o755)
    link.symlink_to(path)
    assert cli.main(["migrate", "--fix", str(link)]) == 0
    fixed = path.read_bytes().decode()
    assert fixed.startswith("\ufeff") and "\r\n    shuffle=True, drop_last=True,  # mix\r\n)" in fixed and "# all" in fixed
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o755


def notebook(*cells):
    code = [
        dict(cell_type="code", source=text.splitlines(True), metadata={}, outputs=[], execution_count=None) for text in cells
    ]
    words = dict(cell_type="markdown", source=["# Title"], metadata={})
    return json.dumps(dict(cells=[words, *code], metadata={}, nbformat=4, nbformat_minor=5), indent=1)


def test_a_notebook_is_one_program_whose_cells_are_named_and_whose_magics_stay(tmp_path):
    text = notebook(
        "!pip install torch_xla[tpu]==2.6\n%env XLA_USE_BF16=1\nimport torch",
        "%%bash\nnvidia-smi",
        "files = !ls\nmodel = model.cuda()  # here\nmodel?\nif True:\n    !echo done\nfor i in range(3):\n    %time i + 1",
    )
    path = written(tmp_path, text, "guide.ipynb")
    findings, fixed = tool.examine(path)
    assert [(f.rule, f.cell, f.line) for f in findings] == [("install", 2, 1), ("old-variable", 2, 2), ("cuda", 4, 2)]
    sources = ["".join(cell["source"]) for cell in json.loads(fixed)["cells"]]
    assert sources[1].splitlines()[:2] == ["!pip install torch_xla[tpu]==2.6", "%env XLA_USE_BF16=1"]
    assert "import torch_xla" in sources[1] and sources[2] == "%%bash\nnvidia-smi"
    wanted = sources[3].replace("model.to(torch_xla.device())", "model.cuda()")
    assert wanted == "".join(json.loads(text)["cells"][3]["source"]) and wanted != sources[3]
    assert "guide.ipynb cell 4:2:9" in tool.as_text(findings)


@pytest.mark.parametrize(
    "cell",
    [
        "if x:  # right?\n    pass",
        "'a %d'\\\n    % 3",
        "a = (1\n    != 2)",
        "!pip list \\\n    --verbose",
        "?torch",
        "d['x'] = !ls",
        "    x = 1\n    y = 2",
        "await thing",
        "",
        "# only words",
        "%%html\n<b>no Python</b>",
        'text = """\n!ls\n%time\n"""',
    ],
)
def test_cells_as_ipython_takes_them_are_read_and_stay_as_they_are(cell, tmp_path):
    path = written(tmp_path, notebook("x = 1", cell, "model = model.cuda()"), "odd.ipynb")
    findings, fixed = tool.examine(path)
    assert [(f.rule, f.cell, f.line) for f in findings] == [("cuda", 4, 1)]
    assert "".join(json.loads(fixed)["cells"][2]["source"]) == cell


@pytest.mark.parametrize(
    "cell, line",
    [
        ("!python -m pip install torch_xla", 1),
        ("%pip install -q torch==2.1 torchvision", 1),
        ("!curl x -o pytorch-xla-env-setup.py\n!python pytorch-xla-env-setup.py --version $VERSION", 2),
        ("!pip install 'torch'", 1),
        ('!pip install "torch>=2.0"', 1),
        ("!pip install torch[opt]", 1),
        ("!pip install https://storage.googleapis.com/tpu-pytorch/wheels/torch_xla-1.9-cp37-cp37m-linux_x86_64.whl", 1),
        ("x = 1\n!pip install -U \\\n  torch_xla", 2),
        ("%%bash\ncd x\npip install -q \\\n   torch_xla", 3),
        ("out = !pip install torch_xla", 1),
        ("!pip install torch_xla \\", 1),
        ("!pip uninstall -y torch && pip install libtpu", 1),
        ("get_ipython().system('pip install torch_xla')", 1),
        ("pip install torch_xla\nx = 1", 1),
        ("!pip install timm --no-deps  # keeps torch as it is", None),
        ("!pip install accelerate; echo torch done", None),
        ("!pip install torchvision torchmetrics torch-geometric torch_optimizer", None),
        ("%%bash\n# pip install torch_xla is what old guides did\necho 'it''s", None),
        ("!curl https://x/env-setup.py -o pytorch-xla-env-setup.py", None),
        ('text = """\n!pip install torch_xla\n"""', None),
        ("pip install timm\ncd folder\nx = 1", None),
    ],
)
def test_installing_another_torch_is_found_wherever_a_cell_does_it(cell, line, tmp_path):
    path = written(tmp_path, notebook(cell, "model = model.cuda()"), "install.ipynb")
    findings, fixed = tool.examine(path)
    assert [(f.cell, f.line) for f in findings if f.rule == "install"] == ([(2, line)] if line else [])
    assert [(f.rule, f.cell) for f in findings if f.rule != "install"] == [("cuda", 3)]
    assert "".join(json.loads(fixed)["cells"][1]["source"]).endswith(cell)


def test_one_bad_cell_hides_no_other(tmp_path):
    path = written(tmp_path, notebook("!pip install torch_xla", "def f(:", "model = model.cuda()"), "bad.ipynb")
    findings, fixed = tool.examine(path)
    assert [(f.rule, f.cell) for f in findings] == [("install", 2), ("unreadable", 3), ("cuda", 4)]
    assert "".join(json.loads(fixed)["cells"][2]["source"]) == "def f(:"


def test_a_notebook_without_code_has_nothing_to_mend(tmp_path):
    path = written(tmp_path, notebook(), "words.ipynb")
    assert tool.examine(path) == ([], path.read_text())


def test_the_notebooks_and_workloads_of_tpukit_have_nothing_to_mend():
    paths = tool.files_in([ROOT / "notebooks", ROOT / "tpukit" / "workloads"])
    assert len(paths) > 10
    assert [f.place for path in paths for f in tool.examine(path)[0] if f.level == "error"] == []


def test_formats_are_what_editors_and_workflows_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "model = model.cuda()\nimport os\nos.environ['XLA_USE_BF16'] = '1'\n", "a.py")
    written(tmp_path, "model.cuda()\n", "a b#%.py")
    assert cli.main(["migrate", "a.py", "--format", "github"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("::error file=a.py,line=1,col=9,title=tpukit cuda::`.cuda()` of `model`: ")
    assert second.startswith("::warning file=a.py,line=3,")
    cli.main(["migrate", "a.py", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert [(f["rule"], f["level"], f["line"], f["fixable"]) for f in found] == [
        ("cuda", "error", 1, True),
        ("old-variable", "warning", 3, False),
    ]
    cli.main(["migrate", "a.py", "--format", "sarif"])
    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == set(tool.RULES)
    assert run["results"][1]["locations"][0]["physicalLocation"]["region"] == dict(startLine=3, startColumn=12)
    cli.main(["migrate", "a b#%.py", "--format", "sarif"])
    place = json.loads(capsys.readouterr().out)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a%20b%23%25.py"


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.ipynb", "{}", "a.ipynb:1:1: error .unreadable. no notebook .KeyError"),
        ("a.ipynb", "no json", "no notebook .JSONDecodeError"),
        ("a.py", b"\xff\xfe\x00", "no text in UTF-8"),
        ("a.txt", "words", "neither a script nor a notebook: give .py or .ipynb"),
        ("missing.py", None, r"missing.py cannot be read \(No such file"),
        ("folder", "", "no .py or .ipynb files in"),
    ],
)
def test_what_cannot_be_read_is_said_and_nothing_is_written(name, text, words, tmp_path, capsys):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["migrate", "--fix", str(path)]) == 1
    shown = capsys.readouterr()
    assert re.search(words, shown.out + shown.err)
    assert text is None or path.is_dir() or path.read_bytes() in (text, str(text).encode())


def test_a_missing_file_is_said_before_any_other_is_rewritten(tmp_path, capsys):
    path = written(tmp_path, "model.cuda()\n")
    assert cli.main(["migrate", "--fix", str(path), str(tmp_path / "missing.py")]) == 1
    assert "missing.py cannot be read" in capsys.readouterr().err and path.read_text() == "model.cuda()\n"


def test_a_script_keeps_the_encoding_that_its_first_line_names(tmp_path):
    path = tmp_path / "old.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nname = 'Jürgen'\nmodel.cuda()\n".encode("latin-1"))
    assert cli.main(["migrate", "--fix", str(path)]) == 0
    text = path.read_bytes().decode("latin-1")
    assert "name = 'Jürgen'\nmodel.to(torch_xla.device())" in text


def test_what_cannot_be_written_is_said(tmp_path, monkeypatch):
    path = written(tmp_path, "model.cuda()\n")

    def refuse(path, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tool.files, "write_atomic", refuse)
    with pytest.raises(TpukitError, match="cannot be written .Read-only file system.: copy it"):
        tool.write(path, "x")


# What a stranger's file can do to who reads it


def nested(depth):
    return "[" * depth + "]" * depth


LINE = "    model.to(device).cuda(); x = x.cuda(); loss = f(model(x.to(device)), [1, 2, 3], key=(a + b) * c)\n"
HOSTILE = {
    "parentheses.py": b"x = " + b"(" * 5000 + b")" * 5000,
    "brackets.py": b"x = " + nested(100_000).encode(),
    "not.py": b"x = " + b"not " * 50_000 + b"y",
    "sum.py": b"x = " + b"1+" * 2_000 + b"1",
    "attributes.py": b"x = a" + b".b" * 2_000,
    "rot13.py": b"# coding: rot13\nvzcbeg bf\n",
    "zlib.py": b"# coding: zlib\nimport os\n",
    "undefined.py": b"# coding: undefined\nimport os\n",
    "surrogate.py": b"# coding: raw_unicode_escape\nx = '\\ud800'\n",
    "utf7.py": b"# coding: utf-7\nx = '+2AA-'\n",
    "zero.py": b"x = 1\0\nmodel.cuda()\n",
    "bomb.ipynb": nested(100_000).encode(),
    "objects.ipynb": b'{"cells":' * 50_000,
    "cell.ipynb": json.dumps(dict(cells=[dict(cell_type="code", source=["x = " + nested(50_000)])])).encode(),
    "number.ipynb": b'{"cells": ' + b"9" * 10_000 + b"}",
    "sources.ipynb": b'{"cells": [{"cell_type": "code", "source": {"a": {}}}, {"cell_type": "code", "source": 1}]}',
}


def test_a_hostile_file_is_named_nothing_of_it_is_written_and_the_others_are_read(tmp_path, capsys):
    for name, data in HOSTILE.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "a_first.py").write_text("model.cuda()\n")
    (tmp_path / "z_last.py").write_text("model.cuda()\n")
    assert cli.main(["migrate", "--fix", "--format", "json", str(tmp_path)]) == 1
    said = capsys.readouterr()
    found = {}
    for finding in json.loads(said.out):
        found.setdefault(Path(finding["path"]).name, []).append((finding["rule"], finding["level"]))
    assert "Traceback" not in said.err and found.keys() <= {*HOSTILE, "a_first.py", "z_last.py"}
    # Those that a parser of another version reads have nothing in them to be found.
    assert {name: rules for name, rules in found.items() if rules != [("unreadable", "error")]} == {}
    must = "parentheses brackets rot13 zlib undefined surrogate utf7 zero".split()
    assert {f"{name}.py" for name in must} | {name for name in HOSTILE if name.endswith(".ipynb")} <= found.keys()
    assert {name: (tmp_path / name).read_bytes() for name in HOSTILE} == HOSTILE
    assert "cuda" not in (tmp_path / "a_first.py").read_text() + (tmp_path / "z_last.py").read_text()


def test_a_file_that_takes_too_long_is_named_and_the_next_one_is_read(tmp_path, monkeypatch):
    endless, good = tmp_path / "endless.py", written(tmp_path, "model.cuda()\n")
    os.mkfifo(endless)  # nobody ever writes into it
    tool.examine(good)  # so that the start of the process does not count
    monkeypatch.setattr(apart, "LIMIT_S", 1.0)
    (found,), fixed = tool.examine(endless)
    assert (found.rule, found.found, fixed) == ("unreadable", "not read within 1 s", "")
    monkeypatch.undo()
    assert [f.rule for f in tool.examine(good)[0]] == ["cuda"]


def test_a_file_that_takes_too_much_memory_is_named():
    code = "from tpukit.tools.migrate import isolated; isolated.answers(lambda path: (bytearray(5 * 2**30), ''))"
    ran = subprocess.run([sys.executable, "-c", code], input='[".", "a.py"]\n', capture_output=True, text=True)
    assert json.loads(ran.stdout) == {"unreadable": "needs more than 4 GiB of memory"}


def test_an_interrupt_ends_the_process_that_reads(tmp_path, monkeypatch):
    def interrupted(*words):
        raise KeyboardInterrupt

    good = written(tmp_path, "model.cuda()\n")
    tool.examine(good)
    process = tool._worker.process
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(isolated.threading.Timer, "start", lambda timer: None)
        patch.setattr(isolated.os, "getcwd", interrupted)
        tool.examine(good)
    assert process.returncode is not None and [f.rule for f in tool.examine(good)[0]] == ["cuda"]


def test_no_code_of_the_current_folder_runs_while_files_are_read(tmp_path, monkeypatch):
    for name in ("libcst", "json", "tpukit", "torch", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "tpukit", "migrate", "torch.py"], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert ran.returncode == 0
    monkeypatch.setattr(tool, "_worker", isolated.Reader())
    assert tool.examine("torch.py")[0] == []


def test_the_process_that_reads_ends_by_itself_where_nobody_is_left_to_end_it(tmp_path):
    program = (
        "import time\nfrom tpukit.tools.migrate import isolated\nisolated.LIMIT_S = -4\nisolated.answers(lambda path: time.sleep(600))"
    )
    asked = json.dumps([str(tmp_path), "endless.py"]) + "\n"
    ran = subprocess.run([sys.executable, "-c", program], input=asked, text=True, cwd=ROOT, capture_output=True, timeout=60)
    assert ran.returncode == -signal.SIGALRM


def test_what_is_shown_of_a_file_holds_no_control_character(tmp_path, capsys):
    path = tmp_path / "\x1b[2J.py"
    path.write_text("model.cuda()  # \x1b]0;title\x07\nx = f'{loss.item()}\x9b'\n")
    for form in tool.FORMATS:
        cli.main(["migrate", str(path), "--format", form])
    cli.main(["migrate", str(path), "--fix"])
    assert "cuda" not in path.read_text() and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(capsys.readouterr()))
