"""Training steps and `forward` methods: which code runs in each of them, and which of its values are
tensors."""

import re

import libcst as cst
import libcst.matchers as m

from tpukit.tools.migrate.source import last_name, method_of, names_in

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

    def __init__(self, source):
        self.source = source
        self.losses, self.bodies = set(), set()
        for _, call in source.calls:
            if method_of(call) == "backward" and not OTHER_TRAINERS.search(last_name(call.func.value)):
                self.losses |= _losses_in(call.func.value)
                loops = (
                    o for o in source.ancestors(call) if isinstance(o, (cst.For, cst.While, cst.FunctionDef))
                )
                self.bodies.update(list(loops)[:1])
        methods = m.findall(source.tree, m.ClassDef(bases=[m.AtLeastN(n=1)]))
        self.forwards = {
            f for owner in methods for f in m.findall(owner, m.FunctionDef(name=m.Name("forward")))
        }
        self.tensors = {scope: self._find_tensors(scope) for scope in self.bodies | self.forwards}

    def in_compiled_code(self, node):
        """Whether a node is in a training step or a forward method."""
        return self.in_step(node) or not self.forwards.isdisjoint(self.source.ancestors(node))

    def in_step(self, node):
        """Whether a node runs in every training step."""
        for outer in self.source.ancestors(node):
            if isinstance(outer, cst.If) and self.is_occasional(outer.test):
                return False
            if outer in self.bodies:
                return True
            if isinstance(outer, (cst.FunctionDef, cst.Lambda)):
                return False
        return False

    def is_occasional(self, test):
        """Whether a test looks like that of a schedule: `step % 100 == 0`, `step < 3`, `args.log_every`."""
        if m.findall(test, m.Modulo()) or SCHEDULE.search(" ".join(names_in(test))):
            return True
        early = m.ComparisonTarget(operator=m.Equal() | m.In() | m.LessThan() | m.LessThanEqual())
        return any(
            COUNTER.search(last_name(c.left)) for c in m.findall(test, m.Comparison(comparisons=[early]))
        )

    # Values

    def values(self, node):
        """The names in an expression whose values it needs: x of `x + 1`, but not of `x.shape`, `len(x)` or
        `x.item()`."""
        visitor = _Values(self.source)
        node.visit(visitor)
        return visitor.names

    def needs_loss(self, node):
        return bool(self.losses & self.values(node))

    def is_tensor(self, node, tensors=None):
        """Whether an expression gives a tensor on the device."""
        return bool(self.values(node) & (self._tensors_at(node) if tensors is None else tensors))

    def is_mask(self, node):
        """Whether an expression is a comparison of a tensor, or a name of one or of a mask."""
        match node:
            case cst.Name():
                compared = [
                    value
                    for value in self.source.assigned.get(node.value, [])
                    if isinstance(value, cst.Comparison)
                ]
                return (
                    any(map(self.is_tensor, compared))
                    or self.is_tensor(node)
                    and node.value.lower().endswith("mask")
                )
            case cst.Comparison() | cst.UnaryOperation(operator=cst.BitInvert()):
                return self.is_tensor(node)
            case cst.BinaryOperation(operator=cst.BitAnd() | cst.BitOr() | cst.BitXor()):
                return self.is_mask(node.left) or self.is_mask(node.right)
        return False

    def _tensors_at(self, node):
        """Names of tensors known where a node is."""
        return set().union(
            *(self.tensors[outer] for outer in self.source.ancestors(node) if outer in self.tensors)
        )

    def _find_tensors(self, scope):
        """Names of tensors in a step or a forward method, its assignments followed in their order."""
        tensors = set(self.losses)
        match scope:
            case cst.For():
                tensors |= self._batch_names(scope)
            case cst.FunctionDef():
                tensors |= {p.name.value for p in scope.params.params if self._may_be_tensor(p)} - {
                    "self",
                    "cls",
                }
        for assignment in m.findall(scope, m.Assign()):
            names = set()
            for target in assignment.targets:
                if not m.findall(
                    target, m.Attribute() | m.Subscript()
                ):  # x.y = ... and x[i] = ... bind no name
                    names |= names_in(target)
            tensors = (
                tensors | names
                if self.is_tensor(assignment.value, tensors)
                else tensors - (names - self.losses)
            )
        return tensors

    def _batch_names(self, loop):
        """The names that a loop gives a batch's parts: not the counter of enumerate() or range()."""
        target, iterated = loop.target, self.source.code(loop.iter)
        if "range(" in iterated:
            return set()
        if "enumerate(" in iterated and isinstance(target, cst.Tuple):
            target = target.elements[-1].value
        return names_in(target)

    def _may_be_tensor(self, parameter):
        annotated = parameter.annotation is not None and "Tensor" not in self.source.code(
            parameter.annotation.annotation
        )
        return not annotated and (parameter.default is None or m.matches(parameter.default, m.Name("None")))


class _Values(cst.CSTVisitor):
    def __init__(self, source):
        super().__init__()
        self.source, self.names = source, set()

    def visit_Name(self, node):
        self.names.add(node.value)

    def visit_Attribute(self, node):
        if node.attr.value not in METADATA | TO_HOST:
            node.value.visit(self)
        return False

    def visit_Subscript(self, node):
        node.value.visit(self)
        return False

    visit_Arg = visit_Subscript

    def visit_Call(self, node):
        return not HOST_CALLS.match(self.source.name(node.func))

    def visit_Comparison(self, node):
        sides = [node.left, *(target.comparator for target in node.comparisons)]
        about_objects = (cst.In, cst.NotIn, cst.Is, cst.IsNot)
        if any(isinstance(target.operator, about_objects) for target in node.comparisons):
            return False
        return not any(isinstance(side, cst.SimpleString) for side in sides)


def _losses_in(receiver):
    """The names whose gradient `receiver.backward()` asks for: of loss, (loss / n), scaler.scale(loss),
    loss.mean()."""
    match receiver:
        case cst.Name():
            return {receiver.value}
        case cst.BinaryOperation():
            return _losses_in(receiver.left) or _losses_in(receiver.right)
        case cst.Call(func=cst.Attribute(attr=cst.Name("scale")), args=[scaled, *_]):
            return _losses_in(scaled.value)
        case cst.Call(func=cst.Attribute(attr=cst.Name("mean" | "sum"))):
            return _losses_in(receiver.func.value)
    return set()
