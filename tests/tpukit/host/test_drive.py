"""Google Drive on Colab: who is asked for it, and how often."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tpukit.data.test_datasets import touch
from tpukit import find_dataset, mount_drive


@pytest.fixture
def page(colab, tmp_path, monkeypatch):
    """A Colab notebook: fakes of its page, which answers questions, and for its `drive.mount`.

    What `mount` does: "yes" mounts a Drive with an IRSTD-1k, "no" raises, as when the user closes the window.
    """
    monkeypatch.chdir(tmp_path)
    found = SimpleNamespace(env=colab, answers=True, user="yes", asked=[])

    def mount(place):
        found.asked.append(place)
        if found.user == "no":
            raise RuntimeError("Error: credential propagation was unsuccessful")
        touch(colab.drive / "datasets/IRSTD-1k")

    kernel = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=found.answers))
    )
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    drive = SimpleNamespace(drive=SimpleNamespace(mount=mount))
    monkeypatch.setitem(sys.modules, "google", SimpleNamespace(colab=drive))
    monkeypatch.setitem(sys.modules, "google.colab", drive)
    return found


@pytest.mark.parametrize("is_given", [False, True])
def test_a_dataset_on_a_drive_that_is_not_mounted_is_found_by_asking_the_user_once(is_given, page):
    path = page.env.drive / "datasets/IRSTD-1k"
    for _ in range(2):
        assert find_dataset("IRSTD-1k", path if is_given else None, env=page.env) == path
        assert len(page.asked) == 1


@pytest.mark.parametrize("is_asked_for_results_first", [False, True])
def test_a_user_who_refuses_drive_is_not_asked_again_for_data(is_asked_for_results_first, page, capsys):
    page.user = "no"
    if is_asked_for_results_first:
        assert mount_drive(page.env) is None
    for _ in range(2):
        assert "synthetic" in find_dataset("IRSTD-1k", size=4, env=page.env).name and len(page.asked) == 1
    printed = capsys.readouterr().out
    assert "credential propagation" in printed and "Drive is not mounted" in printed
    assert mount_drive(page.env) is None and len(page.asked) == 2  # who asks for it is asked again


def test_nobody_is_asked_for_drive_where_data_is_at_hand_or_nobody_could_answer(page, capsys):
    given = touch(page.env.outputs / "given")
    assert find_dataset("IRSTD-1k", given, env=page.env) == given
    assert find_dataset("eit", fallback=str(given), env=page.env) == given
    page.answers = False  # papermill's kernel
    assert "synthetic" in find_dataset("IRSTD-1k", size=4, env=page.env).name
    del sys.modules["IPython"]  # a shell's `tpukit train`
    assert "synthetic" in find_dataset("IRSTD-1k", size=4, env=page.env).name
    assert "Drive is not mounted" in capsys.readouterr().out
    touch(Path("datasets/IRSTD-1k"))
    page.answers = True
    assert find_dataset("IRSTD-1k", env=page.env) == Path("datasets/IRSTD-1k") and len(page.asked) == 0


def test_drive_is_mounted_on_colab_and_elsewhere_it_is_a_clear_no_op(page, here, capsys):
    for _ in range(2):
        assert mount_drive(page.env) == page.env.drive and page.asked == [str(page.env.drive.parent)]
    assert mount_drive(here) is None and len(page.asked) == 1
    assert "only Colab" in capsys.readouterr().out
