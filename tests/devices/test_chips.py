"""The table of chip facts agrees with the names of hosts and the compiler's topologies."""

import re

import pytest

from tpukit.devices import chips


@pytest.mark.parametrize(
    "accelerator_type, name",
    [
        ("v5litepod-8", "TPU v5e"),
        ("v5e-1", "TPU v5e"),
        ("v5p-8", "TPU v5p"),
        ("v2-8", "TPU v2"),
        ("v5", None),
        ("TPU", None),
    ],
)
def test_a_chip_is_found_by_the_type_that_a_host_reports(accelerator_type, name):
    chip = chips.find_chip(accelerator_type)
    assert (chip and chip.name) == name


def test_a_machine_has_the_chips_of_its_name_and_topology_and_the_memory_that_a_training_counts_on():
    for name, machine in chips.MACHINES.items():
        generation, count = name.split("-")
        rows, columns = map(int, re.fullmatch(rf"{generation}:(\d)x(\d)", machine.topology).groups())
        assert machine.chips == int(count) == rows * columns and machine.chip.short_name == generation
        assert machine.chip is chips.find_chip(generation) is chips.find_chip(machine.chip.cloud_type)
