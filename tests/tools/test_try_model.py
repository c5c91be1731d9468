"""`tpukit doctor --model`."""

import pytest

from tests.tasks.cdeit.small import SMALL
from tpukit import CDEIT, MNIST, TpukitError, detect
from tpukit.tools.doctor import BLOCKS, model


def test_doctor_says_how_far_half_precision_moves_the_model(cpu):
    env = detect({}, "/nowhere")
    checks = model.try_model(CDEIT(**SMALL), env)
    assert [(c.what, c.level) for c in checks] == [("cdeit in fp32", "ok"), ("cdeit in bf16", "ok")]
    moved = float(checks[1].found.split("changes by ")[1].split("%")[0])
    assert 0.01 < moved < 5


def test_what_a_compiler_refuses_is_a_finding_with_its_reason_and_what_tpukit_refuses_an_error(monkeypatch):
    def refuse(*_):
        raise error

    monkeypatch.setattr(model, "take_step", refuse)
    # XLA's type for it
    error = ValueError("Ran out of memory in memory space hbm. Used 18.2G of 15.75G hbm.\nmore")
    checks = model.try_model(MNIST(), detect({}, "/nowhere"))
    assert checks[0].level == BLOCKS and "18.2G of 15.75G" in checks[0].found and checks[0].fix
    error = TpukitError("no such chip")
    with pytest.raises(TpukitError, match="no such chip"):
        model.try_model(MNIST(), detect({}, "/nowhere"))
