"""What was found in a module, and the edits of its text that fix it."""

import ast
import re

from tpukit.tools.migrate.findings import TABLES
from tpukit.tools.migrate.source import Located, Source

# The modules that new code needs: torch_xla.runtime of torch_xla.runtime.world_size(), torch_xla of "xla".
MODULES = re.compile(r"\b(torch_xla(?:\.\w+)*)\.\w|\b(torch)\.\w|[\"']xla[\"']")


class Report:
    """findings: (line, column in UTF-8, rule, found, fixable, advice), in no order."""

    def __init__(self, source: Source):
        self.source, self.findings = source, []
        self.edits = []  # (start, end, new text), in bytes of the code
        self.covered = set()  # (node, a rule that is not reported again in it, or "" for all of them)

    def add(self, node: Located, rule: str, found: str = "", *, replace="", edit=None, advice: str = ""):
        """Add a finding, unless it is in what another one covers.

        replace: the expression that fixes it, in the node's place. edit: another fix, as (start, end, new
        text)."""
        outers = list(self.source.ancestors(node))
        if not self.covered.isdisjoint((outer, one) for outer in [node, *outers] for one in (rule, "")):
            return
        found = found or f"`{short(node)}`"
        if replace:
            edit = (self.source.start(node), self.source.end(node), replace)
        if replace or edit is None:
            self.covered.add((node, "" if replace or isinstance(node, ast.IfExp) else rule))
        for outer in outers:
            if isinstance(outer, ast.JoinedStr):  # older Pythons know no place in it, a fix not its quotes
                node, edit = outer, None
        self.findings.append((node.lineno, node.col_offset + 1, rule, found, edit is not None, advice))
        self.edits += [edit] if edit else []

    def add_name(self, node: Located, table: str):
        """Add what a table of rules.toml says of an import, a name or an attribute."""
        parent = self.source.parents[node]
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{module}{alias.name}"
                if name.startswith("torch_xla") and (entry := entry_of(name, table)):
                    self.add(node, entry["rule"], f"`import {alias.name}`", advice=entry["advice"])
        elif not isinstance(parent, ast.Attribute):
            name, call = self.source.name(node), getattr(parent, "func", None) is node and parent
            entry = entry_of(name, table)
            if not entry or "called" in entry and not call:
                return
            use = entry.get("use", "")
            if use.endswith(")"):  # takes the place of a call without arguments
                node, use = call or node, use if call and not call.args + call.keywords else ""
            self.add(node, entry["rule"], f"`{name}`", replace=use, advice=entry["advice"])

    def fixed(self) -> str:
        """The code with all fixes, and with the imports that they need."""
        parts, end = [], 0
        for start, stop, text in sorted([*self.edits, *self._imports()], key=lambda edit: edit[:2]):
            if start >= end:  # else it is in what another one replaces
                parts += [self.source.text(end, start), text]
                end = stop
        return "".join([*parts, self.source.text(end, len(self.source.code))])

    def _imports(self):
        """Edits that import what is not imported yet: above the first import, or below the docstring."""
        found = [match for _, _, text in self.edits for match in MODULES.finditer(text)]
        modules = {match[1] or match[2] or "torch_xla" for match in found}
        body: list[Located] = list(self.source.tree.body)
        if ast.get_docstring(self.source.tree) is not None:
            body = body[1:]
        body = [one for one in body if not isinstance(one, ast.ImportFrom) or one.module != "__future__"]
        imports = [one for one in body if isinstance(one, ast.Import | ast.ImportFrom)]
        plain = [alias for one in imports if isinstance(one, ast.Import) for alias in one.names]
        there = {alias.name for alias in plain if not alias.asname}
        for first in (imports or body)[:1]:
            line = min(one.lineno for one in [first, *getattr(first, "decorator_list", [])])
            start = self.source.starts[line - 1]
            for module in sorted(modules - there):
                yield start, start, f"import {module}{self._newline}"

    def line_below(self, statement: Located, text: str) -> tuple[int, int, str] | None:
        """The edit that puts a line below a statement; None where something else is on its lines."""
        source = self.source
        before = source.text(source.starts[statement.lineno - 1], source.start(statement))
        after = source.text(source.end(statement), source.starts[statement.end_lineno]).rstrip("\r\n")
        if before.strip() or not re.fullmatch(r"\s*(#.*)?", after):
            return None
        end = source.end(statement) + len(after.encode())
        return end, end, f"{self._newline}{before}{text}"

    @property
    def _newline(self):
        return "\r\n" if self.source.code[: self.source.starts[1]].endswith(b"\r\n") else "\n"


def entry_of(name: str, table: str) -> dict[str, str] | None:
    """What a table of rules.toml says of a full name: the first entry that it begins with; None where that is
    nothing."""
    for start, entry in TABLES[table].items():
        if f"{name}.".startswith(f"{start}."):
            advice = f"use {entry['use']}" if "use" in entry else ""
            return {"advice": advice, **entry} if entry else None
    return None


def short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."
