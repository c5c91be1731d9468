"""The surroundings of a node: a training step, a `forward` method, a launch of processes, conditions on CUDA.

A call's conditions in rules.toml (`where`) are methods here."""

import ast
import itertools
import re

from tpukit_tools.migrate.findings import TABLES
from tpukit_tools.migrate.source import Function, Located, Source, last_name, method_of

NAMES_CUDA = re.compile(r"""["']cuda["':]|\bis_cuda\b""")
MENTIONS_XLA = re.compile(r"torch_xla\.device|xla_device|[\"']xla|(?<![a-z])tpu(?![a-z])", re.IGNORECASE)
# How conditions look that hold only in some steps: `step % 100 == 0`, `step < 3`, `args.log_every`.
SCHEDULE = re.compile(
    r"(?i)%|log|print|interval|every|eval|verbose|debug|report|freq|first|is_last|sync_grad|\btime\b"
    r"|step|iter|batch|idx|index|epoch|count|\b([ijkn]|it)\b"
)
MASK = re.compile(
    r"[<>]|[!=]=|~|mask$|\.bool\(\)$|\.(eq|ne|[gl][te]|is(nan|finite|inf))\([^()]*\)$", re.IGNORECASE
)
NO_MASK = re.compile(rf"{SCHEDULE.pattern}|['\"]|\.(shape|size)\b")
DRAWN = re.compile(r"torch\.(rand|normal|empty\(\d+\))")
EVALUATES = re.compile(r"(?i)val|test|eval|dev|pred|infer|train=False")
PARAMETERS = re.compile(r"parameters\(|state_dict\(|param_groups|\['params'\]")
# Names of optimizers and loss scalers, and of the classes that make them.
UPDATES = re.compile("opt|scaler", re.IGNORECASE)
# Methods of models, optimizers and loaders: a function of the same name in the file is another one.
FOREIGN = {"train", "eval", "step"}
# Methods in which a library runs the step.
LIBRARY_STEPS = {"training_step", "compute_loss"}
LAUNCHES = {"torch_xla.launch", "torch_xla.distributed.xla_multiprocessing.spawn"}
# Moves that are none to another device.
MOVED_ELSEWHERE = re.compile(r"\(['\"]cpu|dtype|float|half|memory_format")


class Surroundings:
    """losses: names whose gradients are asked for. bodies: the loops (or functions) of training steps;
    library_bodies: those whose step a library takes. forwards: `forward` methods. reached: functions of the
    file that one of these calls, also through others."""

    def __init__(self, source: Source):
        self.source = source
        self.losses, self.bodies, self.library_bodies, self.reached = set(), set(), set(), set()
        for call in source.calls:
            if method_of(call) == "backward":
                loss = call.args[0] if call.args else call.func.value  # accelerator.backward(loss)
                names = {one.id for one in ast.walk(loss) if isinstance(one, ast.Name)}
                self.losses |= {name for name in names if len(names) == 1 or "loss" in name}
                bodies = self.library_bodies if call.args else self.bodies
                bodies |= self._body_of(call)
        functions = [one for one in source.nodes if isinstance(one, ast.FunctionDef)]
        self.forwards = {function for function in functions if function.name == "forward"}
        methods = {one for one in functions if isinstance(source.parents[one], ast.ClassDef)}
        self.library_bodies |= {method for method in methods if method.name in LIBRARY_STEPS}
        self.launches = [call for call in source.calls if source.name(call.func) in LAUNCHES]
        by_name = {}
        for function in functions:
            by_name.setdefault((function.name, function in methods), []).append(function)
        while new := set(self._called_in_steps(by_name)) - self.reached:
            self.reached |= new

    def _body_of(self, backward):
        """Return what is run in each training step, as a set: the innermost loop or function around the
        gradient, and that in which weights are also updated. Gradients may have a loop of their own, which
        sums them, or a function, which optimizer.step() calls."""
        outers = self.source.ancestors(backward)
        loops = [one for one in outers if isinstance(one, ast.For | ast.While | ast.FunctionDef)]
        steps = [call for call in self.source.calls if method_of(call) == "step"]
        updates = [call for call in steps if "sched" not in ast.unparse(call.func).lower()]
        around = {outer for call in updates for outer in self.source.ancestors(call)}
        return {*loops[:1], *[loop for loop in loops if loop in around][:1]}

    def _called_in_steps(self, by_name):
        """Yield the functions of the file that compiled code calls."""
        for call in self.source.calls:
            name, is_method = last_name(call.func), isinstance(call.func, ast.Attribute)
            is_own = name not in FOREIGN or ast.unparse(call.func).startswith("self.")
            if (name, is_method) in by_name and is_own and self.in_compiled_code(call):
                yield from by_name[name, is_method]

    # The training step

    def in_step(self, node: ast.AST) -> bool:
        """Return whether a node runs in every training step."""
        return self._runs_in(node, self.bodies | self.library_bodies)

    def _runs_in(self, node, bodies):
        for outer in self.source.ancestors(node):
            if isinstance(outer, ast.If) and SCHEDULE.search(ast.unparse(outer.test)):
                return False
            if isinstance(outer, ast.arguments):  # a default, or an annotation
                return False
            if outer in bodies:
                return True
            if isinstance(outer, Function):
                return False
        return False

    def in_compiled_code(self, node: ast.AST) -> bool:
        """Return whether a node is in a training step, a forward method, or a function that they call."""
        is_in_step = self._runs_in(node, self.bodies | self.library_bodies | self.reached)
        return is_in_step or not self.forwards.isdisjoint(self.source.ancestors(node))

    def in_training(self, call: ast.Call) -> bool:
        """Return whether a call is in a function that has training steps."""
        functions = self.bodies | {self.source.function_of(body) for body in self.bodies}
        return self.source.function_of(call) in functions

    def updates_weights(self, call: ast.Call) -> bool:
        """Return whether a step is of an optimizer or a loss scaler, by its name, or by what made it or holds
        it."""
        values = self.source.assigned.get(last_name(getattr(call.func, "value", call.func)), [])
        makers = [value.func if isinstance(value, ast.Call) else value for value in values]
        names = [ast.unparse(call.func), *map(self.source.name, makers)]
        is_schedule = any("sched" in name.lower() for name in names)
        return not is_schedule and any(map(UPDATES.search, names))

    def changes_weights(self, node: ast.AST) -> bool:
        """Return whether a training step changes weights by their gradients without any optimizer."""
        by_hand = re.search(r"\.grad\b", ast.unparse(node)) and self.in_step(node)
        steps = [call for call in self.source.calls if method_of(call) in ("step", "optimizer_step")]
        return bool(by_hand) and not any(map(self.updates_weights, steps))

    def takes_loss(self, call: ast.Call) -> bool:
        """Return whether a loss is in an argument of a call: `print(f"{loss:.3f}")`."""
        values = [*call.args, *(arg.value for arg in call.keywords)]
        return any(self.is_loss(part) for value in values for part in ast.walk(value))

    def is_loss(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Name) and value.id in self.losses

    def is_not_drawn(self, call: ast.Call) -> bool:
        """Return whether a value is no random number, which is drawn on the host: `torch.rand(1).item()`."""
        return DRAWN.search(ast.unparse(call)) is None

    def is_for_each_parameter(self, call: ast.Call) -> bool:
        """Return whether a call is made for each of a model's parameters, in a loop or a comprehension."""
        loops = [outer for outer in self.source.ancestors(call) if isinstance(outer, ast.For)]
        inner = [getattr(outer, "generators", []) for outer in self.source.ancestors(call)]
        iters = [loop.iter for loop in [*loops, *itertools.chain(*inner)]]
        values = [value for one in iters for value in self.source.assigned.get(last_name(one), [])]
        return any(PARAMETERS.search(ast.unparse(one)) for one in [*iters, *values])

    def is_mask(self, index: ast.AST) -> bool:
        """Return whether an index is named as a mask, or compares values that are no counter and no text."""
        values = self.source.assigned.get(last_name(index), [])
        texts = [ast.unparse(one) for one in [index, *values]]
        return not NO_MASK.search(texts[0]) and any(map(MASK.search, texts))

    def feeds_training(self, call: ast.Call) -> bool:
        """Return whether no name around a DataLoader speaks of an evaluation, whose last samples count."""
        owner = self.source.parents[call]
        data = [*call.args[:1], *(arg.value for arg in call.keywords if arg.arg == "dataset")]
        made = [value for one in data for value in self.source.assigned.get(last_name(one), [])]
        texts = [*map(ast.unparse, [*getattr(owner, "targets", []), *data])]
        texts += ["train=False" for value in made if "train=False" in ast.unparse(value)]
        texts.append(getattr(self.source.function_of(call), "name", ""))
        return not any(map(EVALUATES.search, texts))

    # Optimizers and processes

    def is_before_the_move(self, call: ast.Call) -> bool:
        """Return whether an optimizer is made of a model, or of a part of one, that is moved to a device
        afterwards, in the same function."""
        groups = [value for one in call.args for value in self.source.assigned.get(last_name(one), [])]
        texts = [ast.unparse(one) for one in [call, *groups] if one is call or not _makes_object(one)]
        parts = re.findall(r"([\w.]+)\.(?:named_)?parameters\(", " ".join(texts))
        moves = [
            move
            for move in self.source.calls
            if parts
            and method_of(move) in ("to", "cuda")
            and any(f"{part}.".startswith(f"{ast.unparse(move.func.value)}.") for part in parts)
            and self.source.function_of(move) is self.source.function_of(call)
            and not (MOVED_ELSEWHERE.search(ast.unparse(move)) or self.cuda_condition(move))
        ]
        return bool(moves) and moves[0].lineno > call.lineno or "self" in parts and self._is_moved_later(call)

    def _is_moved_later(self, call):
        """Return whether an optimizer of `self.parameters()` is made in an __init__, and an instance of its
        class is moved: `Layer(2, 2).to(device)`."""
        owner = next((one for one in self.source.ancestors(call) if isinstance(one, ast.ClassDef)), None)
        moves = [one for one in self.source.calls if method_of(one) in ("to", "cuda")]
        made = [
            value
            for move in moves
            if not (MOVED_ELSEWHERE.search(ast.unparse(move)) or self.cuda_condition(move))
            for value in [move.func.value, *self.source.assigned.get(last_name(move.func.value), [])]
        ]
        names = {last_name(value.func) for value in made if isinstance(value, ast.Call)}
        return self._is_in_init(call) and owner is not None and owner.name in names

    def has_training_steps(self, call: ast.Call) -> bool:
        return bool(self.bodies)

    def is_tied_before_the_move(self, node: ast.Assign) -> bool:
        """Return whether weights are tied, `self.head.weight = self.embedding.weight`, and only where their
        model is made."""
        return _ties(node) and all(self._is_in_init(one) for one in self.source.nodes if _ties(one))

    def _is_in_init(self, node):
        return getattr(self.source.function_of(node), "name", "") == "__init__"

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
            elif isinstance(outer, ast.Call):
                conditions = [
                    arg.value for arg in outer.keywords if arg.arg == "enabled" and arg is not child
                ]
            for condition in conditions:
                if answer := self.kind_of(condition):
                    return "knows" if self.mentions_xla(outer) else answer
            child = outer
        return ""

    def is_without_xla(self, node: ast.AST) -> bool:
        """Return whether a node runs only where there is no XLA: in the `else` of `if IS_TPU`."""
        pairs = itertools.pairwise([node, *self.source.ancestors(node)])
        ifs = [outer for inner, outer in pairs if isinstance(outer, ast.If) and inner in outer.orelse]
        tests = [ast.unparse(outer.test) for outer in ifs]
        return any(re.fullmatch(TABLES["asks_for_xla"], test) for test in tests)

    def kind_of(self, test: ast.AST) -> str:
        """Return what a condition does (see `cuda_condition`), by its own text or by what a name in it
        (`use_cuda`) was given."""
        parts = test.values if isinstance(test, ast.BoolOp) else [test]
        names = [last_name(getattr(part, "operand", part)) for part in parts]  # use_cuda of `not use_cuda`
        values = [value for name in names for value in self.source.assigned.get(name, [])]
        for text in map(ast.unparse, [test, *values]):
            if any(name in text for name in TABLES["asks_for_cuda"]):
                return "asks"
            if NAMES_CUDA.search(text):  # device.type == "cuda", x.is_cuda
                return "knows"
        return ""

    def mentions_xla(self, condition: Located) -> bool:
        """Return whether XLA is mentioned in a condition or one of its branches, those of elif too."""
        while isinstance(outer := self.source.parents[condition], ast.If) and outer.orelse == [condition]:
            condition = outer
        return MENTIONS_XLA.search(ast.unparse(condition)) is not None


def _makes_object(value):
    """Return whether a value is made by a class, as an optimizer is, not a list of parameters."""
    return isinstance(value, ast.Call) and last_name(value.func)[:1].isupper()


def _ties(node):
    """Return whether a node is an assignment of a layer's weight to another layer."""
    match node:
        case ast.Assign(targets=[ast.Attribute(attr="weight")], value=ast.Attribute(attr="weight")):
            return True
    return False
