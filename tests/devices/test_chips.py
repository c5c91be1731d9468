"""The table of chip facts agrees with the names of hosts."""

import pytest

from tpukit.devices import chips


@pytest.mark.parametrize(
    "accelerator_type, name",
    [
        ("v5litepod-8", "TPU v5e"),
        ("v5e-1", "TPU v5e"),
        ("v5p-8", None),
        ("v5", None),
    ],
)
def test_a_chip_is_found_by_the_type_that_a_host_reports(accelerator_type, name):
    chip = chips.find_chip(accelerator_type)
    assert (chip and chip.name) == name
