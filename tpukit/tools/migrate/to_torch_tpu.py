"""From torch_xla to torch_tpu: what code calls of torch_xla, and what takes its place (see rules.toml)."""

import ast
import re

from tpukit.tools.migrate.findings import TABLES
from tpukit.tools.migrate.source import Source, argument, is_constant, method_of

# Functions, called without an argument -> the expression that is the same with torch_tpu.
SAME = {
    "torch_xla.device": 'torch.device("tpu")',
    "torch_xla.core.xla_model.xla_device": 'torch.device("tpu")',
    "torch.inference_mode": "torch.no_grad()",
}
MATMUL_PRECISION = "torch_xla.backends.set_mat_mul_precision"
XLA_WORD = re.compile(r"xla(:\d+)?")
TAKES_DEVICE = {"torch.device", *TABLES["classes"]["autocasts"]}


class ToTorchTPU:
    """findings and `fixed`, as of `Checker`."""

    def __init__(self, code: str):
        self.source = Source(code)
        self.findings, self.edits, self.imports = [], [], set()
        for node in self.source.nodes:
            match node:
                case ast.Import() | ast.ImportFrom():
                    words = ast.unparse(node)
                    if re.match(r"(import|from) torch_xla\b", words):
                        advice = "leave it out once nothing of it is used; `import torch` loads torch_tpu"
                        self._report(node, words, advice)
                case ast.Call():
                    self._check_call(self.source.name(node.func), node)
                case ast.Attribute() | ast.Name() if self._is_not_called(node):
                    if (name := self.source.name(node)).startswith("torch_xla."):
                        self._report(node, f"`{name}`", advice_for(name))
                case ast.Compare(left=ast.Attribute(attr="type"), comparators=[value]):
                    self._check_device(value)

    def _is_not_called(self, node):
        """Whether a name is a whole one, and not that of a function that is called here."""
        parent = self.source.parents[node]
        return not isinstance(parent, ast.Attribute) and getattr(parent, "func", None) is not node

    def _check_device(self, value):
        if isinstance(value, ast.Constant) and (word := XLA_WORD.fullmatch(str(value.value))):
            new = '"tpu"' if word[1] in (None, ":0") else ""
            self._report(value, f"`{word[0]}`", "the device is called 'tpu', one in each process", new)

    def _check_call(self, name, call):
        takes_device = name in TAKES_DEVICE or method_of(call) == "to"
        for value in call.args if takes_device else []:
            self._check_device(value)
        for arg in call.keywords:
            if takes_device or arg.arg == "device":
                self._check_device(arg.value)
        new = "" if call.args or call.keywords else SAME.get(name, "")
        if name == MATMUL_PRECISION:
            precision = argument(call, "precision", 0)
            if isinstance(precision, ast.Constant) and precision.value in ("high", "highest"):
                new = f'torch.set_float32_matmul_precision("{precision.value}")'
        if name.startswith("torch_xla."):
            self._report(call, f"`{name}`", advice_for(name), new)
        elif name == "torch.inference_mode":
            advice = "it is reported to crash with torch.compile: use torch.no_grad()"
            self._report(call, f"`{name}`", advice, new, "torch-tpu")
        elif name == "torch.distributed.init_process_group" and "xla" in ast.unparse(call):
            advice = "use init_process_group('tpu_dist'), with the variables that torchrun sets"
            self._report(call, f"`{name}`", advice)
        elif name == "torch.compile" and is_constant(argument(call, "dynamic"), True):
            advice = "torch_tpu refuses it: pass dynamic=False"
            self._report(call, "`torch.compile(dynamic=True)`", advice, rule="torch-tpu")
        elif name == "torch.compile" and argument(call, "mode") is not None:
            advice = "torch_tpu refuses modes: leave it out"
            self._report(call, "`torch.compile(mode=...)`", advice, rule="torch-tpu")

    def _report(self, node, found, advice, new="", rule="torch-xla"):
        self.findings.append((*self.source.position(node), rule, found[:60], bool(new), advice))
        if new:
            self.edits.append((self.source.start(node), self.source.end(node), new))
            self.imports |= {"torch"} if isinstance(node, ast.Call) else set()

    def fixed(self) -> str:
        return self.source.changed(self.edits, self.imports)


def advice_for(name: str) -> str:
    """What to do instead of a name of torch_xla."""
    known = TABLES["torch_tpu"]
    starts = (known[start] for start in known if f"{name}.".startswith(f"{start}."))
    return next(starts, "torch_tpu has no known equivalent")
