"""Which code runs only on CUDA, and which checks (`torch.cuda.is_available()`) decide that."""

import re

import libcst as cst
import libcst.matchers as m

from tpukit.tools.migrate.source import last_name

CHECKS = {"torch.cuda.is_available", "torch.cuda.device_count"}
NAMES_CUDA = re.compile(r"""["']cuda["':]|\.is_cuda\b""")
MENTIONS_XLA = re.compile(r"torch_xla\.device|xla_device|[\"']xla|(?<![a-z])tpu(?![a-z])", re.IGNORECASE)
HARMLESS = re.compile(r"#|torch\.backends\.cud|torch\.cuda\.(manual_seed|\w*memory|empty_cache)")


class CudaBranches:
    def __init__(self, source):
        self.source = source

    def checks_around(self, node):
        """None where a node may run without CUDA. Else the calls in the condition that ask for CUDA: none of
        them where the code compares a device's name or has another branch for XLA, and so knows other
        devices."""
        child = node
        for outer in self.source.ancestors(node):
            checks = None
            if isinstance(outer, (cst.If, cst.IfExp)) and child is not outer.test:
                checks = self.checks_in(outer.test, child is outer.body)
                if checks and self.handles_xla(outer, child):
                    checks = set()
            elif isinstance(outer, cst.BooleanOperation) and child is outer.right:
                checks = self.checks_in(outer.left, isinstance(outer.operator, cst.And))
            if checks is not None:
                return checks
            child = outer
        return None

    def checks_in(self, test, outcome=True, seen=frozenset()):
        """None where a test may come out as `outcome` without CUDA. Else the calls in it that ask for
        CUDA."""
        match test:
            case cst.UnaryOperation(operator=cst.Not()):
                return self.checks_in(test.expression, not outcome, seen)
            case cst.BooleanOperation():
                sides = [self.checks_in(side, outcome, seen) for side in (test.left, test.right)]
                one_is_enough = isinstance(test.operator, cst.And) == outcome
                return _union([side for side in sides if side is not None] if one_is_enough else sides)
        calls = {call for call in m.findall(test, m.Call()) if self.source.name(call.func) in CHECKS}
        if calls:
            return calls if outcome else None
        if NAMES_CUDA.search(self.source.code(test)):  # device.type == "cuda", x.is_cuda
            is_negated = bool(m.findall(test, m.NotEqual() | m.NotIn()))
            return set() if outcome != is_negated else None
        name = last_name(test)
        if not name or name in seen:
            return None
        return _union(
            [self.checks_in(value, outcome, seen | {name}) for value in self.source.assigned.get(name, [])]
        )

    def handles_xla(self, condition, branch):
        """Whether XLA is mentioned in an if, elif, else (or IfExp) outside of one branch."""
        while isinstance(outer := self.source.parents[condition], cst.If) and outer.orelse is condition:
            condition = outer
        others = self.source.code(condition).replace(self.source.code(branch), "")
        return bool(MENTIONS_XLA.search(others))

    def is_harmless(self, check):
        """Whether a check decides about flags, seeds or memory figures of CUDA alone."""
        condition = self.source.parents[check]
        has_else = isinstance(condition, cst.If) and condition.orelse is not None
        if not isinstance(condition, (cst.If, cst.IfExp)) or condition.test is not check or has_else:
            return False
        lines = [line.strip() for line in self.source.code(condition.body).splitlines()]
        return all(HARMLESS.match(line) for line in lines if line)


def _union(sets):
    """None where one of the sets is None, or there are none."""
    return set().union(*sets) if sets and None not in sets else None
