"""Training steps and `forward` methods: which code runs in each of them, and which of its values are
tensors."""

import ast
import re

from tpukit.tools.migrate.source import Function, Source, last_name, method_of, names_in

TO_HOST = {"item", "tolist", "numpy", "cpu"}
# Attributes and methods that are known without the tensor's values.
METADATA = set(
    "shape device dtype ndim grad_fn requires_grad is_cuda names dim size numel type stride".split()
)
# Functions that give no tensor on the device.
HOST_CALLS = re.compile(
    r"(numpy|pandas|math|time|os|random|copy|logging)\.|builtins\.(?!(sum|abs|pow|min|max)$)"
    r"|torch\.(is_tensor|is_floating_point|numel)$"
)
# Libraries whose `backward(loss)` brings a step of its own.
OTHER_TRAINERS = re.compile(r"accelerator|fabric|engine|strategy", re.IGNORECASE)
# How conditions look that hold only in some steps: `step % 100 == 0`, `step < 3`, `args.log_every`.
SCHEDULE = re.compile(
    r"%|log|print|interval|every|eval|verbose|debug|report|freq|first|is_last|\btime\b"
    r"|step|iter|batch|idx|index|epoch|count|\b([ijkn]|it)\b",
    re.IGNORECASE,
)


class Steps:
    """losses: names whose gradients are asked for. bodies: the loops (or functions) of training steps.
    forwards: `forward` methods of modules."""

    def __init__(self, source: Source):
        self.source = source
        self.losses, self.bodies = set(), set()
        for _, call in source.calls:
            if method_of(call) == "backward" and not OTHER_TRAINERS.search(last_name(call.func.value)):
                self.losses |= _losses_in(call.func.value)
                outers = source.ancestors(call)
                loops = [one for one in outers if isinstance(one, ast.For | ast.While | ast.FunctionDef)]
                self.bodies |= set([loop for loop in loops if not _is_of_one_step(loop)][:1])
        classes = [one for one in source.nodes if isinstance(one, ast.ClassDef) and one.bases]
        methods = {one for owner in classes for one in ast.walk(owner) if isinstance(one, ast.FunctionDef)}
        self.forwards = {method for method in methods if method.name == "forward"}
        self.tensors = {scope: self._find_tensors(scope) for scope in self.bodies | self.forwards}

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

    def needs_loss(self, node: ast.AST) -> bool:
        return bool(self.losses & self.values(node))

    def is_tensor(self, node: ast.AST) -> bool:
        """Whether an expression in a step or a forward method gives a tensor on the device."""
        scopes = [self.tensors[outer] for outer in self.source.ancestors(node) if outer in self.tensors]
        return not self.values(node).isdisjoint(set().union(*scopes))

    def is_mask(self, node: ast.AST) -> bool:
        """Whether an expression is a comparison of a tensor, or a name of one or of a mask."""
        match node:
            case ast.Name():
                values = self.source.assigned.get(node.id, [])
                is_named_so = node.id.lower().endswith("mask")
                is_mask = is_named_so or any(isinstance(value, ast.Compare) for value in values)
                return is_mask and self.is_tensor(node)
            case ast.Compare() | ast.UnaryOp(op=ast.Invert()):
                return self.is_tensor(node)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor()):
                return self.is_mask(node.left) or self.is_mask(node.right)
        return False

    def _find_tensors(self, scope):
        """Names of tensors in a step or a forward method, its assignments followed in their order."""
        tensors = set(self.losses)
        if isinstance(scope, ast.FunctionDef):
            for one in ast.walk(scope.args):
                if isinstance(one, ast.arg) and (
                    not one.annotation or "Tensor" in ast.unparse(one.annotation)
                ):
                    tensors |= {one.arg} - {"self"}
        elif isinstance(scope, ast.For) and "range(" not in ast.unparse(scope.iter):
            has_counter = "enumerate(" in ast.unparse(scope.iter) and isinstance(scope.target, ast.Tuple)
            tensors |= names_in(scope.target.elts[-1] if has_counter else scope.target)
        inside = set(ast.walk(scope))
        for assignment in self.source.nodes:
            if isinstance(assignment, ast.Assign) and assignment in inside:
                names = set().union(*map(_names_bound, assignment.targets))
                is_tensor = not tensors.isdisjoint(self.values(assignment.value))
                tensors = tensors | names if is_tensor else tensors - (names - self.losses)
        return tensors


def _is_of_one_step(loop):
    """Whether a loop only adds up the gradients of micro-batches."""
    is_counted = isinstance(loop, ast.For) and "range(" in ast.unparse(loop.iter)
    return is_counted and ".step(" not in ast.unparse(loop)


def _names_bound(target):
    """The names that an assignment binds: none by `x.y = ...` and `x[i] = ...`."""
    changes_object = any(isinstance(one, ast.Attribute | ast.Subscript) for one in ast.walk(target))
    return set() if changes_object else names_in(target)


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
