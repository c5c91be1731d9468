"""The rules on code for GPUs or an old torch_xla: each method reports what breaks a rule, and how to fix
it."""

import ast
import re
from typing import Any

from tpukit.tools.migrate.cuda_branches import CHECKS, CudaBranches
from tpukit.tools.migrate.findings import OLD_VARIABLES, TABLES
from tpukit.tools.migrate.report import Report, entry_of
from tpukit.tools.migrate.source import Source, argument, is_constant, is_cuda_word, last_name, method_of
from tpukit.tools.migrate.steps import HOST_CALLS, TO_HOST, Steps

XM, LOADERS = "torch_xla.core.xla_model", "torch_xla.distributed.parallel_loader"
SPAWN = "torch_xla.distributed.xla_multiprocessing.spawn"
LAUNCHES = {"torch_xla.launch", SPAWN}
XLA_LOADERS = {f"{LOADERS}.MpDeviceLoader", f"{LOADERS}.ParallelLoader"}
SYNCS = {"torch_xla.sync", "torch_xla.step", "torch_xla.compile", f"{XM}.mark_step", *XLA_LOADERS}
AUTOCAST = re.compile(r"torch\.(cuda\.)?(amp\.)?(autocast_mode\.)?autocast$")
SCALER = re.compile(r"torch\.(cuda\.)?amp\.(grad_scaler\.)?GradScaler$")
OPTIMIZER = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)")
DATA_LOADER = re.compile(r"torch\.utils\.data\.(dataloader\.)?DataLoader$")
LOADER_ARGUMENTS = (
    "dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last"
)
DYNAMIC = {"nonzero", "masked_select", "unique", "argwhere", "unique_consecutive"}
# What a whole module's text shows, a statement in each line.
ON_XLA = re.compile(r"init_process_group\(.*['\"]xla")
SUMS_GRADIENTS = re.compile(
    r"FullyShardedDataParallel|ZeroRedundancyOptimizer|reduce_gradients|all_reduce\(.*grad"
)
SHARDS = re.compile(
    r"DistributedSampler|num_replicas|num_shards|[.]shard\(|split_dataset_by_node|IterableDataset"
)
# What needs the value of a tensor that is given to it: functions, and methods of loggers and progress bars.
SHOWS = re.compile(r"builtins\.(print|float|int|bool|str|repr|min|max)$|logging\.")
SHOWING_METHODS = set("debug info warning error set_postfix set_description add_scalar".split())
# What decides about flags, seeds or memory figures of CUDA alone.
HARMLESS = re.compile(
    r"if torch\.cuda\.is_available\(\):(\n +torch\.(backends\.|cuda\.(manual_seed|empty_cache|\w*memory)).*)+"
    r"|torch\.cuda\.\w*memory.* if .*"
)
# Rules that code which runs only on CUDA cannot break.
NOT_ON_CUDA = {"cuda", "cuda-check", "fp16", "data-parallel", "torch-compile"}
MODELS = re.compile(r"(?i)(^|_)(model|net|network|encoder|decoder|generator|discriminator|unet|backbone)\d*$")
# What does not move a model to a device.
MOVED_ELSEWHERE = re.compile(r"\(['\"]cpu|dtype|float|half|memory_format")
ON_HOST = re.compile(r"\.cpu\(\)|\.to\(['\"]cpu['\"]\)")


class Checker(ast.NodeVisitor):
    """Each node of the source is visited by itself, an outer one before what is in it."""

    def __init__(self, code: str):
        self.source = Source(code)
        self.report, self.steps = Report(self.source), Steps(self.source)
        self.cuda = CudaBranches(self.source)
        self.skipped = set()  # checks that keep code for CUDA from a TPU
        self.text = ast.unparse(self.source.tree)
        self.on_xla = ON_XLA.search(self.text) is not None
        self.launches = [call for name, call in self.source.calls if name in LAUNCHES]
        for node in self.source.nodes:
            self.visit(node)
        for name, check in reversed(self.source.calls):  # an inner one before the one around it
            if check in self.skipped:
                advice = "false on a TPU: what it asks for CUDA is skipped, and the CPU trains"
                self.add(check, "cuda", advice=advice)
            elif name in CHECKS and not HARMLESS.fullmatch(ast.unparse(self.source.parents[check])):
                self.add(check, "cuda-check")

    def add(self, node, rule, found="", **fix):
        """Add a finding (see `Report.add`), unless its code runs only on CUDA."""
        checks = self.cuda.checks_around(node) if rule in NOT_ON_CUDA else None
        if checks is None:
            self.report.add(node, rule, found, **fix)
        elif rule == "cuda":
            self.skipped |= checks

    def generic_visit(self, node: Any):
        """A node without a rule."""

    # Names and words

    def visit_Import(self, node: Any):
        """`from torch_xla.core.xla_model import xrt_world_size`"""
        self.report.add_name(node, "torch_xla")

    visit_ImportFrom = visit_Import

    def visit_Name(self, node: Any):
        """`torch.float16`, `xm.xrt_world_size`, `torch.cuda.synchronize`, `nn.DataParallel`"""
        is_right = self.on_xla and self.source.name(node).endswith("DistributedDataParallel")
        is_only_named = isinstance(self.source.parents[node], ast.Dict | ast.Compare)
        if not is_right and not is_only_named and self.cuda.checks_around(node) is None:
            self.report.add_name(node, "torch_xla")

    def visit_Attribute(self, node: Any):
        """`x.half()`"""
        self.visit_Name(node)
        call = self.source.parents[node]
        if node.attr == "half" and isinstance(call, ast.Call) and not call.args + call.keywords:
            if not isinstance(self.source.parents[call], ast.Dict | ast.Attribute):  # stored, or float again
                end = self.source.end(node)
                self.add(node, "fp16", edit=(end - len("half"), end, "bfloat16"))

    def visit_Constant(self, word: Any):
        """`os.environ["XLA_USE_BF16"]`, `"cuda"`"""
        parent = self.source.parents[word]
        if not isinstance(word.value, str) or isinstance(parent, ast.JoinedStr):
            return
        if word.value in OLD_VARIABLES:
            advice = OLD_VARIABLES[word.value]
            outers = self.source.ancestors(word)
            may_be_left_out = any(isinstance(outer, ast.If | ast.IfExp | ast.Try) for outer in outers)
            is_read = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load)
            if is_read and not may_be_left_out:
                self.add(word, "gone", word.value, advice=f"no image sets it, KeyError: {advice}")
            else:
                self.add(word, "old-variable", word.value, advice=advice)
        self.visit_JoinedStr(word)

    def visit_JoinedStr(self, word: Any):
        """`"cuda"` as a device: an argument, a default, a variable's value, or the outcome of a check."""
        if not is_cuda_word(word):
            return
        node = word
        while (outer := self._device_expression(node)) is not None:
            node = outer
        device = "torch_xla.device()" if "torch.device(" in ast.unparse(node) else '"xla"'
        owner = self.source.parents[node]
        keyword = owner.arg if isinstance(owner, ast.keyword) else ""
        owner = self.source.parents[owner] if keyword else owner
        name = self.source.name(owner.func) if isinstance(owner, ast.Call) else ""
        if keyword == "map_location":
            self.add(node, "cuda", replace='"cpu"', advice="load to the CPU, then move")
        elif keyword == "default" or name in ("torch.Generator", "torch.set_default_device"):
            self.add(node, "cuda")
        elif isinstance(owner, ast.Call):
            takes_device = name.startswith("torch.") and "device" in keyword or method_of(owner) == "to"
            if takes_device or node is not word:
                self.add(node, "cuda", replace=device if takes_device or device.endswith(")") else "")
        elif not isinstance(owner, ast.Compare):
            is_bound = isinstance(owner, ast.Assign | ast.AnnAssign | ast.arguments)
            if node is not word or is_bound and "dev" in ast.unparse(owner).lower():
                self.add(node, "cuda", replace=device)

    def _device_expression(self, node):
        """What names one device together with a node: torch.device(node), "cuda:" + str(i), "cuda" if
        use_cuda else "cpu"."""
        parent = self.source.parents[node]
        if isinstance(parent, ast.keyword):
            parent = self.source.parents[parent]
        match parent:
            case ast.BinOp():
                return parent
            case ast.IfExp() if node is not parent.test and not self.cuda.mentions_xla(parent):
                return parent if self.cuda.checks_in(parent.test) != set() else None
            case ast.Call() if node is not parent.func and self.source.name(parent.func) == "torch.device":
                return parent
        return None

    # Calls

    def visit_Call(self, call: Any):
        name = self.source.name(call.func)
        if AUTOCAST.match(name) or SCALER.match(name):
            self._check_precision(call, name)
        elif DATA_LOADER.match(name):
            self._check_data_loader(call)
        elif name == "torch.save" and call.args:
            self._check_save(call.args[0])
        elif name == "torch.compile" and argument(call, "backend") is None:
            self.add(call, "torch-compile", "`torch.compile`")
        elif name == SPAWN and not is_constant(processes := argument(call, "nprocs", 2), 1):
            if processes is not None:
                advice = "all cores are started; a number raises"
                self.add(processes, "gone", "`nprocs` of spawn", replace="None", advice=advice)
        elif name in XLA_LOADERS and self.launches and not SHARDS.search(self.text):
            self.add(call, "no-shard")
        elif method_of(call) == "cuda" and not entry_of(name, "torch_xla"):
            start = self.source.end(call.func) - len("cuda")
            edit = (start, self.source.end(call), "to(torch_xla.device())")
            self.add(call, "cuda", f"`.cuda()` of `{ast.unparse(call.func.value)[:40]}`", edit=edit)
        elif method_of(call) == "step":
            self._check_step(call, last_name(call.func.value))
        if name in TABLES["classes"]["opens_device"]:
            self._check_early_device(call)
        values = [*call.args, *(arg.value for arg in call.keywords)]
        if SHOWS.match(name) or method_of(call) in SHOWING_METHODS:
            self._check_read(call, values)
        elif method_of(call) in TO_HOST and not values and self.steps.in_step(call):
            self.add(call, "read-in-loop")
        self._check_dynamic_function(call, name)

    def _check_precision(self, call, name):
        """`torch.autocast("cuda")`, `GradScaler()`"""
        is_old = name == "torch.cuda.amp.autocast"
        device = argument(call, "device_type", 0)
        enabled = argument(call, "enabled", 0 if is_old else None)
        if enabled is not None and self.cuda.checks_in(enabled) is not None:  # off where there is no CUDA
            self.report.covered.add((call, ""))
        elif SCALER.match(name):
            if not is_constant(enabled, False):
                self.add(call, "fp16", replace="torch.amp.GradScaler(enabled=False)")
        elif is_old or device is not None and is_cuda_word(device):
            switch = f", enabled={ast.unparse(enabled)}" if enabled else ""
            self.add(call, "fp16", replace=f"torch.autocast('xla', dtype=torch.bfloat16{switch})")

    def _check_data_loader(self, call):
        """`DataLoader(data, batch_size=8, shuffle=True)`"""
        given = dict(zip(LOADER_ARGUMENTS.split(), call.args)) | {arg.arg: arg.value for arg in call.keywords}
        words = {name: ast.unparse(value) for name, value in given.items()}
        is_one = words.get("batch_size", "1") == "1"
        is_even = words.get("drop_last", "False") != "False" or words.get("batch_sampler", "None") != "None"
        if is_one or is_even or None in given or any(isinstance(one, ast.Starred) for one in call.args):
            return
        if words.get("shuffle") == "True" or isinstance(given.get("shuffle"), ast.Compare):
            start = self.source.start(call.keywords[0]) if call.keywords else 0
            edit = (start, start, "drop_last=True, ") if start and "drop_last" not in given else None
            self.add(call, "ragged-batch", edit=edit)
        elif words.get("sampler", "None") != "None":
            if not re.search(r"Sequential|val|test|eval", ast.unparse(call)):
                self.add(call, "ragged-batch")

    def _check_save(self, saved):
        """`torch.save(model.state_dict(), path)`"""
        values = self.source.assigned.get(saved.id, []) if isinstance(saved, ast.Name) else [saved]
        for state in (one for value in values for one in ast.walk(value)):
            if not isinstance(state, ast.Call) or method_of(state) != "state_dict":
                continue
            is_copied = any(isinstance(outer, ast.DictComp) for outer in self.source.ancestors(state))
            owner, text = last_name(state.func.value), ast.unparse(state)
            if is_copied or ON_HOST.search(text):
                continue
            if MODELS.search(owner):
                copies = f"{{name: value.cpu() for name, value in {text}.items()}}"
                self.add(state, "save", replace=copies if saved in values else "")
            elif "opt" in owner.lower():
                self.add(state, "save")

    def _check_early_device(self, call):
        """A call that opens the device surely before a launch: at the top of the module, or earlier in a
        block that the launch is in."""
        function = self.source.function_of(call)
        block: Any = next(one for one in self.source.ancestors(call) if isinstance(one, ast.stmt))
        if not hasattr(block, "body"):
            block = self.source.parents[block]
        for launch in self.launches:
            is_elsewhere = function is not self.source.function_of(launch)
            follows = launch.lineno > call.lineno and block in self.source.ancestors(launch)
            if function is self.source.tree if is_elsewhere else follows and not getattr(block, "orelse", []):
                self.add(call, "early-device")

    def visit_Assign(self, node: Any):
        """An optimizer of a model that is moved afterwards, in the same function."""
        if isinstance(node.value, ast.Call) and OPTIMIZER.match(self.source.name(node.value.func)):
            models = re.findall(r"([\w.]+)\.parameters\(", ast.unparse(node.value))
            calls = [call for _, call in self.source.calls if method_of(call) in ("to", "cuda")]
            moves = [call for call in calls if ast.unparse(call.func.value) in models]
            moves = [call for call in moves if not MOVED_ELSEWHERE.search(ast.unparse(call))]
            moves = [call for call in moves if self.cuda.checks_around(call) is None]
            function = self.source.function_of(node)
            lines = [call.lineno for call in moves if self.source.function_of(call) is function]
            if lines and lines[0] > node.lineno:
                self.add(node, "optimizer-first", f"made of {models[0]} before it is moved")

    # The training step

    def _check_read(self, node, values):
        """Values of which a node needs to know what they are."""
        if self.steps.in_step(node) and any(map(self.steps.needs_loss, values)):
            self.add(node, "read-in-loop")

    def visit_FormattedValue(self, node: Any):
        """`f"{loss}"`"""
        self._check_read(node, [node.value])

    def visit_If(self, node: Any):
        """`if loss > 3` waits for the loss."""
        self._check_read(node.test, [node.test])

    visit_While = visit_Assert = visit_If

    def _check_dynamic_function(self, call, name):
        """`torch.nonzero(x)`, `x.nonzero()`, `torch.where(x)`"""
        is_where = name == "torch.where" and len(call.args) == 1 and not call.keywords
        is_dynamic = last_name(call.func) in DYNAMIC and not HOST_CALLS.match(name)
        if (is_where or is_dynamic) and self.steps.in_compiled_code(call):
            self.add(call, "dynamic-shape")

    def visit_Subscript(self, node: Any):
        """`x[mask]`, but not `x[mask] = 0`, which keeps its shape"""
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if isinstance(node.ctx, ast.Load) and any(map(self.steps.is_mask, indices)):
            if self.steps.in_compiled_code(node):
                self.add(node, "dynamic-shape")

    def _check_step(self, call, owner):
        """`optimizer.step()`, in a function that goes backward"""
        functions = self.steps.bodies | {self.source.function_of(body) for body in self.steps.bodies}
        is_plain = owner == "optimizer" or self._is_made_by(owner, OPTIMIZER)
        if not is_plain and not self._is_made_by(owner, SCALER):
            return
        if self.source.function_of(call) not in functions:
            return
        sums_gradients = SUMS_GRADIENTS.search(self.text) or self.on_xla and "DistributedData" in self.text
        if self.launches and not sums_gradients:
            step = f"{XM}.optimizer_step({ast.unparse(call.func.value)})"
            replace = step if is_plain and not call.args + call.keywords else ""
            self.add(call, "gradient-sum", replace=replace)
        names = (self.source.name(node) for node in self.source.nodes)
        if SYNCS.isdisjoint(names) and "barrier=True" not in self.text:
            statement = self.source.parents[call]
            is_statement = isinstance(statement, ast.Expr)
            edit = self.report.line_below(statement, "torch_xla.sync()") if is_statement else None
            self.add(statement if edit else call, "no-sync", edit=edit)

    def _is_made_by(self, name, makers):
        values = self.source.assigned.get(name, [])
        return any(makers.match(self.source.name(one.func)) for one in values if isinstance(one, ast.Call))
