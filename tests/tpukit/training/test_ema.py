"""The moving average of the weights."""

import torch

from tests.conftest import checkpoint
from tests.tpukit.training.conftest import DIGITS, train_in
from tpukit import MNIST
from tpukit.training import ema


def test_the_average_of_the_weights_forgets_the_start_quickly_and_then_as_slowly_as_asked(
    digits, tmp_path, cpu, monkeypatch
):
    task = MNIST(dataset_dir=digits, epochs=4, ema_decay=0.6, **DIGITS)  # 25 steps per epoch
    seen = []
    update_average = ema.update_average

    def noting(averaged, model, weight):
        seen.append({n: v.clone() for n, v in model.state_dict().items()})
        update_average(averaged, model, weight)

    monkeypatch.setattr(ema, "update_average", noting)
    run = train_in(tmp_path, task, cpu)
    torch.manual_seed(task.seed)
    mean = task.model().state_dict()
    assert len(seen) == 10
    for count, now in enumerate(seen, 1):
        decay = min(0.6, 1 - (1 + count) ** (-2 / 3))
        mean = {n: decay * mean[n] + (1 - decay) * now[n] for n in mean}
    kept = checkpoint(run)["averaged"]
    assert all(torch.allclose(kept[n], mean[n], atol=1e-6) for n in mean)
    assert not torch.allclose(kept["0.weight"], checkpoint(run)["model"]["0.weight"], atol=1e-4)
