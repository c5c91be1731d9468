"""The rules on a module's code: each method reports what breaks a rule, and how to fix it."""

import re

import libcst as cst
import libcst.matchers as m

from tpukit.tools.migrate import fixes
from tpukit.tools.migrate.cuda_branches import CHECKS, CudaBranches
from tpukit.tools.migrate.rules import OLD_VARIABLES
from tpukit.tools.migrate.source import CUDA_WORD, Source, argument, last_name, method_of
from tpukit.tools.migrate.steps import TO_HOST, Steps

XM, XR = "torch_xla.core.xla_model", "torch_xla.runtime"
LOADERS, SPAWN = "torch_xla.distributed.parallel_loader", "torch_xla.distributed.xla_multiprocessing.spawn"

# Old function -> (rule, today's function, which takes the same arguments).
OLD_FUNCTIONS = {
    f"{XM}.xrt_world_size": ("gone", f"{XR}.world_size"),
    f"{XM}.get_ordinal": ("gone", f"{XR}.global_ordinal"),
    f"{XM}.xla_device": ("deprecated", "torch_xla.device"),
    f"{XM}.mark_step": ("deprecated", "torch_xla.sync"),
}
# What can no longer be imported -> where it is today.
OLD_IMPORTS = {old: new for old, (rule, new) in OLD_FUNCTIONS.items() if rule == "gone"} | {
    "torch_xla.experimental.pjrt": XR,
    "torch_xla.experimental.xla_sharding": "torch_xla.distributed.spmd",
}
AUTOCASTS = {
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.amp.autocast_mode.autocast",
}
SCALERS = {"torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"}
DATA_LOADERS = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
OPTIMIZER = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)")
PARALLEL = re.compile(r"torch\.nn\.(parallel\.)?(DataParallel|DistributedDataParallel)")
HARMLESS_CUDA = re.compile(r"torch\.cuda\.(manual_seed|empty_cache|amp\.)")  # without CUDA they do nothing
DYNAMIC = {"nonzero", "masked_select", "unique", "argwhere", "unique_consecutive"}
OPENS_DEVICE = {
    "torch_xla.device",
    "torch_xla.debug.metrics.metrics_report",
    *(f"{XR}.{name}" for name in ("world_size", "global_ordinal", "is_bf16_supported")),
    *(
        f"{XM}.{name}"
        for name in ("xla_device", "is_master_ordinal", "master_print", "xrt_world_size", "get_ordinal")
    ),
}
LAUNCHES = {"torch_xla.launch", SPAWN}
SYNCS = {"torch_xla.sync", "torch_xla.step", "torch_xla.compile", f"{XM}.mark_step"}
SYNCS |= {f"{LOADERS}.MpDeviceLoader", f"{LOADERS}.ParallelLoader"}
# What sums the gradients over the cores, so that a plain optimizer.step() is right.
SUMS_GRADIENTS = re.compile(r"FullyShardedDataParallel|ZeroRedundancyOptimizer|reduce_gradients$")
# What needs the value of a tensor that is given to it: functions, and methods of loggers and progress bars.
SHOWS = {f"builtins.{name}" for name in ("print", "float", "int", "bool", "str", "repr", "min", "max")}
SHOWING_METHODS = {
    "debug",
    "info",
    "warning",
    "error",
    "set_postfix",
    "set_postfix_str",
    "set_description",
    "add_scalar",
}
# Rules that code which runs only on CUDA cannot break.
NOT_ON_CUDA = {"cuda", "cuda-check", "fp16", "data-parallel", "torch-compile"}
MODELS = re.compile(
    r"(^|_)(model|net|network|encoder|decoder|generator|discriminator|unet|backbone|module)\d*$",
    re.IGNORECASE,
)
# A shell's command that installs packages, and those among them whose versions the image has matched to one
# another.
ON_HOST = re.compile(r"\.cpu\(\)|\.to\(['\"]cpu['\"]\)")
STATE = m.Call(func=m.Attribute(attr=m.Name("state_dict")), args=[])
INSTALL = re.compile(r"\b(pip[\d.]*|conda|mamba)\s(.*\s)?install\s+(?P<packages>.*)")
MATCHED = re.compile(
    r"(py)?torch([\[=<>~!@ ].*)?|(torch[-_]xla|libtpu)\b.*|.*/(torch|torch_xla|libtpu)-.*\.whl", re.IGNORECASE
)
ENVIRONMENT = re.compile(r"%(?:set_)?env\s+(\w+)")
ALL_RULES = "all rules"


def check_magic(command):
    """Findings, from the rule on, of a notebook's command for IPython or a shell."""
    if installs_torch(command):
        yield "install", f"`{command[:60]}`", False, ""
    variable = ENVIRONMENT.match(command)
    if variable and variable[1] in OLD_VARIABLES:
        yield "old-variable", variable[1], False, OLD_VARIABLES[variable[1]]


def installs_torch(line):
    """Whether a line of shell installs torch, torch_xla or libtpu."""
    without_comment = re.sub(r"(^|\s)#.*", "", line)
    for command in re.split(r"[;&|]+\s", without_comment):
        found = INSTALL.search(command)
        if found and "echo " not in command:
            if any(MATCHED.fullmatch(package.strip("'\"")) for package in found["packages"].split()):
                return True
    return False


class Checker(cst.CSTVisitor):
    """findings: (line, column, rule, found, fixable, advice), in no order."""

    def __init__(self, code):
        super().__init__()
        self.source = Source(code)
        self.steps, self.cuda = Steps(self.source), CudaBranches(self.source)
        self.findings, self.changes, self.imports = [], {}, set()
        self.covered = {}  # reported node -> the rule that is not reported again inside it
        self.checks, self.skipped = (
            [],
            {},
        )  # calls that ask for CUDA; the first line that each keeps from a TPU
        self._read_setup()
        self.source.tree.visit(self)
        for check in reversed(self.checks):  # an inner one before the one around it
            if check in self.skipped:
                self.report(
                    check,
                    "cuda",
                    advice=f"false on a TPU: `{self.skipped[check]}` is skipped, and the CPU trains",
                )
            elif not self.cuda.is_harmless(check):
                self.report(check, "cuda-check")

    def _read_setup(self):
        """What the module as a whole does about processes, gradients and steps."""
        calls, code = self.source.calls, self.source.code
        self.launches = [call for name, call in calls if name in LAUNCHES]
        self.on_xla = any(
            name.endswith("init_process_group") and re.search("[\"']xla", code(call)) for name, call in calls
        )
        self.sums_gradients = any(
            SUMS_GRADIENTS.search(name)
            or (self.on_xla and name.endswith("DistributedDataParallel"))
            or (name in (f"{XM}.all_reduce", "torch.distributed.all_reduce") and "grad" in code(call))
            for name, call in calls
        )
        names = m.findall(self.source.tree, m.Attribute() | m.Name())
        barriers = [
            call for name, call in calls if name == f"{XM}.optimizer_step" and argument(call, "barrier")
        ]
        self.syncs = bool(barriers) or any(self.source.name(name) in SYNCS for name in names)
        self.optimizers, self.scalers = {"optimizer"}, set()
        for name, values in self.source.assigned.items():
            makers = [self.source.name(value.func) for value in values if isinstance(value, cst.Call)]
            if any(map(OPTIMIZER.match, makers)):
                self.optimizers.add(name)
            if SCALERS.intersection(makers):
                self.scalers.add(name)

    def report(self, node, rule, found="", *, replace="", change=None, imports="", advice=""):
        """Add a finding. replace: the expression that fixes it, in the node's place; change: a function from
        the node to what takes its place. imports: the module that the fix needs."""
        checks = self.cuda.checks_around(node)
        if checks is not None and (rule in NOT_ON_CUDA or not checks):
            if rule == "cuda":
                for check in checks:
                    self.skipped.setdefault(check, self._short(node))
            return
        if any(self.covered.get(outer) in (rule, ALL_RULES) for outer in self.source.ancestors(node)):
            return
        line, column = self.source.position(node)
        fixable = bool(replace or change)
        self.findings.append((line, column, rule, found or f"`{self._short(node)}`", fixable, advice))
        if change is None:
            self.covered[node] = ALL_RULES if replace or isinstance(node, cst.IfExp) else rule
        if fixable:
            self.changes[node] = change or fixes.replacement(replace)
            self.imports |= {imports} - {""}

    def _short(self, node):
        text = " ".join(self.source.code(node).split())
        return text if len(text) <= 60 else text[:57] + "..."

    def fixed(self):
        """The code with all fixes, and the imports that they need."""
        return fixes.apply(self.source.tree, self.changes, self.imports)

    # Names and words

    def check_import(self, node):
        """`from torch_xla.core.xla_model import xrt_world_size`"""
        if isinstance(node.names, cst.ImportStar):
            return
        module = (
            f"{self.source.code(node.module)}." if isinstance(node, cst.ImportFrom) and node.module else ""
        )
        for alias in node.names:
            for old, new in OLD_IMPORTS.items():
                if f"{module}{alias.evaluated_name}.".startswith(f"{old}."):
                    self.report(node, "gone", f"`import {alias.evaluated_name}`", advice=f"use {new}")

    visit_Import = visit_ImportFrom = check_import

    def visit_SimpleString(self, node):
        name = node.evaluated_value
        if name in OLD_VARIABLES:
            self.report(node, "old-variable", name, advice=OLD_VARIABLES[name])
        self.check_cuda_word(node)

    def visit_Attribute(self, node):
        name, parent = self.source.name(node), self.source.parents[node]
        if name in ("torch.float16", "torch.half"):
            if not isinstance(
                parent, (cst.DictElement, cst.Comparison, cst.ComparisonTarget)
            ):  # only named there
                self.report(node, "fp16", replace="torch.bfloat16", imports="torch")
        elif node.attr.value == "half" and m.matches(parent, m.Call(args=[])):
            if isinstance(self.source.parents[parent], (cst.DictElement, cst.Attribute)):
                return  # stored as such, or made float again: nothing is computed with it
            self.report(node, "fp16", change=fixes.to_bfloat16)

    def check_cuda_word(self, word):
        """`"cuda"` as a device: an argument, a default, a variable's value, or the outcome of a check."""
        if not CUDA_WORD.match(self.source.code(word)):
            return
        node, device = word, '"xla"'
        while (outer := self._device_expression(node)) is not None:
            node, device = outer, "torch_xla.device()" if isinstance(outer, cst.Call) else device
        match self.source.parents[node]:
            case cst.Arg(keyword=keyword) as arg:
                self._check_cuda_argument(
                    node, self.source.parents[arg], keyword.value if keyword else "", device
                )
            case (
                cst.Assign(targets=[cst.AssignTarget(target=name)])
                | cst.AnnAssign(target=name)
                | cst.Param(name=name)
            ):
                if node is not word or "dev" in last_name(name).lower():
                    self.report(node, "cuda", replace=device, imports="torch_xla")
            case cst.Comparison() | cst.ComparisonTarget():
                pass
            case _ if node is not word:
                self.report(node, "cuda", replace=device, imports="torch_xla")

    visit_FormattedString = check_cuda_word

    def _device_expression(self, node):
        """What names one device together with a node: torch.device(node), "cuda:" + str(i), "cuda" if
        use_cuda else "cpu"."""
        parent = self.source.parents[node]
        match parent:
            case cst.BinaryOperation():
                return parent
            case cst.IfExp() if node is not parent.test:
                checks = self.cuda.checks_in(parent.test, node is parent.body)
                return None if checks == set() or self.cuda.handles_xla(parent, node) else parent
            case cst.Arg():
                call = self.source.parents[parent]
                return (
                    call
                    if isinstance(call, cst.Call) and self.source.name(call.func) == "torch.device"
                    else None
                )

    def _check_cuda_argument(self, node, call, keyword, device):
        if not isinstance(call, cst.Call):
            return
        name, method = self.source.name(call.func), method_of(call)
        if keyword == "map_location":
            self.report(node, "cuda", replace='"cpu"', advice="load to the CPU, then move")
        elif keyword == "default" or name in ("torch.Generator", "torch.set_default_device"):
            self.report(node, "cuda")
        elif name.startswith("torch.") and "device" in keyword or name in AUTOCASTS or method == "to":
            self.report(node, "cuda", replace=device, imports="torch_xla")
        elif not isinstance(node, (cst.SimpleString, cst.FormattedString)):
            self.report(node, "cuda", replace="" if keyword else device, imports="torch_xla")

    # Calls

    def visit_Call(self, node):
        name = self.source.name(node.func)
        self.check_cuda_call(node, name)
        self.check_precision(node, name)
        self.check_old_function(node, name)
        self.check_data_loader(node, name)
        self.check_save(node, name)
        self.check_early_device(node, name)
        self.check_read(node, name)
        self.check_dynamic_function(node, name)
        self.check_step(node)

    def check_cuda_call(self, call, name):
        """`model.cuda()`, `torch.cuda.synchronize()`, `nn.DataParallel(model)`, `torch.compile(model)`"""
        if name in CHECKS:
            self.checks.append(call)
        elif name.startswith("torch.cuda."):
            if HARMLESS_CUDA.match(name) or self.cuda.checks_around(call) is not None:
                return
            sync = "torch_xla.sync(wait=True)" if name == "torch.cuda.synchronize" else ""
            advice = f"use {sync}" if sync else "there is no CUDA on a TPU: leave it out"
            self.report(call, "cuda", replace=sync, imports="torch_xla", advice=advice)
        elif method_of(call) == "cuda":
            found = f"`.cuda()` of `{self._short(call.func.value)}`"
            self.report(call, "cuda", found, change=fixes.to_xla, imports="torch_xla")
        elif PARALLEL.fullmatch(name) and not (self.on_xla and "Distributed" in name):
            self.report(call, "data-parallel", f"`{last_name(call.func)}`")
        elif name == "torch.compile" and argument(call, "backend") is None:
            self.report(call, "torch-compile", "`torch.compile`")

    def check_precision(self, call, name):
        """`torch.autocast("cuda")`, `GradScaler()`"""
        has_cuda_in_name = name == "torch.cuda.amp.autocast"
        is_autocast = has_cuda_in_name or (
            name in AUTOCASTS and self.source.is_cuda_device(argument(call, "device_type", 0))
        )
        if not is_autocast and name not in SCALERS:
            return
        enabled = argument(call, "enabled", 0 if has_cuda_in_name else None)
        if enabled is not None and self.cuda.checks_in(enabled) is not None:  # off where there is no CUDA
            self.covered[call] = ALL_RULES
        elif is_autocast:
            switch = f", enabled={self.source.code(enabled)}" if enabled else ""
            self.report(
                call, "fp16", replace=f"torch.autocast('xla', dtype=torch.bfloat16{switch})", imports="torch"
            )
        elif not m.matches(enabled, m.Name("False")):
            self.report(call, "fp16", replace="torch.amp.GradScaler(enabled=False)", imports="torch")

    def check_old_function(self, call, name):
        if name in OLD_FUNCTIONS:
            rule, new = OLD_FUNCTIONS[name]
            module = new.rpartition(".")[0]
            self.report(
                call.func, rule, f"`{name.split('.')[-1]}`", replace=new, imports=module, advice=f"use {new}"
            )
        processes = argument(call, "nprocs", 2) if name == SPAWN else None
        if processes is not None and not m.matches(processes, m.Integer("1")):
            self.report(
                processes,
                "gone",
                "`nprocs` of spawn",
                replace="None",
                advice="all cores are started; a number raises",
            )

    def check_data_loader(self, call, name):
        if name not in DATA_LOADERS or any(arg.star for arg in call.args):
            return
        size, drop_last = argument(call, "batch_size", 1), argument(call, "drop_last", 8)
        if size is None or m.matches(size, m.Integer("1")) or argument(call, "batch_sampler", 4):
            return
        if drop_last is not None and not m.matches(drop_last, m.Name("False")):
            return
        shuffle, sampler = argument(call, "shuffle", 2), argument(call, "sampler", 3)
        if shuffle is not None and m.matches(shuffle, m.Name("True") | m.Comparison()):
            self.report(call, "ragged-batch", change=fixes.with_drop_last if drop_last is None else None)
        elif sampler is not None and not re.search(r"Sequential|val|test|eval", self.source.code(call)):
            self.report(call, "ragged-batch")

    def check_save(self, call, name):
        """`torch.save(model.state_dict(), path)`"""
        if name != "torch.save" or not call.args:
            return
        saved = call.args[0].value
        for value in self.source.assigned.get(saved.value, []) if isinstance(saved, cst.Name) else [saved]:
            parts = [element.value for element in value.elements] if isinstance(value, cst.Dict) else [value]
            on_device = [part for part in parts if not ON_HOST.search(self.source.code(part))]
            for state in (state for part in on_device for state in m.findall(part, STATE)):
                copies = f"{{name: value.cpu() for name, value in {self.source.code(state)}.items()}}"
                owner = last_name(state.func.value)
                if MODELS.search(owner):
                    self.report(state, "save", replace=copies if value is saved else "")
                elif len(on_device) < len(parts) and re.search(
                    "opt", owner, re.I
                ):  # beside copies: the file still needs a TPU
                    self.report(state, "save")

    def check_early_device(self, call, name):
        """A call that opens the device surely before a launch: at the top of the module, or in a block around
        the launch."""
        if name not in OPENS_DEVICE:
            return
        function = self.source.function_of(call)
        blocks = {outer for outer in self.source.ancestors(call) if isinstance(outer, cst.BaseSuite)}
        for launch in self.launches:
            if function is self.source.function_of(launch):
                above = self.source.position(call) <= self.source.position(launch)
                early = above and blocks.issubset(self.source.ancestors(launch))
            else:
                early = function is self.source.tree
            if early:
                self.report(call, "early-device")

    def visit_Assign(self, node):
        """An optimizer of a model that is moved afterwards, in the same function."""
        if not isinstance(node.value, cst.Call) or not OPTIMIZER.match(self.source.name(node.value.func)):
            return
        function = self.source.function_of(node)
        for parameters in m.findall(node.value, m.Attribute(attr=m.Name("parameters"))):
            model = self.source.code(parameters.value)
            moves = [call for _, call in self.source.calls if self._moves(call, model)]
            places = [
                self.source.position(call) for call in moves if self.source.function_of(call) is function
            ]
            if places and min(places) > self.source.position(node):
                self.report(node, "optimizer-first", f"made of {model} before it is moved")

    def _moves(self, call, model):
        """Whether a call moves a model to a device other than the CPU."""
        if method_of(call) not in ("to", "cuda") or self.source.code(call.func.value) != model:
            return False
        moved_elsewhere = re.search(r"\(['\"]cpu|dtype|float|half|memory_format", self.source.code(call))
        return not moved_elsewhere and self.cuda.checks_around(call) is None

    # The training step

    def check_read(self, call, name):
        """`loss.item()`, `print(loss)`"""
        method = method_of(call)
        reads = method in TO_HOST and not call.args
        shows = name in SHOWS or name.startswith("logging.") or method in SHOWING_METHODS
        if not (reads or shows) or not self.steps.in_step(call):
            return
        if (
            reads
            and self.steps.is_tensor(call.func.value)
            or shows
            and any(map(self.steps.needs_loss, call.args))
        ):
            self.report(call, "read-in-loop")

    def visit_FormattedStringExpression(self, node):
        if self.steps.in_step(node) and self.steps.needs_loss(node.expression):
            self.report(node, "read-in-loop")

    def check_condition(self, node):
        """`if loss > 3` waits for the loss."""
        if (
            self.steps.in_step(node)
            and self.steps.needs_loss(node.test)
            and not self.steps.is_occasional(node.test)
        ):
            self.report(node.test, "read-in-loop")

    visit_If = visit_While = visit_Assert = check_condition

    def check_dynamic_function(self, call, name):
        """`torch.nonzero(x)`, `x.nonzero()`, `torch.where(x)`"""
        function = last_name(call.func)
        is_method = function in DYNAMIC and method_of(call) and self.steps.is_tensor(call.func.value)
        is_function = (
            function in DYNAMIC
            and name == f"torch.{function}"
            or name == "torch.where"
            and len(call.args) == 1
        )
        if (is_method or is_function) and self.steps.in_compiled_code(call):
            self.report(call, "dynamic-shape")

    def visit_Subscript(self, node):
        """`x[mask]`, but not `x[mask] = 0`, which keeps its shape"""
        indices = [element.slice.value for element in node.slice if isinstance(element.slice, cst.Index)]
        if self.steps.in_compiled_code(node) and any(map(self.steps.is_mask, indices)):
            if not any(isinstance(outer, cst.AssignTarget) for outer in self.source.ancestors(node)):
                self.report(node, "dynamic-shape")

    def check_step(self, call):
        """`optimizer.step()`, in a function that goes backward"""
        owner = last_name(call.func.value) if method_of(call) == "step" else ""
        functions = self.steps.bodies | {self.source.function_of(body) for body in self.steps.bodies}
        if owner not in self.optimizers | self.scalers or self.source.function_of(call) not in functions:
            return
        if self.launches and not self.sums_gradients:
            is_plain = owner in self.optimizers and not call.args
            step = f"{XM}.optimizer_step({self.source.code(call.func.value)})"
            self.report(call, "gradient-sum", replace=step if is_plain else "", imports=XM)
        if not self.syncs:
            line = self.source.parents[self.source.parents[call]]
            is_whole_line = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
            fix = dict(change=fixes.with_sync, imports="torch_xla") if is_whole_line else {}
            self.report(line if is_whole_line else call, "no-sync", **fix)
