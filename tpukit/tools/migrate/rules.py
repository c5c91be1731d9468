"""What in a module's code is trouble on a TPU, and how it is mended. Names are followed through the imports, never guessed."""

import re

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider, QualifiedNameProvider

XM, XR, XMP = "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.distributed.xla_multiprocessing"
LOADERS = "torch_xla.distributed.parallel_loader"

# name -> (level, what to do). An error does not work on a TPU; a warning is slow there, or silently not what was meant.
RULES = {
    "cuda": ("error", "a TPU is no CUDA device: use torch_xla.device()"),
    "cuda-check": ("warning", "says no on a TPU: see that what follows does not silently fall to the CPU there"),
    "fp16": ("error", "XLA devices train in bfloat16: torch.autocast('xla', dtype=torch.bfloat16), without a loss scaler"),
    "data-parallel": ("error", "one process a core instead: torch_xla.launch, or tpukit.launch, and a share of the data for each"),
    "gradient-sum": ("error", "every core would train a model of its own: xm.optimizer_step(optimizer) sums the gradients first"),
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
    "early-device": ("error", "opens the device before the cores start ('Runtime is already initialized'): move it into the function"),
    "install": ("error", "replaces what the image brings, and then torch and torch_xla do not match: use the image's"),
    "torch-compile": ("warning", "its default backend is not for XLA: backend='openxla', or leave it out"),
    "unreadable": ("error", "mend it first"),
}  # fmt: skip

# Old names -> (rule, today's, whether the call stays the same).
OLD_NAMES = {
    f"{XM}.xrt_world_size": ("gone", f"{XR}.world_size", True),
    f"{XM}.get_ordinal": ("gone", f"{XR}.global_ordinal", True),
    f"{XM}.get_local_ordinal": ("gone", f"{XR}.local_ordinal", True),
    f"{XM}.xla_device": ("deprecated", "torch_xla.device", True),
    f"{XM}.mark_step": ("deprecated", "torch_xla.sync", True),
    f"{LOADERS}.ParallelLoader": ("deprecated", f"{LOADERS}.MpDeviceLoader", False),
    "torch_xla.amp.autocast": ("deprecated", "torch.autocast('xla', dtype=torch.bfloat16)", False),
}
OLD_VARIABLES = {
    "COLAB_TPU_ADDR": "it belonged to Colab's old TPU runtime; tpukit.detect() says what is here",
    "XRT_TPU_CONFIG": "it configured the runtime before PJRT; nothing replaces it",
    "XLA_USE_BF16": "torch.autocast('xla', dtype=torch.bfloat16) instead",
    "XLA_DOWNCAST_BF16": "torch.autocast('xla', dtype=torch.bfloat16) instead",
}
OPENS_DEVICE = {"torch_xla.device", f"{XR}.world_size", f"{XR}.global_ordinal"}
OPENS_DEVICE |= {
    f"{XM}.{name}" for name in ("xla_device", "is_master_ordinal", "master_print", "xrt_world_size", "get_ordinal")
}
LAUNCHES = {"torch_xla.launch", f"{XMP}.spawn"}
SYNCS = {"torch_xla.sync", "torch_xla.step", "torch_xla.compile", f"{XM}.mark_step"}
SYNCS |= {f"{LOADERS}.MpDeviceLoader", f"{LOADERS}.ParallelLoader"}
AUTOCASTS = {"torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast_mode.autocast"}
SCALERS = {"torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"}
PARALLEL = {f"torch.nn.{place}{name}" for place in ("", "parallel.") for name in ("DataParallel", "DistributedDataParallel")}
DYNAMIC = {f"torch.{name}" for name in ("nonzero", "masked_select", "unique", "argwhere", "unique_consecutive")}
DATA_LOADERS = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
# Functions of torch.cuda that do nothing, or nothing bad, where there is no CUDA.
HARMLESS = {"manual_seed", "manual_seed_all", "empty_cache", "amp"}
MODELS = re.compile(r"(^|_)(model|net|network|encoder|decoder|generator|discriminator|unet|backbone)\d*$", re.IGNORECASE)
OTHER_BACKWARDS = re.compile(r"accelerator|fabric|engine|strategy", re.IGNORECASE)
ON_A_SCHEDULE = re.compile(r"log|print|interval|every|eval|verbose|debug|report|freq|first", re.IGNORECASE)
ABOUT = m.Attribute(
    value=m.Name(), attr=m.OneOf(*[m.Name(name) for name in ("shape", "device", "dtype", "grad_fn", "requires_grad")])
)
LOOPS = (cst.For, cst.While)


class Finder(cst.CSTVisitor):
    """found: (line, column, rule, what was found, whether `mended` mends it, advice or "") of a module's code."""

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider, QualifiedNameProvider)

    def __init__(self, code):
        super().__init__()
        self.found, self.fixes, self.needs, self.reads = [], {}, set(), set()
        wrapper = MetadataWrapper(cst.parse_module(code))
        self.tree = wrapper.module
        wrapper.visit(self)

    def visit_Module(self, node):
        calls = m.findall(node, m.Call())
        self.calls = [(self._name(call.func), call) for call in calls]
        names = {name for name, _ in self.calls}
        self.launches = bool(names & LAUNCHES)
        self.sums = f"{XM}.reduce_gradients" in names
        self.on_xla = any(
            name.endswith("init_process_group") and '"xla"' in self._text(c).replace("'", '"') for name, c in self.calls
        )
        self.syncs = bool(names & SYNCS) or any(
            name == f"{XM}.optimizer_step" and _keyword(call, "barrier") is not None for name, call in self.calls
        )
        self._look_at_steps(calls)
        self._look_at_names(node)

    def _look_at_steps(self, calls):
        """regions: the loops (or functions) of training steps. losses: names that go backward. tensors: names that a step makes."""
        self.regions, self.losses, self.tensors = set(), set(), set()
        for call in calls:
            if not m.matches(call.func, m.Attribute(attr=m.Name("backward"))) or OTHER_BACKWARDS.search(_tail(call.func.value)):
                continue
            self.losses |= _loss_of(call.func.value)
            region = next((o for o in self._up(call) if isinstance(o, (*LOOPS, cst.FunctionDef))), None)
            if region is not None:
                self.regions.add(region)
        for region in self.regions:
            targets = [region.target] if isinstance(region, cst.For) else []
            for assign in m.findall(region, m.Assign()):
                if not any(self._name(c.func).split(".")[0] in ("numpy", "pandas") for c in m.findall(assign.value, m.Call())):
                    targets += [target.target for target in assign.targets]
            self.tensors |= {name.value for target in targets for name in m.findall(target, m.Name())}
        self.tensors |= self.losses

    def _look_at_names(self, node):
        """optimizers, scalers, models: names of such. strings: names of devices that have to stay strings."""
        self.optimizers, self.scalers, self.strings, self.models = {"optimizer"}, set(), set(), set()
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
            if name in AUTOCASTS | SCALERS and call.args:
                self.strings.add(_tail((_keyword(call, "device_type") or call.args[0].value)))

    # Helpers

    def _name(self, node):
        """What a name means after the imports, as torch.nn.DataParallel; empty where it is not known."""
        return next((q.name for q in self.get_metadata(QualifiedNameProvider, node, set()) or ()), "")

    def _text(self, node):
        return self.tree.code_for_node(node)

    def _up(self, node):
        """The nodes around a node, from the nearest."""
        while (node := self.get_metadata(ParentNodeProvider, node, None)) is not None:
            yield node

    def _once_in_a_while(self, test):
        names = " ".join(name.value for name in m.findall(test, m.Name()))
        return bool(m.findall(test, m.Modulo()) or ON_A_SCHEDULE.search(names))

    def _in_step(self, node):
        """Whether a node runs in every training step: in its loop, and not only once in a while."""
        for outer in self._up(node):
            if isinstance(outer, cst.If) and self._once_in_a_while(outer.test):
                return False
            if outer in self.regions:
                return True
        return False

    def _in_forward(self, node):
        return any(isinstance(outer, cst.FunctionDef) and outer.name.value == "forward" for outer in self._up(node))

    def _values(self, node):
        """Names in an expression whose values count, not only their shapes."""
        about = {id(a.value) for a in m.findall(node, ABOUT)}
        return {name.value for name in m.findall(node, m.Name()) if id(name) not in about}

    def _say(self, node, rule, found="", *, fix=None, needs=(), advice=""):
        at = self.get_metadata(PositionProvider, node).start
        self.found.append((at.line, at.column + 1, rule, found or f"`{_short(self._text(node))}`", fix is not None, advice))
        if fix is not None:
            self.fixes[node] = fix
            self.needs |= set(needs)

    # Devices

    def visit_IfExp(self, node):
        if self._asks_for_cuda(node.test) and _is_cuda(node.body):
            assign = next((outer for outer in self._up(node) if isinstance(outer, cst.Assign)), None)
            targets = {_tail(target.target) for target in assign.targets} if assign else set()
            self._say(
                node, "cuda", fix=None if targets & self.strings else _expression("torch_xla.device()"), needs=["torch_xla"]
            )
            return False
        return None

    def _asks_for_cuda(self, node):
        return any(self._name(call.func) == "torch.cuda.is_available" for call in m.findall(node, m.Call()))

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
        elif keyword == "default" and method == "add_argument":
            self._say(node.value, "cuda")

    def visit_Assign(self, node):
        if _is_cuda(node.value) and any("device" in _tail(target.target).lower() for target in node.targets):
            self._say(node, "cuda")

    def visit_AnnAssign(self, node):
        if node.value is not None and _is_cuda(node.value) and "device" in _tail(node.target).lower():
            self._say(node, "cuda")

    def visit_Param(self, node):
        if node.default is not None and _is_cuda(node.default) and "device" in node.name.value.lower():
            self._say(node, "cuda")

    def visit_SimpleString(self, node):
        if (name := node.evaluated_value) in OLD_VARIABLES:
            self._say(node, "old-variable", name, advice=OLD_VARIABLES[name])

    def visit_Attribute(self, node):
        around = self.get_metadata(ParentNodeProvider, node)
        if self._name(node) in ("torch.float16", "torch.half"):
            if not isinstance(
                around, (cst.DictElement, cst.Comparison, cst.ComparisonTarget)
            ):  # there it is a word, not a choice
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
            rule, new, _ = OLD_NAMES.get(f"{module}.{alias.evaluated_name}", ("", "", False))
            if rule == "gone":
                self._say(node, rule, f"`import {alias.evaluated_name}`", advice=f"use {new}")

    # Calls

    def visit_Call(self, node):
        name, method = self._name(node.func), node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        goes_in = None
        if name == "torch.device":
            if any(_is_cuda(text) for text in m.findall(node, m.SimpleString() | m.FormattedString())):
                self._say(node, "cuda", fix=_expression("torch_xla.device()"), needs=["torch_xla"])
                return False
        elif method == "cuda" and not name.startswith("torch.cuda"):
            what = f"`.cuda()` of `{_short(self._text(node.func.value))}`"
            self._say(node, "cuda", what, fix=_to_device, needs=["torch_xla"])
        elif name in AUTOCASTS:
            goes_in = self._autocast(node, name)
        elif name in SCALERS:
            if not m.matches(_keyword(node, "enabled") or node, m.Name("False")):
                self._say(node, "fp16", fix=_expression("torch.amp.GradScaler(enabled=False)"), needs=["torch"])
            return False
        elif name in PARALLEL:
            if not (self.on_xla and "Distributed" in name):
                self._say(node, "data-parallel", f"`{name.split('.')[-1]}`")
        elif name.startswith("torch.cuda."):
            self._cuda_function(node, name.split(".")[2])
        elif name in OLD_NAMES:
            rule, new, same = OLD_NAMES[name]
            fix = (lambda call: call.with_changes(func=cst.parse_expression(new))) if same else None
            self._say(node, rule, f"`{name.split('.')[-1]}`", fix=fix, needs=[new.rpartition(".")[0]], advice=f"use {new}")
        elif name == f"{XMP}.spawn" and not m.matches(
            _keyword(node, "nprocs") or cst.Name("None"), m.Name("None") | m.Integer("1")
        ):
            fix = lambda call: call.with_changes(args=_without(call.args, "nprocs"))  # noqa: E731
            self._say(
                node, "gone", "`nprocs` of spawn", fix=fix, advice="leave it out: all cores are started, and a number raises"
            )
        elif name in DATA_LOADERS:
            self._loader(node)
        elif name == "torch.compile" and _keyword(node, "backend") is None:
            self._say(node, "torch-compile", "`torch.compile`")
        elif name in (f"{XM}.save", "torch.save"):
            self._save(node, name)
        elif name in DYNAMIC or name == "torch.where" and len(node.args) == 1:
            if self._in_step(node) or self._in_forward(node):
                self._say(node, "dynamic-shape")
        elif method in ("nonzero", "masked_select") and self._in_forward(node) and not name.startswith("numpy"):
            self._say(node, "dynamic-shape")
        self._reading(node, name, method)
        self._stepping(node, method)
        if self.launches and name in OPENS_DEVICE and not any(isinstance(o, cst.FunctionDef) for o in self._up(node)):
            self._say(node, "early-device")
        return goes_in

    def _autocast(self, node, name):
        if name == "torch.cuda.amp.autocast":
            enabled = _keyword(node, "enabled") or next((a.value for a in node.args if a.keyword is None), None)
        elif _is_cuda(_keyword(node, "device_type") or (node.args[0].value if node.args else node)):
            enabled = _keyword(node, "enabled")
        else:
            return None  # of a variable's device; its dtype is looked at by itself
        switch = "" if enabled is None else f", enabled={self._text(enabled)}"
        self._say(node, "fp16", fix=_expression(f"torch.autocast('xla', dtype=torch.bfloat16{switch})"), needs=["torch"])
        return False

    def _cuda_function(self, node, function):
        if (
            any(isinstance(outer, cst.If) and self._asks_for_cuda(outer.test) for outer in self._up(node))
            and function != "is_available"
        ):
            return  # not reached on a TPU
        if function in ("is_available", "device_count"):
            self._say(node, "cuda-check")
        elif function == "synchronize":
            fix = _expression("torch_xla.sync(wait=True)")
            self._say(node, "cuda", fix=fix, needs=["torch_xla"], advice="use torch_xla.sync(wait=True)")
        elif function not in HARMLESS:
            self._say(node, "cuda", advice="there is no CUDA on a TPU: leave it out")

    def _loader(self, node):
        shuffle, sampler = (_keyword(node, name) for name in ("shuffle", "sampler"))
        known = _keyword(node, "drop_last") is not None or _keyword(node, "batch_sampler") is not None
        if known or any(a.star for a in node.args) or m.matches(_keyword(node, "batch_size") or node, m.Name("None")):
            return
        if shuffle is not None and m.matches(shuffle, m.Name("True")):
            self._say(node, "ragged-batch", fix=lambda call: call.with_changes(args=_after(call.args, "shuffle", "drop_last")))
        elif sampler is not None and not re.search(r"None|Sequential|val|test|eval", self._text(node)):
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
        taken = method in ("item", "tolist", "numpy") and not node.args and _root(node.func.value) in self.tensors
        values = set().union(*(self._values(a.value) for a in node.args)) if node.args else set()
        inside = any(m.findall(a, m.Attribute(attr=m.OneOf(*map(m.Name, ("item", "tolist", "numpy"))))) for a in node.args)
        shown = name in ("builtins.print", "builtins.float") and self.losses & values and not inside
        if taken or shown:
            self.reads.add(node)
            self._say(node, "read-in-loop")

    def visit_If(self, node):
        self._branch(node)

    def visit_While(self, node):
        self._branch(node)

    def _branch(self, node):
        """`if loss > 3` in a step waits for the loss."""
        test = node.test
        calls = m.findall(test, m.Attribute(attr=m.Name("item"))) or m.findall(test, m.Is() | m.IsNot())
        if calls or self._once_in_a_while(test) or not self._in_step(node):
            return
        if self.losses & self._values(test):
            self._say(test, "read-in-loop", f"`if {_short(self._text(test))}`")

    def visit_Subscript(self, node):
        if len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
            return
        index = node.slice[0].slice.value
        mask = isinstance(index, cst.Comparison) or m.matches(index, m.UnaryOperation(operator=m.BitInvert()))
        if not mask or any(isinstance(outer, cst.AssignTarget) for outer in self._up(node)):  # x[mask] = 0 keeps its shape
            return
        batch = {n.value for r in self.regions if isinstance(r, cst.For) for n in m.findall(r.target, m.Name())}
        if self._in_forward(node) or self._in_step(node) and _root(node.value) in batch | self.losses:
            self._say(node, "dynamic-shape")

    def _stepping(self, node, method):
        if method != "step":
            return
        base, around = _tail(node.func.value), [o for outer in self._up(node) for o in (outer, *self._loops_in(outer))]
        if base not in self.optimizers | self.scalers or not self.regions & set(around):
            return
        if self.launches and not self.sums:
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
        models = {n.value.value for n in m.findall(assign.value, m.Attribute(value=m.Name(), attr=m.Name("parameters")))}
        scope = lambda node: next((o for o in self._up(node) if isinstance(o, (cst.FunctionDef, cst.Module))), None)  # noqa: E731
        line = lambda node: self.get_metadata(PositionProvider, node).start.line  # noqa: E731
        moves = [
            call
            for _, call in self.calls
            if m.matches(call.func, m.Attribute(value=m.Name(), attr=m.Name("to") | m.Name("cuda")))
            and call.func.value.value in models
            and scope(call) is scope(assign)
        ]
        if (
            moves
            and line(min(moves, key=line)) > line(assign)
            and not re.search(r"['\"]cpu['\"]", self._text(min(moves, key=line)))
        ):
            self._say(assign, "optimizer-first", f"made of {', '.join(sorted(models))} before it is moved")

    # Mending

    def mended(self):
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


def _is_cuda(node):
    if isinstance(node, cst.FormattedString):
        return bool(node.parts) and m.matches(
            node.parts[0], m.FormattedStringText(m.MatchIfTrue(lambda t: t.startswith("cuda")))
        )
    if isinstance(node, cst.BinaryOperation):
        return isinstance(node.left, cst.SimpleString) and str(node.left.evaluated_value).startswith("cuda")
    return isinstance(node, cst.SimpleString) and bool(re.fullmatch(r"cuda(:\d+)?", str(node.evaluated_value)))


def _is_import(statement):
    return m.matches(statement, m.SimpleStatementLine(body=[m.ZeroOrMore(), m.Import() | m.ImportFrom(), m.ZeroOrMore()]))


def _is_future(statement):
    return m.matches(statement, m.SimpleStatementLine(body=[m.ImportFrom(module=m.Name("__future__"))]))


def _is_docstring(statement):
    return m.matches(statement, m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.ConcatenatedString())]))


def _loss_of(receiver):
    """The names whose gradient `receiver.backward()` asks for: of loss, (loss / n), scaler.scale(loss) and loss.mean()."""
    if isinstance(receiver, cst.Name):
        return {receiver.value}
    if isinstance(receiver, cst.BinaryOperation):
        return _loss_of(receiver.left) or _loss_of(receiver.right)
    if isinstance(receiver, cst.Call) and isinstance(receiver.func, cst.Attribute):
        if receiver.func.attr.value == "scale" and receiver.args:
            return _loss_of(receiver.args[0].value)
        return _loss_of(receiver.func.value) if receiver.func.attr.value in ("mean", "sum") else set()
    return set()


def _tail(node):
    """The last name of a name or an attribute."""
    return node.value if isinstance(node, cst.Name) else node.attr.value if isinstance(node, cst.Attribute) else ""


def _root(node):
    """The first name of an expression: x of x.sum()[0]."""
    while isinstance(node, (cst.Attribute, cst.Call, cst.Subscript)):
        node = node.func if isinstance(node, cst.Call) else node.value
    return node.value if isinstance(node, cst.Name) else ""


def _keyword(call, name):
    return next((a.value for a in call.args if a.keyword is not None and a.keyword.value == name), None)


def _without(arguments, name):
    kept = [a for a in arguments if a.keyword is None or a.keyword.value != name]
    return [*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)] if kept else kept


def _after(arguments, name, new):
    """Arguments with `new=True` behind the one called `name`, on its line."""
    made = []
    for argument in arguments:
        if argument.keyword is None or argument.keyword.value != name:
            made.append(argument)
            continue
        equal = argument.equal
        between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        made.append(argument.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace("")))
        last = cst.Arg(cst.Name("True"), keyword=cst.Name(new), equal=equal, comma=argument.comma)
        made.append(last.with_changes(whitespace_after_arg=argument.whitespace_after_arg))
    return made


def _short(text):
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
