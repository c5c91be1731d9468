"""The rules: code, level and message of each; what a finding is; and findings as text, as a table and as
JSON."""

import dataclasses
import json
import typing

from tpukit.host import environment
from tpukit.host.tables import Table, printable


class Rule(typing.NamedTuple):
    level: str  # error: does not work on a TPU. warning: slow there, or silently not what was meant.
    message: str


RULES = {
    "cuda": Rule("error", "a TPU is not a CUDA device: use torch_xla.device()"),
    "cuda-check": Rule(
        "warning", "false on a TPU: make sure that the code after it does not silently fall back to the CPU"
    ),
    "fp16": Rule(
        "error",
        "TPUs train in bfloat16: use torch.autocast('xla', dtype=torch.bfloat16), without a loss scaler",
    ),
    "data-parallel": Rule(
        "error",
        "a TPU needs one process per core, each with its share of the data: use torch_xla.launch or"
        " tpukit.launch",
    ),
    "gradient-sum": Rule(
        "error",
        "each core would train its own model: xm.optimizer_step(optimizer) sums the gradients over the cores"
        " first",
    ),
    "no-sync": Rule(
        "error", "operations are only recorded until torch_xla.sync(): call it once after each optimizer step"
    ),
    "read-in-loop": Rule(
        "warning", "waits for the device in every step: sum on the device, and read once every 100 steps"
    ),
    "ragged-batch": Rule("warning", "a last batch of another size recompiles the step: pass drop_last=True"),
    "dynamic-shape": Rule(
        "error", "the shape of the result depends on the data: use torch.where, or multiply by the mask"
    ),
    "save": Rule("warning", "tensors on a TPU are saved as such and load only there: save CPU copies"),
    "optimizer-first": Rule(
        "error",
        "moving a model to XLA creates new parameters, and this optimizer keeps the old ones: create it after"
        " the move",
    ),
    "gone": Rule("error", "removed from torch_xla"),
    "deprecated": Rule("warning", "deprecated in torch_xla"),
    "old-variable": Rule("warning", "an environment variable of old guides: leave it out"),
    "early-device": Rule(
        "error",
        "opens the device before the processes start ('Runtime is already initialized'): move it into their"
        " function",
    ),
    "install": Rule(
        "error", "replaces the image's torch and torch_xla by versions that may not match: use the image's"
    ),
    "torch-compile": Rule(
        "warning", "the default backend does not support XLA: pass backend='openxla', or leave it out"
    ),
    "torch-tpu": Rule("error", "does not work with torch_tpu"),
    "torch-xla": Rule("error", "belongs to torch_xla, which torch_tpu replaces"),
    "unreadable": Rule("error", "fix the file first"),
}

OLD_VARIABLES = {
    name: f"{why}. Instead: {instead}" for name, (why, instead) in environment.OLD_VARIABLES.items()
}


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule. line, column: from 1, in the file or in the notebook's cell. cell: its
    number among all cells, from 1; 0 in a script. advice: instead of the rule's message. fixable: the fixed
    text of the file has it fixed."""

    path: str
    cell: int
    line: int
    column: int
    rule: str
    found: str
    fixable: bool = False
    advice: str = ""

    @property
    def level(self):
        return RULES[self.rule].level

    @property
    def message(self):
        return f"{self.found}: {self.advice or RULES[self.rule].message}"

    @property
    def place(self):
        cell = f" cell {self.cell}" if self.cell else ""
        return f"{self.path}{cell}:{self.line}:{self.column}"


def as_text(findings):
    """A line for each finding, and a summary."""
    lines = [
        f"{f.place}: {f.level} [{f.rule}] {f.message}{' (--fix)' if f.fixable else ''}" for f in findings
    ]
    return printable("\n".join([*lines, _summary(findings)]))


def as_table(findings):
    """The findings as a table, for notebooks."""
    rows = []
    for f in findings:
        fix, place = "yes" if f.fixable else "", f.place.rpartition("/")[2]
        rows.append(
            (place, f.level, f.rule, f.found.replace("`", ""), f.advice or RULES[f.rule].message, fix)
        )
    return Table(_summary(findings), ("place", "level", "rule", "found", "what to do", "--fix"), rows)


def as_json(findings):
    return json.dumps(
        [dict(dataclasses.asdict(f), level=f.level, message=f.message) for f in findings], indent=1
    )


def _summary(findings):
    if not findings:
        return "nothing found that will not work on a TPU"
    errors, fixable = sum(f.level == "error" for f in findings), sum(f.fixable for f in findings)
    slow = f"{len(findings) - errors} that will be slow or not what was meant"
    return f"{errors} that will not work on a TPU, {slow}; --fix fixes {fixable} of them"


FORMATS = dict(text=as_text, json=as_json)
