"""Five public loops' shapes (see public_loops.py) on two cores and on one. On XLA they take minutes to
compile, and the emulated TPU runs them too."""

import pytest
import torch

from tests.tpukit.launching.conftest import CPU, needs_torch_xla, python, xla_environ
from tests.tpukit.launching.public_loops import LOOPS

# The other launch comes second, because it opens this process's XLA device.
PROGRAM = """
import contextlib, io
from tests.tpukit.launching.public_loops import all_loops

with contextlib.redirect_stdout(io.StringIO()) as out:
    two = launch(all_loops, cores=2)
    one = launch(all_loops, cores=1)
torch.save(dict(two=two, one=one, out=out.getvalue()), sys.argv[1])
"""
# In fp32 rounding is 1e-7 of the largest gradients, and Adam makes of the smallest ones steps as large as of
# those. LBFGS computes in fp64.
BOUNDS = dict.fromkeys(LOOPS, 1e-5) | dict(lbfgs=1e-10)
STEPS = dict(mnist=12, dcgan=4, nanogpt=6, unet=6, lbfgs=6)  # lbfgs: evaluations


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("xla", marks=[pytest.mark.nightly, pytest.mark.long])]
)
def launched_loops(request, tmp_path_factory):
    """dict(two, one: name -> what the loop returned on as many cores, out: what was printed)."""
    if request.param == "xla":
        needs_torch_xla()
    path = tmp_path_factory.mktemp("public") / "ended.pt"
    ran = python(PROGRAM, path, env=CPU if request.param == "cpu" else xla_environ())
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return torch.load(path, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_public_loops_shape_on_two_cores_trains_what_it_trains_on_one(name, launched_loops):
    two, one = launched_loops["two"][name], launched_loops["one"][name]
    bound = BOUNDS[name]
    assert two["ranks"][0] == two["ranks"][1]
    assert two["ranks"][0] == pytest.approx(one["ranks"][0], abs=bound, rel=0)
    assert two["losses"] == pytest.approx(one["losses"], abs=bound, rel=0)
    assert one["moved"] > 500 * bound
    assert two["steps"] == one["steps"] == STEPS[name]


@pytest.mark.slow
def test_public_loops_shapes_are_accused_of_nothing(launched_loops):
    lines = [line for line in launched_loops["out"].splitlines() if line.strip()]
    assert len(lines) == 4 and lines[-1] == "all 2 cores started", lines
