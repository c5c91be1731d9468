"""A dataset in rows of lanes: the same samples, and in the TPU compiler's graph no copy of the set."""

import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("torch_xla")

from tests.conftest import ROOT


@pytest.mark.parametrize(
    "shape, dtype, rows",
    [
        ((7, 3, 32, 32), np.uint8, (7, 24, 128)),
        ((7, 1, 480, 640), np.uint8, (14, 1200, 128)),  # 300 KiB
        ((7, 3, 333, 111), np.float32, (14, 440, 128)),  # 434 KiB
        ((7, 600), np.int16, (7, 8, 128)),
        ((7, 8, 128), np.bool_, (7, 8, 128)),
        ((7, 512), np.float32, (7, 512)),  # a row would be half empty
        ((7, 28, 28), np.uint8, (7, 28, 28)),
        ((7, 64, 64), np.int64, (7, 64, 64)),
        ((7,), np.int64, (7,)),
    ],
)
def test_samples_in_rows_are_the_samples_of_the_array_bit_by_bit(shape, dtype, rows, xla):
    given = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    array = given[..., 0] % 2 == 1 if dtype is np.bool_ else given.view(dtype)[..., 0]
    whole = xla.put_dataset(dict(one=array, label=np.arange(len(array))))
    assert whole["one"].rows.shape == rows
    index = np.array([6, 0, 3, 3])
    chosen = torch.as_tensor(index).to(xla.device)
    found = {name: xla.compile(stored.take)(chosen).cpu() for name, stored in whole.items()}
    assert found["one"].numpy().tobytes() == array[index].tobytes()
    assert found["one"].shape == (4, *shape[1:])
    assert found["label"].tolist() == index.tolist()


def test_an_array_that_is_put_on_the_device_may_be_changed_afterwards(xla):
    array, labels = np.zeros((2, 3, 32, 32), np.uint8), np.zeros(2, np.int64)
    whole = xla.put_dataset(dict(image=array, label=labels))
    array += 1
    labels += 1
    assert not any(stored.take(torch.arange(2).to(xla.device)).any() for stored in whole.values())


TRACER = """
import os, sys
from pathlib import Path
import numpy as np, torch
from tpukit_tools.plan.xla_export import ExportRuntime
from tpukit.training.data import BatchLoader, BatchSpec

path, dtype, *shape = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
class Data:
    device_arrays = lambda self: dict(image=np.zeros(shape, dtype))
    device_nbytes = lambda self: np.zeros(shape, dtype).nbytes
    sample_parameters = lambda self, indices, numbers: {}
    compose = lambda self, rows, parameters: rows
    __len__ = lambda self: shape[0]

runtime = ExportRuntime("fp32")
loader = BatchLoader(Data(), runtime, workers=0)
batch = next(loader.batches([BatchSpec(np.arange(16))]))
weight = torch.ones(8, shape[1], 3, 3).to(runtime.device)
runtime.sync()
def convolved(batch):
    return torch.nn.functional.conv2d(loader.compose(batch)["image"].float(), weight)

runtime.compile(convolved)(batch)
Path(path).write_bytes(runtime.graphs[0]["stablehlo"])
os._exit(0)  # else what is still pending would run
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape, dtype",
    [((1800, 3, 224, 224), "uint8"), ((700, 1, 480, 640), "uint8"), ((500, 3, 333, 111), "float32")],
)
def test_the_compiled_graph_reads_a_batch_of_the_set_and_nothing_of_its_size(shape, dtype, tmp_path):
    from benchmarks import hlo
    from tpukit_tools.plan import compiler
    from tpukit_tools.plan.compiler import MACHINES

    graph = tmp_path / "graph.mlirbc"
    trace = [sys.executable, "-c", TRACER, graph, dtype, *map(str, shape)]
    subprocess.run(trace, cwd=ROOT, check=True, capture_output=True, timeout=300)
    libraries = compiler.install_compiler(lambda text: None)
    ran = compiler.run_compiler(graph, MACHINES["v5e-1"], libraries)
    text = compiler.read_answer(ran, libraries)["hlo"]
    computations, entry = hlo.parse(text)
    whole = np.zeros(shape, dtype).nbytes
    # The set is an argument of the graph. What reads it, or the same bytes by another name, reads no quarter
    # of it.
    names, readers = set(), []
    for one in computations[entry].values():
        if one.opcode == "parameter" and one.arrays[0].nbytes >= whole:
            names.add(one.name)
        elif names & set(one.operands):
            (names.add if one.opcode == "bitcast" else readers.append)(one.name)
    moved = {name: nbytes for name, nbytes in hlo.operations(text) if name in readers}
    assert moved and max(moved.values()) < whole / 4, moved
