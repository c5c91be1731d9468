"""Datasets by their names: those of the workloads, their folders, and their synthetic sets."""

import pytest

from tpukit import TpukitError, find_dataset, workloads
from tpukit.workloads import cdeit
from tpukit.workloads.datasets import make_synthetic
from tpukit.workloads.mshnet.data import LISTS


@pytest.mark.parametrize("name", ["cifar10", "IRSTD1k", "NUDT-SIRST", ""])
def test_a_name_that_no_workload_knows_is_an_error_that_lists_the_names(here, tmp_path, name):
    known = {workloads.find(workload).dataset for workload in workloads.WORKLOADS}
    assert len(known) == 3
    for ask in (lambda: find_dataset(here, name), lambda: make_synthetic(name, tmp_path / "made")):
        with pytest.raises(TpukitError) as error:
            ask()
        assert all(other in str(error.value) for other in known)
    assert not list(tmp_path.glob("**/*.png"))


def test_every_folder_that_a_workload_looks_for_is_one_of_the_parts():
    names = {name for convention in (*cdeit.CONVENTIONS.values(), cdeit.TRAINING) for name in convention.folders}
    names |= {pattern.split("/")[0] for patterns in LISTS.values() for pattern in patterns if "/" in pattern}
    parts = {name for key in workloads.WORKLOADS for name in workloads.find(key).dataset_parts}
    assert names | {"images", "masks", "raw"} == parts
