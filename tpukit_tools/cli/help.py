"""The help of a task's options: the docstrings below its settings."""

import ast
import dataclasses
import inspect
import itertools
from typing import Annotated

from tyro import conf


def annotate_help(cls: type) -> None:
    """Annotate each setting of a task with its docstring in one line, because tyro keeps the source's line
    breaks."""
    settings = {field.name for field in dataclasses.fields(cls)}
    for base in cls.__mro__[:-1]:  # without object
        statements = ast.walk(ast.parse(inspect.getsource(base)))
        for declared, below in itertools.pairwise(statements):
            match declared, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    if name in settings:
                        option = conf.arg(help=" ".join(text.split()))
                        base.__annotations__[name] = Annotated[base.__annotations__[name], option]
