"""A parsed module: what names mean after its imports, what surrounds a node, and how its text is changed."""

import ast
import builtins
import re
import warnings
from collections.abc import Iterator

CUDA_WORD = re.compile(r"""[fF]?(["'])cuda(:|\1)""")
# Nodes with a position.
Located = ast.expr | ast.stmt | ast.keyword | ast.arg | ast.alias | ast.excepthandler | ast.pattern
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
        self.lines = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", code.encode())
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        every = list(ast.walk(self.tree))
        self.parents = {child: node for node in every for child in ast.iter_child_nodes(node)}
        self.nodes = sorted((node for node in every if hasattr(node, "lineno")), key=_start)
        self.imported, self.assigned = {}, {}
        for node in self.nodes:
            self._read_names(node)
        self.calls = [(self.name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]

    def _read_names(self, node):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    first = alias.name.partition(".")[0]
                    self.imported.setdefault(alias.asname or first, alias.name if alias.asname else first)
            case ast.ImportFrom(names=names):
                module = "." * node.level + (node.module or "")
                for alias in names:
                    self.imported.setdefault(alias.asname or alias.name, f"{module}.{alias.name}")
            case ast.Assign(targets=targets):
                for target in targets:
                    self.assigned.setdefault(last_name(target), []).append(node.value)

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

    def position(self, node: Located) -> tuple[int, int]:
        """(line, column), from 1; within an f-string that of the whole, because older Pythons know no
        other."""
        for outer in self.ancestors(node):
            if isinstance(outer, ast.JoinedStr):
                node = outer
        before = self.lines[node.lineno - 1][: node.col_offset]
        return node.lineno, len(before.decode()) + 1

    def start(self, node: Located) -> int:
        """Where a node's text starts, in bytes of the code."""
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Located) -> int:
        assert node.end_col_offset is not None  # in a tree that was parsed
        return self.starts[last_line(node) - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return b"".join(self.lines)[start:end].decode()

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function that a node is in, or the module."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, Function)), self.tree)

    def is_cuda_device(self, node: ast.AST | None) -> bool:
        """Whether an expression is a CUDA device or its name: "cuda", "cuda:0", f"cuda:{i}",
        torch.device("cuda")."""
        if isinstance(node, ast.Call) and self.name(node.func) == "torch.device" and node.args:
            node = node.args[0]
        return isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and is_cuda_word(node)

    def changed(self, edits: list[tuple[int, int, str]], modules: set[str]) -> str:
        """The code with edits (start, end, new text), and with imports of the modules."""
        data, end = [], 0
        whole = b"".join(self.lines)
        if edits:
            edits = sorted([*edits, *self._imports(modules)], key=lambda edit: edit[:2])
        for start, stop, text in edits:
            if start >= end:  # else it is in what another one replaces
                data += [whole[end:start], text.encode()]
                end = stop
        return b"".join([*data, whole[end:]]).decode()

    def _imports(self, modules):
        """Edits that import the modules that are not imported yet: above the first import, or below the
        docstring."""
        body = self.tree.body
        there = {
            alias.name
            for node in body
            if isinstance(node, ast.Import)
            for alias in node.names
            if not alias.asname
        }
        at = 0
        for place, node in enumerate(body):
            is_docstring = place == 0 and ast.get_docstring(self.tree) is not None
            if is_docstring or isinstance(node, ast.ImportFrom) and node.module == "__future__":
                at = place + 1
            elif isinstance(node, ast.Import | ast.ImportFrom):
                at = place
                break
        if at < len(body):
            line = min(node.lineno for node in [body[at], *getattr(body[at], "decorator_list", [])]) - 1
        else:
            line = last_line(body[-1])
        return [self.insertion(line, f"import {name}") for name in sorted(modules - there)]

    def line_after(self, node: ast.AST, text: str) -> tuple[int, int, str] | None:
        """The edit that puts a line of text after an expression; None where it is not alone on its lines."""
        if not isinstance(node, ast.Expr):
            return None
        last = last_line(node)
        before = self.text(self.starts[node.lineno - 1], self.start(node))
        after = self.text(self.end(node), self.starts[last])
        is_alone = not before.strip() and re.fullmatch(r"\s*(#.*)?", after.rstrip("\r\n"))
        return self.insertion(last, f"{before}{text}") if is_alone else None

    def insertion(self, line: int, text: str) -> tuple[int, int, str]:
        """The edit that puts a line of text after so many lines of the code."""
        newline = "\r\n" if self.lines[0].endswith(b"\r\n") else "\n"
        is_open = line > 0 and not self.lines[line - 1].endswith((b"\n", b"\r"))
        return self.starts[line], self.starts[line], f"{newline}{text}" if is_open else f"{text}{newline}"


def _start(node):
    return node.lineno, node.col_offset


def last_line(node: Located) -> int:
    """The number of the line that a node ends in."""
    assert node.end_lineno is not None  # in a tree that was parsed
    return node.end_lineno


def is_cuda_word(node: ast.AST) -> bool:
    """Whether the text of an expression starts as the name of a CUDA device does."""
    return bool(CUDA_WORD.match(ast.unparse(node)))


def last_name(node: ast.AST) -> str:
    """x of `x` and of `a.b.x`; empty for another expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
    return ""


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


def names_in(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
