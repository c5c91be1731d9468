"""`python -m benchmarks.cycles`: the compiler's cycle estimates of matrix products whose time on a v5e is
published.

Published: XLA's products of bfloat16 matrices in JAX's guide "Matrix Multiplication" for Pallas on TPUs
(docs.jax.dev, pallas/tpu/matmul, read in November 2026), the mean of 100 calls with the time to dispatch
them, on a TPU v5e."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tpukit.host.tables import Table
from tpukit.tools import plan
from tpukit.tools.plan import hlo

PUBLISHED_MS = {1024: 0.119, 4096: 0.827, 8192: 6.05}  # side of the matrices -> milliseconds
CLOCK_HZ = 1.5e9  # of a v5e, as 197 TFLOP/s of four units of 128 x 128 products
WRITE_GRAPH = """
import sys, jax, jax.export
x = jax.ShapeDtypeStruct((int(sys.argv[2]),) * 2, "bfloat16")
lowered = jax.jit(jax.numpy.matmul).trace(x, x).lower(lowering_platforms=("tpu",))
from jaxlib.mlir.dialects import stablehlo
module = lowered.compiler_ir()
open(sys.argv[1], "wb").write(stablehlo.serialize_portable_artifact(module, stablehlo.get_minimum_version()))
"""


def main():
    environ = {**os.environ, "PYTHONPATH": str(plan.install_compiler()), "JAX_PLATFORMS": "cpu"}
    rows = []
    for side, published_ms in PUBLISHED_MS.items():
        with tempfile.TemporaryDirectory() as folder:
            graph = Path(folder) / "matmul.mlirbc"
            subprocess.run([sys.executable, "-c", WRITE_GRAPH, graph, str(side)], env=environ, check=True)
            command = [sys.executable, "-P", "-s", plan.COMPILER_SCRIPT, graph, "v5e:1x1", "1", "processes"]
            ran = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
        operations = hlo.operations(json.loads(ran.stdout.splitlines()[-1])["hlo"])
        cycles, hbm_bytes = (
            sum(getattr(one, name) for one in operations) for name in ("cycles", "hbm_bytes")
        )
        estimate_ms = 1e3 * cycles / CLOCK_HZ
        flop_ms, hbm_ms = 1e3 * 2 * side**3 / 197e12, 1e3 * hbm_bytes / 819e9
        figures = (
            f"{flop_ms:.3g}",
            f"{hbm_ms:.3g}",
            f"{cycles / 1e6:.4g}",
            f"{estimate_ms:.3g}",
            published_ms,
        )
        rows.append((side, *figures, f"{published_ms / estimate_ms:.2f}"))
    columns = (
        "side",
        "FLOP ms",
        "HBM ms",
        "Mcycles",
        "cycles at 1.5 GHz, ms",
        "published ms",
        "published / cycles",
    )
    print(Table("Products of square bfloat16 matrices on a v5e", columns, rows))


if __name__ == "__main__":
    main()
