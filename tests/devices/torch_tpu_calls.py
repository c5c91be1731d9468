"""What tpukit uses of torch_tpu, read from the source of tpukit, and whether the real package has it.

In an environment with torch_tpu: `python -m tests.devices.torch_tpu_calls` reads what `used()` gave as JSON,
and prints what does not fit, as JSON."""

import ast
import inspect
import json
import os
import shutil
import sys
import types

import pytest

from tests.conftest import ROOT
from tpukit.tools import plan
from tpukit.tools.child import run_python


def used(folder=ROOT / "tpukit"):
    """Every name of torch_tpu and torch.tpu in the files of a folder, and of torch where the file is
    torch_tpu's: a list of (place, name, number of positional arguments, keywords); without a number where
    nothing is called, and without keywords where it is imported.

    "torch.tpu.f().x" is the attribute of what a call returns, "torch.tpu.x[]" an element.
    """
    found = []
    for path in sorted(folder.rglob("*.py")):
        own = path.name.startswith("torch_tpu")
        place = str(path.relative_to(folder))
        for line, name, *call in _names(ast.parse(path.read_text())):
            parts = name.replace("()", "").replace("[]", "").split(".")
            if parts[0] == "torch_tpu" or parts[:2] == ["torch", "tpu"] or own and parts[0] == "torch":
                found.append((f"{place}:{line}", name, *call))
    return found


def _names(tree):
    known, inner = {}, set()  # local name -> name of a module or in one; nodes within a longer name

    def full(node):
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if not isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
            return None
        inside = node.func if isinstance(node, ast.Call) else node.value
        name = full(inside)
        inner.add(inside)
        suffix = {ast.Attribute: f".{getattr(node, 'attr', '')}", ast.Call: "()", ast.Subscript: "[]"}[
            type(node)
        ]
        return name and name + suffix

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield node.lineno, alias.name, None, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}", None, None
    for node in ast.walk(tree):  # an outer node before what is in it
        if isinstance(node, ast.Call) and (name := full(node.func)):
            inner.add(node.func)
            splat = any(isinstance(argument, ast.Starred) for argument in node.args) or any(
                k.arg is None for k in node.keywords
            )
            yield (
                node.lineno,
                name,
                None if splat else len(node.args),
                [keyword.arg for keyword in node.keywords],
            )
        elif node not in inner and isinstance(node, (ast.Attribute, ast.Name)) and (name := full(node)):
            yield node.lineno, name, None, []


def fault(name, count, keywords):
    """What is wrong with a use of the real package, or ""."""
    found = sys.modules.get(name.partition(".")[0])
    try:
        for part in name.split(".")[1:]:
            word = part.rstrip("()[]")
            fields = getattr(found, "__dataclass_fields__", {})
            found = fields[word] if isinstance(found, type) and word in fields else getattr(found, word)
            if part.endswith("()") and not isinstance(found, type):
                found = inspect.signature(found).return_annotation
            if part != word and not (isinstance(found, type) and found is not inspect.Signature.empty):
                return ""  # what that is, the package does not say
        if getattr(found, "__tt_api_stage__", "") in ("Internal", "Deprecated"):
            return found.__tt_api_stage__
        if count is not None:
            _bind(found, count, keywords)
        if count is None and keywords == [] and isinstance(found, types.ModuleType):
            return "a module that goes elsewhere, where `used` does not follow it"
    except Exception as error:
        if "No jellyfish device found" in str(error):
            return ""  # it is there, and opens a chip
        return f"{type(error).__name__}: {error}"
    return ""


def _bind(function, count, keywords):
    """Raise TypeError if a function does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C++, with its arguments in the docstring, if anywhere
        if missing := [keyword for keyword in keywords if f"{keyword}:" not in function.__doc__]:
            raise TypeError(f"no argument {', '.join(missing)}") from None
    else:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))


def in_the_real_package(tmp_path, *arguments, text=""):
    """A process that has ended, in the environment of the planner, which holds torch_tpu itself: `folder`."""
    if sys.platform != "linux" or shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("torch_tpu has wheels for Linux, and takes 2.5 GB")
    folder = plan.install_compiler(backend="torch_tpu")
    variables = dict(
        PYTHONPATH=f"{ROOT}{os.pathsep}{folder}", TORCH_DEVICE_BACKEND_AUTOLOAD="0", TPU_SKIP_MDS_QUERY="1"
    )
    ran = run_python(*arguments, text=text, variables=variables)
    ran.folder = folder
    return ran


if __name__ == "__main__":
    from tpukit.devices import torch_tpu_private

    torch_tpu_private.load()

    faults = [(place, name, fault(name, *call)) for place, name, *call in json.load(sys.stdin)]
    print("FAULTS", json.dumps([found for found in faults if found[2]]))
