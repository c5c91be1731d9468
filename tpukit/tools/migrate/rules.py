"""What in a module's code is trouble on a TPU, and how it is fixed. Names are followed through the imports, never guessed."""

import re

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ParentNodeProvider, PositionProvider

from tpukit.host import environment
from tpukit.tools.migrate.notebook import installs
from tpukit.tools.migrate.reading import ASKS, HANDLES_XLA, HOST, LOOPS, TO_HOST, Reader, _is_cuda, _leaves, _root, _tail

XM, XR, XMP = "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.distributed.xla_multiprocessing"
LOADERS = "torch_xla.distributed.parallel_loader"

# name -> (level, what to do). An error does not work on a TPU; a warning is slow there, or silently not what was meant.
RULES = {
    "cuda": ("error", "a TPU is no CUDA device: use torch_xla.device()"),
    "cuda-check": ("warning", "says no on a TPU: see that what follows does not silently fall to the CPU there"),
    "fp16": ("error", "XLA devices train in bfloat16: torch.autocast('xla', dtype=torch.bfloat16), without a loss scaler"),
    "data-parallel": ("error", "one process a core instead: torch_xla.launch, or tpukit.launch, with its share of the data"),
    "gradient-sum": ("error", "every core would train its own model: xm.optimizer_step(optimizer) sums the gradients first"),
    "no-sync": ("error", "operations are only collected until torch_xla.sync(): call it once after each optimizer step"),
    "read-in-loop": ("warning", "waits for the device in every step: add up on the device, and read once in a hundred steps"),
    "ragged-batch": ("warning", "the last batch may have another shape, which compiles the step again: drop_last=True"),
    "dynamic-shape": ("error", "the shape of the result depends on the data: use torch.where, or a product with the mask"),
    "save": ("warning", "tensors of a TPU are saved as such and load only there: save CPU copies"),
    "save-on-one": ("error", "hangs: every core has to call xm.save, which writes on one"),
    "optimizer-first": ("error", "moving a model to XLA makes new parameters, and this optimizer keeps the old: make it after"),
    "gone": ("error", "no longer in torch_xla"),
    "deprecated": ("warning", "works, and will go"),
    "old-variable": ("warning", "nothing reads it any more, or will soon"),
    "early-device": ("error", "opens the device before the cores do ('Runtime is already initialized'): do so in the function"),
    "install": ("error", "replaces what the image brings, and then torch and torch_xla do not match: use the image's"),
    "torch-compile": ("warning", "its default backend is not for XLA: backend='openxla', or leave it out"),
    "unreadable": ("error", "fix it first"),
}  # fmt: skip

# Old names -> (rule, today's, which is called in the same way).
OLD_NAMES = {
    f"{XM}.xrt_world_size": ("gone", f"{XR}.world_size"),
    f"{XM}.get_ordinal": ("gone", f"{XR}.global_ordinal"),
    f"{XM}.xla_device": ("deprecated", "torch_xla.device"),
    f"{XM}.mark_step": ("deprecated", "torch_xla.sync"),
}
OLD_MODULES = {
    "torch_xla.experimental.pjrt": XR,
    "torch_xla.experimental.xla_sharding": "torch_xla.distributed.spmd",
}
OLD_VARIABLES = {name: f"{why}. Instead: {instead}" for name, (why, instead) in environment.OLD_VARIABLES.items()}
OPENS_DEVICE = {"torch_xla.device", "torch_xla.debug.metrics.metrics_report"}
OPENS_DEVICE |= {f"{XR}.{name}" for name in ("world_size", "global_ordinal", "is_bf16_supported")}
OPENS_DEVICE |= {
    f"{XM}.{name}" for name in ("xla_device", "is_master_ordinal", "master_print", "xrt_world_size", "get_ordinal")
}
LAUNCHES = {"torch_xla.launch", f"{XMP}.spawn"}
SYNCS = {"torch_xla.sync", "torch_xla.step", "torch_xla.compile", f"{XM}.mark_step"}
SYNCS |= {f"{LOADERS}.MpDeviceLoader", f"{LOADERS}.ParallelLoader"}
SYNC_WORDS = {name.rpartition(".")[2] for name in SYNCS}
AUTOCASTS = {"torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast_mode.autocast"}
SCALERS = {"torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"}
PARALLEL = {f"torch.nn.{place}{name}" for place in ("", "parallel.") for name in ("DataParallel", "DistributedDataParallel")}
DYNAMIC = {f"torch.{name}" for name in ("nonzero", "masked_select", "unique", "argwhere", "unique_consecutive")}
DYNAMIC_METHODS = {name.rpartition(".")[2] for name in DYNAMIC}
DATA_LOADERS = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
CUDA_TENSOR = re.compile(r"torch\.cuda\.\w+Tensor")
# Functions of torch.cuda that do nothing, or nothing bad, where there is no CUDA.
HARMLESS = {"manual_seed", "manual_seed_all", "empty_cache", "amp"}
MODELS = re.compile(r"(^|_)(model|net|network|encoder|decoder|generator|discriminator|unet|backbone)\d*$", re.IGNORECASE)
# What is no trouble where it is done only after asking for CUDA.
FOR_CUDA = {"cuda", "cuda-check", "fp16", "data-parallel", "torch-compile"}
SHELLS = {"os.system", "os.popen"}
SHELLS |= {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen", "getoutput")}
# What sums the gradients over the cores by itself, so that a plain step of the optimizer is right.
SUMS = re.compile(r"FullyShardedDataParallel|ZeroRedundancyOptimizer|reduce_gradients$")
# What needs the value of a tensor that is given to it.
SHOWS = {f"builtins.{name}" for name in ("print", "float", "int", "bool", "str", "repr", "min", "max")}
SHOWING = {"debug", "info", "warning", "error", "set_postfix", "set_postfix_str", "set_description", "add_scalar"}


class Finder(Reader):
    """found: (line, column, rule, what was found, whether `fixed` fixes it, advice or "") of a module's code."""

    def __init__(self, code):
        super().__init__(code)
        self.found, self.fixes, self.needs, self.reads = [], {}, set(), set()
        self.asked, self.hangs = [], {}  # calls that ask for CUDA, and what first hangs on each
        self.wrapper.visit(self)

    def visit_Module(self, node):
        self.read(node)
        names = {name for name, _ in self.calls}
        self.launched = [call for name, call in self.calls if name in LAUNCHES]
        self.on_xla = any(
            name.endswith("init_process_group") and '"xla"' in self._text(c).replace("'", '"') for name, c in self.calls
        )
        distributed = self.on_xla and any(name in PARALLEL and "Distributed" in name for name in names)
        self.sums = distributed or any(SUMS.search(name) or self._sums_in_place(name, call) for name, call in self.calls)
        used = [n for n in m.findall(node, m.Attribute() | m.Name()) if _tail(n) in SYNC_WORDS]
        self.syncs = any(self._name(n) in SYNCS for n in used) or any(
            name == f"{XM}.optimizer_step" and _keyword(call, "barrier") is not None for name, call in self.calls
        )
        self._look_at_names(node)

    def leave_Module(self, original_node):
        for call in reversed(self.asked):  # an outer one after those that hang on it
            if call in self.hangs:
                advice = f"says no on a TPU, and `{self.hangs[call]}` is left out: the CPU would train; use torch_xla.device()"
                self._say(call, "cuda", advice=advice)
            elif not self._decides_flags_or_figures(call):
                self._say(call, "cuda-check")

    def _sums_in_place(self, name, call):
        """Whether a call sums gradients over the cores: `xm.all_reduce('sum', gradients)` changes them, and gives nothing."""
        if name not in (f"{XM}.all_reduce", "torch.distributed.all_reduce"):
            return False
        return isinstance(self.get_metadata(ParentNodeProvider, call), cst.Expr) or "grad" in self._text(call)

    def _look_at_names(self, node):
        """optimizers, scalers, models: names of such. devices: names used as one. strings: those that have to stay strings."""
        self.optimizers, self.scalers, self.strings, self.models = {"optimizer"}, set(), set(), set()
        self.devices = set()
        for attribute in m.findall(node, m.Attribute(attr=m.Name("parameters") | m.Name("named_parameters") | m.Name("train"))):
            self.models.add(_tail(attribute.value))
        for assign in m.findall(node, m.Assign(value=m.Call())):
            name, targets = self._name(assign.value.func), {_tail(target.target) for target in assign.targets}
            if name.startswith("torch.optim.") and "lr_scheduler" not in name:
                self.optimizers |= targets
                self._made_too_early(assign)
            if name in SCALERS:
                self.scalers |= targets
        self.models -= self.optimizers | self.scalers
        for comparison in m.findall(node, m.Comparison()):
            self.strings |= {name.value for name in m.findall(comparison, m.Name())}
        for attribute in m.findall(node, m.Attribute(value=m.Name(), attr=m.Name("startswith") | m.Name("split"))):
            self.strings.add(attribute.value.value)
        for name, call in self.calls:
            moves = name == "torch.device" or isinstance(call.func, cst.Attribute) and call.func.attr.value == "to"
            self.devices |= {_tail(a.value) for a in call.args[:1] if moves and a.keyword is None}
            self.devices.add(_tail(_keyword(call, "device")))
            if name in AUTOCASTS | SCALERS and call.args:
                self.strings.add(_tail((_keyword(call, "device_type") or call.args[0].value)))

    def _say(self, node, rule, found="", *, fix=None, needs=(), advice=""):
        asked = self._guard(node)
        if asked is not None and (rule in FOR_CUDA or not asked):  # not reached on a TPU
            for call in asked if rule == "cuda" else ():
                self.hangs.setdefault(call, _short(self._text(node)))
            return
        at = self.get_metadata(PositionProvider, node).start
        self.found.append((at.line, at.column + 1, rule, found or f"`{_short(self._text(node))}`", fix is not None, advice))
        if fix is not None:
            self.fixes[node] = fix
            self.needs |= set(needs)

    # Devices

    def visit_IfExp(self, node):
        for chosen, truth in ((node.body, True), (node.orelse, False)):
            if not self._means_cuda(chosen) or not self._implies(node.test, truth) or not self._asked(node.test):
                continue
            if HANDLES_XLA.search(self._other_ways(node, chosen)):
                continue
            around = self.get_metadata(ParentNodeProvider, node)
            call = self.get_metadata(ParentNodeProvider, around)
            if isinstance(call, cst.Call) and self._name(call.func) in AUTOCASTS:
                self._say(node, "cuda", fix=_expression('"xla"'), advice="use 'xla'")
            else:
                fix = None if self._has_to_be_a_string(around) else _expression("torch_xla.device()")
                self._say(node, "cuda", fix=fix, needs=["torch_xla"])
            return False
        return None

    def _has_to_be_a_string(self, around):
        """Whether what is assigned or given here may be compared with strings."""
        if isinstance(around, cst.Assign):
            return bool({_tail(target.target) for target in around.targets} & self.strings)
        return isinstance(around, cst.Arg) and around.keyword is not None and "device" not in around.keyword.value

    def visit_Arg(self, node):
        keyword, call = node.keyword.value if node.keyword else "", self.get_metadata(ParentNodeProvider, node)
        if not _is_cuda(node.value) or not isinstance(call, cst.Call):
            return
        name, method = self._name(call.func), call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        takes_devices = method == "to" or name.startswith("torch.") and name != "torch.Generator"
        if keyword == "map_location" and takes_devices:
            self._say(node.value, "cuda", fix=_expression('"cpu"'), advice="load to the CPU, and move")
        elif (keyword == "device" or not keyword and method == "to") and takes_devices:
            self._say(node.value, "cuda", fix=_expression("torch_xla.device()"), needs=["torch_xla"])
        elif keyword == "default" and method == "add_argument" or name in ("torch.Generator", "torch.set_default_device"):
            self._say(node.value, "cuda")

    def visit_Assign(self, node):
        if _is_cuda(node.value) and any(self._is_a_device(target.target) for target in node.targets):
            self._say(node, "cuda")

    def _is_a_device(self, target):
        return "device" in _tail(target).lower() or _tail(target) in self.devices - {""}

    def visit_AnnAssign(self, node):
        if node.value is not None and _is_cuda(node.value) and self._is_a_device(node.target):
            self._say(node, "cuda")

    def visit_Param(self, node):
        if node.default is not None and _is_cuda(node.default) and self._is_a_device(node.name):
            self._say(node, "cuda")

    def visit_SimpleString(self, node):
        if (name := node.evaluated_value) in OLD_VARIABLES:
            self._say(node, "old-variable", name, advice=OLD_VARIABLES[name])

    def visit_Attribute(self, node):
        around = self.get_metadata(ParentNodeProvider, node)
        if CUDA_TENSOR.fullmatch(self._name(node)) and not (isinstance(around, cst.Call) and around.func is node):
            self._say(node, "cuda")
        elif self._name(node) in ("torch.float16", "torch.half"):
            # There it is a word, not a choice.
            if not isinstance(around, (cst.DictElement, cst.Comparison, cst.ComparisonTarget)):
                self._say(node, "fp16", fix=_expression("torch.bfloat16"), needs=["torch"])
        elif node.attr.value == "half" and m.matches(around, m.Call(args=[])) and not self._only_stored(around):
            self._say(node, "fp16", fix=lambda half: half.with_changes(attr=cst.Name("bfloat16")))

    def _only_stored(self, call):
        """Whether a result of `.half()` is not computed with: kept in a dict or saved, or made float again."""
        around = self.get_metadata(ParentNodeProvider, call)
        if m.matches(around, m.Attribute(attr=m.Name("float"))):
            return True
        outer = (node for node in self._up(call) if isinstance(node, (cst.DictElement, cst.Call)))
        return any(isinstance(node, cst.DictElement) or self._name(node.func) == "torch.save" for node in outer)

    def visit_ImportFrom(self, node):
        if node.module is None or isinstance(node.names, cst.ImportStar):
            return
        module = self._text(node.module)
        for alias in node.names:
            name = f"{module}.{alias.evaluated_name}"
            rule, new = OLD_NAMES.get(name, ("", ""))
            new = new if rule == "gone" else OLD_MODULES.get(name) or OLD_MODULES.get(module)
            if new:
                self._say(node, "gone", f"`import {alias.evaluated_name}`", advice=f"use {new}")

    def visit_Import(self, node):
        for alias in node.names:
            if alias.evaluated_name in OLD_MODULES:
                advice = f"use {OLD_MODULES[alias.evaluated_name]}"
                self._say(node, "gone", f"`import {alias.evaluated_name}`", advice=advice)

    # Calls

    def visit_Call(self, node):
        name, method = self._name(node.func), node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        goes_in = None
        if name == "torch.device":
            words = [text for text in m.findall(node, m.SimpleString() | m.FormattedString()) if _is_cuda(text)]
            if any(self._guard(word) != set() for word in words if not self._is_compared(word)) and not self._is_compared(node):
                self._say(node, "cuda", fix=_expression("torch_xla.device()"), needs=["torch_xla"])
                return False
        elif method == "cuda" and not name.startswith("torch.cuda"):
            what = f"`.cuda()` of `{_short(self._text(node.func.value))}`"
            self._say(node, "cuda", what, fix=_to_device, needs=["torch_xla"])
        elif name in AUTOCASTS:
            goes_in = self._autocast(node, name)
        elif name in SCALERS:
            if not self._only_for_cuda(_keyword(node, "enabled")):
                self._say(node, "fp16", fix=_expression("torch.amp.GradScaler(enabled=False)"), needs=["torch"])
            return False
        elif name in PARALLEL:
            if not (self.on_xla and "Distributed" in name):
                self._say(node, "data-parallel", f"`{name.split('.')[-1]}`")
        elif name.startswith("torch.cuda."):
            self._cuda_function(node, name.split(".")[2])
        elif name in OLD_NAMES:
            rule, new = OLD_NAMES[name]
            fix = lambda call: call.with_changes(func=cst.parse_expression(new))  # noqa: E731
            self._say(node, rule, f"`{name.split('.')[-1]}`", fix=fix, needs=[new.rpartition(".")[0]], advice=f"use {new}")
        elif name == f"{XMP}.spawn":
            self._spawn(node)
        elif name in DATA_LOADERS:
            self._loader(node)
        elif name == "torch.compile" and _keyword(node, "backend") is None:
            self._say(node, "torch-compile", "`torch.compile`")
        elif name in (f"{XM}.save", "torch.save"):
            self._save(node, name)
        elif name in DYNAMIC or name == "torch.where" and len(node.args) == 1:
            if self._in_step(node) or self._in_forward(node):
                self._say(node, "dynamic-shape")
        elif method in DYNAMIC_METHODS and self._is_tensor(node.func.value, self._known(node)[0]):
            if self._in_step(node) or self._in_forward(node):
                self._say(node, "dynamic-shape")
        elif name in SHELLS or method == "system" and "get_ipython" in self._text(node.func):
            words = m.findall(node, m.SimpleString() | m.FormattedStringText())
            command = " ".join(str(w.evaluated_value) if isinstance(w, cst.SimpleString) else w.value for w in words)
            if installs(command):
                self._say(node, "install", f"`{_short(command)}`")
        self._reading(node, name, method)
        self._stepping(node, method)
        if name in ("torch_xla.device", f"{XM}.xla_device"):
            for call in self._guard(node) or ():
                self.hangs.setdefault(call, _short(self._text(node)))
        if name in OPENS_DEVICE and any(self._comes_before(node, launch) for launch in self.launched):
            self._say(node, "early-device")
        return goes_in

    def _comes_before(self, node, launch):
        """Whether a call surely runs before a launch: at the top of the module, or above it in the same function and branch."""
        scope = self._scope(node)
        if scope is not self._scope(launch):
            return scope is self.tree
        around, child = {*self._up(launch)}, node
        for outer in self._up(node):
            if outer in around:
                other_branch = isinstance(outer, cst.If) and child is not outer.test
                return self._line(node) <= self._line(launch) and not other_branch
            if isinstance(outer, cst.IndentedBlock) and _leaves(outer):
                return False
            child = outer
        return False

    def _is_compared(self, node):
        return isinstance(self.get_metadata(ParentNodeProvider, node), (cst.Comparison, cst.ComparisonTarget))

    def _only_for_cuda(self, enabled):
        """Whether a switch is off on a TPU."""
        return enabled is not None and (m.matches(enabled, m.Name("False")) or self._implies(enabled, True))

    def _spawn(self, node):
        given = _argument(node, "nprocs", 2)
        if given is None or m.matches(given.value, m.Name("None") | m.Integer("1")):
            return
        left_out = lambda call: call.with_changes(args=_without(call.args, "nprocs"))  # noqa: E731
        none = lambda call: call.with_changes(args=_with(call.args, 2, cst.Name("None")))  # noqa: E731
        advice = "leave it out: all cores are started, and a number raises"
        self._say(node, "gone", "`nprocs` of spawn", fix=left_out if given.keyword else none, advice=advice)

    def _autocast(self, node, name):
        if name == "torch.cuda.amp.autocast":
            enabled = _keyword(node, "enabled") or next((a.value for a in node.args if a.keyword is None), None)
        elif _is_cuda(_keyword(node, "device_type") or (node.args[0].value if node.args else node)):
            enabled = _keyword(node, "enabled")
        else:
            return None  # of a variable's device; its dtype is looked at by itself
        if enabled is not None and self._implies(enabled, True):
            return False
        switch = "" if enabled is None else f", enabled={self._text(enabled)}"
        self._say(node, "fp16", fix=_expression(f"torch.autocast('xla', dtype=torch.bfloat16{switch})"), needs=["torch"])
        return False

    def _cuda_function(self, node, function):
        if f"torch.cuda.{function}" in ASKS:
            self.asked.append(node)
        elif self._guard(node) is not None:
            return
        elif function == "synchronize":
            fix = _expression("torch_xla.sync(wait=True)")
            self._say(node, "cuda", fix=fix, needs=["torch_xla"], advice="use torch_xla.sync(wait=True)")
        elif function not in HARMLESS:
            self._say(node, "cuda", advice="there is no CUDA on a TPU: leave it out")

    def _loader(self, node):
        if any(a.star for a in node.args):
            return
        names = dict(batch_size=1, shuffle=2, sampler=3, batch_sampler=4, drop_last=8)
        given = {name: _argument(node, name, place) for name, place in names.items()}
        given = {name: a for name, a in given.items() if a is not None and not m.matches(a.value, m.Name("None"))}
        value = {name: argument.value for name, argument in given.items()}
        kept = "drop_last" in value and not m.matches(value["drop_last"], m.Name("False"))
        if kept or "batch_sampler" in value or m.matches(value.get("batch_size", cst.Integer("1")), m.Integer("1")):
            return
        shuffled = m.matches(
            value.get("shuffle", node), m.Name("True") | m.Comparison(comparisons=[m.ComparisonTarget(m.Is())])
        )
        if shuffled:
            behind = max(i for i, a in enumerate(node.args) if a.keyword is None or a is given["shuffle"])
            fix = lambda call: call.with_changes(args=_behind(call.args, behind, "drop_last"))  # noqa: E731
            self._say(node, "ragged-batch", fix=None if "drop_last" in value else fix)
        elif "sampler" in value and not re.search(r"Sequential|val|test|eval", self._text(node)):
            self._say(node, "ragged-batch")

    def _save(self, node, name):
        if name == f"{XM}.save":
            guards = [self._text(outer.test) for outer in self._up(node) if isinstance(outer, cst.If)]
            if any(re.search(r"ordinal|rank|master", guard) for guard in guards):
                self._say(node, "save-on-one", "xm.save on one core only")
            return
        what = given = node.args[0].value if node.args else None
        if isinstance(what, cst.Name):  # put together before
            made = [a.value for a in m.findall(self.tree, m.Assign()) if what.value in {_tail(t.target) for t in a.targets}]
            what = next((value for value in made if m.findall(value, m.Attribute(attr=m.Name("state_dict")))), None)
        if what is None or re.search(r"\.cpu\(\)|\.to\(['\"]cpu['\"]\)", self._text(what)):
            return
        states = m.findall(what, m.Call(func=m.Attribute(attr=m.Name("state_dict")), args=[]))
        if not any(_tail(s.func.value) in self.models or MODELS.search(_tail(s.func.value)) for s in states):
            return
        fix = None
        if given in states:
            copies = f"{{name: value.cpu() for name, value in {self._text(given)}.items()}}"
            fix = (
                lambda call: call.with_changes(  # noqa: E731
                    args=[call.args[0].with_changes(value=cst.parse_expression(copies)), *call.args[1:]]
                )
            )
        self._say(node, "save", fix=fix)

    # The step

    def _reading(self, node, name, method):
        if not self._in_step(node) or any(outer in self.reads for outer in self._up(node)):
            return
        taken = method in HOST and not node.args and self._is_on_the_device(node.func.value, method)
        given = set().union(*(self._values(a.value) for a in node.args)) if node.args else set()
        inside = any(m.findall(a, TO_HOST) for a in node.args)
        shows = name in SHOWS or name.startswith("logging.") or method in SHOWING
        shown = shows and self.losses & given and not inside
        if taken or shown:
            self.reads.add(node)
            self._say(node, "read-in-loop")

    def _is_on_the_device(self, node, method):
        if _root(node) in self.models:
            return False
        return self._is_tensor(node, self._known(node)[0]) or method != "cpu" and _root(node) in self.made

    def visit_FormattedStringExpression(self, node):
        if not self._in_step(node) or any(outer in self.reads for outer in self._up(node)):
            return
        if self.losses & self._values(node.expression) and not m.findall(node.expression, TO_HOST):
            self.reads.add(node)
            self._say(node, "read-in-loop")

    def visit_If(self, node):
        self._branch(node)

    def visit_While(self, node):
        self._branch(node)

    def visit_Assert(self, node):
        self._branch(node)

    def _branch(self, node):
        """`if loss > 3` in a step waits for the loss."""
        test = node.test
        calls = m.findall(test, TO_HOST) or m.findall(test, m.Is() | m.IsNot())
        if calls or self._once_in_a_while(test) or not self._in_step(node):
            return
        if self.losses & self._values(test):
            word = type(node).__name__.lower()
            self._say(test, "read-in-loop", f"`{word} {_short(self._text(test))}`")

    def visit_Subscript(self, node):
        if not self._in_step(node) and not self._in_forward(node):
            return
        if any(isinstance(outer, cst.AssignTarget) for outer in self._up(node)):  # x[mask] = 0 keeps its shape
            return
        indices = [element.slice.value for element in node.slice if isinstance(element.slice, cst.Index)]
        if any(self._is_mask(index, *self._known(node)) for index in indices):
            self._say(node, "dynamic-shape")

    def _stepping(self, node, method):
        if method != "step":
            return
        base, around = _tail(node.func.value), [o for outer in self._up(node) for o in (outer, *self._loops_in(outer))]
        if base not in self.optimizers | self.scalers or not self.regions & set(around):
            return
        if self.launched and not self.sums:
            whole = f"{XM}.optimizer_step({self._text(node.func.value)})"
            fix = _expression(whole) if base in self.optimizers and not node.args else None
            self._say(node, "gradient-sum", fix=fix, needs=[XM])
        if not self.syncs:
            line = self.get_metadata(ParentNodeProvider, node)
            statement = self.get_metadata(ParentNodeProvider, line)
            alone = isinstance(line, cst.Expr) and isinstance(statement, cst.SimpleStatementLine)
            sync = cst.parse_statement("torch_xla.sync()\n")
            fix = (lambda step: cst.FlattenSentinel([step, sync])) if alone else None
            self._say(statement if alone else node, "no-sync", fix=fix, needs=["torch_xla"])

    def _loops_in(self, node):
        """The loops within a loop or function: gradients may be accumulated in an inner one."""
        return m.findall(node.body, m.For() | m.While()) if isinstance(node, (*LOOPS, cst.FunctionDef)) else ()

    def _made_too_early(self, assign):
        """Say so where the model that an optimizer was made of is moved for the first time afterwards, in the same function."""
        in_scope = lambda node: self._scope(node) is self._scope(assign)  # noqa: E731
        before = [a for a in self.assigns if self._line(a) < self._line(assign) and in_scope(a)]
        given = {a.value.value for a in m.findall(assign.value, m.Arg(value=m.Name()))}
        makers = [assign.value, *(a.value for a in before if given & {_tail(t.target) for t in a.targets})]
        parameters = m.Attribute(value=m.Name() | m.Attribute(), attr=m.Name("parameters") | m.Name("named_parameters"))
        for model in sorted({self._text(n.value) for maker in makers for n in m.findall(maker, parameters)}):
            moves = [c for _, c in self.calls if self._moves(c) and in_scope(c) and self._guard(c) != set()]
            own = [self._line(call) for call in moves if self._text(call.func.value) == model]
            made = [a.value for a in before if any(self._text(t.target) == model for t in a.targets)]
            moved = any(self._moves(call) for value in made for call in m.findall(value, m.Call()))
            if own and min(own) > self._line(assign) and not moved:
                self._say(assign, "optimizer-first", f"made of {model} before it is moved")

    def _moves(self, call):
        """Whether a call moves something to a device that is not the CPU."""
        if not m.matches(call.func, m.Attribute(attr=m.Name("to") | m.Name("cuda"))):
            return False
        return not any(re.search(r"^['\"]cpu|dtype|float|half|memory_format", self._text(a)) for a in call.args[:1])

    # Mending

    def fixed(self):
        """The code with all fixes, and the imports that they need."""
        if not self.fixes:
            return self.tree.code
        tree = self.tree.visit(_Mender(self.fixes))
        there = {
            alias.evaluated_name
            for s in tree.body
            if _is_import(s)
            for i in m.findall(s, m.Import())
            for alias in i.names
            if not alias.asname
        }
        new = [cst.parse_statement(f"import {name}\n") for name in sorted(self.needs - there)]
        if not new:
            return tree.code
        at = next((i for i, s in enumerate(tree.body) if _is_import(s) and not _is_future(s)), None)
        if at is None:
            at = next((i for i, s in enumerate(tree.body) if not _is_docstring(s) and not _is_future(s)), len(tree.body))
        if at < len(tree.body):  # in the place of a statement, below what stands above it
            old = tree.body[at]
            new[0] = new[0].with_changes(leading_lines=old.leading_lines)
            return tree.with_changes(
                body=[*tree.body[:at], *new, old.with_changes(leading_lines=[]), *tree.body[at + 1 :]]
            ).code
        return tree.with_changes(body=[*tree.body, *new]).code


class _Mender(cst.CSTTransformer):
    def __init__(self, fixes):
        super().__init__()
        self.fixes = fixes

    def on_leave(self, original_node, updated_node):
        updated = super().on_leave(original_node, updated_node)
        fix = self.fixes.get(original_node)
        return fix(updated) if fix else updated


def _expression(text):
    """A fix that puts another expression in the place of one, in the same brackets."""
    return lambda old: cst.parse_expression(text).with_changes(lpar=old.lpar, rpar=old.rpar)


def _to_device(call):
    to = call.func.with_changes(attr=cst.Name("to"))
    return call.with_changes(func=to, args=[cst.Arg(cst.parse_expression("torch_xla.device()"))])


def _is_import(statement):
    return m.matches(statement, m.SimpleStatementLine(body=[m.ZeroOrMore(), m.Import() | m.ImportFrom(), m.ZeroOrMore()]))


def _is_future(statement):
    return m.matches(statement, m.SimpleStatementLine(body=[m.ImportFrom(module=m.Name("__future__"))]))


def _is_docstring(statement):
    return m.matches(statement, m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.ConcatenatedString())]))


def _keyword(call, name):
    return next((a.value for a in call.args if a.keyword is not None and a.keyword.value == name), None)


def _argument(call, name, place):
    """The argument of this name, or in this place; None where it is not given."""
    named = next((a for a in call.args if a.keyword is not None and a.keyword.value == name), None)
    plain = [a for a in call.args if a.keyword is None]
    return named or (plain[place] if place < len(plain) else None)


def _without(arguments, name):
    kept = [a for a in arguments if a.keyword is None or a.keyword.value != name]
    return [*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)] if kept else kept


def _with(arguments, place, value):
    return [a.with_changes(value=value) if i == place else a for i, a in enumerate(arguments)]


def _behind(arguments, place, new):
    """Arguments with `new=True` behind the one in a place, on its line."""
    old = arguments[place]
    between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    equal = next((a.equal for a in arguments if a.keyword), cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")))
    first = old.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace(""))
    last = cst.Arg(cst.Name("True"), keyword=cst.Name(new), equal=equal, comma=old.comma)
    last = last.with_changes(whitespace_after_arg=old.whitespace_after_arg)
    return [*arguments[:place], first, last, *arguments[place + 1 :]]


def _short(text):
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
