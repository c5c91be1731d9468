"""What is read from code before any rule: what names mean, which values are tensors, which lines only CUDA reaches."""

import re

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider, QualifiedNameProvider

LOOPS = (cst.For, cst.While)
# What is asked of a tensor without its values, and what brings values to the host.
ABOUT = set(
    "shape device dtype ndim grad_fn requires_grad is_cuda is_leaf layout names dim size numel nelement ndimension stride "
    "is_contiguous is_floating_point get_device element_size type".split()
)
ABOUT_CALLS = {f"builtins.{name}" for name in ("isinstance", "type", "len", "callable", "hasattr", "id")}
ABOUT_CALLS |= {f"torch.{name}" for name in ("is_tensor", "is_floating_point", "numel")}
HOST = {"item", "tolist", "numpy", "cpu"}
TO_HOST = m.Attribute(attr=m.OneOf(*map(m.Name, sorted(HOST))))
# Results that are a tensor of booleans, and what leaves one as it is.
COMPARING = set("bool eq ne lt le gt ge isnan isinf isfinite isclose logical_and logical_or logical_not logical_xor".split())
RESHAPING = set("view reshape flatten squeeze unsqueeze to clone detach contiguous".split())
NO_TENSORS = {"numpy", "pandas", "builtins", "math", "time", "os", "random", "copy", "logging"}
TENSORS_TOO = {f"builtins.{name}" for name in ("sum", "abs", "pow", "min", "max")}
ASKS = {"torch.cuda.is_available", "torch.cuda.device_count"}
OTHER_BACKWARDS = re.compile(r"accelerator|fabric|engine|strategy", re.IGNORECASE)
ON_A_SCHEDULE = re.compile(
    r"log|print|interval|every|eval|verbose|debug|report|freq|first|is_last|last_(step|batch|iter|epoch)|\btime\b",
    re.IGNORECASE,
)
HANDLES_XLA = re.compile(r"torch_xla\.device|xla_device|[\"']xla|(?<![a-z])tpu(?![a-z])", re.IGNORECASE)


class Reader(cst.CSTVisitor):
    """A module's code with what is known of it."""

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider, QualifiedNameProvider)

    def __init__(self, code):
        super().__init__()
        wrapper = MetadataWrapper(cst.parse_module(code))
        self.tree = wrapper.module
        self.wrapper = wrapper

    def read(self, module):
        self.calls = [(self._name(call.func), call) for call in m.findall(module, m.Call())]
        self.assigns = m.findall(module, m.Assign())
        self.assigned = {}  # last name of a target -> the values that it gets
        for assign in self.assigns:
            for target in assign.targets:
                self.assigned.setdefault(_tail(target.target), []).append(assign.value)
        self._read_counters(module)
        self._read_steps()
        self.scopes = {}  # training loop or forward -> (names of tensors, names of masks) in it
        forwards = [f for f in m.findall(module, m.FunctionDef(name=m.Name("forward"))) if self._is_of_a_module(f)]
        for scope in [*self.regions, *forwards]:
            self.scopes[scope] = self._tensors_of(scope)

    def _read_counters(self, module):
        """counters: names that count steps or epochs."""
        counted = m.findall(module, m.AugAssign(target=m.Name(), operator=m.AddAssign(), value=m.Integer()))
        self.counters = {node.target.value for node in counted}
        for loop in m.findall(module, m.For()):
            calls = {self._name(call.func) for call in m.findall(loop.iter, m.Call())}
            target = loop.target
            if "builtins.enumerate" in calls and isinstance(target, cst.Tuple):
                target = target.elements[0].value
            elif "builtins.range" not in calls:
                continue
            self.counters |= {target.value} if isinstance(target, cst.Name) else set()

    def _read_steps(self):
        """regions: loops (or functions) of training steps. losses: names that go backward. made: names that a step makes."""
        self.regions, self.losses, self.made = set(), set(), set()
        for _, call in self.calls:
            if not m.matches(call.func, m.Attribute(attr=m.Name("backward"))) or OTHER_BACKWARDS.search(_tail(call.func.value)):
                continue
            self.losses |= _loss_of(call.func.value)
            region = next((o for o in self._up(call) if isinstance(o, (*LOOPS, cst.FunctionDef))), None)
            if region is not None:
                self.regions.add(region)
        for region in self.regions:
            targets = [region.target] if isinstance(region, cst.For) else []
            for assign in m.findall(region, m.Assign()):
                libraries = {self._name(call.func).split(".")[0] for call in m.findall(assign.value, m.Call())}
                if not libraries & {"numpy", "pandas"} and not m.findall(assign.value, TO_HOST):
                    targets += [target.target for target in assign.targets]
            self.made |= {name.value for target in targets for name in m.findall(target, m.Name())}
        self.made |= self.losses
        self.counters -= self.losses

    # Names and places

    def _name(self, node):
        """What a name means after the imports, as torch.nn.DataParallel; empty where it is not known."""
        return next((q.name for q in self.get_metadata(QualifiedNameProvider, node, set()) or ()), "")

    def _text(self, node):
        return self.tree.code_for_node(node)

    def _line(self, node):
        return self.get_metadata(PositionProvider, node).start.line

    def _up(self, node):
        """The nodes around a node, from the nearest."""
        while (node := self.get_metadata(ParentNodeProvider, node, None)) is not None:
            yield node

    def _scope(self, node):
        """The function, or the module, that a node runs in."""
        return next((outer for outer in self._up(node) if isinstance(outer, (cst.FunctionDef, cst.Lambda))), self.tree)

    def _is_of_a_module(self, function):
        """Whether a function belongs to a class that is made of another, as of torch.nn.Module."""
        owner = next((outer for outer in self._up(function) if isinstance(outer, cst.ClassDef)), None)
        return owner is not None and bool(owner.bases)

    def _in_forward(self, node):
        return any(isinstance(o, cst.FunctionDef) and o in self.scopes and o not in self.regions for o in self._up(node))

    def _in_step(self, node):
        """Whether a node runs in every training step: in its loop, and not only once in a while."""
        child = node
        for outer in self._up(node):
            if isinstance(outer, cst.If) and self._once_in_a_while(outer.test):
                return False
            if any(self._once_in_a_while(test) for test in _left_before(outer, child)):
                return False
            if outer in self.regions:
                return True
            if isinstance(outer, (cst.FunctionDef, cst.Lambda)):
                return False
            child = outer
        return False

    def _once_in_a_while(self, test):
        names = " ".join(name.value for name in m.findall(test, m.Name()))
        if m.findall(test, m.Modulo()) or ON_A_SCHEDULE.search(names):
            return True
        at = m.ComparisonTarget(operator=m.Equal() | m.In() | m.LessThan() | m.LessThanEqual())
        compared = m.findall(test, m.Comparison(comparisons=[at]))
        return any(self.counters & {name.value for name in m.findall(c.left, m.Name())} for c in compared)

    # Values

    def _values(self, node):
        """Names in an expression whose values count: not x of x.shape or of isinstance(x, list), nor a keyword."""
        parts = [a.attr for a in m.findall(node, m.Attribute())] + [a.keyword for a in m.findall(node, m.Arg()) if a.keyword]
        parts += [a.value for a in m.findall(node, m.Attribute()) if a.attr.value in ABOUT]
        parts += [call for call in m.findall(node, m.Call()) if self._name(call.func) in ABOUT_CALLS]
        about = {id(name) for part in parts for name in m.findall(part, m.Name())}
        return {name.value for name in m.findall(node, m.Name()) if id(name) not in about}

    def _tensors_of(self, scope):
        """(names of tensors, names of masks) in a training loop, a step's function or a forward. A name that anything else is
        assigned to is left out."""
        seeds = set(self.losses)
        if isinstance(scope, cst.For):
            seeds |= {name.value for name in m.findall(scope.target, m.Name())} - self.counters
        elif isinstance(scope, cst.FunctionDef):
            seeds |= {p.name.value for p in scope.params.params if self._may_be_a_tensor(p)}
        assigns = [
            ({name.value for target in a.targets for name in _assigned_names(target.target)}, a.value)
            for a in m.findall(scope, m.Assign())
        ]
        others = set()
        while True:
            names, before = seeds - others, None
            while names != before:
                before = names
                names = names.union(*(made for made, value in assigns if self._is_tensor(value, names))) - others
            wrong = set().union(*(made & names for made, value in assigns if not self._is_tensor(value, names)))
            if not wrong:
                break
            others |= wrong
        masks = {name for name in names if name.lower().endswith("mask")}
        for made, value in assigns:
            masks |= made if self._is_mask(value, names, masks) else set()
        return names, masks & names

    def _may_be_a_tensor(self, parameter):
        plain = parameter.default is None or m.matches(parameter.default, m.Name("None"))
        typed = parameter.annotation is None or "Tensor" in self._text(parameter.annotation.annotation)
        return plain and typed and parameter.name.value not in ("self", "cls")

    def _known(self, node):
        """(names of tensors, names of masks) where a node stands."""
        known = [self.scopes[outer] for outer in self._up(node) if outer in self.scopes]
        return set().union(*(names for names, _ in known)), set().union(*(masks for _, masks in known))

    def _is_tensor(self, node, names):
        """Whether an expression of tensors with these names gives a tensor that lies on the device."""
        inner = lambda part: self._is_tensor(part, names)  # noqa: E731
        if isinstance(node, cst.Name):
            return node.value in names
        if isinstance(node, cst.Attribute):
            return node.attr.value not in ABOUT and inner(node.value)
        if isinstance(node, cst.Subscript):
            return inner(node.value)
        if isinstance(node, (cst.Tuple, cst.List)):
            return any(inner(element.value) for element in node.elements)
        if isinstance(node, cst.UnaryOperation):
            return not isinstance(node.operator, cst.Not) and inner(node.expression)
        if isinstance(node, cst.IfExp):
            return inner(node.body) or inner(node.orelse)
        if isinstance(node, cst.BinaryOperation):
            return not isinstance(node.left, (cst.SimpleString, cst.FormattedString)) and (
                inner(node.left) or inner(node.right)
            )
        if isinstance(node, cst.Comparison):
            sides = [node.left, *(target.comparator for target in node.comparisons)]
            asked = any(isinstance(target.operator, (cst.In, cst.NotIn, cst.Is, cst.IsNot)) for target in node.comparisons)
            return not asked and not any(isinstance(side, cst.SimpleString) for side in sides) and any(map(inner, sides))
        if not isinstance(node, cst.Call):
            return False
        name = self._name(node.func)
        if name == "builtins.next":
            return True  # of a loader's iterator
        if isinstance(node.func, cst.Attribute):
            if node.func.attr.value in ABOUT | HOST:
                return False
            if inner(node.func.value) or node.func.attr.value in ("to", "cuda"):
                return True
        if name in ABOUT_CALLS or name.split(".")[0] in NO_TENSORS and name not in TENSORS_TOO:
            return False
        return any(inner(argument.value) for argument in node.args)

    def _is_mask(self, node, names, masks):
        """Whether an expression is a tensor of booleans."""
        if isinstance(node, cst.Name):
            return node.value in masks
        if isinstance(node, cst.Comparison):
            return self._is_tensor(node, names)
        if isinstance(node, cst.UnaryOperation):
            return isinstance(node.operator, cst.BitInvert) and self._is_tensor(node.expression, names)
        if isinstance(node, cst.BinaryOperation):
            both = isinstance(node.operator, (cst.BitAnd, cst.BitOr, cst.BitXor))
            return both and any(self._is_mask(side, names, masks) for side in (node.left, node.right))
        if not isinstance(node, cst.Call):
            return False
        if _tail(node.func) in RESHAPING and isinstance(node.func, cst.Attribute):
            return self._is_mask(node.func.value, names, masks)
        return _tail(node.func) in COMPARING and self._is_tensor(node, names)

    # Where only CUDA comes

    def _means_cuda(self, node):
        """Whether an expression is a CUDA device, or the word for it."""
        if m.matches(node, m.Call()) and self._name(node.func) == "torch.device":
            return bool(node.args) and _is_cuda(node.args[0].value)
        return _is_cuda(node)

    def _implies(self, test, truth, seen=frozenset()):
        """Whether CUDA is there if a test comes out as `truth`."""
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            return self._implies(test.expression, not truth, seen)
        if isinstance(test, cst.BooleanOperation):
            sides = (self._implies(side, truth, seen) for side in (test.left, test.right))
            return any(sides) if isinstance(test.operator, cst.And) == truth else all(sides)
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            operator, right = test.comparisons[0].operator, test.comparisons[0].comparator
            if isinstance(operator, cst.GreaterThan):
                return truth and bool(self._asked(test.left))
            if isinstance(right, (cst.Tuple, cst.List, cst.Set)):
                words = all(self._means_cuda(element.value) for element in right.elements)
            else:
                words = self._means_cuda(test.left) or self._means_cuda(right)
            return words and isinstance(operator, (cst.Equal, cst.In) if truth else (cst.NotEqual, cst.NotIn))
        if isinstance(test, cst.Call):
            asks = self._name(test.func) in ASKS
            return truth and (asks or _tail(test.func) == "startswith" and any(_is_cuda(a.value) for a in test.args))
        name = _tail(test)
        if not name or name in seen:
            return False
        values = self.assigned.get(name, [])
        known = bool(values) and all(self._implies(value, truth, seen | {name}) for value in values)
        return known or truth and isinstance(test, cst.Attribute) and name == "is_cuda"

    def _asked(self, test, seen=frozenset()):
        """The calls of torch.cuda.is_available and the like that a test hangs on, through the names in it."""
        if isinstance(test, cst.UnaryOperation):
            return self._asked(test.expression, seen)
        if isinstance(test, cst.BooleanOperation):
            return self._asked(test.left, seen) | self._asked(test.right, seen)
        if isinstance(test, cst.Comparison):
            return self._asked(test.left, seen)
        if isinstance(test, cst.Call):
            return {test} if self._name(test.func) in ASKS else set()
        name = _tail(test)
        values = self.assigned.get(name, []) if name and name not in seen else []
        return set().union(*(self._asked(value, seen | {name}) for value in values))

    def _guard(self, node):
        """None where a node may be reached without CUDA. Else the calls that ask for CUDA before it: none of them where the
        code compares a device's name, or has something else for a TPU, and so knows of other devices."""
        child = node
        for outer in self._up(node):
            tests = []
            if isinstance(outer, (cst.If, cst.IfExp)) and child is not outer.test:
                tests = [(outer.test, child is outer.body)]
            elif isinstance(outer, cst.BooleanOperation) and child is outer.right:
                tests = [(outer.left, isinstance(outer.operator, cst.And))]
            for test, truth in tests:
                if self._implies(test, truth):
                    return set() if HANDLES_XLA.search(self._other_ways(outer, node)) else self._asked(test)
            if any(self._implies(test, False) and not self._asked(test) for test in _left_before(outer, child)):
                return set()
            child = outer
        return None

    def _decides_flags_or_figures(self, call):
        """Whether all that hangs on a check are flags of CUDA's libraries, or a figure of its memory."""
        condition = self.get_metadata(ParentNodeProvider, call)
        if isinstance(condition, cst.IfExp) and condition.test is call:
            names = [self._name(asked.func) for asked in m.findall(condition.body, m.Call())]
            return bool(names) and all(name.startswith("torch.cuda.") and "memory" in name for name in names)
        if not isinstance(condition, cst.If) or condition.test is not call or condition.orelse is not None:
            return False
        lines = [part for line in condition.body.body for part in getattr(line, "body", [None])]
        targets = [part.targets[0].target if isinstance(part, cst.Assign) else None for part in lines]
        return all(target is not None and self._name(target).startswith("torch.backends.cud") for target in targets)

    def _other_ways(self, condition, node):
        """The tests of an if, elif, else, and what stands in its branches but in that of a node."""
        around = {*self._up(node), node}
        while isinstance(above := self.get_metadata(ParentNodeProvider, condition), cst.If) and above.orelse is condition:
            condition = above
        parts = []
        while isinstance(condition, (cst.If, cst.IfExp)):
            parts += [condition.test, condition.body]
            condition = condition.orelse
        parts += [condition] if condition is not None else []
        return "\n".join(self._text(part) for part in parts if part not in around)


def _left_before(block, child):
    """The tests under which a block is left before one of its statements: `if step % 100: continue`."""
    if not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return
    for statement in block.body:
        if statement is child:
            return
        if isinstance(statement, cst.If) and statement.orelse is None and _leaves(statement.body):
            yield statement.test


def _leaves(body):
    """Whether a block ends by leaving the one around it."""
    last = body.body[-1] if body.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, (cst.Return, cst.Raise, cst.Continue, cst.Break))


def _assigned_names(target):
    """The names that an assignment makes: not those of x[i] = ... or x.y = ..."""
    if isinstance(target, (cst.Tuple, cst.List)):
        return [name for element in target.elements for name in _assigned_names(element.value)]
    return [target] if isinstance(target, cst.Name) else []


def _is_cuda(node):
    if isinstance(node, cst.FormattedString):
        return bool(node.parts) and m.matches(
            node.parts[0], m.FormattedStringText(m.MatchIfTrue(lambda t: t.startswith("cuda")))
        )
    if isinstance(node, cst.BinaryOperation):
        return isinstance(node.left, cst.SimpleString) and str(node.left.evaluated_value).startswith("cuda")
    return isinstance(node, cst.SimpleString) and bool(re.fullmatch(r"cuda(:\d+)?:?", str(node.evaluated_value)))


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
