"""From torch_xla to torch_tpu: what code calls of torch_xla, and what takes its place. docs/TORCHTPU.md has
the same table."""

import re

import libcst as cst
import libcst.matchers as m

from tpukit.tools.migrate import fixes
from tpukit.tools.migrate.source import Source, argument, method_of

XM, XR = "torch_xla.core.xla_model", "torch_xla.runtime"
DEVICE = 'torch.device("tpu")'
# Functions that take no argument there -> the expression that is the same with torch_tpu.
SAME = {"torch_xla.device": DEVICE, f"{XM}.xla_device": DEVICE}
LAUNCH = (
    "call torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=8), then torch.multiprocessing.spawn, with"
    " RANK, LOCAL_RANK, "
)
LAUNCH += "WORLD_SIZE, MASTER_ADDR and MASTER_PORT set in each process; or tpukit.launch"
AT_ONCE = "leave it out: operations run at once"
DTENSOR = "torch_tpu shards by DTensor: torch.distributed.tensor"
# How a name of torch_xla begins, the more special before the more general -> what to do instead.
INSTEAD = {
    "torch_xla.sync": f"{AT_ONCE}. To wait for them, torch.accelerator.synchronize()",
    f"{XM}.mark_step": f"{AT_ONCE}. To wait for them, torch.accelerator.synchronize()",
    "torch_xla.step": AT_ONCE,
    f"{XM}.add_step_closure": "call the function itself: operations run at once",
    "torch_xla.compile": "use torch.compile(model), without a mode or a backend",
    "torch_xla.launch": LAUNCH,
    "torch_xla.distributed.xla_multiprocessing": LAUNCH,
    "torch_xla.distributed.parallel_loader": "move each batch to the device yourself: batch.to('tpu')",
    "torch_xla.distributed.spmd": DTENSOR,
    f"{XR}.use_spmd": DTENSOR,
    "torch_xla.distributed.xla_backend": "leave it out: the backend is called 'tpu_dist'",
    f"{XM}.optimizer_step": (
        "use optimizer.step(), and DistributedDataParallel over init_process_group('tpu_dist')"
    ),
    f"{XM}.all_reduce": "use torch.distributed.all_reduce, after init_process_group('tpu_dist')",
    f"{XM}.all_gather": "use torch.distributed.all_gather, after init_process_group('tpu_dist')",
    f"{XM}.mesh_reduce": "use torch.distributed.all_gather_object, and reduce the list",
    f"{XM}.rendezvous": "use torch.distributed.barrier()",
    f"{XM}.save": "use torch.save on rank 0, with CPU copies",
    f"{XM}.master_print": "print on rank 0: torch.distributed.get_rank() == 0",
    f"{XM}.is_master_ordinal": "use torch.distributed.get_rank() == 0",
    f"{XM}.get_memory_info": (
        "torch.tpu.get_device_properties().total_memory is the size; torch_tpu does not tell what is used"
    ),
    f"{XM}.set_rng_state": "use torch.manual_seed",
    "torch_xla.manual_seed": "use torch.manual_seed",
    f"{XR}.world_size": "use torch.distributed.get_world_size()",
    f"{XR}.global_runtime_device_count": "use torch.distributed.get_world_size(): each process has one chip",
    f"{XR}.global_ordinal": "use torch.distributed.get_rank()",
    f"{XR}.device_type": "use torch.accelerator.current_accelerator().type",
    f"{XR}.initialize_cache": (
        "leave it out: torch_tpu's cache is set by TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
    ),
    "torch_xla.amp.syncfree": "use the optimizer of the same name in torch.optim",
    "torch_xla.amp": 'use torch.autocast("tpu", dtype=torch.bfloat16), without a GradScaler',
    "torch_xla.utils.checkpoint": "use torch.utils.checkpoint",
    "torch_xla.debug.profiler": "use torch.profiler",
    "torch_xla.debug.metrics": "torch_tpu has no such counts",
}
MATMUL_PRECISION = "torch_xla.backends.set_mat_mul_precision"
XLA_WORD = re.compile(r"""(["'])xla(:\d+)?\1""")
TAKES_DEVICE = {"torch.device", "torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"}
DEVICE_IS_XLA = m.Comparison(left=m.Attribute(attr=m.Name("type")), comparisons=[m.ComparisonTarget()])


class ToTorchTPU:
    """findings and `fixed`, as of `Checker`."""

    def __init__(self, code):
        self.source = Source(code)
        self.findings, self.changes = [], {}
        for node in m.findall(self.source.tree, m.Import() | m.ImportFrom()):
            words = self.source.code(node)
            if re.match(r"(import|from)\s+torch_xla\b", words):
                self._report(
                    node, words, "", "leave it out once nothing of it is used; `import torch` loads torch_tpu"
                )
        for name, call in self.source.calls:
            self._check_call(name, call)
        for node in m.findall(self.source.tree, m.Attribute() | m.Name()):
            if self._is_not_called(node) and (name := self.source.name(node)).startswith("torch_xla."):
                self._report(node, f"`{name}`", "", advice_for(name))
        for node in m.findall(self.source.tree, DEVICE_IS_XLA):
            self._check_device(node.comparisons[0].comparator)

    def _is_not_called(self, node):
        """Whether a name is a whole one, and neither of an import nor of a function that is called here."""
        parent = self.source.parents[node]
        if isinstance(parent, (cst.Attribute, cst.Import, cst.ImportFrom, cst.ImportAlias, cst.AsName)):
            return False
        return not (
            isinstance(parent, cst.Call)
            and parent.func is node
            or isinstance(parent, cst.Arg)
            and parent.keyword is node
        )

    def _check_device(self, value):
        if word := XLA_WORD.fullmatch(self.source.code(value)):
            only = word[2] in (None, ":0")
            self._report(
                value,
                f"`{word[0]}`",
                '"tpu"' if only else "",
                "the device is called 'tpu', one in each process",
            )

    def _check_call(self, name, call):
        for arg in call.args:
            if (
                name in TAKES_DEVICE
                or method_of(call) == "to"
                or arg.keyword
                and arg.keyword.value == "device"
            ):
                self._check_device(arg.value)
        if name == "torch.compile":
            self._check_compile(call)
        if name == "torch.inference_mode":
            new = "" if call.args else "torch.no_grad()"
            self._report(
                call,
                f"`{name}`",
                new,
                "it is reported to crash with torch.compile: use torch.no_grad()",
                "torch-tpu",
            )
        if name == "torch.distributed.init_process_group" and "xla" in self.source.code(call):
            self._report(
                call,
                f"`{name}`",
                "",
                "use init_process_group('tpu_dist'), with the variables that torchrun sets",
            )
        if name == MATMUL_PRECISION:
            precision = argument(call, "precision", 0)
            known = precision is not None and self.source.code(precision).strip("'\"") in ("high", "highest")
            new = f"torch.set_float32_matmul_precision({self.source.code(precision)})" if known else ""
            self._report(call, f"`{name}`", new, "use torch.set_float32_matmul_precision")
        elif name in SAME:
            self._report(
                call, f"`{name}`", "" if call.args else SAME[name], f"use {DEVICE}: each process has one chip"
            )
        elif name.startswith("torch_xla."):
            self._report(call, f"`{name}`", "", advice_for(name))

    def _check_compile(self, call):
        dynamic = argument(call, "dynamic")
        if dynamic is not None and self.source.code(dynamic) == "True":
            self._report(
                call,
                "`torch.compile(dynamic=True)`",
                "",
                "torch_tpu refuses it: pass dynamic=False",
                "torch-tpu",
            )
        if argument(call, "mode") is not None:
            self._report(
                call, "`torch.compile(mode=...)`", "", "torch_tpu refuses modes: leave it out", "torch-tpu"
            )

    def _report(self, node, found, replace, advice, rule="torch-xla"):
        self.findings.append(
            (*self.source.position(node), rule, " ".join(found.split())[:60], bool(replace), advice)
        )
        if replace:
            self.changes[node] = fixes.replacement(replace)

    def fixed(self):
        imports = {"torch"} if any(isinstance(node, cst.Call) for node in self.changes) else set()
        return fixes.apply(self.source.tree, self.changes, imports)


def advice_for(name):
    """What to do instead of a name of torch_xla."""
    return next(
        (INSTEAD[start] for start in INSTEAD if f"{name}.".startswith(f"{start}.")),
        "torch_tpu has no known equivalent",
    )
