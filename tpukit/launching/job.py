"""`Job`, which every process of a launch is given, and in it the `LaunchedCall` of the call."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tpukit.runs.tensors import plain

if TYPE_CHECKING:
    from tpukit.host.environment import Environment
    from tpukit.launching.core import Core

HANG_TIMEOUT_S = 900.0
PRINTED = "printed.txt"  # what rank 0 prints, warnings and logs among it


@contextlib.contextmanager
def temporary_folder() -> Generator[Path]:
    """Context manager: make a folder, which stays after a failure, whose message names it."""
    folder = Path(tempfile.mkdtemp(prefix="tpukit-cores-"))
    yield folder
    shutil.rmtree(folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchedCall:
    """Properties of the call that a launch makes; the defaults are those of a plain function.

    Args:
        arguments: returns the call's (arguments, keywords) on a core.
        reserve: returns a context manager of the folder for the cores' files, in which only this launch
            writes.
        say: prints a line of the launch itself.
        progress: returns dict(step, total, name, unit, ...), or {} if that is unknown.
        saved: returns a sentence about what is left of a launch that failed.
        precision: of the devices, see `open_runtime`.
        check: raises TpukitError if this many cores cannot share the function's work.
        why_one_gpu: returns the reason if one GPU serves better than this many, otherwise "".
        trains: whether the call counts its steps from the start, and on a signal saves after one. Another
            call may take any time before its first step, and ends at once."""

    arguments: Callable[[Core], tuple[tuple[Any, ...], dict[str, Any]]]
    reserve: Callable[[], contextlib.AbstractContextManager[Path]] = temporary_folder
    say: Callable[[str], None] = print
    progress: Callable[[], dict[str, Any]] = dict
    saved: Callable[[], str] = str
    precision: str = "fp32"
    check: Callable[[Callable[..., Any], int], None] = lambda function, cores: None
    why_one_gpu: Callable[[int], str] = lambda gpus: ""
    trains: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    """The launch, as every process of it sees it."""

    start_timeout_s: ClassVar[float] = 600.0
    """Time to import torch_xla and open the chips; eight were never timed."""

    function: Callable[..., Any]
    plan: LaunchedCall
    env: Environment
    hang_timeout_s: float
    processes: int = 1
    folder: Path = Path()
    """Where the forked processes leave their files."""
    rendezvous: Path | None = None
    """The file in which they meet, in a folder that is this user's alone."""
    from_start: bool = True
    """Whether the time until a hang counts from the start, not from the first step."""

    def call(self, core: Core) -> Any:
        """Call the function on a core. `sys.exit(0)` in it returns None."""
        arguments, keywords = self.plan.arguments(core)
        try:
            return self.function(*arguments, **keywords)
        except SystemExit as end:
            if end.code:
                raise

    def file(self, index: int, name: str) -> Path:
        """Return the path of what core number `index` writes: its log, step, stacks, hang, result or end."""
        return self.folder / f"rank-{index:02d}.{name}"

    def describe(self, index: int, step: int | None, rank: int | None = None) -> str:
        """Describe where a core is, in words. step: how many it has taken; None before the core started."""
        core = f"core {index}" if rank is None else f"core {index} (rank {rank})"
        if step is None:
            return f"{core} while starting"
        return f"{core} in step {step + 1}" if step or self.plan.trains else core


def portable(result: Any, core: Core) -> Any:
    """Return what of a function's result another process can be given, on the CPU, with None in place of what
    it cannot, which rank 0 names."""

    def replace(value: Any, key: str, kind: str) -> Any:
        for base in (dict, list, tuple):
            if isinstance(value, base):  # a subclass, as defaultdict is
                return plain(base(value), key, replace)
        core.print(
            f"{key} is {kind}, and another process cannot be given that: from several cores, None takes its"
            " place. Return numbers, strings, arrays, tensors, and lists and dicts of them"
        )
        return None

    result = core.runtime.to_cpu(result)
    return plain(result, "result", replace) if core.rank == 0 else None
