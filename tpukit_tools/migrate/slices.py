"""Parts of a tensor on the device that Python numbers choose, others in each step: `data[i : i + length]`.

Such a number is a part of the graph, so each step is compiled (seen with torch_xla 2.9)."""

import ast
import itertools
import re

from tpukit_tools.migrate.source import Function, Located, Source, last_name, method_of
from tpukit_tools.migrate.surroundings import Surroundings

DEPTH = 6  # names, calls and functions from a tensor's use to its move
LOOPS = ast.For | ast.While
COUNTS = re.compile(r"\b(range|enumerate|count)\(")
DRAWS = re.compile(r"\brand\w*\b|\.choice\(")
HOST = {"cpu", "numpy", "tolist", "item"}  # methods whose result is not on the device
NO_DEVICE = re.compile(r"^['\"]cpu|device\(['\"]cpu|dtype|\b(float|half|double|int|long|bool|u?int)\d*$")


class Slices:
    """found: the subscripts, and calls of .narrow(), of such parts."""

    def __init__(self, source: Source, around: Surroundings):
        self.source, self.around = source, around
        self.functions, self.calls_of, self.values = {}, {}, {}
        for node in source.nodes:
            if isinstance(node, Function):
                self.functions.setdefault(getattr(node, "name", ""), []).append(node)
            for name, value in _assignments(node):
                self.values.setdefault(name, []).append((node, value))
        for call in source.calls:
            self.calls_of.setdefault(last_name(call.func), []).append(call)
        self.loops = self._step_loops()
        self.found: list[Located] = [node for node in source.nodes if self.loops and self._is_one(node)]

    def _step_loops(self):
        """Return the loops each of whose passes is one training step."""
        bodies = self.around.bodies
        calls = [
            call
            for body in bodies
            if isinstance(body, ast.FunctionDef)
            for call in self.calls_of.get(body.name, [])
        ]
        outers = [self._loop_around(call) for call in calls]
        updates = [call for call in self.source.calls if method_of(call) == "step"]
        updates = [*filter(self.around.updates_weights, updates)]
        updates += self.calls_of.get("optimizer_step", [])
        own = {body for body in bodies if isinstance(body, LOOPS)}
        if updates:  # else the weights are changed by hand
            own &= {*map(self._loop_around, updates)}
        return {*own, *filter(None, outers)}

    def _loop_around(self, node):
        """Return the loop of batches around a node: not one over optimizers."""
        loops = [one for one in self.source.ancestors(node) if isinstance(one, LOOPS)]
        iters = [ast.unparse(one.iter).lower() if isinstance(one, ast.For) else "" for one in loops]
        return next((one for one, text in zip(loops, iters) if "opt" not in text), None)

    def _is_one(self, node):
        match node:
            case ast.Subscript(value=tensor, slice=index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                bounds = itertools.chain(
                    *([one.lower, one.upper] if isinstance(one, ast.Slice) else [one] for one in parts)
                )
                numbers = [one for one in bounds if one is not None]
            case ast.Call(func=ast.Attribute(value=tensor, attr="narrow"), args=[_, *numbers]):
                pass
            case _:
                return False
        is_step = self.around.in_compiled_code(node) or not self.loops.isdisjoint(self.source.ancestors(node))
        changes = any(self._changes(one, self.source.function_of(node), DEPTH) for one in numbers)
        return is_step and changes and self._is_on_device(tensor, DEPTH)

    # Numbers

    def _changes(self, number, function, depth):
        """Return whether an expression is a Python number that is another one in each step."""
        if not depth or not all(_is_arithmetic(one) for one in _walk(number)):
            return False
        names = {one.id for one in _walk(number) if isinstance(one, ast.Name)}
        return any(self._is_counter(name, number, function, depth) for name in names)

    def _is_counter(self, name, use, function, depth):
        for loop in self.source.ancestors(use):
            if loop in self.loops and _counts(loop, name):
                return True
            for each in getattr(loop, "generators", []):
                if name in _names(each.target):
                    made = [value for _, value in self.values.get(last_name(each.iter), [])]
                    return any(DRAWS.search(ast.unparse(one)) for one in [each.iter, *made])
            if isinstance(loop, ast.For) and name in _names(loop.target):
                return False  # of a loop that is unrolled in each step
        values = [
            value for node, value in self.values.get(name, []) if self.source.function_of(node) is function
        ]
        if any(self._is_drawn(one) or self._changes(one, function, depth - 1) for one in values):
            return True
        return any(
            self._changes(given, self.source.function_of(call), depth - 1)
            for call, given in self._given(name, function)
        )

    def _is_drawn(self, value):
        """Return whether a value is one random number, no array of them."""
        text = ast.unparse(value)
        if re.search(r"\brand\w*\(.*\.item\(\)$|^int\(torch\.rand", text):
            return True
        name = self.source.name(getattr(value, "func", value))
        return name in ("random.randint", "random.randrange") or (
            name == "numpy.random.randint" and len(value.args) < 3 and "size=" not in text
        )

    # Tensors

    def _is_on_device(self, value, depth):
        """Return whether a value is a tensor on the device that was put there before the steps."""
        if not depth:
            return False
        match value:
            case ast.Name(id=name):
                function = self.source.function_of(value)
                given = self._given(name, function)
                return self._is_put(name, function, depth) or any(
                    self._is_on_device(one, depth - 1) for _, one in given
                )
            case ast.Attribute(attr=name):
                values = [one for node, one in self.values.get(name, []) if not self._is_in_loop(node)]
                return any(self._is_on_device(one, depth - 1) for one in values)
            case ast.Subscript(value=inner) | ast.Starred(value=inner):
                return self._is_on_device(inner, depth - 1)
            case ast.IfExp(body=one, orelse=other):
                return self._is_on_device(one, depth - 1) or self._is_on_device(other, depth - 1)
            case ast.Call():
                return self._makes_on_device(value, depth)
        return False

    def _is_put(self, name, function, depth):
        """Return whether a name gets a tensor on the device, in its function, else in the module; in no loop
        of steps, where it would be a batch."""
        of_function = [
            pair for pair in self.values.get(name, []) if self.source.function_of(pair[0]) is function
        ]
        is_argument = any(name == one.arg for one in _arguments(function))
        of_module = [
            pair for pair in self.values.get(name, []) if self.source.function_of(pair[0]) is self.source.tree
        ]
        pairs = of_function or ([] if is_argument else of_module)
        is_batch = any(self._is_in_loop(node) for node, _ in pairs)
        return not is_batch and any(self._is_on_device(one, depth - 1) for _, one in pairs)

    def _is_in_loop(self, node):
        return any(isinstance(one, LOOPS) for one in [node, *self.source.ancestors(node)])

    def _makes_on_device(self, call, depth):
        name, owner = last_name(call.func), getattr(call.func, "value", None)
        devices = [one.value for one in call.keywords if one.arg == "device"]
        if name in ("to", "cuda") and isinstance(call.func, ast.Attribute):
            devices += call.args[:1] or (
                [call] if name == "cuda" or devices == [] and not call.keywords else []
            )
        if devices:
            return not any(NO_DEVICE.search(ast.unparse(one)) for one in devices)
        functions = self.functions.get(name, [])
        if len(functions) == 1:
            returns = [one.value for one in ast.walk(functions[0]) if isinstance(one, ast.Return)]
            return any(self._is_on_device(one, depth - 1) for one in returns)
        is_module = isinstance(owner, ast.Name) and owner.id in self.source.imported
        return (
            owner is not None and not is_module and name not in HOST and self._is_on_device(owner, depth - 1)
        )

    def _given(self, name, function):
        """Return [(call, what it gives a function of the file as its argument of this name)]."""
        names = [one.arg for one in _arguments(function)]
        if name not in names or len(self.functions.get(getattr(function, "name", ""), [])) != 1:
            return []
        place = names.index(name) - (names[0] == "self")
        given = []
        for call in self.calls_of.get(function.name, []):
            given += [(call, one.value) for one in call.keywords if one.arg == name]
            if not any(isinstance(one, ast.Starred) for one in call.args):
                given += [(call, one) for one in call.args[place : place + 1]]
        return given


def _assignments(node):
    """Return [(name, value)] of an assignment."""
    match node:
        case ast.Assign(targets=targets, value=value):
            pairs = [(target, value) for target in targets]
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.AugAssign(target=target, value=value)
        ):
            pairs = [(target, value)]
        case _:
            return []
    unpacked = []
    for target, value in pairs:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            unpacked += zip(target.elts, values)
        else:
            unpacked.append((target, value))
    return [(last_name(target), value) for target, value in unpacked if last_name(target)]


def _arguments(function):
    arguments = getattr(function, "args", None)
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if arguments else []


def _names(target):
    return {
        one.id for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }


def _counts(loop, name):
    """Return whether a loop gives a name a new number in each pass."""
    if isinstance(loop, ast.While):
        steps = [one for one in ast.walk(loop) if isinstance(one, ast.AugAssign)]
        return any(isinstance(one.target, ast.Name) and one.target.id == name for one in steps)
    numbers = loop.target
    if isinstance(loop.iter, ast.Call) and isinstance(numbers, ast.Tuple):
        called = last_name(loop.iter.func)
        inner = loop.iter.args[:1] if called == "enumerate" else loop.iter.args
        counted = [True] if called == "enumerate" else []
        counted += [COUNTS.search(ast.unparse(one)) for one in inner]
        return any(is_number and name in _names(one) for one, is_number in zip(numbers.elts, counted))
    return name in _names(numbers) and COUNTS.search(ast.unparse(loop.iter)) is not None


def _walk(number):
    """Yield an expression's parts, but nothing in what a call of numbers is given, as data of len(data)."""
    yield number
    if not (isinstance(number, ast.Call) and last_name(number.func) in ("len", "size")):
        for one in ast.iter_child_nodes(number):
            if isinstance(one, ast.expr) and one is not getattr(number, "func", None):
                yield from _walk(one)


def _is_arithmetic(node):
    """Return whether a part of an expression makes a number of numbers: i + 3, min(bptt, len(data) - i)."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in ("min", "max", "len", "int", "size", "abs")
    if isinstance(node, ast.Subscript):  # data.shape[0], of which only the number matters
        return last_name(node.value) == "shape"
    return isinstance(node, ast.Name | ast.Attribute | ast.Constant | ast.BinOp | ast.UnaryOp | ast.IfExp)
