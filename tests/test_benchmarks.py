"""The benchmarks that stand in for a device still fit the loop that they measure."""

import pytest

from benchmarks import overheads
from tpukit.workloads.datasets import make_synthetic


@pytest.mark.parametrize("scored", [True, False])
def test_a_loop_on_the_fast_device_loses_some_time_to_each_of_its_parts(tmp_path, monkeypatch, scored):
    for name, number in dict(EPOCHS=2, STEPS=5, BATCHES=2).items():
        monkeypatch.setattr(overheads, name, number)
    folder = make_synthetic("IRSTD-1k", tmp_path / "infrared", size=50)  # 40 to train, 10 to test
    found = overheads.measure(folder, scored=scored)
    assert found.keys() == overheads.measure_bare().keys()
    assert min(found["lost_ms"], found["saves_ms"], found["records_ms"]) > 0
