"""A parsed module: what its names mean after its imports, and where its nodes are in the text."""

import ast
import builtins
import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

from tpukit_tools.migrate.findings import TABLES

Located = Any  # a node with a position, of a tree that was parsed
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def parse(code: str) -> ast.Module:
    """Return the syntax tree, with `await` at the top as in notebooks. Raises SyntaxError, and ValueError
    for a zero byte."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes in the user's strings
        return compile(code, "<code>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


class Source:
    """nodes: those with a position, an outer one before what is in it. calls: the calls among them. assigned:
    last name of a target -> the values assigned to it, or what a loop takes it from."""

    def __init__(self, code: str):
        self.tree = parse(code)
        self.code = code.encode()
        lines = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", self.code)
        self.starts = [0, *itertools.accumulate(map(len, lines))]  # where lines start, in bytes
        every: list[Located] = list(ast.walk(self.tree))
        self.parents = {child: node for node in every for child in ast.iter_child_nodes(node)}
        located = [node for node in every if hasattr(node, "lineno")]
        self.nodes = sorted(located, key=lambda node: (node.lineno, node.col_offset))
        self.calls: list[Located] = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.imported, self.assigned = {}, {}
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for bound, name in _imports(node).items():
                    self.imported.setdefault(bound, name)
            elif isinstance(node, ast.Assign):
                for name in filter(None, map(last_name, node.targets)):
                    self.assigned.setdefault(name, []).append(node.value)
            elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                self.assigned.setdefault(node.target.id, []).append(node.iter)
        self.bound = set(self.imported)
        for node in every:
            if not isinstance(node, ast.keyword) and not isinstance(getattr(node, "ctx", None), ast.Load):
                kept = (getattr(node, field, None) for field in ("id", "arg", "name"))
                self.bound |= {name for name in kept if isinstance(name, str)}

    def name(self, node: ast.AST) -> str:
        """Return the full name of a name or an attribute, such as torch.nn.DataParallel or builtins.print.
        Of an attribute of something else, only what follows it: .item of `f(x).item`. A name that the code
        uses and nowhere binds, as in a pasted piece of it, is what rules.toml says."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        root = ""
        if isinstance(node, ast.Name):
            root = self.imported.get(node.id, node.id)
            if node.id not in self.bound:
                used = ".".join([node.id, *reversed(parts)])
                meant = (full for name, full in TABLES["unbound"].items() if re.match(rf"{name}(\.|$)", used))
                root = next(meant, root)
            if node.id not in self.imported | self.assigned and hasattr(builtins, node.id):
                root = f"builtins.{node.id}"
        return ".".join([root, *reversed(parts)])

    def start(self, node: Located) -> int:
        """Return where a node's text starts, in bytes of the code."""
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Located) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def ancestors(self, node: ast.AST) -> Iterator[Located]:
        """Yield the nodes around a node, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """Return the function that a node is in, or the module."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, Function)), self.tree)


def _imports(node):
    """name that an import binds -> full name of what it is bound to."""
    module = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    bound = {alias.asname or alias.name.partition(".")[0]: alias for alias in node.names}
    return {name: module + (alias.name if alias.asname else name) for name, alias in bound.items()}


def last_name(node: ast.AST) -> str:
    """Return x of `x` and of `a.b.x`; "" of another expression."""
    return getattr(node, "attr", getattr(node, "id", ""))


def method_of(call: ast.Call) -> str:
    """Return the name of the method that is called; "" of a plain function."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
