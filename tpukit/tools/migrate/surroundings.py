"""What surrounds a node: conditions that ask for CUDA (`torch.cuda.is_available()`), a training step, a
`forward` method."""

import ast
import re

from tpukit.tools.migrate.source import Function, Located, Source, last_name, method_of

CHECKS = {"torch.cuda.is_available", "torch.cuda.device_count"}
NAMES_CUDA = re.compile(r"""["']cuda["':]|\.is_cuda\b""")
MENTIONS_XLA = re.compile(r"torch_xla\.device|xla_device|[\"']xla|(?<![a-z])tpu(?![a-z])", re.IGNORECASE)
Checks = set[ast.Call] | None
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


class Surroundings:
    """losses: names whose gradients are asked for. bodies: the loops (or functions) of training steps.
    forwards: `forward` methods."""

    def __init__(self, source: Source):
        self.source = source
        self.losses, self.bodies = set(), set()
        for _, call in source.calls:
            if method_of(call) == "backward" and not OTHER_TRAINERS.search(last_name(call.func.value)):
                self.losses |= _losses_in(call.func.value)
                outers = source.ancestors(call)
                loops = [one for one in outers if isinstance(one, ast.For | ast.While | ast.FunctionDef)]
                self.bodies |= set([loop for loop in loops if not _adds_micro_batches(loop)][:1])
        functions = [one for one in source.nodes if isinstance(one, ast.FunctionDef)]
        self.forwards = {function for function in functions if function.name == "forward"}

    def checks_around(self, node: ast.AST) -> Checks:
        """None where no condition around a node asks for CUDA. Else its calls that ask: none of them where it
        compares a device's name or mentions XLA, and so knows other devices."""
        child: Located = node
        for outer in self.source.ancestors(node):
            conditions = []
            if isinstance(outer, ast.If | ast.IfExp) and child is not outer.test:
                conditions = [outer.test]
            elif isinstance(outer, ast.BoolOp):
                conditions = outer.values[: outer.values.index(child)]
            checks = self._union(conditions, set())
            if checks is not None:
                return set() if self.mentions_xla(outer) else checks
            child = outer
        return None

    def checks_in(self, test: ast.AST, seen: frozenset[str] = frozenset()) -> Checks:
        """None where a condition does not ask for CUDA. Else the calls in it that do, followed through names
        (`use_cuda`)."""
        calls = {one for one in ast.walk(test) if isinstance(one, ast.Call)}
        if calls := {call for call in calls if self.source.name(call.func) in CHECKS}:
            return calls
        if NAMES_CUDA.search(ast.unparse(test)):  # device.type == "cuda", x.is_cuda
            return set()
        match test:
            case ast.UnaryOp(operand=operand):
                return self.checks_in(operand, seen)
            case ast.BoolOp(values=values):
                return self._union(values, seen)
        name = last_name(test)
        values = self.source.assigned.get(name, []) if name and name not in seen else []
        if any(self.checks_in(value, seen | {name}) is None for value in values):
            return None
        return self._union(values, seen | {name})

    def _union(self, tests, seen):
        """The checks in any of some conditions; None where none of them asks."""
        checks = [self.checks_in(test, frozenset(seen)) for test in tests]
        known = [found for found in checks if found is not None]
        return set().union(*known) if known else None

    def mentions_xla(self, condition):
        """Whether XLA is mentioned in a condition or one of its branches, those of elif too."""
        while isinstance(outer := self.source.parents[condition], ast.If) and outer.orelse == [condition]:
            condition = outer
        return MENTIONS_XLA.search(ast.unparse(condition)) is not None

    def in_compiled_code(self, node: ast.AST) -> bool:
        """Whether a node is in a training step or a forward method."""
        return self.in_step(node) or not self.forwards.isdisjoint(self.source.ancestors(node))

    def in_step(self, node: ast.AST) -> bool:
        """Whether a node runs in every training step."""
        for outer in self.source.ancestors(node):
            if isinstance(outer, ast.If) and SCHEDULE.search(ast.unparse(outer.test)):
                return False
            if outer in self.bodies:
                return True
            if isinstance(outer, Function):
                return False
        return False

    def values(self, node: ast.AST) -> set[str]:
        """The names in an expression whose values it needs: x of `x + 1`, but not of `x.shape`, `len(x)`,
        `x is None` or `x.item()`."""
        match node:
            case ast.Name():
                return {node.id}
            case ast.Attribute():
                return set() if node.attr in METADATA | TO_HOST else self.values(node.value)
            case ast.Subscript():
                return self.values(node.value)
            case ast.Call() if HOST_CALLS.match(self.source.name(node.func)):
                return set()
            case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
                return set()
        return set().union(*map(self.values, ast.iter_child_nodes(node)))

    def is_mask(self, index: ast.AST) -> bool:
        """Whether an index looks like a mask: it compares values, but no counter and no text, or is named
        so."""
        text = ast.unparse(index)
        parts = [*ast.walk(index), *self.source.assigned.get(last_name(index), [])]
        compared = [one for one in parts if isinstance(one, ast.Compare | ast.UnaryOp) and self.values(one)]
        is_about_objects = SCHEDULE.search(text) or "'" in text or not self.values(index)
        return not is_about_objects and bool(compared or text.lower().endswith("mask"))


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
