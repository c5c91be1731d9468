"""Which code runs only on CUDA, and which checks (`torch.cuda.is_available()`) decide that."""

import ast
import re

from tpukit.tools.migrate.source import Source, last_name

CHECKS = {"torch.cuda.is_available", "torch.cuda.device_count"}
NAMES_CUDA = re.compile(r"""["']cuda["':]|\.is_cuda\b""")
MENTIONS_XLA = re.compile(r"torch_xla\.device|xla_device|[\"']xla|(?<![a-z])tpu(?![a-z])", re.IGNORECASE)
HARMLESS = re.compile(r"torch\.backends\.cud|torch\.cuda\.(manual_seed|\w*memory|empty_cache)")
Checks = set[ast.Call] | None


class CudaBranches:
    def __init__(self, source: Source):
        self.source = source

    def checks_around(self, node: ast.AST) -> Checks:
        """None where a node may run without CUDA. Else the calls in the condition that ask for CUDA: none of
        them where the code compares a device's name or has another branch for XLA, and so knows other
        devices."""
        child = node
        for outer in self.source.ancestors(node):
            checks = None
            match outer:
                case ast.If() | ast.IfExp() if child is not outer.test:
                    checks = self.checks_in(outer.test, child in _as_list(outer.body))
                    if checks and self.handles_xla(outer, child):
                        checks = set()
                case ast.BoolOp(op=operator, values=values):
                    before = values[: values.index(child)] if isinstance(child, ast.expr) else []
                    checks = self._checks_in_all(before, operator, isinstance(operator, ast.And))
            if checks is not None:
                return checks
            child = outer
        return None

    def checks_in(self, test: ast.AST, outcome: bool = True, seen: frozenset[str] = frozenset()) -> Checks:
        """None where a test may come out as `outcome` without CUDA. Else the calls in it that ask for
        CUDA."""
        match test:
            case ast.UnaryOp(op=ast.Not()):
                return self.checks_in(test.operand, not outcome, seen)
            case ast.BoolOp():
                return self._checks_in_all(test.values, test.op, outcome, seen)
        calls = {one for one in ast.walk(test) if isinstance(one, ast.Call)}
        if calls := {call for call in calls if self.source.name(call.func) in CHECKS}:
            return calls if outcome else None
        if NAMES_CUDA.search(ast.unparse(test)):  # device.type == "cuda", x.is_cuda
            is_negated = any(isinstance(one, ast.NotEq | ast.NotIn) for one in ast.walk(test))
            return set() if outcome != is_negated else None
        name = last_name(test)
        if not name or name in seen:
            return None
        values = self.source.assigned.get(name, [])
        return _union([self.checks_in(value, outcome, seen | {name}) for value in values])

    def _checks_in_all(self, tests, operator, outcome, seen=frozenset()):
        checks = [self.checks_in(test, outcome, seen) for test in tests]
        one_is_enough = isinstance(operator, ast.And) == outcome
        return _union([found for found in checks if found is not None] if one_is_enough else checks)

    def handles_xla(self, condition: ast.AST, child: ast.AST) -> bool:
        """Whether XLA is mentioned in an if, elif, else (or IfExp) outside of the branch with a node."""
        while isinstance(outer := self.source.parents[condition], ast.If) and outer.orelse == [condition]:
            condition = outer
        return any(MENTIONS_XLA.search(ast.unparse(part)) for part in _without_branch(condition, child))

    def is_harmless(self, check: ast.Call) -> bool:
        """Whether a check decides about flags, seeds or memory figures of CUDA alone."""
        condition = self.source.parents[check]
        has_else = isinstance(condition, ast.If) and condition.orelse
        if not isinstance(condition, ast.If | ast.IfExp) or condition.test is not check or has_else:
            return False
        lines = [line for part in _as_list(condition.body) for line in ast.unparse(part).splitlines()]
        return all(HARMLESS.match(line.strip()) for line in lines)


def _without_branch(condition, child):
    """The parts of a condition, and of its elif, but for the branch that holds a node."""
    yield condition.test
    for branch in map(_as_list, (condition.body, condition.orelse)):
        if child in branch:
            continue
        if isinstance(condition, ast.If) and len(branch) == 1 and isinstance(branch[0], ast.If):
            yield from _without_branch(branch[0], child)
        else:
            yield from branch


def _as_list(branch):
    return branch if isinstance(branch, list) else [branch]


def _union(sets):
    """None where one of the sets is None, or there are none."""
    return set().union(*sets) if sets and None not in sets else None
