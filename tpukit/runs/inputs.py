"""Runs in Kaggle's inputs: the output of an earlier version of a notebook, or a copy."""

import glob
from pathlib import Path

from tpukit.host import files
from tpukit.host.environment import Environment
from tpukit.host.errors import TpukitError


def find_in_inputs(env: Environment, name: str) -> Path | None:
    """Return the folder of the run `name` below the Kaggle inputs, or None if there is none. Raises
    TpukitError for several."""
    if env.inputs is None or not name:
        return None
    # The deepest: notebooks/OWNER/NOTEBOOK/outputs/.
    patterns = [f"{'*/' * depth}{glob.escape(name)}" for depth in range(5)]
    runs = [folder for pattern in patterns for folder in sorted(env.inputs.glob(pattern)) if is_run(folder)]
    if len(runs) > 1:
        raise TpukitError(
            f"{len(runs)} inputs hold a run named {name}: {', '.join(map(str, runs))}. Remove all but one"
        )
    return runs[0] if runs else None


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run of tpukit."""
    return files.exists(folder / "config.json") and files.exists(folder / "checkpoints")
