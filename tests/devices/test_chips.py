"""The table of chip facts agrees with the price table, the names of hosts and the compiler's topologies."""

import csv
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tpukit.devices import chips


def test_every_chip_has_a_price_at_google_cloud():
    tables = list((ROOT / "tpukit/tools").rglob("prices.csv"))
    rows = [row for table in tables for row in csv.reader(table.read_text().splitlines())]
    assert not tables or {chip.name for chip in chips.CHIPS} <= {
        row[0] for row in rows if "Google Cloud" in row
    }


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


def test_a_session_has_no_more_chips_than_its_place_lends():
    assert (chips.session_chips("TPU v5e", "Kaggle"), chips.session_chips("T4", "Kaggle")) == (8, 2)
    assert chips.session_chips("TPU v6e", "Colab") == chips.session_chips("T4", "Colab free") == 1
    assert chips.session_chips("TPU v5e", "Google Cloud") is None


def test_the_table_is_read_without_torch():
    program = "import sys; from tpukit.devices import chips; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
