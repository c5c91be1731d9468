"""The rules on a module's code: each method reports what breaks a rule, and how to fix it."""

import ast
import re
from typing import Any

from tpukit.tools.migrate.cuda_branches import CHECKS, CudaBranches
from tpukit.tools.migrate.findings import OLD_VARIABLES, TABLES
from tpukit.tools.migrate.source import (
    Source,
    argument,
    defaults_of,
    is_constant,
    is_cuda_word,
    last_name,
    method_of,
)
from tpukit.tools.migrate.steps import TO_HOST, Steps

XM, XR = "torch_xla.core.xla_model", "torch_xla.runtime"
LOADERS, SPAWN = "torch_xla.distributed.parallel_loader", "torch_xla.distributed.xla_multiprocessing.spawn"
AUTOCASTS, SCALERS, DATA_LOADERS = (
    set(TABLES["classes"][name]) for name in ("autocasts", "scalers", "data_loaders")
)
OPTIMIZER = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)")
PARALLEL = re.compile(r"torch\.nn\.(parallel\.)?(DataParallel|DistributedDataParallel)")
HARMLESS_CUDA = re.compile(r"torch\.cuda\.(manual_seed|empty_cache|amp\.)")  # without CUDA they do nothing
DYNAMIC = {"nonzero", "masked_select", "unique", "argwhere", "unique_consecutive"}
OPENS_DEVICE = set(TABLES["classes"]["opens_device"])
LAUNCHES = {"torch_xla.launch", SPAWN}
SYNCS = {"torch_xla.sync", "torch_xla.step", "torch_xla.compile", f"{XM}.mark_step"}
SYNCS |= {f"{LOADERS}.MpDeviceLoader", f"{LOADERS}.ParallelLoader"}
# What sums the gradients over the cores, so that a plain optimizer.step() is right.
SUMS_GRADIENTS = re.compile(r"FullyShardedDataParallel|ZeroRedundancyOptimizer|reduce_gradients$")
# What needs the value of a tensor that is given to it: functions, and methods of loggers and progress bars.
SHOWS = re.compile(r"builtins\.(print|float|int|bool|str|repr|min|max)$|logging\.")
SHOWING_METHODS = set(
    "debug info warning error set_postfix set_postfix_str set_description add_scalar".split()
)
# Rules that code which runs only on CUDA cannot break.
NOT_ON_CUDA = {"cuda", "cuda-check", "fp16", "data-parallel", "torch-compile"}
MODELS = re.compile(
    r"(^|_)(model|net|network|encoder|decoder|generator|discriminator|unet|backbone|module)\d*$",
    re.IGNORECASE,
)
ON_HOST = re.compile(r"\.cpu\(\)|\.to\(['\"]cpu['\"]\)")
# A shell's command that installs packages, and those whose versions the image has matched to one another.
INSTALL = re.compile(r"\b(pip[\d.]*|conda|mamba)\s(.*\s)?install\s+(?P<packages>.*)")
MATCHED = re.compile(
    r"(py)?torch([\[=<>~!@ ].*)?|(torch[-_]xla|libtpu)\b.*|.*/(torch|torch_xla|libtpu)-.*\.whl", re.IGNORECASE
)
ENVIRONMENT = re.compile(r"%(?:set_)?env\s+(\w+)")
ALL_RULES = "all rules"


def check_magic(command: str):
    """Findings, from the rule on, of a notebook's command for IPython or a shell."""
    if installs_torch(command):
        yield "install", f"`{command[:60]}`", False, ""
    variable = ENVIRONMENT.match(command)
    if variable and variable[1] in OLD_VARIABLES:
        yield "old-variable", variable[1], False, OLD_VARIABLES[variable[1]]


def installs_torch(line: str) -> bool:
    """Whether a line of shell installs torch, torch_xla or libtpu."""
    without_comment = re.sub(r"(^|\s)#.*", "", line)
    for command in re.split(r"[;&|]+\s", without_comment):
        found = INSTALL.search(command)
        if found and "echo " not in command:
            if any(MATCHED.fullmatch(package.strip("'\"")) for package in found["packages"].split()):
                return True
    return False


class Checker(ast.NodeVisitor):
    """findings: (line, column, rule, found, fixable, advice), in no order. Each node of the source is visited
    by itself, an outer one before what is in it."""

    def __init__(self, code: str):
        self.source = Source(code)
        self.steps, self.cuda = Steps(self.source), CudaBranches(self.source)
        self.findings, self.edits, self.imports = [], [], set()
        self.covered = {}  # reported node -> the rule that is not reported again inside it
        self.checks = []  # calls that ask for CUDA
        self.skipped = {}  # check -> the first line that it keeps from a TPU
        self._read_setup()
        for node in self.source.nodes:
            self.visit(node)
        for check in reversed(self.checks):  # an inner one before the one around it
            if check in self.skipped:
                advice = f"false on a TPU: `{self.skipped[check]}` is skipped, and the CPU trains"
                self.report(check, "cuda", advice=advice)
            elif not self.cuda.is_harmless(check):
                self.report(check, "cuda-check")

    def _read_setup(self):
        """What the module as a whole does about processes, gradients and steps."""
        calls = self.source.calls
        self.launches = [call for name, call in calls if name in LAUNCHES]
        self.on_xla = any(
            name.endswith("init_process_group") and "'xla" in ast.unparse(call) for name, call in calls
        )
        self.sums_gradients = any(self._sums_gradients(name, call) for name, call in calls)
        named = (node for node in self.source.nodes if isinstance(node, ast.Attribute | ast.Name))
        self.syncs = any(self.source.name(node) in SYNCS for node in named) or any(
            name == f"{XM}.optimizer_step" and argument(call, "barrier") for name, call in calls
        )
        self.optimizers, self.scalers = {"optimizer"}, set()
        for name, values in self.source.assigned.items():
            makers = [self.source.name(value.func) for value in values if isinstance(value, ast.Call)]
            if any(map(OPTIMIZER.match, makers)):
                self.optimizers.add(name)
            if SCALERS.intersection(makers):
                self.scalers.add(name)

    def _sums_gradients(self, name, call):
        if name in (f"{XM}.all_reduce", "torch.distributed.all_reduce"):
            return "grad" in ast.unparse(call)
        is_wrapped = self.on_xla and name.endswith("DistributedDataParallel")
        return is_wrapped or SUMS_GRADIENTS.search(name)

    def report(self, node, rule, found="", *, replace="", edit=None, imports="", advice=""):
        """Add a finding.

        replace: the expression that fixes it, in the node's place. edit: another fix, as (start, end, new
        text) of the code. imports: the module that the fix needs."""
        checks = self.cuda.checks_around(node)
        if checks is not None and (rule in NOT_ON_CUDA or not checks):
            if rule == "cuda":
                for check in checks:
                    self.skipped.setdefault(check, self._short(node))
            return
        outers = list(self.source.ancestors(node))
        if any(self.covered.get(outer) in (rule, ALL_RULES) for outer in outers):
            return
        if replace:
            edit = (self.source.start(node), self.source.end(node), replace)
        if any(isinstance(outer, ast.JoinedStr) for outer in outers):  # a fix could not use its quotes
            edit = None
        line, column = self.source.position(node)
        self.findings.append(
            (line, column, rule, found or f"`{self._short(node)}`", edit is not None, advice)
        )
        if replace or edit is None:
            self.covered[node] = ALL_RULES if replace or isinstance(node, ast.IfExp) else rule
        if edit:
            self.edits.append(edit)
            self.imports |= {imports} - {""}

    def _short(self, node):
        text = " ".join(ast.unparse(node).split())
        return text if len(text) <= 60 else text[:57] + "..."

    def fixed(self) -> str:
        """The code with all fixes, and the imports that they need."""
        return self.source.changed(self.edits, self.imports)

    def generic_visit(self, node: Any):
        """A node without a rule."""

    # Names and words

    def visit_ImportFrom(self, node: Any):
        """`from torch_xla.core.xla_model import xrt_world_size`"""
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
        for alias in node.names:
            for old, new in TABLES["old_imports"].items():
                if f"{module}{alias.name}.".startswith(f"{old}."):
                    self.report(node, "gone", f"`import {alias.name}`", advice=f"use {new}")

    visit_Import = visit_ImportFrom

    def visit_Attribute(self, node: Any):
        """`torch.float16`, `x.half()`"""
        parent = self.source.parents[node]
        if self.source.name(node) in ("torch.float16", "torch.half"):
            if not isinstance(parent, ast.Dict | ast.Compare):  # only named there
                self.report(node, "fp16", replace="torch.bfloat16", imports="torch")
        elif node.attr == "half" and isinstance(parent, ast.Call) and not parent.args + parent.keywords:
            if isinstance(self.source.parents[parent], ast.Dict | ast.Attribute):
                return  # stored as such, or made float again: nothing is computed with it
            end = self.source.end(node)
            self.report(node, "fp16", edit=(end - len("half"), end, "bfloat16"))

    def visit_Constant(self, word: Any):
        """`os.environ["XLA_USE_BF16"]`, `"cuda"`"""
        if not isinstance(word.value, str) or isinstance(self.source.parents[word], ast.JoinedStr):
            return
        if word.value in OLD_VARIABLES:
            self.report(word, "old-variable", word.value, advice=OLD_VARIABLES[word.value])
        self.visit_JoinedStr(word)

    def visit_JoinedStr(self, word: Any):
        """`"cuda"` as a device: an argument, a default, a variable's value, or the outcome of a check."""
        if not is_cuda_word(word):
            return
        node, device = word, '"xla"'
        while (outer := self._device_expression(node)) is not None:
            node, device = outer, "torch_xla.device()" if isinstance(outer, ast.Call) else device
        match self.source.parents[node]:
            case ast.Call() as call:
                self._check_cuda_argument(node, call, "", device)
            case ast.keyword(arg=keyword) as argument_:
                self._check_cuda_argument(node, self.source.parents[argument_], keyword, device)
            case ast.Assign(targets=[name]) | ast.AnnAssign(target=name):
                self._check_bound(node, word, last_name(name), device)
            case ast.arguments() as parameters:
                name = next(one.arg for one, default in defaults_of(parameters) if default is node)
                self._check_bound(node, word, name, device)
            case ast.Compare():
                pass
            case _ if node is not word:
                self.report(node, "cuda", replace=device, imports="torch_xla")

    def _check_bound(self, node, word, name, device):
        if node is not word or "dev" in name.lower():
            self.report(node, "cuda", replace=device, imports="torch_xla")

    def _device_expression(self, node):
        """What names one device together with a node: torch.device(node), "cuda:" + str(i), "cuda" if
        use_cuda else "cpu"."""
        parent = self.source.parents[node]
        if isinstance(parent, ast.keyword):
            parent = self.source.parents[parent]
        match parent:
            case ast.BinOp():
                return parent
            case ast.IfExp() if node is not parent.test:
                checks = self.cuda.checks_in(parent.test, node is parent.body)
                return None if checks == set() or self.cuda.handles_xla(parent, node) else parent
            case ast.Call() if node is not parent.func and self.source.name(parent.func) == "torch.device":
                return parent
        return None

    def _check_cuda_argument(self, node, call, keyword, device):
        if not isinstance(call, ast.Call):
            return
        name, method = self.source.name(call.func), method_of(call)
        if keyword == "map_location":
            self.report(node, "cuda", replace='"cpu"', advice="load to the CPU, then move")
        elif keyword == "default" or name in ("torch.Generator", "torch.set_default_device"):
            self.report(node, "cuda")
        elif name.startswith("torch.") and "device" in keyword or name in AUTOCASTS or method == "to":
            self.report(node, "cuda", replace=device, imports="torch_xla")
        elif not isinstance(node, ast.Constant | ast.JoinedStr):
            self.report(node, "cuda", replace="" if keyword else device, imports="torch_xla")

    # Calls

    def visit_Call(self, call: Any):
        name = self.source.name(call.func)
        self.check_cuda_call(call, name)
        self.check_precision(call, name)
        self.check_old_function(call, name)
        self.check_data_loader(call, name)
        self.check_save(call, name)
        self.check_early_device(call, name)
        self.check_read(call, name)
        self.check_dynamic_function(call, name)
        self.check_step(call)

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
            start = self.source.end(call.func) - len("cuda")
            edit = (start, self.source.end(call), "to(torch_xla.device())")
            self.report(call, "cuda", found, edit=edit, imports="torch_xla")
        elif PARALLEL.fullmatch(name) and not (self.on_xla and "Distributed" in name):
            self.report(call, "data-parallel", f"`{last_name(call.func)}`")
        elif name == "torch.compile" and argument(call, "backend") is None:
            self.report(call, "torch-compile", "`torch.compile`")

    def check_precision(self, call, name):
        """`torch.autocast("cuda")`, `GradScaler()`"""
        has_cuda_in_name = name == "torch.cuda.amp.autocast"
        names_cuda = name in AUTOCASTS and self.source.is_cuda_device(argument(call, "device_type", 0))
        is_autocast = has_cuda_in_name or names_cuda
        if not is_autocast and name not in SCALERS:
            return
        enabled = argument(call, "enabled", 0 if has_cuda_in_name else None)
        if enabled is not None and self.cuda.checks_in(enabled) is not None:  # off where there is no CUDA
            self.covered[call] = ALL_RULES
        elif is_autocast:
            switch = f", enabled={ast.unparse(enabled)}" if enabled else ""
            autocast = f"torch.autocast('xla', dtype=torch.bfloat16{switch})"
            self.report(call, "fp16", replace=autocast, imports="torch")
        elif not is_constant(enabled, False):
            self.report(call, "fp16", replace="torch.amp.GradScaler(enabled=False)", imports="torch")

    def check_old_function(self, call, name):
        """`xm.xrt_world_size()`, `xmp.spawn(train, nprocs=8)`"""
        if name in TABLES["old_functions"]:
            rule, new = TABLES["old_functions"][name]
            found, module = f"`{name.rpartition('.')[2]}`", new.rpartition(".")[0]
            self.report(call.func, rule, found, replace=new, imports=module, advice=f"use {new}")
        processes = argument(call, "nprocs", 2) if name == SPAWN else None
        if processes is not None and not (isinstance(processes, ast.Constant) and processes.value == 1):
            advice = "all cores are started; a number raises"
            self.report(processes, "gone", "`nprocs` of spawn", replace="None", advice=advice)

    def check_data_loader(self, call, name):
        """`DataLoader(data, batch_size=8, shuffle=True)`"""
        is_splatted = any(isinstance(arg, ast.Starred) for arg in call.args)
        if name not in DATA_LOADERS or is_splatted or any(arg.arg is None for arg in call.keywords):
            return
        size, drop_last = argument(call, "batch_size", 1), argument(call, "drop_last", 8)
        is_one = isinstance(size, ast.Constant) and size.value == 1
        if size is None or is_one or argument(call, "batch_sampler", 4):
            return
        if drop_last is not None and not is_constant(drop_last, False):
            return
        shuffle, sampler = argument(call, "shuffle", 2), argument(call, "sampler", 3)
        if is_constant(shuffle, True) or isinstance(shuffle, ast.Compare):
            self.report(call, "ragged-batch", edit=self._drop_last(call) if drop_last is None else None)
        elif sampler is not None and not re.search(r"Sequential|val|test|eval", ast.unparse(call)):
            self.report(call, "ragged-batch")

    def _drop_last(self, call):
        """The edit that passes drop_last=True, before the first keyword argument or at the end."""
        if call.keywords:
            start = self.source.start(call.keywords[0])
            return start, start, "drop_last=True, "
        end = self.source.end(call) - 1
        between = self.source.text(self.source.end(call.args[-1]), end)
        has_comma = "," in re.sub("#.*", "", between)
        return end, end, "drop_last=True" if has_comma else ", drop_last=True"

    def check_save(self, call, name):
        """`torch.save(model.state_dict(), path)`"""
        if name != "torch.save" or not call.args:
            return
        saved = call.args[0]
        for value in self.source.assigned.get(saved.id, []) if isinstance(saved, ast.Name) else [saved]:
            parts = value.values if isinstance(value, ast.Dict) else [value]
            on_device = [part for part in parts if not ON_HOST.search(ast.unparse(part))]
            for state in (state for part in on_device for state in ast.walk(part)):
                match state:
                    case ast.Call(
                        func=ast.Attribute(attr="state_dict", value=saved_of), args=[], keywords=[]
                    ):
                        owner = last_name(saved_of)
                    case _:
                        continue
                if MODELS.search(owner):
                    copies = f"{{name: value.cpu() for name, value in {ast.unparse(state)}.items()}}"
                    self.report(state, "save", replace=copies if value is saved else "")
                elif len(on_device) < len(parts) and "opt" in owner.lower():  # beside copies: the file
                    self.report(state, "save")  # still needs a TPU

    def check_early_device(self, call, name):
        """A call that opens the device surely before a launch: at the top of the module, or earlier in a
        block that the launch is in."""
        if name not in OPENS_DEVICE or not self.launches:
            return
        function = self.source.function_of(call)
        followers = set(map(id, self._follow(call)))
        for launch in self.launches:
            is_elsewhere = function is not self.source.function_of(launch)
            if function is self.source.tree if is_elsewhere else id(launch) in followers:
                self.report(call, "early-device")

    def _follow(self, call):
        """The nodes of the statement of a call, and of those after it in its block."""
        statement = next(outer for outer in self.source.ancestors(call) if isinstance(outer, ast.stmt))
        blocks = (block for _, block in ast.iter_fields(self.source.parents[statement]))
        block = next(block for block in blocks if isinstance(block, list) and statement in block)
        return [node for later in block[block.index(statement) :] for node in ast.walk(later)]

    def visit_Assign(self, node: Any):
        """An optimizer of a model that is moved afterwards, in the same function."""
        if not isinstance(node.value, ast.Call) or not OPTIMIZER.match(self.source.name(node.value.func)):
            return
        function = self.source.function_of(node)
        for parameters in ast.walk(node.value):
            if not isinstance(parameters, ast.Attribute) or parameters.attr != "parameters":
                continue
            model = ast.unparse(parameters.value)
            moves = [call for _, call in self.source.calls if self._moves(call, model)]
            starts = [self.source.start(call) for call in moves if self.source.function_of(call) is function]
            if starts and min(starts) > self.source.start(node):
                self.report(node, "optimizer-first", f"made of {model} before it is moved")

    def _moves(self, call, model):
        """Whether a call moves a model to a device other than the CPU."""
        if method_of(call) not in ("to", "cuda") or ast.unparse(call.func.value) != model:
            return False
        moved_elsewhere = re.search(r"\(['\"]cpu|dtype|float|half|memory_format", ast.unparse(call))
        return not moved_elsewhere and self.cuda.checks_around(call) is None

    # The training step

    def check_read(self, call, name):
        """`loss.item()`, `print(loss)`"""
        method = method_of(call)
        values = [*call.args, *(arg.value for arg in call.keywords)]
        reads = method in TO_HOST and not values
        shows = SHOWS.match(name) or method in SHOWING_METHODS
        if not (reads or shows) or not self.steps.in_step(call):
            return
        reads = reads and self.steps.is_tensor(call.func.value)
        if reads or shows and any(map(self.steps.needs_loss, values)):
            self.report(call, "read-in-loop")

    def visit_FormattedValue(self, node: Any):
        """`f"{loss}"`"""
        if self.steps.in_step(node) and self.steps.needs_loss(node.value):
            self.report(node, "read-in-loop")

    def visit_If(self, node: Any):
        """`if loss > 3` waits for the loss."""
        waits = self.steps.in_step(node) and self.steps.needs_loss(node.test)
        if waits and not self.steps.is_occasional(node.test):
            self.report(node.test, "read-in-loop")

    visit_While = visit_Assert = visit_If

    def check_dynamic_function(self, call, name):
        """`torch.nonzero(x)`, `x.nonzero()`, `torch.where(x)`"""
        function = last_name(call.func)
        is_dynamic = name == "torch.where" and len(call.args) == 1 and not call.keywords
        if function in DYNAMIC:
            is_method = bool(method_of(call)) and self.steps.is_tensor(call.func.value)
            is_dynamic = is_method or name == f"torch.{function}"
        if is_dynamic and self.steps.in_compiled_code(call):
            self.report(call, "dynamic-shape")

    def visit_Subscript(self, node: Any):
        """`x[mask]`, but not `x[mask] = 0`, which keeps its shape"""
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not self.steps.in_compiled_code(node) or not any(map(self.steps.is_mask, indices)):
            return
        child = node
        for outer in self.source.ancestors(node):
            if isinstance(outer, ast.Assign) and child in outer.targets:
                return
            child = outer
        self.report(node, "dynamic-shape")

    def check_step(self, call):
        """`optimizer.step()`, in a function that goes backward"""
        owner = last_name(call.func.value) if method_of(call) == "step" else ""
        functions = self.steps.bodies | {self.source.function_of(body) for body in self.steps.bodies}
        if owner not in self.optimizers | self.scalers or self.source.function_of(call) not in functions:
            return
        if self.launches and not self.sums_gradients:
            is_plain = owner in self.optimizers and not call.args + call.keywords
            step = f"{XM}.optimizer_step({ast.unparse(call.func.value)})"
            self.report(call, "gradient-sum", replace=step if is_plain else "", imports=XM)
        if not self.syncs:
            statement = self.source.parents[call]
            edit = self.source.line_after(statement, "torch_xla.sync()")
            self.report(statement if edit else call, "no-sync", edit=edit, imports="torch_xla")
