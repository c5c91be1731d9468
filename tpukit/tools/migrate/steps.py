"""Training steps and `forward` methods: which code runs in each of them, and which of its values are
tensors."""

import ast
import re

from tpukit.tools.migrate.source import Function, Source, defaults_of, is_constant, last_name, names_in

TO_HOST = {"item", "tolist", "numpy", "cpu"}
# Attributes and methods that are known without the tensor's values.
METADATA = set(
    "shape device dtype ndim grad_fn requires_grad is_cuda is_leaf layout names dim size numel nelement"
    " ndimension stride is_contiguous is_floating_point get_device element_size type".split()
)
# Functions that give no tensor on the device.
HOST_CALLS = re.compile(
    r"(numpy|pandas|math|time|os|random|copy|logging)\.|builtins\.(?!(sum|abs|pow|min|max)$)"
    r"|torch\.(is_tensor|is_floating_point|numel)$"
)
# Libraries whose `backward(loss)` brings a step of its own.
OTHER_TRAINERS = re.compile(r"accelerator|fabric|engine|strategy", re.IGNORECASE)
SCHEDULE = re.compile(
    r"log|print|interval|every|eval|verbose|debug|report|freq|first|is_last|last_(step|batch|iter|epoch)|\btime\b",
    re.IGNORECASE,
)
COUNTER = re.compile(r"^(i|j|k|n|it)$|step|iter|batch|idx|index|epoch|count", re.IGNORECASE)


class Steps:
    """losses: names whose gradients are asked for. bodies: the loops (or functions) of training steps.
    forwards: `forward` methods of modules."""

    def __init__(self, source: Source):
        self.source = source
        self.losses, self.bodies = set(), set()
        for _, call in source.calls:
            match call.func:
                case ast.Attribute(attr="backward", value=loss) if not OTHER_TRAINERS.search(last_name(loss)):
                    self.losses |= _losses_in(loss)
                    outers = source.ancestors(call)
                    loops = [one for one in outers if isinstance(one, ast.For | ast.While | ast.FunctionDef)]
                    self.bodies.update(loops[:1])
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
            if isinstance(outer, ast.If) and self.is_occasional(outer.test):
                return False
            if outer in self.bodies:
                return True
            if isinstance(outer, Function):
                return False
        return False

    def is_occasional(self, test: ast.expr) -> bool:
        """Whether a test looks like that of a schedule: `step % 100 == 0`, `step < 3`, `args.log_every`."""
        inside = list(ast.walk(test))
        if any(isinstance(one, ast.Mod) for one in inside) or SCHEDULE.search(" ".join(names_in(test))):
            return True
        compared = [one for one in inside if isinstance(one, ast.Compare) and len(one.ops) == 1]
        early = [one for one in compared if isinstance(one.ops[0], ast.Eq | ast.In | ast.Lt | ast.LtE)]
        return any(COUNTER.search(last_name(one.left)) for one in early)

    # Values

    def values(self, node: ast.AST) -> set[str]:
        """The names in an expression whose values it needs: x of `x + 1`, but not of `x.shape`, `len(x)` or
        `x.item()`."""
        match node:
            case ast.Name():
                return {node.id}
            case ast.Attribute():
                return set() if node.attr in METADATA | TO_HOST else self.values(node.value)
            case ast.Subscript():
                return self.values(node.value)
            case ast.Call() if HOST_CALLS.match(self.source.name(node.func)):
                return set()
            case ast.Compare() if _compares_objects(node):
                return set()
        return set().union(*map(self.values, ast.iter_child_nodes(node)))

    def needs_loss(self, node: ast.AST) -> bool:
        return bool(self.losses & self.values(node))

    def is_tensor(self, node: ast.AST, tensors: set[str] | None = None) -> bool:
        """Whether an expression gives a tensor on the device. tensors: by default those known where it
        is."""
        if tensors is None:
            scopes = [outer for outer in self.source.ancestors(node) if outer in self.tensors]
            tensors = set().union(*(self.tensors[scope] for scope in scopes))
        return bool(self.values(node) & tensors)

    def is_mask(self, node: ast.AST) -> bool:
        """Whether an expression is a comparison of a tensor, or a name of one or of a mask."""
        match node:
            case ast.Name():
                values = self.source.assigned.get(node.id, [])
                if any(isinstance(value, ast.Compare) and self.is_tensor(value) for value in values):
                    return True
                return self.is_tensor(node) and node.id.lower().endswith("mask")
            case ast.Compare() | ast.UnaryOp(op=ast.Invert()):
                return self.is_tensor(node)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor()):
                return self.is_mask(node.left) or self.is_mask(node.right)
        return False

    def _find_tensors(self, scope):
        """Names of tensors in a step or a forward method, its assignments followed in their order."""
        tensors = set(self.losses)
        match scope:
            case ast.For():
                tensors |= self._batch_names(scope)
            case ast.FunctionDef():
                tensors |= set(_parameters_of_tensors(scope.args)) - {"self", "cls"}
        inside = set(ast.walk(scope))
        for assignment in self.source.nodes:
            if isinstance(assignment, ast.Assign) and assignment in inside:
                names = set().union(*map(_names_bound, assignment.targets))
                is_tensor = self.is_tensor(assignment.value, tensors)
                tensors = tensors | names if is_tensor else tensors - (names - self.losses)
        return tensors

    def _batch_names(self, loop):
        """The names that a loop gives a batch's parts: not the counter of enumerate() or range()."""
        target, iterated = loop.target, ast.unparse(loop.iter)
        if "range(" in iterated:
            return set()
        if "enumerate(" in iterated and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        return names_in(target)


def _names_bound(target):
    """The names that an assignment binds: none by `x.y = ...` and `x[i] = ...`."""
    changes_object = any(isinstance(one, ast.Attribute | ast.Subscript) for one in ast.walk(target))
    return set() if changes_object else names_in(target)


def _parameters_of_tensors(arguments):
    """The names of parameters that may be tensors, by their annotations and defaults."""
    for parameter, default in defaults_of(arguments):
        annotated = parameter.annotation is not None and "Tensor" not in ast.unparse(parameter.annotation)
        if not annotated and (default is None or is_constant(default, None)):
            yield parameter.arg


def _compares_objects(comparison):
    """`x is None`, `name in names`, `mode == "train"`: no values of a tensor are compared."""
    about_objects = (ast.In, ast.NotIn, ast.Is, ast.IsNot)
    sides = [comparison.left, *comparison.comparators]
    has_text = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
    return has_text or any(isinstance(operator, about_objects) for operator in comparison.ops)


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
