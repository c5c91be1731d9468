"""A parsed module: what names mean after its imports, and what surrounds a node."""

import ast
import builtins
import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

CUDA_WORD = re.compile(r"""[fF]?(["'])cuda(:|\1)""")
Located = Any  # a node with a position, of a tree that was parsed
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def parse(code: str) -> ast.Module:
    """The syntax tree, with `await` at the top as in notebooks. Raises SyntaxError, and ValueError for a zero
    byte."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the user's strings
        return compile(code, "<code>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


class Source:
    """nodes: those with a position, an outer one before what is in it. calls: (full name, node) of each call.
    assigned: last name of a target -> the values assigned to it."""

    def __init__(self, code: str):
        self.tree = parse(code)
        self.code = code.encode()
        lines = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", self.code)
        self.starts = [0, *itertools.accumulate(map(len, lines))]  # of the lines, in bytes
        every: list[Located] = list(ast.walk(self.tree))
        self.parents = {child: node for node in every for child in ast.iter_child_nodes(node)}
        located = [node for node in every if hasattr(node, "lineno")]
        self.nodes = sorted(located, key=lambda node: (node.lineno, node.col_offset))
        self.imported, self.assigned = {}, {}
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for bound, name in imports_of(node).items():
                    self.imported.setdefault(bound, name)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self.assigned.setdefault(last_name(target), []).append(node.value)
        calls: list[Located] = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.calls = [(self.name(call.func), call) for call in calls]

    def name(self, node: ast.AST) -> str:
        """The full name of a name or attribute, such as torch.nn.DataParallel; empty where there is none."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        root = self.imported.get(node.id, node.id)
        if node.id not in self.imported | self.assigned and hasattr(builtins, node.id):
            root = f"builtins.{node.id}"
        return ".".join([root, *reversed(parts)])

    def start(self, node: Located) -> int:
        """Where a node's text starts, in bytes of the code."""
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Located) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.code[start:end].decode()

    def ancestors(self, node: ast.AST) -> Iterator[Located]:
        """The nodes around a node, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function that a node is in, or the module."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, Function)), self.tree)


def imports_of(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """name that an import binds -> full name of what it is bound to."""
    module = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    bound = {alias.asname or alias.name.partition(".")[0]: alias for alias in node.names}
    return {name: module + (alias.name if alias.asname else name) for name, alias in bound.items()}


def is_cuda_word(node: ast.AST) -> bool:
    """Whether the text of an expression starts as the name of a CUDA device does: "cuda", f"cuda:{i}"."""
    return bool(CUDA_WORD.match(ast.unparse(node)))


def last_name(node: ast.AST) -> str:
    """x of `x` and of `a.b.x`; empty for another expression."""
    return (
        getattr(node, "attr", getattr(node, "id", "")) if isinstance(node, ast.Attribute | ast.Name) else ""
    )


def method_of(call: ast.Call) -> str:
    """The name of the method that is called; empty for a plain function."""
    return last_name(call.func) if isinstance(call.func, ast.Attribute) else ""


def argument(call: ast.Call, keyword: str, position: int | None = None) -> ast.expr | None:
    """The value of an argument by its keyword or position; None where it is not given, or is None."""
    values = [arg.value for arg in call.keywords if arg.arg == keyword]
    if position is not None:
        values += call.args[position : position + 1]
    return values[0] if values and not is_constant(values[0], None) else None


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
