"""TPU cores, with a mock where torch_xla meets the chips."""

import errno
import os

import pytest

from tests.conftest import refuses
from tpukit.devices import chip_access
from tpukit_tools import subprocess_call


def test_variables_that_would_send_cores_to_the_wrong_chip_or_peers_are_cleared(monkeypatch):
    names = {*chip_access.ONE_PROCESS_VARIABLES, *chip_access.LEFTOVER_VARIABLES}
    environ = dict(TPU_HOST_BOUNDS="1,1,1") | dict.fromkeys(names, "0")
    monkeypatch.setattr(os, "environ", environ)
    chip_access.clear_variables()
    assert not names & os.environ.keys() and os.environ["TPU_HOST_BOUNDS"] == "1,1,1"


KAGGLE = dict(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_ID="0")
KAGGLE["TPU_PROCESS_ADDRESSES"] = "local"
OLDER = dict(TPU_HOST_BOUNDS="1,1,1", TPU_CHIPS_PER_HOST_BOUNDS="2,4,1")
ONE_CHIP = dict(TPU_PROCESS_BOUNDS="1,1,1", TPU_CHIPS_PER_PROCESS_BOUNDS="1,1,1", TPU_VISIBLE_CHIPS="0")
ONE_CHIP["TPU_PROCESS_PORT"] = "8476"
NEWER = dict(TPU_PROCESS_BOUNDS="1,1,1", TPU_CHIPS_PER_PROCESS_BOUNDS="2,4,1")


def tpu_variables():
    return {name: value for name, value in os.environ.items() if name.startswith(("TPU_", "CLOUD_TPU"))}


@pytest.mark.parametrize(
    "left", [OLDER | ONE_CHIP, NEWER], ids=["Kaggle's after one chip was used", "newer names alone"]
)
def test_torch_xla_gives_each_of_eight_processes_a_chip_and_a_port_of_its_own(left, monkeypatch, xla):
    """By torch_xla's own function, which reads what `clear_variables` leaves."""
    from torch_xla._internal import tpu

    found = []
    for index in range(8):
        for name in tpu_variables():
            monkeypatch.delenv(name)
        for name, value in (KAGGLE | left).items():
            monkeypatch.setenv(name, value)
        chip_access.clear_variables()
        tpu.configure_topology(index, 8)
        found.append(tpu_variables())
    for name in ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID"):
        assert len({variables[name] for variables in found}) == 8, name
    addresses = ",".join(f"localhost:{port}" for port in range(8476, 8484))
    shared = dict(TPU_PROCESS_BOUNDS="2,4,1", TPU_CHIPS_PER_PROCESS_BOUNDS="1,1,1")
    assert all(
        variables.items() >= (shared | dict(TPU_PROCESS_ADDRESSES=addresses)).items() for variables in found
    )


def open_first_of_one(_):
    return chip_access.open_chip(0, 1)


@pytest.mark.slow
def test_a_chip_is_opened_by_torch_xlas_own_function(xla):
    """PJRT's opening for real, with the one core that PJRT_DEVICE=CPU has."""
    assert subprocess_call.call(open_first_of_one, None, timeout_s=120) == [0, 1]


def test_cores_that_see_each_themselves_only_are_refused(monkeypatch):
    pjrt = pytest.importorskip("torch_xla._internal.pjrt")

    monkeypatch.setattr(pjrt, "initialize_multiprocess", lambda index, processes: None)
    monkeypatch.setattr(chip_access, "rank_of_opened_chip", lambda: (0, 1))
    assert chip_access.open_chip(0, 1) == (0, 1)
    with refuses("core 3 sees 1 of 8 cores", "not linked", "fresh session"):
        chip_access.open_chip(3, 8)


def test_a_launch_waits_for_chips_that_a_dying_process_still_holds(tmp_path, monkeypatch, capsys):
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for name in ("0", "1", "vfio"):
        (tmp_path / "dev/vfio" / name).touch()
    opened, held = os.open, ["0", "0", "1"]  # chip 0 at two checks, chip 1 at one

    def refuse(path, *arguments):
        if getattr(path, "name", "") in held:
            held.remove(path.name)
            raise OSError(errno.EBUSY, "Device or resource busy")
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    chip_access.wait_until_free(print, tmp_path, timeout_s=60)
    printed = capsys.readouterr().out
    assert "dev/vfio/0, " in printed and "dev/vfio/1; waiting" in printed and held == []
    held += ["0", "1"] * 99
    with refuses("dev/vfio/0, ", "dev/vfio/1 for 0.2 s"):
        chip_access.wait_until_free(print, tmp_path, timeout_s=0.2)
