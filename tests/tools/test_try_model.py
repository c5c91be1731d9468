"""`tpukit doctor --model`."""

from tests.workloads.cdeit.small import SMALL
from tpukit import CDEIT, detect
from tpukit.tools.try_model import try_model


def test_doctor_says_how_far_half_precision_moves_the_model(cpu):
    env = detect({}, "/nowhere")
    checks = try_model(CDEIT(**SMALL), env)
    assert [c.what for c in checks] == ["cdeit in fp32", "cdeit in bf16"] and {c.level for c in checks} == {"ok"}
    moved = float(checks[1].found.split("changes by ")[1].split("%")[0])
    assert 0.01 < moved < 5
