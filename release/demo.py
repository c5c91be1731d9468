"""`python -m release.demo RUN`: writes the weights that travel with tpukit, in bfloat16, with the settings
and the score of the run, which `tpukit train mshnet --network small` made."""

import json
import sys

import torch

from tpukit.inference.trained import DEMO_FOLDER
from tpukit.runs import weights
from tpukit.runs.run import Run

MAX_BYTES = 400_000


def main(folder: str) -> None:
    """Write weights.safetensors. Counters of batch norm, which change no result, are left out."""
    run = Run.find(folder)
    state = weights.read(run.best())
    state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items() if tensor.is_floating_point()}
    metadata = weights.metadata(run.best())
    content = b"".join(weights.serialize(state, metadata))
    if len(content) > MAX_BYTES:
        raise SystemExit(f"{len(content)} bytes: the small network has at most {MAX_BYTES}")
    (DEMO_FOLDER / "weights.safetensors").write_bytes(content)
    print(json.dumps(metadata, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
