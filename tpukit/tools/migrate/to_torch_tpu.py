"""From torch_xla to torch_tpu: what code calls of torch_xla, and what takes its place (see rules.toml)."""

import ast
import re

from tpukit.tools.migrate.report import Report
from tpukit.tools.migrate.source import Source, argument, is_constant, method_of

XLA_WORD = re.compile(r"xla(:\d+)?")
TAKES_DEVICE = re.compile(r"torch\.(device|(amp\.)?autocast)$")


def check_for_torch_tpu(code: str) -> Report:
    report = Report(Source(code))
    for node in report.source.nodes:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Attribute() | ast.Name():
                report.add_name(node, "torch_tpu")
            case ast.Call():
                _check_call(report, report.source.name(node.func), node)
            case ast.Compare(left=ast.Attribute(attr="type"), comparators=[value]):
                _check_device(report, value)
    return report


def _check_device(report, value):
    if isinstance(value, ast.Constant) and (word := XLA_WORD.fullmatch(str(value.value))):
        new = '"tpu"' if word[1] in (None, ":0") else ""
        advice = "the device is called 'tpu', one in each process"
        report.add(value, "torch-xla", f"`{word[0]}`", replace=new, advice=advice)


def _check_call(report, name, call):
    takes_device = TAKES_DEVICE.match(name) or method_of(call) == "to"
    for value in call.args if takes_device else []:
        _check_device(report, value)
    for arg in call.keywords:
        if takes_device or arg.arg == "device":
            _check_device(report, arg.value)
    if name == "torch.distributed.init_process_group" and "xla" in ast.unparse(call):
        advice = "use init_process_group('tpu_dist'), with the variables that torchrun sets"
        report.add(call, "torch-xla", f"`{name}`", advice=advice)
    elif name == "torch.compile" and is_constant(argument(call, "dynamic"), True):
        report.add(call, "torch-tpu", advice="torch_tpu refuses dynamic=True: pass dynamic=False")
    elif name == "torch.compile" and argument(call, "mode") is not None:
        report.add(call, "torch-tpu", advice="torch_tpu refuses modes: leave it out")
