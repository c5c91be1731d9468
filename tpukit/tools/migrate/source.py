"""A parsed module: what names mean after its imports, what surrounds a node, and small questions about libcst
nodes."""

import re

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider, ScopeProvider

CUDA_WORD = re.compile(r"""[fF]?(["'])cuda(:|\1)""")


class Source:
    """calls: (full name, node) of each call. assigned: last name of a target -> the values assigned to it."""

    def __init__(self, code):
        wrapper = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
        self.tree = wrapper.module
        self.parents = wrapper.resolve(ParentNodeProvider)
        self.positions = wrapper.resolve(PositionProvider)
        self.scopes = wrapper.resolve(ScopeProvider)
        self.calls = [(self.name(call.func), call) for call in m.findall(self.tree, m.Call())]
        self.assigned = {}
        for assignment in m.findall(self.tree, m.Assign()):
            for target in assignment.targets:
                self.assigned.setdefault(last_name(target.target), []).append(assignment.value)

    def name(self, node):
        """The full name of a name or attribute, such as torch.nn.DataParallel; empty where it is not
        known."""
        root = node
        while isinstance(root, cst.Attribute):
            root = root.value
        scope = self.scopes.get(root) if isinstance(root, cst.Name) else None
        return min((name.name for name in scope.get_qualified_names_for(node)), default="") if scope else ""

    def code(self, node):
        return self.tree.code_for_node(node)

    def position(self, node):
        """(line, column), from 1."""
        start = self.positions[node].start
        return start.line, start.column + 1

    def ancestors(self, node):
        """The nodes around a node, the nearest first."""
        while (node := self.parents.get(node)) is not None:
            yield node

    def function_of(self, node):
        """The function that a node is in, or the module."""
        return next(
            (outer for outer in self.ancestors(node) if isinstance(outer, (cst.FunctionDef, cst.Lambda))),
            self.tree,
        )

    def is_cuda_device(self, node):
        """Whether an expression is a CUDA device or its name: "cuda", "cuda:0", f"cuda:{i}",
        torch.device("cuda")."""
        if isinstance(node, cst.Call) and self.name(node.func) == "torch.device" and node.args:
            node = node.args[0].value
        words = isinstance(node, (cst.SimpleString, cst.FormattedString, cst.BinaryOperation))
        return words and bool(CUDA_WORD.match(self.code(node)))


def last_name(node):
    """x of `x` and of `a.b.x`; empty for another expression."""
    match node:
        case cst.Name():
            return node.value
        case cst.Attribute():
            return node.attr.value
    return ""


def method_of(call):
    """The name of the method that is called; empty for a plain function."""
    return last_name(call.func) if isinstance(call.func, cst.Attribute) else ""


def argument(call, keyword, position=None):
    """The value of an argument by its keyword or position; None where it is not given, or is None."""
    values = [arg.value for arg in call.args if arg.keyword and arg.keyword.value == keyword]
    if position is not None:
        values += [arg.value for arg in call.args if not arg.keyword][position : position + 1]
    return values[0] if values and not m.matches(values[0], m.Name("None")) else None


def names_in(node):
    return {name.value for name in m.findall(node, m.Name())}
