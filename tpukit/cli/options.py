"""What several commands share: options of a launch, and where messages go."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tpukit.launching import HANG_TIMEOUT_S

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
    """Folder (on Drive or in a mounted bucket, say) that gets a copy of the run at every checkpoint."""
    hang_timeout_s: float = HANG_TIMEOUT_S
    """When no step completes for this many seconds, show every core's Python stack and stop."""

    def of_launch(self) -> dict[str, Any]:
        """The options of `tpukit.launch`."""
        return dict(cores=self.cores, parallel=self.parallel, hang_timeout_s=self.hang_timeout_s)


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
