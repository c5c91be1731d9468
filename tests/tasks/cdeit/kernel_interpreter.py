"""For a Python with jax: the kernels of `tasks/cdeit/tpu/kernels.py`, interpreted on the CPU or counted.

kernel_interpreter.py run KIND HEADS ARRAYS.npz RESULTS.npz    arrays a, b, ... in the order of the arguments
kernel_interpreter.py count KIND B T C HEADS BIASED            prints the bytes that its blocks move
"""

import itertools
import math
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "tpukit/tasks/cdeit/tpu"))
import kernels


def run(kind, heads, path, results):
    arrays = [jnp.asarray(value) for _, value in sorted(np.load(path).items())]
    if arrays[0].dtype == jnp.uint16:  # bfloat16 has no type in numpy
        arrays = [
            jax.lax.bitcast_convert_type(a, jnp.bfloat16) if a.dtype == jnp.uint16 else a for a in arrays
        ]
    found = getattr(kernels, kind)(*arrays, heads=int(heads), interpret=True)
    np.savez(results, *[np.asarray(value.astype(jnp.float32)) for value in found])


def count(kind, batch, tokens, width, heads, biased):
    """Go through the grid with the kernel's own blocks, and add up those that differ from the step before."""
    shape, heads = (int(batch), int(tokens), 3 * int(width)), int(heads)
    with mock.patch.object(kernels.pallas, "pallas_call") as call:
        getattr(kernels, kind)(*kernels.arguments(kind, shape, heads, biased == "1"), heads=heads)
    how, operands = call.call_args.kwargs, call.return_value.call_args.args
    specs, arrays = [*how["in_specs"], *how["out_specs"]], [*operands, *how["out_shape"]]
    total = 0
    for spec, array in zip(specs, arrays):
        last = None
        for step in itertools.product(*map(range, how["grid"])):
            block = tuple(int(index) for index in spec.index_map(*step))
            total += (block != last) * math.prod(spec.block_shape) * array.dtype.itemsize
            last = block
    print(total)


if __name__ == "__main__":
    dict(run=run, count=count)[sys.argv[1]](*sys.argv[2:])
