"""What surrounds a node: a training step, a `forward` method, a launch of processes, conditions on CUDA.

A call's conditions in rules.toml (`where`) are methods here."""

import ast
import re

from tpukit.tools.migrate.findings import TABLES
from tpukit.tools.migrate.source import Function, Located, Source, last_name, method_of

NAMES_CUDA = re.compile(r"""["']cuda["':]|\.is_cuda\b""")
MENTIONS_XLA = re.compile(r"torch_xla\.device|xla_device|[\"']xla|(?<![a-z])tpu(?![a-z])", re.IGNORECASE)
TO_HOST = {"item", "numpy", "cpu"}  # methods that only tensors have
# Attributes and methods that are known without the tensor's values.
METADATA = set("shape device dtype ndim grad_fn requires_grad is_cuda names dim size numel type".split())
# Functions that give no tensor on the device.
HOST_CALLS = re.compile(
    r"(numpy|pandas|math|time|os|random|copy|logging)\.|builtins\.(?!(sum|abs|pow|min|max)$)"
    r"|torch\.(is_tensor|is_floating_point|numel)$"
)
# Libraries whose `backward(loss)` brings a step of its own.
OTHER_TRAINERS = re.compile(r"accelerator|fabric|engine|strategy", re.IGNORECASE)
# How conditions look that hold only in some steps: `step % 100 == 0`, `step < 3`, `args.log_every`.
SCHEDULE = re.compile(
    r"(?i)%|log|print|interval|every|eval|verbose|debug|report|freq|first|is_last|\btime\b"
    r"|step|iter|batch|idx|index|epoch|count|\b([ijkn]|it)\b"
)
SYNCS = {"torch_xla.sync", "torch_xla.core.xla_model.mark_step"}
LAUNCHES = {"torch_xla.launch", "torch_xla.distributed.xla_multiprocessing.spawn"}
STEPPED = re.compile(
    r"torch\.optim\.(?!lr_scheduler|swa_utils)|torch\.(cuda\.)?amp\.(grad_scaler\.)?GradScaler$"
)
# Moves that are none to another device.
MOVED_ELSEWHERE = re.compile(r"\(['\"]cpu|dtype|float|half|memory_format")


class Surroundings:
    """losses: names whose gradients are asked for. bodies: the loops (or functions) of training steps.
    forwards: `forward` methods."""

    def __init__(self, source: Source):
        self.source = source
        self.losses, self.bodies = set(), set()
        for call in source.calls:
            if method_of(call) == "backward" and not OTHER_TRAINERS.search(last_name(call.func.value)):
                self.losses |= _losses_in(call.func.value)
                outers = source.ancestors(call)
                loops = [one for one in outers if isinstance(one, ast.For | ast.While | ast.FunctionDef)]
                self.bodies |= set([loop for loop in loops if not _adds_micro_batches(loop)][:1])
        functions = [one for one in source.nodes if isinstance(one, ast.FunctionDef)]
        self.forwards = {function for function in functions if function.name == "forward"}
        self.launches = [call for call in source.calls if source.name(call.func) in LAUNCHES]

    # The training step

    def in_step(self, node: ast.AST) -> bool:
        """Return whether a node runs in every training step."""
        for outer in self.source.ancestors(node):
            if isinstance(outer, ast.If) and SCHEDULE.search(ast.unparse(outer.test)):
                return False
            if outer in self.bodies:
                return True
            if isinstance(outer, Function):
                return False
        return False

    def in_compiled_code(self, node: ast.AST) -> bool:
        """Return whether a node is in a training step or a forward method."""
        return self.in_step(node) or not self.forwards.isdisjoint(self.source.ancestors(node))

    def takes_loss(self, call: ast.Call) -> bool:
        """Return whether a call needs the value of a loss."""
        return any(self.reads_loss(value) for value in [*call.args, *(arg.value for arg in call.keywords)])

    def reads_loss(self, node: ast.AST) -> bool:
        return not self.losses.isdisjoint(self._values(node))

    def _values(self, node):
        """The names in an expression whose values it needs: x of `x + 1`, but not of `x.shape`, `len(x)`,
        `x is None` or `x.item()`."""
        match node:
            case ast.Name():
                return {node.id}
            case ast.Attribute():
                return set() if node.attr in METADATA | TO_HOST else self._values(node.value)
            case ast.Subscript():
                return self._values(node.value)
            case ast.Call() if HOST_CALLS.match(self.source.name(node.func)):
                return set()
            case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
                return set()
        return set().union(*map(self._values, ast.iter_child_nodes(node)))

    def is_mask(self, index: ast.AST) -> bool:
        """Return whether an index is named as a mask, or compares values that are no counter and no text."""
        text = ast.unparse(index)
        parts = [*ast.walk(index), *self.source.assigned.get(last_name(index), [])]
        compared = [one for one in parts if isinstance(one, ast.Compare | ast.UnaryOp) and self._values(one)]
        is_about_objects = SCHEDULE.search(text) or "'" in text or not self._values(index)
        return not is_about_objects and bool(compared or text.lower().endswith("mask"))

    # Optimizers and processes

    def ends_a_step(self, call: ast.Call) -> bool:
        """Return whether a call ends a training step: `optimizer.step()`, `scaler.step(optimizer)`."""
        owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        made = [one for one in self.source.assigned.get(owner, []) if isinstance(one, ast.Call)]
        is_made = any(STEPPED.match(self.source.name(one.func)) for one in made)
        functions = self.bodies | {self.source.function_of(body) for body in self.bodies}
        return (owner == "optimizer" or is_made) and self.source.function_of(call) in functions

    def is_not_synced(self, call: ast.Call) -> bool:
        """Return whether no sync is in the loop of a training step, or in a function without such a loop."""
        loops = [body for body in self.bodies if not isinstance(body, ast.FunctionDef)]
        functions = {self.source.function_of(loop) for loop in loops}
        syncs = [node for node in self.source.nodes if self.source.name(node) in SYNCS]
        return not any(
            self.source.function_of(node) not in functions or set(loops) & set(self.source.ancestors(node))
            for node in syncs
        )

    def is_before_the_move(self, call: ast.Call) -> bool:
        """Return whether an optimizer is made of a model that is moved to a device afterwards, in the same
        function."""
        models = re.findall(r"([\w.]+)\.parameters\(", ast.unparse(call))
        function = self.source.function_of(call)
        for move in self.source.calls:
            if method_of(move) in ("to", "cuda") and ast.unparse(move.func.value) in models:
                is_here = self.source.function_of(move) is function and not self.cuda_condition(move)
                if is_here and not MOVED_ELSEWHERE.search(ast.unparse(move)):
                    return move.lineno > call.lineno
        return False

    def before_launch(self, call: ast.Call) -> bool:
        """Return whether a call runs in the module itself, above a launch of processes."""
        is_outside = self.source.function_of(call) is self.source.tree
        return is_outside and any(launch.lineno > call.lineno for launch in self.launches)

    def is_saved(self, call: ast.Call) -> bool:
        """Return whether a state is given to `torch.save` as it is, not copied by {name: ... for ...}."""
        outers = {call, *self.source.ancestors(call)}
        for save in self.source.calls:
            if self.source.name(save.func) == "torch.save" and save.args:
                saved = save.args[0]
                values = self.source.assigned.get(saved.id, []) if isinstance(saved, ast.Name) else [saved]
                if not outers.isdisjoint(values):
                    return not any(isinstance(outer, ast.DictComp) for outer in outers)
        return False

    def is_not_stored(self, call: ast.Call) -> bool:
        """Return whether a value is neither put into a dict, such as a checkpoint, nor converted at once."""
        return not isinstance(self.source.parents[call], ast.Dict | ast.Attribute)

    def in_launched_module(self, call: ast.Call) -> bool:
        return bool(self.launches)

    # Conditions that ask for CUDA

    def cuda_condition(self, node: ast.AST) -> str:
        """Return "asks" if a node runs only where torch.cuda.is_available(); "knows" if only where a device
        has some name, or the code mentions XLA; else ""."""
        child: Located = None
        for outer in [node, *self.source.ancestors(node)]:
            conditions = []
            if isinstance(outer, ast.If | ast.IfExp) and child is not None and child is not outer.test:
                conditions = [outer.test]
            elif isinstance(outer, ast.BoolOp) and child is not None:
                conditions = outer.values[: outer.values.index(child)]
            elif isinstance(outer, ast.Call):
                conditions = [arg.value for arg in outer.keywords if arg.arg == "enabled"]
            for condition in conditions:
                if answer := self.kind_of(condition):
                    return "knows" if self.mentions_xla(outer) else answer
            child = outer
        return ""

    def kind_of(self, test: ast.AST, seen: tuple[str, ...] = ()) -> str:
        """Return what a condition does (see `cuda_condition`), followed through names (`use_cuda`)."""
        calls = [one for one in ast.walk(test) if isinstance(one, ast.Call)]
        if any(self.source.name(call.func) in TABLES["asks_for_cuda"] for call in calls):
            return "asks"
        if NAMES_CUDA.search(ast.unparse(test)):  # device.type == "cuda", x.is_cuda
            return "knows"
        match test:
            case ast.UnaryOp(operand=operand):
                return self.kind_of(operand, seen)
            case ast.BoolOp(values=values):
                return max(self.kind_of(value, seen) for value in values)
        name = last_name(test)
        values = self.source.assigned.get(name, []) if name not in seen else []
        return min((self.kind_of(value, (*seen, name)) for value in values), default="")

    def mentions_xla(self, condition: Located) -> bool:
        """Return whether XLA is mentioned in a condition or one of its branches, those of elif too."""
        while isinstance(outer := self.source.parents[condition], ast.If) and outer.orelse == [condition]:
            condition = outer
        return MENTIONS_XLA.search(ast.unparse(condition)) is not None


def _adds_micro_batches(loop):
    """Whether a loop is only a part of a step: `for micro_batch in range(4)`."""
    is_counted = isinstance(loop, ast.For) and "range(" in ast.unparse(loop.iter)
    return is_counted and ".step(" not in ast.unparse(loop)


def _losses_in(receiver):
    """The names whose gradient `receiver.backward()` asks for: of loss, (loss / n), scaler.scale(loss),
    loss.mean()."""
    match receiver:
        case ast.Name():
            return {receiver.id}
        case ast.BinOp():
            return _losses_in(receiver.left) or _losses_in(receiver.right)
        case ast.Call(func=ast.Attribute(attr="scale"), args=[scaled, *_]):
            return _losses_in(scaled)
        case ast.Call(func=ast.Attribute(attr="mean" | "sum", value=averaged)):
            return _losses_in(averaged)
    return set()
