"""For a Python with jax: a kernel of `tasks/cdeit/tpu/kernels.py`, interpreted on the CPU.

kernel_interpreter.py KIND HEADS ARRAYS.npz RESULTS.npz    arrays a, b, ... in the order of the arguments
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "tpukit_tasks/cdeit/tpu"))
import kernels

kind, heads, path, results = sys.argv[1:]
arrays = [jnp.asarray(value) for _, value in sorted(np.load(path).items())]
if arrays[0].dtype == jnp.uint16:  # bfloat16 has no type in numpy
    arrays = [jax.lax.bitcast_convert_type(a, jnp.bfloat16) if a.dtype == jnp.uint16 else a for a in arrays]
found = getattr(kernels, kind)(*arrays, heads=int(heads), interpret=True)
np.savez(results, *[np.asarray(value.astype(jnp.float32)) for value in found])
