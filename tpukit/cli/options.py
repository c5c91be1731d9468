"""What several commands share: options of a launch, aliases of options, where messages go."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tpukit.host.errors import TpukitError
from tpukit.launching import HANG_TIMEOUT_S

# Aliases of options, as published training scripts call them, or the release before this one.
ALIASES = {
    "--data-path": "--dataset-dir",
    "--global-batch-size": "--batch-size",
    "--model": "--model-name",
    "--num-cores": "--cores",
    "--workload": "--task",
}
NO_FLAG = "the accelerator that is here is used; leave it out"
TWO_COMMANDS = "it is two commands: `tpukit train TASK` and `tpukit test TASK`"
# Commands and options of the older guides and of the release before this one, and what takes their place.
REMOVED = {
    "main.py": "`tpukit train mshnet` or `tpukit train cdeit`: the page docs/OLD_GUIDES.md",
    "main_tpu.py": "`tpukit train mshnet` or `tpukit train cdeit`: the page docs/OLD_GUIDES.md",
    "train --use-tpu": NO_FLAG,
    "test --use-tpu": NO_FLAG,
    "train --mode": TWO_COMMANDS,
    "test --mode": TWO_COMMANDS,
    "rent": "rent a machine by `sky` itself, with the task files in docs/sky/: the page docs/RENTING.md",
    "compare --plan": "`tpukit plan TASK --chip v5e-8 --batch-sizes 32` asks the TPU's compiler, by itself",
    "compare --out": "each machine's file has a name of its own, in outputs/comparison: copy it from there",
    "compare --deadline-h": "the column calendar says how long each place takes",
    "compare --budget-usd": "the column cost says what each place costs, and the cheapest comes first",
    "compare --prices-out": "copy tpukit/tools/measure/prices.csv, and edit the copy",
    "plan --find-batch": "`--batch-sizes 16 32 64` says of each batch whether it fits",
    "report --hlo": "`--trace` keeps step.hlo by itself",
    "doctor --weights": "`tpukit test TASK --weights FILE --precision bf16` scores a file",
    "export --dataset-dir": "put the dataset back where the run found it, or random samples are compared",
    "train --label-column": "name the columns of the table path (or image) and label",
    "train --path-column": "name the columns of the table path (or image) and label",
    "train --brightness": "`--colour` is the range of brightness, contrast and saturation",
    "train --contrast": "`--colour` is the range of brightness, contrast and saturation",
    "train --saturation": "`--colour` is the range of brightness, contrast and saturation",
    "train --mixup": "take `--label-smoothing`, or a class of your own whose `loss` mixes the images",
    "simulate --snr-db": "call tpukit.tasks.cdeit.simulator.simulate, which takes it",
    "simulate --mismatch": "call tpukit.tasks.cdeit.simulator.simulate, which takes it",
}

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@dataclasses.dataclass(frozen=True)
class CoreOptions:
    cores: int | None = None
    """TPU cores or GPUs to use; by default all. On a CPU: processes; by default one."""
    parallel: Literal["processes", "spmd"] = "processes"
    """processes: one for each core. spmd: one process and one compiled graph over all TPU cores of this
    host."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions(CoreOptions):
    run: Path | None = None
    """Folder of the run; by default TASK in this machine's output folder."""
    backup: Path | None = None
    """Folder (on Drive, say) or address (s3://bucket/run, gs://, hf://) that gets a copy of the run at every
    checkpoint."""
    hang_timeout_s: float = HANG_TIMEOUT_S
    """When no step completes for this many seconds, show every core's Python stack and stop."""

    def of_launch(self) -> dict[str, Any]:
        """The options of `tpukit.launch`."""
        return dict(cores=self.cores, parallel=self.parallel, hang_timeout_s=self.hang_timeout_s)


def resolve_aliases(argv: list[str]) -> list[str]:
    """The words of a command line with aliases replaced by the options' names; words after `--` stay as they
    are."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    for word in own:
        call = word if word == own[0] else f"{own[0]} {word.partition('=')[0].replace('_', '-')}"
        if call in REMOVED:
            raise TpukitError(f"`{call}` is gone: {REMOVED[call]}")
    if own[:1] == ["doctor"]:  # whose --model is a task
        return argv
    words = []
    for word in own:
        name, equals, value = word.partition("=")
        option = name.replace("_", "-")
        if option == "--workload":
            to_stderr("--workload is called --task now")
        words.append(f"{ALIASES[option]}{equals}{value}" if option in ALIASES else word)
    if words[:1] == ["watch"]:
        to_stderr("`tpukit watch` is `tpukit report --follow` now")
        words = ["report", *(word for word in words[1:] if word != "--once"), "--follow"]
    return words + argv[len(own) :]


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
