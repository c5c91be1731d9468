"""The help of a task's options: the docstrings below its settings."""

import ast
import dataclasses
import inspect
import itertools
from typing import Annotated

from tyro import conf

# As published training scripts and the old guides call options.
ALIASES = {
    "--data-path": "--dataset-dir",
    "--eval-steps": "--eval-every-steps",
    "--global-batch-size": "--batch-size",
    "--model": "--model-name",
    "--num-cores": "--cores",
}


def other_names(parameter: str) -> tuple[str, ...]:
    """Return the names that an option has beside its own, for its help."""
    return tuple(alias for alias, name in ALIASES.items() if name == f"--{parameter.replace('_', '-')}")


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
                        option = conf.arg(help=" ".join(text.split()), aliases=other_names(name))
                        base.__annotations__[name] = Annotated[base.__annotations__[name], option]
