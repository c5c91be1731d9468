"""What a workload must implement, and settings that are refused."""

import dataclasses
import inspect

import pytest

from tpukit import CDEIT, MNIST, MSHNet, TpukitError, Workload


@pytest.mark.parametrize("method", ["datasets", "model", "optimizer", "loss", "predict", "evaluate", "panels"])
def test_a_workload_that_leaves_a_method_out_is_told_which(method):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Empty(Workload):
        name, dataset, score = "empty", "none", "x"

    arguments = inspect.signature(getattr(Empty(), method)).parameters.values()
    with pytest.raises(NotImplementedError, match=rf"Empty must implement {method}\(\)"):
        getattr(Empty(), method)(*[None for a in arguments if a.default is a.empty])


@pytest.mark.parametrize(
    "wrong",
    [dict(batch_size=0), dict(batch_size=-4), dict(log_every=0), dict(eval_every=0), dict(num_workers=-1), dict(seed=-1)],
    ids=str,
)
@pytest.mark.parametrize("workload", [MNIST, MSHNet, CDEIT])
def test_settings_that_no_training_can_have_are_refused_by_their_name(workload, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(TpukitError, match=rf"{name}={value}: it has to be [01] or more"):
        workload(**wrong)
