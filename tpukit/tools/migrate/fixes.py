"""What takes the place of code that breaks a rule, and the imports that this needs."""

import libcst as cst
import libcst.matchers as m

FUTURE = m.SimpleStatementLine(body=[m.ImportFrom(module=m.Name("__future__"))])
DOCSTRING = m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.ConcatenatedString())])
IMPORT = m.SimpleStatementLine(body=[m.ZeroOrMore(), m.Import() | m.ImportFrom(), m.ZeroOrMore()])


def apply(tree, changes, modules):
    """The code of a tree with its nodes changed, and with imports of the modules."""
    return _with_imports(tree.visit(_Fixer(changes)), modules).code if changes else tree.code


class _Fixer(cst.CSTTransformer):
    def __init__(self, changes):
        super().__init__()
        self.changes = changes

    def on_leave(self, original_node, updated_node):
        updated = super().on_leave(original_node, updated_node)
        change = self.changes.get(original_node)
        return change(updated) if change else updated


def replacement(code):
    """A change that puts another expression in the place of one, in the same parentheses."""

    def replace(old):
        return cst.parse_expression(code).with_changes(lpar=old.lpar, rpar=old.rpar)

    return replace


def to_xla(call):
    to = call.func.with_changes(attr=cst.Name("to"))
    return call.with_changes(func=to, args=[cst.Arg(cst.parse_expression("torch_xla.device()"))])


def to_bfloat16(half):
    return half.with_changes(attr=cst.Name("bfloat16"))


def with_sync(statement):
    return cst.FlattenSentinel([statement, cst.parse_statement("torch_xla.sync()\n")])


def with_drop_last(call):
    """With `drop_last=True` before the first keyword argument, or at the end."""
    at = next((i for i, arg in enumerate(call.args) if arg.keyword), len(call.args))
    example = cst.parse_expression("f(drop_last=True)" if at == len(call.args) else "f(drop_last=True, x=0)")
    return call.with_changes(args=[*call.args[:at], example.args[0], *call.args[at:]])


def _with_imports(tree, modules):
    """With the imports that are not there yet, above the first one, or below the docstring."""
    there = {tree.code_for_node(statement).strip() for statement in tree.body}
    new = [
        cst.parse_statement(f"import {name}\n") for name in sorted(modules) if f"import {name}" not in there
    ]
    at = 0
    for place, statement in enumerate(tree.body):
        if m.matches(statement, FUTURE) or place == 0 and m.matches(statement, DOCSTRING):
            at = place + 1
        elif m.matches(statement, IMPORT):
            at = place
            break
    old = list(tree.body[at:])
    if new and old:  # comments above a statement stay above what comes before it
        new[0] = new[0].with_changes(leading_lines=old[0].leading_lines)
        old[0] = old[0].with_changes(leading_lines=[])
    return tree.with_changes(body=[*tree.body[:at], *new, *old])
