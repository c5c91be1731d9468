"""Which code runs only on CUDA, and which checks (`torch.cuda.is_available()`) decide that."""

import ast
import re

from tpukit.tools.migrate.source import Source, last_name

CHECKS = {"torch.cuda.is_available", "torch.cuda.device_count"}
NAMES_CUDA = re.compile(r"""["']cuda["':]|\.is_cuda\b""")
MENTIONS_XLA = re.compile(r"torch_xla\.device|xla_device|[\"']xla|(?<![a-z])tpu(?![a-z])", re.IGNORECASE)
Checks = set[ast.Call] | None


class CudaBranches:
    def __init__(self, source: Source):
        self.source = source

    def checks_around(self, node: ast.AST) -> Checks:
        """None where no condition around a node asks for CUDA. Else its calls that ask: none of them where it
        compares a device's name or mentions XLA, and so knows other devices."""
        child = node
        for outer in self.source.ancestors(node):
            conditions = []
            if isinstance(outer, ast.If | ast.IfExp) and child is not outer.test:
                conditions = [outer.test]
            elif isinstance(outer, ast.BoolOp):
                conditions = outer.values[: outer.values.index(child)]
            checks = self._union(conditions, set())
            if checks is not None:
                return set() if self.mentions_xla(outer) else checks
            child = outer
        return None

    def checks_in(self, test: ast.AST, seen: frozenset[str] = frozenset()) -> Checks:
        """None where a condition does not ask for CUDA. Else the calls in it that do, followed through names
        (`use_cuda`)."""
        calls = {one for one in ast.walk(test) if isinstance(one, ast.Call)}
        if calls := {call for call in calls if self.source.name(call.func) in CHECKS}:
            return calls
        if NAMES_CUDA.search(ast.unparse(test)):  # device.type == "cuda", x.is_cuda
            return set()
        match test:
            case ast.UnaryOp(operand=operand):
                return self.checks_in(operand, seen)
            case ast.BoolOp(values=values):
                return self._union(values, seen)
        name = last_name(test)
        values = self.source.assigned.get(name, []) if name and name not in seen else []
        if any(self.checks_in(value, seen | {name}) is None for value in values):
            return None
        return self._union(values, seen | {name})

    def _union(self, tests, seen):
        """The checks in any of some conditions; None where none of them asks."""
        checks = [self.checks_in(test, frozenset(seen)) for test in tests]
        known = [found for found in checks if found is not None]
        return set().union(*known) if known else None

    def mentions_xla(self, condition):
        """Whether XLA is mentioned in a condition or one of its branches, those of elif too."""
        while isinstance(outer := self.source.parents[condition], ast.If) and outer.orelse == [condition]:
            condition = outer
        return MENTIONS_XLA.search(ast.unparse(condition)) is not None
