"""The rules on code for GPUs or an old torch_xla: each method reports what breaks a rule, and how to fix
it."""

import ast
import re

from tpukit.tools.migrate.findings import OLD_VARIABLES
from tpukit.tools.migrate.report import Report, entry_of
from tpukit.tools.migrate.source import Source, argument, is_constant, is_cuda_word, last_name, method_of
from tpukit.tools.migrate.surroundings import CHECKS, HOST_CALLS, TO_HOST, Surroundings

XM, LOADERS = "torch_xla.core.xla_model", "torch_xla.distributed.parallel_loader"
SPAWN = "torch_xla.distributed.xla_multiprocessing.spawn"
OPENS_DEVICE = re.compile(
    r"torch_xla\.(device|runtime\.(world_size|global_ordinal)|debug\.metrics\.metrics_report)$"
    r"|torch_xla\.core\.xla_model\.(xla_device|is_master_ordinal|master_print)$"
)
LAUNCHES = {"torch_xla.launch", SPAWN}
XLA_LOADERS = {f"{LOADERS}.MpDeviceLoader", f"{LOADERS}.ParallelLoader"}
SYNCS = {"torch_xla.sync", "torch_xla.step", "torch_xla.compile", f"{XM}.mark_step", *XLA_LOADERS}
AUTOCAST = re.compile(r"torch\.(cuda\.)?(amp\.)?(autocast_mode\.)?autocast$")
SCALER = re.compile(r"torch\.(cuda\.)?amp\.(grad_scaler\.)?GradScaler$")
OPTIMIZER = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)")
DATA_LOADER = re.compile(r"torch\.utils\.data\.(dataloader\.)?DataLoader$")
LOADER = (
    "dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last".split()
)
DYNAMIC = {"nonzero", "masked_select", "unique", "argwhere", "unique_consecutive"}
# What a whole module's text shows, a statement in each line.
ON_XLA = re.compile(r"init_process_group\(.*['\"]xla")
SUMS_GRADIENTS = re.compile(r"FullySharded|ZeroRedundancyOptimizer|reduce_gradients|all_reduce\(.*grad")
SHARDS = re.compile(r"DistributedSampler|num_replicas|[.]shard\(|split_dataset_by_node|IterableDataset")
# What needs the value of a tensor that is given to it: functions, and methods of loggers and progress bars.
SHOWS = re.compile(r"builtins\.(print|float|int|bool|str|repr|min|max)$|logging\.")
SHOWING_METHODS = set(
    "debug info warning error set_postfix set_postfix_str set_description add_scalar".split()
)
# What decides about flags, seeds or memory figures of CUDA alone.
HARMLESS = re.compile(
    r"if torch\.cuda\.is_available\(\):(\n +torch\.(backends\.|cuda\.(manual_seed|empty_cache|\w*memory)).*)+"
    r"|torch\.cuda\.\w*memory.* if .*"
)
# Rules that code which runs only on CUDA cannot break.
NOT_ON_CUDA = {"cuda", "cuda-check", "fp16", "data-parallel", "torch-compile"}
MODELS = re.compile(
    r"(?i)(^|_)(model|module|u?net(work)?|encoder|decoder|generator|discriminator|backbone)\d*$"
)
# What does not move a model to a device.
MOVED_ELSEWHERE = re.compile(r"\(['\"]cpu|dtype|float|half|memory_format")
ON_HOST = re.compile(r"\.cpu\(\)|\.to\(['\"]cpu['\"]\)")


class Checker:
    """report: what was found. Each node is checked by itself, an outer one before what is in it."""

    def __init__(self, code: str):
        self.source = Source(code)
        self.report, self.around = Report(self.source), Surroundings(self.source)
        self.skipped = set()  # checks that keep code for CUDA from a TPU
        self.text = ast.unparse(self.source.tree)
        self.on_xla = ON_XLA.search(self.text) is not None
        self.launches = [call for name, call in self.source.calls if name in LAUNCHES]
        for node in self.source.nodes:
            self._check(node)
        for name, check in reversed(self.source.calls):  # an inner one before the one around it
            if check in self.skipped:
                advice = "false on a TPU: what it asks for CUDA is skipped, and the CPU trains"
                self.add(check, "cuda", advice=advice)
            elif name in CHECKS and not HARMLESS.fullmatch(ast.unparse(self.source.parents[check])):
                self.add(check, "cuda-check")

    def add(self, node, rule, found="", **fix):
        """Add a finding (see `Report.add`), unless its code runs only on CUDA."""
        checks = self.around.checks_around(node) if rule in NOT_ON_CUDA else None
        if checks is None:
            self.report.add(node, rule, found, **fix)
        elif rule == "cuda":
            self.skipped |= checks

    def _check(self, node):
        match node:
            case ast.Import() | ast.ImportFrom():
                self.report.add_name(node, "torch_xla")
            case ast.Name():
                self._check_name(node)
            case ast.Attribute():
                self._check_name(node)
                self._check_half(node, self.source.parents[node])
            case ast.Constant(value=str()) if not isinstance(self.source.parents[node], ast.JoinedStr):
                self._check_variable(node, self.source.parents[node])
                self._check_word(node)
            case ast.JoinedStr():
                self._check_word(node)
            case ast.Call():
                self._check_call(node, self.source.name(node.func))
            case ast.Assign(value=ast.Call()):
                self._check_optimizer(node)
            case ast.FormattedValue(value=value):
                self._check_read(node, [value])
            case ast.If(test=test) | ast.While(test=test) | ast.Assert(test=test):
                self._check_read(test, [test])
            case ast.Subscript(ctx=ast.Load()):  # `x[mask] = 0` keeps its shape
                self._check_mask(node)

    # Names and words

    def _check_name(self, node):
        """`torch.float16`, `xm.xrt_world_size`, `torch.cuda.synchronize`, `nn.DataParallel`"""
        is_right = self.on_xla and self.source.name(node).endswith("DistributedDataParallel")
        is_only_named = isinstance(self.source.parents[node], ast.Dict | ast.Compare)
        if not is_right and not is_only_named and self.around.checks_around(node) is None:
            self.report.add_name(node, "torch_xla")

    def _check_half(self, node, call):
        """`x.half()`"""
        if node.attr == "half" and isinstance(call, ast.Call) and not call.args + call.keywords:
            if not isinstance(self.source.parents[call], ast.Dict | ast.Attribute):  # stored, or float again
                end = self.source.end(node)
                self.add(node, "fp16", edit=(end - len("half"), end, "bfloat16"))

    def _check_variable(self, word, parent):
        """`os.environ["XLA_USE_BF16"]`"""
        if word.value in OLD_VARIABLES:
            advice = OLD_VARIABLES[word.value]
            outers = self.source.ancestors(word)
            may_be_left_out = any(isinstance(outer, ast.If | ast.IfExp | ast.Try) for outer in outers)
            is_read = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load)
            if is_read and not may_be_left_out:
                self.add(word, "gone", word.value, advice=f"no image sets it, KeyError: {advice}")
            else:
                self.add(word, "old-variable", word.value, advice=advice)

    def _check_word(self, word):
        """`"cuda"` as a device: an argument, a default, a variable's value, or the outcome of a check."""
        if not is_cuda_word(word):
            return
        node = word
        while (outer := self._device_expression(node)) is not None:
            node = outer
        device = "torch_xla.device()" if "torch.device(" in ast.unparse(node) else '"xla"'
        owner = self.source.parents[node]
        keyword = owner.arg or "" if isinstance(owner, ast.keyword) else ""
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
        match parent := self.source.parents[node]:
            case ast.BinOp():
                return parent
            case ast.IfExp() if node is not parent.test and not self.around.mentions_xla(parent):
                return parent if self.around.checks_in(parent.test) != set() else None
            case ast.Call() if node is not parent.func and self.source.name(parent.func) == "torch.device":
                return parent
        return None

    # Calls

    def _check_call(self, call, name):
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
        if OPENS_DEVICE.match(name) and self.source.function_of(call) is self.source.tree:
            if any(launch.lineno > call.lineno for launch in self.launches):
                self.add(call, "early-device")
        values = [*call.args, *(arg.value for arg in call.keywords)]
        if SHOWS.match(name) or method_of(call) in SHOWING_METHODS:
            self._check_read(call, values)
        elif method_of(call) in TO_HOST and not values and self.around.in_step(call):
            self.add(call, "read-in-loop")
        is_where = name == "torch.where" and len(values) == 1
        is_dynamic = is_where or last_name(call.func) in DYNAMIC and not HOST_CALLS.match(name)
        if is_dynamic and self.around.in_compiled_code(call):
            self.add(call, "dynamic-shape")

    def _check_precision(self, call, name):
        """`torch.autocast("cuda")`, `GradScaler()`"""
        is_old = name == "torch.cuda.amp.autocast"
        device = argument(call, "device_type", 0)
        enabled = argument(call, "enabled", 0 if is_old else None)
        if enabled is not None and self.around.checks_in(enabled) is not None:  # off where there is no CUDA
            self.report.covered.add((call, ""))
        elif SCALER.match(name):
            if not is_constant(enabled, False):
                self.add(call, "fp16", replace="torch.amp.GradScaler(enabled=False)")
        elif is_old or device is not None and is_cuda_word(device):
            switch = f", enabled={ast.unparse(enabled)}" if enabled else ""
            self.add(call, "fp16", replace=f"torch.autocast('xla', dtype=torch.bfloat16{switch})")

    def _check_data_loader(self, call):
        """`DataLoader(data, batch_size=8, shuffle=True)`"""
        given = dict(zip(LOADER, call.args)) | {arg.arg: arg.value for arg in call.keywords}
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
        calls = [call for _, call in self.source.calls if method_of(call) == "state_dict"]
        inside = {one for value in values for one in ast.walk(value)}
        for state in (call for call in calls if call in inside):
            is_copied = any(isinstance(outer, ast.DictComp) for outer in self.source.ancestors(state))
            owner, text = last_name(state.func.value), ast.unparse(state)
            if is_copied or ON_HOST.search(text):
                continue
            if MODELS.search(owner):
                copies = f"{{name: value.cpu() for name, value in {text}.items()}}"
                self.add(state, "save", replace=copies if saved in values else "")
            elif "opt" in owner.lower():
                self.add(state, "save")

    def _check_optimizer(self, node):
        """An optimizer of a model that is moved afterwards, in the same function."""
        if OPTIMIZER.match(self.source.name(node.value.func)):
            models = re.findall(r"([\w.]+)\.parameters\(", ast.unparse(node.value))
            calls = [call for _, call in self.source.calls if method_of(call) in ("to", "cuda")]
            moves = [call for call in calls if ast.unparse(call.func.value) in models]
            moves = [call for call in moves if not MOVED_ELSEWHERE.search(ast.unparse(call))]
            moves = [call for call in moves if self.around.checks_around(call) is None]
            function = self.source.function_of(node)
            lines = [call.lineno for call in moves if self.source.function_of(call) is function]
            if lines and lines[0] > node.lineno:
                self.add(node, "optimizer-first", f"made of {models[0]} before it is moved")

    # The training step

    def _check_read(self, node, values):
        """`print(loss)`, `f"{loss}"`, `if loss > 3`: a node that waits for values."""
        needed = set().union(*map(self.around.values, values))
        if self.around.losses & needed and self.around.in_step(node):
            self.add(node, "read-in-loop")

    def _check_mask(self, node):
        """`x[mask]`"""
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(map(self.around.is_mask, indices)) and self.around.in_compiled_code(node):
            self.add(node, "dynamic-shape")

    def _check_step(self, call, owner):
        """`optimizer.step()`, in a function that goes backward"""
        functions = self.around.bodies | {self.source.function_of(body) for body in self.around.bodies}
        is_plain = owner == "optimizer" or self._is_made_by(owner, OPTIMIZER)
        is_step = is_plain or self._is_made_by(owner, SCALER)
        if not is_step or self.source.function_of(call) not in functions:
            return
        is_wrapped = self.on_xla and "DistributedData" in self.text
        if self.launches and not is_wrapped and not SUMS_GRADIENTS.search(self.text):
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
