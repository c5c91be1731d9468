"""From torch_xla to torch_tpu: what code calls of torch_xla, and what takes its place. docs/TORCHTPU.md has the same table."""

import re

import libcst as cst
import libcst.matchers as m

from tpukit.tools.migrate import fixes
from tpukit.tools.migrate.source import Source, argument, method_of

XM, XR = "torch_xla.core.xla_model", "torch_xla.runtime"
DEVICE = 'torch.device("tpu")'
# Functions that take no argument there -> the expression that is the same with torch_tpu.
SAME = {"torch_xla.device": DEVICE, f"{XM}.xla_device": DEVICE}
# How a name of torch_xla begins, the more special before the more general -> what to do instead.
INSTEAD = {
    "torch_xla.sync": "leave it out: operations run at once. To wait for them, torch.accelerator.synchronize()",
    f"{XM}.mark_step": "leave it out: operations run at once. To wait for them, torch.accelerator.synchronize()",
    "torch_xla.step": "leave it out: operations run at once",
    "torch_xla.compile": "use torch.compile(model), without a mode or a backend",
    "torch_xla.launch": "call torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=8), then any launcher; or tpukit.launch",
    "torch_xla.distributed.xla_multiprocessing": "call torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=8), then "
    "torch.multiprocessing.spawn; or tpukit.launch",
    "torch_xla.distributed.parallel_loader": "move each batch to the device yourself: batch.to('tpu')",
    "torch_xla.distributed.spmd": "torch_tpu shards by DTensor: torch.distributed.tensor",
    f"{XM}.optimizer_step": "use optimizer.step(), and DistributedDataParallel over init_process_group('tpu_dist')",
    f"{XM}.all_reduce": "use torch.distributed.all_reduce, after init_process_group('tpu_dist')",
    f"{XM}.save": "use torch.save on rank 0, with CPU copies",
    f"{XM}.master_print": "print on rank 0: torch.distributed.get_rank() == 0",
    f"{XR}.world_size": "use torch.distributed.get_world_size()",
    f"{XR}.global_ordinal": "use torch.distributed.get_rank()",
    "torch_xla.debug.profiler": "use torch.profiler",
    "torch_xla.debug.metrics": "torch_tpu has no such counts",
}
MATMUL_PRECISION = "torch_xla.backends.set_mat_mul_precision"
XLA_WORD = re.compile(r"""(["'])xla(:0)?\1""")
TAKES_DEVICE = {"torch.device", "torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"}


class ToTorchTPU:
    """findings and `fixed`, as of `Checker`."""

    def __init__(self, code):
        self.source = Source(code)
        self.findings, self.changes = [], {}
        for node in m.findall(self.source.tree, m.Import() | m.ImportFrom()):
            words = self.source.code(node)
            if re.match(r"(import|from)\s+torch_xla\b", words):
                self._report(node, words, "", "leave it out once nothing of it is used; `import torch` loads torch_tpu")
        for name, call in self.source.calls:
            self._check_call(name, call)

    def _check_call(self, name, call):
        for arg in call.args:
            is_device = name in TAKES_DEVICE or method_of(call) == "to" or arg.keyword and arg.keyword.value == "device"
            if is_device and XLA_WORD.fullmatch(self.source.code(arg.value)):
                self._report(arg.value, f"`{self.source.code(arg.value)}`", '"tpu"', "the device is called 'tpu'")
        if name == MATMUL_PRECISION:
            precision = argument(call, "precision", 0)
            known = precision is not None and self.source.code(precision).strip("'\"") in ("high", "highest")
            new = f"torch.set_float32_matmul_precision({self.source.code(precision)})" if known else ""
            self._report(call, f"`{name}`", new, "use torch.set_float32_matmul_precision")
        elif name in SAME:
            self._report(call, f"`{name}`", "" if call.args else SAME[name], f"use {DEVICE}: each process has one chip")
        elif name.startswith("torch_xla."):
            advice = next((INSTEAD[start] for start in INSTEAD if f"{name}.".startswith(f"{start}.")), "")
            self._report(call, f"`{name}`", "", advice or "torch_tpu has no known equivalent")

    def _report(self, node, found, replace, advice):
        self.findings.append((*self.source.position(node), "torch-xla", " ".join(found.split())[:60], bool(replace), advice))
        if replace:
            self.changes[node] = fixes.replacement(replace)

    def fixed(self):
        imports = {"torch"} if any(isinstance(node, cst.Call) for node in self.changes) else set()
        return fixes.apply(self.source.tree, self.changes, imports)
