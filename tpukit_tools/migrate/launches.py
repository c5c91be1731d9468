"""Devices that are opened before a launch: torch_xla, and a fork, then refuse to start the cores.

The module is walked as Python would run it, into the functions of the file that it calls: statements in
order, each branch of a condition by itself."""

import ast
import re

from tpukit_tools.migrate.findings import TABLES
from tpukit_tools.migrate.source import Function, Located, Source, last_name

Opened = frozenset[Located]  # the calls that may have opened a device up to here
NOTHING: Opened = frozenset()
EXITS = {"sys.exit", "os._exit", "builtins.exit", "builtins.quit"}
# Methods of models and loaders, too: only of `self` they are surely the file's own.
FOREIGN = {"train", "eval", "step", "to", "run", "fit"}


class Launches:
    """too_early: the calls that open a device before a launch of several cores, in order."""

    def __init__(self, source: Source):
        self.source = source
        self.functions, self.methods = {}, {}
        self.inside, self.seen, self.memory = set(), set(), {}
        self.returned: list[Opened] = []
        self.found: set[Located] = set()
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_method = isinstance(source.parents[node], ast.ClassDef)
                (self.methods if is_method else self.functions).setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):  # a call of it calls its __init__
                made = [one for one in node.body if getattr(one, "name", "") == "__init__"]
                self.functions.setdefault(node.name, []).extend(made)
        if any(self._launches(call) for call in source.calls):
            self._run(source.tree.body, NOTHING)
            imported = [one for one in source.tree.body if "'__main__'" not in _test_of(one)]
            opened = self._run(imported, NOTHING) or NOTHING
            for node in source.nodes:  # a function that this file calls nowhere, such as click's commands
                if isinstance(node, Function) and node not in self.seen:
                    self._enter(node, opened)
        self.too_early = sorted(self.found, key=lambda node: (node.lineno, node.col_offset))

    def _launches(self, call):
        """Return whether a call starts several processes."""
        name = self.source.name(call.func)
        for pattern, single in TABLES["launches"].items():
            if re.fullmatch(pattern, name):
                given = [f"{arg.arg}={ast.unparse(arg.value)}" for arg in call.keywords]
                given += [f"{n}:{ast.unparse(arg)}" for n, arg in enumerate(call.args)]
                return not any(re.fullmatch(single, one) for one in given)
        return False

    def _opens(self, call):
        """Return whether a call opens the XLA device, by its name or by a device that is given to it."""
        name = self.source.name(call.func)
        if re.fullmatch(TABLES["opens_device"], name):
            return True
        values = [*call.args, *(arg.value for arg in call.keywords if arg.arg == "device")]
        puts = re.fullmatch(r"torch\.(?!device|autocast|amp|set_default)\w+|.*\.to", name)
        return puts is not None and any(map(self._is_xla, values))

    def _is_xla(self, value):
        values = self.source.assigned.get(last_name(value)) or [value]
        return all(re.fullmatch(TABLES["xla_device"], ast.unparse(one)) for one in values)

    def _run(self, node, opened: Opened) -> Opened | None:
        """Return what is open after a node, or list of nodes; None if nothing runs after it."""
        match node:
            case list():
                for one in node:
                    after = self._run(one, opened)
                    if after is None:
                        return None
                    opened = after
                return opened
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():  # its body runs when it is called
                made = [*getattr(node, "decorator_list", []), *node.args.defaults, *node.args.kw_defaults]
                return self._run([one for one in made if one is not None], opened)
            case ast.If() | ast.IfExp():
                opened = self._run(node.test, opened) or opened
                return _either(self._run(node.body, opened), self._run(node.orelse, opened))
            case ast.For() | ast.AsyncFor() | ast.While():
                opened = self._run(getattr(node, "iter", getattr(node, "test", None)), opened) or opened
                after = _either(self._run(node.body, opened), opened) or opened
                return self._run(node.orelse, self._run(node.body, after) or after)
            case ast.Try():
                after = self._run(node.body, opened)
                failed = _either(after, opened) or opened
                ends = [self._run(handler.body, failed) for handler in node.handlers]
                ends.append(None if after is None else self._run(node.orelse, after))
                last = self._run(node.finalbody, _either(*ends) or failed)
                return last if any(end is not None for end in ends) else None
            case ast.Match():
                opened = self._run(node.subject, opened) or opened
                return _either(opened, *(self._run(case.body, opened) for case in node.cases))
            case ast.Return():
                after = self._run(list(ast.iter_child_nodes(node)), opened)
                if self.returned:
                    self.returned[-1] = _either(self.returned[-1], after) or NOTHING
                return None
            case ast.Raise():
                return None
            case ast.Call():
                return self._call(node, opened)
        return self._run(list(ast.iter_child_nodes(node)), opened) if isinstance(node, ast.AST) else opened

    def _call(self, call, opened):
        opened = self._run([call.func, *call.args, *call.keywords], opened) or opened
        if self.source.name(call.func) in EXITS:
            return None
        if self._launches(call):
            self.found |= opened
        elif self._opens(call):
            return opened | {call}
        for function in self._called(call):
            opened = self._enter(function, opened)
        return opened

    def _called(self, call):
        """Return the function of the file that a call runs, in a list; none if several have its name."""
        name, text = last_name(call.func), ast.unparse(call.func)
        if isinstance(call.func, ast.Attribute):
            is_own = name not in FOREIGN or text.startswith("self.")
            found = self.methods.get(name, []) if is_own else []
        else:
            found = [] if name in self.source.imported else self.functions.get(name, [])
        return found if len(found) == 1 else []

    def _enter(self, function, opened: Opened) -> Opened:
        """Return what is open after a function of the file has run."""
        key = function, opened
        if key not in self.memory and function not in self.inside:
            self.seen.add(function)
            self.inside.add(function)
            self.returned.append(NOTHING)
            after = self._run(function.body, opened)
            self.memory[key] = opened | (_either(self.returned.pop(), after) or NOTHING)
            self.inside.remove(function)
        return self.memory.get(key, opened)


def _test_of(statement):
    """Return the condition of an `if` at the top of a module; "" of anything else."""
    return ast.unparse(statement.test) if isinstance(statement, ast.If) else ""


def _either(*ends: Opened | None) -> Opened | None:
    """Return what may be open after one of several branches; None if all of them end the function."""
    reached = [end for end in ends if end is not None]
    return NOTHING.union(*reached) if reached else None
