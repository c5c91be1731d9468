"""The rules: code, level and message of each; and what a finding is."""

import dataclasses
import typing

from tpukit.host import environment


class Rule(typing.NamedTuple):
    level: str  # error: does not work on a TPU. warning: slow there, or silently not what was meant.
    message: str


RULES = {
    "cuda": Rule("error", "a TPU is not a CUDA device: use torch_xla.device()"),
    "cuda-check": Rule("warning", "false on a TPU: make sure that the code after it does not silently fall back to the CPU"),
    "fp16": Rule("error", "TPUs train in bfloat16: use torch.autocast('xla', dtype=torch.bfloat16), without a loss scaler"),
    "data-parallel": Rule(
        "error", "a TPU needs one process per core, each with its share of the data: use torch_xla.launch or tpukit.launch"
    ),
    "gradient-sum": Rule(
        "error", "each core would train its own model: xm.optimizer_step(optimizer) sums the gradients over the cores first"
    ),
    "no-sync": Rule("error", "operations are only recorded until torch_xla.sync(): call it once after each optimizer step"),
    "read-in-loop": Rule("warning", "waits for the device in every step: sum on the device, and read once every 100 steps"),
    "ragged-batch": Rule("warning", "a last batch of another size recompiles the step: pass drop_last=True"),
    "dynamic-shape": Rule("error", "the shape of the result depends on the data: use torch.where, or multiply by the mask"),
    "save": Rule("warning", "tensors on a TPU are saved as such and load only there: save CPU copies"),
    "save-on-one": Rule("error", "hangs: every core must call xm.save, which writes on one of them"),
    "optimizer-first": Rule(
        "error", "moving a model to XLA creates new parameters, and this optimizer keeps the old ones: create it after the move"
    ),
    "gone": Rule("error", "removed from torch_xla"),
    "deprecated": Rule("warning", "deprecated in torch_xla"),
    "old-variable": Rule("warning", "an environment variable of old guides: leave it out"),
    "early-device": Rule(
        "error", "opens the device before the processes start ('Runtime is already initialized'): move it into their function"
    ),
    "install": Rule("error", "replaces the image's torch and torch_xla by versions that may not match: use the image's"),
    "torch-compile": Rule("warning", "the default backend does not support XLA: pass backend='openxla', or leave it out"),
    "unreadable": Rule("error", "fix the file first"),
}

OLD_VARIABLES = {name: f"{why}. Instead: {instead}" for name, (why, instead) in environment.OLD_VARIABLES.items()}


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule. line, column: from 1, in the file or in the notebook's cell. cell: its number among all
    cells, from 1; 0 in a script. advice: instead of the rule's message. fixable: the fixed text of the file has it fixed."""

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
