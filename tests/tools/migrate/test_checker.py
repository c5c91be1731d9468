"""Every rule on code that breaks it, and on code that only looks as if it did."""

import pytest

from tests.tools.migrate.helpers import written
from tpukit.tools.migrate import examine
from tpukit.tools import migrate as tool

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
    (
        "cuda",
        (
            "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nwith"
            " torch.autocast(device_type=device):\n    pass"
        ),
    ),
    ("cuda", "torch.cuda.synchronize()"),
    ("cuda-check", "use_cuda = torch.cuda.is_available()"),
    (
        "cuda-check",
        "if torch.cuda.is_available():\n    torch.backends.cudnn.benchmark = True\n    workers = 8",
    ),
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
    (
        "dynamic-shape",
        "class Net(nn.Module):\n    def forward(self, x):\n        return torch.masked_select(x, x > 0)",
    ),
    ("no-sync", STEP.replace("    torch_xla.sync()\n", "")),
    (
        "no-sync",
        STEP.replace("    torch_xla.sync()\n", "").replace(
            "optimizer.step()", "if step % 4 == 0: optimizer.step()"
        ),
    ),
    (
        "no-sync",
        (
            "class Trainer:\n    def __init__(self):\n        self.scaler ="
            " torch.amp.GradScaler(enabled=False)\n    def train(self):\n        for x in self.loader:\n     "
            "       self.scaler.scale(self.model(x)).backward()\n            self.scaler.step(self.optimizer)"
        ),
    ),
    ("save", "torch.save(model.state_dict(), 'model.pt')"),
    ("save", "state = {'net': model.state_dict(), 'epoch': 3}\ntorch.save(state, 'model.pt')"),
    ("save", "state = net.state_dict()\ntorch.save(state, 'model.pt')"),
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
    (
        "cuda",
        (
            "if torch.cuda.is_available():\n    device = torch.device('cuda')\nelse:\n    device ="
            " torch.device('cpu')"
        ),
    ),
    (
        "cuda",
        (
            "def pick():\n    if torch.cuda.is_available():\n        return torch.device('cuda')\n    return"
            " torch.device('cpu')"
        ),
    ),
    ("cuda", "if not torch.cuda.is_available():\n    device = 'cpu'\nelse:\n    device = 'cuda'"),
    (
        "cuda",
        "use_cuda = not args.no_cuda and torch.cuda.is_available()\nif use_cuda:\n    model = model.cuda()",
    ),
    ("cuda", "args.cuda = torch.cuda.is_available()\nx = x.cuda() if args.cuda else x"),
    ("cuda", "device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')"),
    ("cuda", "with torch.autocast('cuda' if torch.cuda.is_available() else 'cpu'):\n    pass"),
    ("cuda", "torch.set_default_device('cuda')"),
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
    ("dynamic-shape", FORWARD + "        return x.unique()"),
    ("dynamic-shape", FORWARD + "        return y.argwhere()"),
    ("dynamic-shape", FORWARD.replace("y)", "mask=None)").replace("y > 0", "3") + "        return x[mask]"),
    (
        "no-sync",
        STEP.replace("    torch_xla.sync()\n", "") + "compiled = torch.compile(model, backend='openxla')",
    ),
    (
        "gradient-sum",
        LAUNCHED.replace("loss.backward()", "shown = xm.all_reduce('sum', loss)\n    loss.backward()"),
    ),
    ("gone", "xmp.spawn(train, (), 8)"),
    ("gone", "from torch_xla.experimental import pjrt"),
    ("gone", "import torch_xla.experimental.pjrt as pjrt"),
    ("gone", "from torch_xla.experimental.xla_sharding import Mesh"),
    ("early-device", "def main():\n    device = torch_xla.device()\n    torch_xla.launch(train)"),
    ("early-device", "def main():\n    torch_xla.launch(train)\nprint(xr.is_bf16_supported())\nmain()"),
    ("early-device", "print(met.metrics_report())\ntorch_xla.launch(train)"),
    ("early-device", "def main():\n    if xr.world_size() > 1:\n        torch_xla.launch(train)"),
    (
        "optimizer-first",
        (
            "class Trainer:\n    def __init__(self):\n        self.model = Net()\n        self.optimizer ="
            " torch.optim.Adam(self.model.parameters())\n        self.model.to(device)"
        ),
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
    (
        "if torch.cuda.is_available():\n    torch.backends.cudnn.benchmark = True\n"
        "    torch.backends.cuda.matmul.allow_tf32 = True"
    ),
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
    STEP.replace("optimizer.step()", "xm.optimizer_step(optimizer, barrier=True)")
    + "torch_xla.launch(train)",
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
    STEP.replace("optimizer.step()", "xm.reduce_gradients(optimizer)\n    optimizer.step()")
    + "torch_xla.launch(train)",
    STEP.replace("loss.backward()", "(loss / args.steps).backward()")
    + "    if (step + 1) % args.steps == 0:\n        pass",
    STEP.replace("loss.backward()", "(loss / args.steps).backward()") + "    if args.fp16:\n        pass",
    STEP + "    print(loss.shape)",
    STEP + "    order = rng.permutation(9).tolist()",
    STEP + "    rows = frame[frame.size > 0]",
    STEP.replace("loss.backward()", "accelerator.backward(loss)")
    + "    if accelerator.sync_gradients:\n        print(loss)",
    "model = torch.compile(model, backend='openxla')",
    # Gradients that are summed otherwise, and steps that are compiled as a whole.
    LAUNCHED.replace(
        "loss.backward()",
        "loss.backward()\n    xm.all_reduce(xm.REDUCE_SUM, [p.grad for p in model.parameters()])",
    ),
    "torch.distributed.init_process_group('xla')\nmodel = nn.parallel.DistributedDataParallel(model)\n"
    + LAUNCHED,
    "from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP\nmodel = FSDP(model)\n"
    + LAUNCHED,
    (
        "@torch_xla.compile\ndef step(x):\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n  "
        "  return loss"
    ),
    # Code that knows of other devices than CUDA.
    (
        "if device.type == 'cuda':\n    torch.cuda.synchronize()\nelif device.type == 'xla':\n   "
        " torch_xla.sync()"
    ),
    (
        "if args.device == 'xla':\n    device = torch_xla.device()\nelif args.device == 'cuda':\n    device ="
        " torch.device('cuda')"
    ),
    "dtype = torch.float16 if device.type == 'cuda' else torch.bfloat16",
    "scaler = torch.amp.GradScaler('cuda', enabled=device.type == 'cuda')",
    (
        "use_amp = device.type == 'cuda'\nwith torch.autocast('cuda', dtype=torch.float16,"
        " enabled=use_amp):\n    pass"
    ),
    "device_type = 'cuda' if 'cuda' in str(device) else 'cpu'",
    "device = torch.device('cuda' if args.device == 'cuda' else 'cpu')",
    (
        "if device == torch.device('cuda') and torch.cuda.is_available():\n    model ="
        " nn.DataParallel(model).half()"
    ),
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
        for test in (
            "step == 0",
            "step == len(loader) - 1",
            "step in (0, 10, 100)",
            "step < 3",
            "time.time() - last > 30",
        )
    ),
    STEP + "    print(type(loss))\n    print(len(loss), f'{loss.shape}')",
    STEP + "    xm.add_step_closure(lambda value: print(value.item()), args=(loss,))",
    STEP + "    kept = {name: value.cpu() for name, value in states.items()}",
    STEP + "    log.update(dict(loss=3))\n    print(dict(loss=3))",
    # Indices that are not masks of tensors.
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
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nmodel.to(torch.bfloat16)",
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nif device.type == 'cuda':\n    model.cuda()",
    "xmp.spawn(train, (), None)",
    "def main():\n    torch_xla.launch(train)\n    print(xr.world_size())",
    (
        "def main():\n    if args.one:\n        train(torch_xla.device())\n    else:\n       "
        " torch_xla.launch(train)"
    ),
    (
        "def main():\n    if args.one:\n        train(torch_xla.device())\n        return\n   "
        " torch_xla.launch(train)"
    ),
    "def train(index):\n    device = torch_xla.device()\ntorch_xla.launch(train)",
]


@pytest.mark.parametrize("rule, code", BROKEN, ids=lambda value: value if len(value) < 20 else None)
def test_code_that_breaks_a_rule_is_named_with_its_line(rule, code, tmp_path):
    findings, _ = examine(written(tmp_path, IMPORTS + code))
    assert {f.rule for f in findings} == {rule}, tool.as_text(findings)
    lines = (IMPORTS + code).splitlines()
    assert all(f.line > IMPORTS.count("\n") and lines[f.line - 1].strip() for f in findings)
    assert f"[{rule}]" in tool.as_text(findings) and len({f.line for f in findings}) == len(findings)


@pytest.mark.parametrize("code", [code for rule, code in BROKEN if rule != "unreadable"])
def test_fixed_code_is_python_and_once_fixed_stays_as_it_is(code, tmp_path):
    path = written(tmp_path, IMPORTS + code)
    findings, fixed = examine(path)
    compile(fixed, "fixed", "exec")
    assert (fixed != IMPORTS + code) == any(f.fixable for f in findings)
    again, same = examine(written(tmp_path, fixed))
    assert same == fixed and not any(f.fixable for f in again)


@pytest.mark.parametrize("code", SOUND)
def test_code_that_only_looks_like_trouble_is_left_alone(code, tmp_path):
    path = written(tmp_path, IMPORTS + code)
    findings, fixed = examine(path)
    assert findings == [] and fixed == path.read_text()


def test_every_rule_has_an_example():
    elsewhere = {"install", "torch-xla", "torch-tpu"}  # test_notebook.py, test_to_torch_tpu.py
    assert {rule for rule, _ in BROKEN} | elsewhere == set(tool.RULES)


def test_names_mean_what_the_imports_say(tmp_path):
    code = "from torch.nn import DataParallel as Both\nfrom torch import save as keep\n"
    code += "model = Both(model)\nkeep(model.state_dict(), 'a')\n"
    findings, _ = examine(written(tmp_path, code))
    assert [(f.rule, f.line) for f in findings] == [("data-parallel", 3), ("save", 4)]
    findings, _ = examine(
        written(tmp_path, "from mine import DataParallel, autocast\nmodel = DataParallel(autocast())\n")
    )
    assert findings == []
