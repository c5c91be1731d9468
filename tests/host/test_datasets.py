"""Files: datasets found in order, archives unpacked safely, everything written whole or not at all."""

import getpass
import gzip
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, best_weights, exact, same
from tpukit import Run, TpukitError, cli, detect, find_dataset, find_run, mount_drive, workloads
from tpukit.host import archives, arrays, files
from tpukit.host.environment import Environment
from tpukit.runs import weights
from tpukit.training import loop
from tpukit.workloads import cdeit, mnist
from tpukit.workloads.cdeit import simulator
from tpukit.workloads.datasets import make_synthetic
from tpukit.workloads.mshnet.data import LISTS


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A local environment whose current folder is tmp_path."""
    monkeypatch.chdir(tmp_path)
    return detect({}, tmp_path)


@pytest.fixture
def kaggle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return detect({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, tmp_path)


def touch(folder):
    folder.mkdir(parents=True)
    (folder / "trainval.txt").write_text("a\n")
    return folder


def test_a_given_path_is_taken_and_a_missing_one_is_an_error(here, tmp_path, capsys):
    place = touch(tmp_path / "mine")
    assert find_dataset(here, "IRSTD-1k", place) == place
    assert "the path that was given" in capsys.readouterr().out
    with pytest.raises(TpukitError, match="does not exist.*allow a fallback"):
        find_dataset(here, "IRSTD-1k", tmp_path / "mispelt")


def test_a_missing_path_falls_back_only_when_allowed_and_says_so(here, tmp_path, capsys):
    wanted = touch(tmp_path / "datasets/IRSTD-1k")
    assert find_dataset(here, "IRSTD-1k", tmp_path / "mispelt", fallback=True).resolve() == wanted
    out = capsys.readouterr().out
    assert "mispelt does not exist, looking elsewhere as allowed" in out and "found in ./datasets" in out


def test_the_places_come_in_order_drive_then_folder_then_synthetic(colab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "synthetic" in find_dataset(colab, "IRSTD-1k", size=4).name
    assert "because no real one was found" in capsys.readouterr().out
    folder = touch(tmp_path / "datasets/IRSTD-1k")
    assert find_dataset(colab, "IRSTD-1k").resolve() == folder
    drive = touch(colab.drive / "datasets/IRSTD-1k")
    assert find_dataset(colab, "IRSTD-1k") == drive
    assert "found on Drive" in capsys.readouterr().out


@pytest.fixture
def page(colab, tmp_path, monkeypatch):
    """A Colab notebook: stand-ins for its page, which answers questions, and for its `drive.mount`.

    What `mount` does: "yes" mounts a Drive with an IRSTD-1k, "no" raises, as when the user closes the window.
    """
    monkeypatch.chdir(tmp_path)
    found = SimpleNamespace(env=colab, answers=True, user="yes", asked=0)

    def mount(place):
        found.asked += 1
        if found.user == "no":
            raise RuntimeError("Error: credential propagation was unsuccessful")
        touch(colab.drive / "datasets/IRSTD-1k")

    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=found.answers)))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    drive = SimpleNamespace(drive=SimpleNamespace(mount=mount))
    monkeypatch.setitem(sys.modules, "google", SimpleNamespace(colab=drive))
    monkeypatch.setitem(sys.modules, "google.colab", drive)
    return found


def test_a_dataset_on_a_drive_that_is_not_mounted_is_found_by_asking_the_user(page, capsys):
    assert find_dataset(page.env, "IRSTD-1k") == page.env.drive / "datasets/IRSTD-1k" and page.asked == 1
    assert find_dataset(page.env, "IRSTD-1k") == page.env.drive / "datasets/IRSTD-1k" and page.asked == 1


def test_a_path_on_a_drive_that_is_not_mounted_is_found_by_asking_the_user(page):
    path = page.env.drive / "datasets/IRSTD-1k"
    assert find_dataset(page.env, "IRSTD-1k", path) == path and page.asked == 1


def test_a_user_who_refuses_drive_is_asked_once_and_gets_a_synthetic_set(page, capsys):
    page.user = "no"
    for _ in range(2):
        assert "synthetic" in find_dataset(page.env, "IRSTD-1k", size=4).name and page.asked == 1
    said = capsys.readouterr().out
    assert "credential propagation" in said and "Drive is not mounted" in said
    assert mount_drive(page.env) is None and page.asked == 2  # who asks for it is asked again


def test_who_refused_to_save_on_drive_is_not_asked_for_data_there(page):
    page.user = "no"
    assert mount_drive(page.env) is None
    find_dataset(page.env, "IRSTD-1k", size=4)
    assert page.asked == 1


def test_nobody_is_asked_for_drive_where_data_is_at_hand_or_nobody_could_answer(page, capsys):
    given = touch(page.env.outputs / "given")
    assert find_dataset(page.env, "IRSTD-1k", given) == given
    assert find_dataset(page.env, "eit", fallback=str(given)) == given
    page.answers = False  # papermill's kernel
    assert "synthetic" in find_dataset(page.env, "IRSTD-1k", size=4).name
    del sys.modules["IPython"]  # a shell's `tpukit train`
    assert "synthetic" in find_dataset(page.env, "IRSTD-1k", size=4).name
    assert "Drive is not mounted" in capsys.readouterr().out
    touch(Path("datasets/IRSTD-1k"))
    page.answers = True
    assert find_dataset(page.env, "IRSTD-1k") == Path("datasets/IRSTD-1k") and page.asked == 0


@pytest.mark.parametrize("name", ["cifar10", "IRSTD1k", "NUDT-SIRST", ""])
def test_a_name_that_no_workload_knows_is_an_error_that_lists_the_names(here, tmp_path, name):
    known = {workloads.find(workload).dataset for workload in workloads.WORKLOADS}
    assert len(known) == 3
    for ask in (lambda: find_dataset(here, name), lambda: make_synthetic(name, tmp_path / "made")):
        with pytest.raises(TpukitError) as error:
            ask()
        assert all(other in str(error.value) for other in known)
    assert not list(tmp_path.glob("**/*.png"))


def test_a_name_of_the_users_own_is_fine_where_there_is_data(here, tmp_path):
    mine = touch(tmp_path / "anywhere")
    assert find_dataset(here, "cifar10", mine) == mine
    there = touch(tmp_path / "datasets/cifar10")
    assert find_dataset(here, "cifar10").resolve() == there


@pytest.mark.parametrize("place", ["irstd-1k", "someone-set/IRSTD-1k", "datasets/someone/irstd-1k"])
def test_kaggle_inputs_are_searched_whatever_their_nesting_and_case(kaggle, place, capsys):
    wanted = touch(kaggle.inputs / place)
    assert find_dataset(kaggle, "IRSTD-1k") == wanted
    assert "found in the Kaggle inputs" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["notebooks/me/my-notebook/outputs", "my-notebook/outputs", "datasets/me/a-copy", "."])
def test_a_run_is_found_in_kaggle_inputs_whatever_their_nesting(kaggle, place):
    assert find_run(kaggle, "mine") is None
    run = Run.open(kaggle.inputs / place / "mine", mnist.MNIST())
    assert find_run(kaggle, "mine") == run.path and find_run(kaggle, "other") is None


def test_a_run_goes_on_from_an_earlier_versions_output_that_is_only_read(kaggle, digits, cpu):
    first, second = (mnist.MNIST(dataset_dir=digits, epochs=n, channels=2, batch_size=50, log_every=2) for n in (1, 2))
    run = Run.open(kaggle.outputs / "mine", first, earlier=find_run(kaggle, "mine"))
    loop.train(first, run, runtime=cpu)
    earlier = kaggle.inputs / "notebooks/me/my-notebook/outputs/mine"
    earlier.parent.mkdir(parents=True)
    run.path.rename(earlier)  # the session ends; its output becomes an input of the next one
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}

    run = Run.open(kaggle.outputs / "mine", second, earlier=find_run(kaggle, "mine"))
    loop.train(second, run, runtime=cpu)
    assert {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()} == before

    straight = Run.open(kaggle.outputs / "straight", second)
    loop.train(second, straight, runtime=cpu)
    assert exact(run) == exact(straight) and same(best_weights(run), best_weights(straight))
    # What is in the working folder is newer than any input.
    Run.open(run.path, second, earlier=find_run(kaggle, "mine"))
    assert run.records("train")[-1]["step"] == 8


def test_tpukit_train_goes_on_from_an_earlier_versions_output(kaggle, digits, monkeypatch):
    run = Run.open(kaggle.inputs / "my-notebook/outputs/mnist", mnist.MNIST(dataset_dir=digits))
    run.log("note", 1)
    monkeypatch.setattr("tpukit.host.environment.detect", lambda: kaggle)
    monkeypatch.setattr("tpukit.launching.launcher.launch", lambda *_, **__: None)
    assert cli.main(["train", "mnist", "--dataset-dir", str(digits)]) == 0
    assert len(Run.find(kaggle.outputs / "mnist").records("note")) == 1


def test_an_input_that_is_no_run_is_not_taken_for_one_and_two_runs_are_a_question(kaggle):
    (kaggle.inputs / "some-model/mine").mkdir(parents=True)
    (kaggle.inputs / "some-model/mine/config.json").write_text("{}")  # as many published models have one
    assert find_run(kaggle, "mine") is None and find_run(kaggle, "") is None
    (kaggle.inputs / "notebook/outputs/mnist/checkpoints").mkdir(parents=True)  # a run has the name of its dataset here
    (kaggle.inputs / "notebook/outputs/mnist/config.json").write_text("{}")
    assert find_run(kaggle, "mnist") == kaggle.inputs / "notebook/outputs/mnist"
    assert "synthetic" in find_dataset(kaggle, "mnist", size=12).name
    for owner in ("a", "b"):
        (kaggle.inputs / f"datasets/{owner}/set/mine/checkpoints").mkdir(parents=True)
        (kaggle.inputs / f"datasets/{owner}/set/mine/config.json").write_text("{}")
    with pytest.raises(TpukitError, match="2 inputs hold a run mine"):
        find_run(kaggle, "mine")
    Run.open(kaggle.outputs / "mine", mnist.MNIST())
    assert find_run(kaggle, "mine") is None  # there is no question where it lies in the outputs already


def test_an_earlier_run_of_other_settings_is_refused_by_name_and_not_copied(kaggle):
    earlier = Run.open(kaggle.inputs / "notebook/outputs/mine", mnist.MNIST(batch_size=50))
    with pytest.raises(TpukitError, match=f"{earlier.path} holds a run with other settings"):
        Run.open(kaggle.outputs / "mine", mnist.MNIST(batch_size=20), earlier=earlier.path)
    Run.open(kaggle.outputs / "mine", mnist.MNIST(batch_size=20))


def test_only_kaggle_has_inputs_to_find_a_run_in(colab, here):
    assert find_run(colab, "mine") is None and find_run(here, "mine") is None


def make_archive(path, entries):
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in entries.items():
                archive.writestr(name, text)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in entries.items():
                info = tarfile.TarInfo(name)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_an_archive_of_folders_too_deep_to_be_removed_again_is_refused_and_leaves_nothing(ending, tmp_path):
    deep = make_archive(tmp_path / f"deep{ending}", {"a/" * 1800 + "b": "x"})
    with pytest.raises(TpukitError, match="nests more than 100 folders"):
        archives.unpack(deep, tmp_path / "out/set")
    assert list((tmp_path / "out").iterdir()) == []
    whole = make_archive(tmp_path / f"whole{ending}", {"a/" * 99 + "b": "x"})
    assert len(list(archives.unpack(whole, tmp_path / "out/set").rglob("*"))) == 99


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
@pytest.mark.parametrize("top", ["", "IRSTD-1k/"])
def test_an_archive_is_found_and_unpacked_whole_with_or_without_a_top_folder(here, tmp_path, ending, top):
    (tmp_path / "datasets").mkdir()
    make_archive(tmp_path / f"datasets/IRSTD-1k{ending}", {f"{top}trainval.txt": "a", f"{top}images/a.png": "x"})
    found = find_dataset(here, "IRSTD-1k")
    assert (found / "trainval.txt").read_text() == "a" and (found / "images/a.png").exists()
    assert find_dataset(here, "IRSTD-1k") == found
    assert [p.name for p in found.parent.iterdir() if not p.name.startswith(".")] == ["IRSTD-1k"]


def test_another_archive_for_the_same_name_is_unpacked_beside_the_first(here, tmp_path, capsys):
    for name in ("IRSTD", "NUDT"):
        make_archive(tmp_path / f"{name}.zip", {"trainval.txt": name})
    first, second = (find_dataset(here, "IRSTD-1k", tmp_path / f"{name}.zip") for name in ("IRSTD", "NUDT"))
    assert [(folder / "trainval.txt").read_text() for folder in (first, second)] == ["IRSTD", "NUDT"]
    assert first.name == "IRSTD-1k" and second.name.startswith("IRSTD-1k-")
    capsys.readouterr()
    assert find_dataset(here, "IRSTD-1k", tmp_path / "NUDT.zip") == second
    assert find_dataset(here, "IRSTD-1k", tmp_path / "IRSTD.zip") == first
    assert "unpacking" not in capsys.readouterr().out
    make_archive(tmp_path / "IRSTD.zip", {"trainval.txt": "a newer one"})
    newer = find_dataset(here, "IRSTD-1k", tmp_path / "IRSTD.zip")
    assert (newer / "trainval.txt").read_text() == "a newer one"


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
@pytest.mark.parametrize("archive", ["eit", "train"])
def test_a_folder_that_belongs_to_the_dataset_is_not_taken_off(tmp_path, archive, ending):
    path = make_archive(tmp_path / f"{archive}{ending}", {"train/000000.npz": "x", "train/000001.npz": "x"})
    folder = archives.unpack(path, tmp_path / "unpacked", parts=("train", "test"))
    assert [p.name for p in folder.iterdir()] == ["train"] and len(list((folder / "train").iterdir())) == 2
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_top_folder_may_hold_one_of_its_own_name(tmp_path):
    path = make_archive(tmp_path / "set.zip", {"set/set/a.txt": "1", "set/b.txt": "2"})
    folder = archives.unpack(path, tmp_path / "unpacked")
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.txt")) == ["b.txt", "set/a.txt"]


def test_every_folder_that_a_workload_looks_for_is_one_of_the_parts():
    names = {name for convention in (*cdeit.CONVENTIONS.values(), cdeit.TRAINING) for name in convention.folders}
    names |= {pattern.split("/")[0] for patterns in LISTS.values() for pattern in patterns if "/" in pattern}
    parts = {name for key in workloads.WORKLOADS for name in workloads.find(key).dataset_parts}
    assert names | {"images", "masks", "raw"} == parts


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
@pytest.mark.parametrize(
    "name",
    [
        "../outside.txt",
        "{outside}",
        "a/../../outside.txt",
        "..\\outside.txt",
        "a\\..\\..\\outside.txt",
        "C:outside.txt",
        "//host/share/outside.txt",
        "a/.. /outside.txt",
    ],
)
def test_an_archive_that_leads_outside_is_refused_and_nothing_is_written(tmp_path, ending, name):
    name = name.format(outside=tmp_path / "outside.txt")
    archive = make_archive(tmp_path / f"bad{ending}", {"good.txt": "1", name: "2"})
    with pytest.raises(TpukitError, match="not safe"):
        archives.unpack(archive, tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == [] and not list(tmp_path.glob("**/*outside.txt"))


def tar_of(path, *members, **how):
    """A .tar.gz of TarInfo objects, without content but for regular files, which hold as many x as their size says."""
    with tarfile.open(path, "w:gz", **how) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size) if member.isreg() else None)
    return path


def member(name, kind=tarfile.REGTYPE, link="", size=0, **more):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    for field, value in more.items():
        setattr(info, field, value)
    return info


SPARSE = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,4", "GNU.sparse.size": "1000000000000"}


@pytest.mark.parametrize(
    "bad",
    [
        member("bad", tarfile.SYMTYPE, "/etc"),
        member("bad", tarfile.SYMTYPE, "good.txt"),
        member("bad", tarfile.LNKTYPE, "top/good.txt"),
        member("bad", tarfile.LNKTYPE, "../../outside.txt"),
        member("bad", tarfile.FIFOTYPE),
        member("bad", tarfile.CHRTYPE),
        member("bad", tarfile.BLKTYPE),
        member("bad", tarfile.GNUTYPE_SPARSE),
        member("bad", b"V"),
        member("bad", size=4, pax_headers=SPARSE),
        member("bad", size=4, pax_headers={"size": "-1024"}),
    ],
    ids=["link", "inner link", "hard link", "outer hard link", "pipe", "tty", "disk", "sparse", "unknown", "pax", "negative"],
)
def test_a_tar_gives_regular_files_and_folders_only(tmp_path, bad):
    path = tar_of(tmp_path / "bad.tar.gz", member("top", tarfile.DIRTYPE), member("top/good.txt", size=1), bad)
    with pytest.raises(TpukitError, match="not safe to unpack: 'bad'|a header in it is damaged"):  # some Pythons refuse -1024
        archives.unpack(path, tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


def test_links_that_only_together_lead_outside_write_nothing(tmp_path):
    # CVE-2025-4517: links so long that the check resolves another path than the system does.
    deep, names = "d" * 247, "abcdefghijklmnop"
    members, path = [], ""
    for name in names:
        members += [member(f"{path}{deep}", tarfile.DIRTYPE), member(f"{path}{name}", tarfile.SYMTYPE, deep)]
        path += f"{deep}/"
    links = "/".join(names)
    members += [
        member(f"{links}/{'l' * 254}", tarfile.SYMTYPE, "../" * len(names)),
        member("escape", tarfile.SYMTYPE, f"{links}/{'l' * 254}/../outside"),
        member("escape/key.txt", size=1),
    ]
    archive = tar_of(tmp_path / "bad.tar.gz", *members)
    with pytest.raises(TpukitError, match="not safe"):
        archives.unpack(archive, tmp_path / "here/target")
    assert not list(tmp_path.glob("**/key.txt"))


@pytest.mark.parametrize("kind", [0o120777, 0o010644, 0o020644, 0o060644])
def test_a_zip_gives_regular_files_and_folders_only(tmp_path, kind):
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        info = zipfile.ZipInfo("bad")
        info.external_attr = kind << 16
        archive.writestr(info, "/etc")
    with pytest.raises(TpukitError, match="not safe to unpack: 'bad'"):
        archives.unpack(tmp_path / "bad.zip", tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_an_archive_decides_nothing_but_names_and_contents(tmp_path, ending):
    path, long = tmp_path / f"set{ending}", "n" * 200
    names = [f"set/./{long}/tool", "set/a.txt", "set/a.txt"]  # the last of a name counts, as when tar itself unpacks
    if ending == ".zip":
        with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
            for number, name in enumerate(names):
                info = zipfile.ZipInfo(name)
                info.external_attr = 0o106777 << 16
                archive.writestr(info, "x" * number)
    else:
        tar_of(path, *[member(name, size=n, mode=0o6777, uid=1, gid=1) for n, name in enumerate(names)])
    umask = os.umask(0o027)
    try:
        folder = archives.unpack(path, tmp_path / "unpacked")
    finally:
        os.umask(umask)
    found = {str(place.relative_to(folder)): place.stat() for place in folder.rglob("*")}
    assert {name: oct(about.st_mode) for name, about in found.items()} == {
        long: "0o40750",
        f"{long}/tool": "0o100640",
        "a.txt": "0o100640",
    }
    assert found["a.txt"].st_size == 2 and {about.st_uid for about in found.values()} == {os.getuid()}


def test_a_zip_written_with_backslashes_gives_folders(tmp_path):
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for name in ("set\\images\\", "set\\images\\a.png"):
            archive.writestr(zipfile.ZipInfo(name), "" if name.endswith("\\") else "1")
    folder = archives.unpack(tmp_path / "set.zip", tmp_path / "unpacked")
    assert [str(p.relative_to(folder)) for p in folder.rglob("*.png")] == ["images/a.png"]


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
@pytest.mark.parametrize("holds", [{"big.bin": "0" * 2_000_000}, {f"{n}.txt": "" for n in range(300)}], ids=["big", "many"])
def test_an_archive_that_the_disk_cannot_hold_is_refused_beforehand(tmp_path, ending, holds, monkeypatch):
    archive = make_archive(tmp_path / f"bomb{ending}", holds)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    monkeypatch.setattr(archives, "_extract", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(TpukitError, match="does not fit.*0.00 GiB"):
        archives.unpack(archive, tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


def test_a_file_that_is_larger_than_its_archive_says_is_an_error_and_not_read_on(tmp_path):
    with zipfile.ZipFile(tmp_path / "lies.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", bytes(3_000_000))
    small = dict(zip(range(4), (1000).to_bytes(4, "little")))
    patched(tmp_path / "lies.zip", {22 + n: v for n, v in small.items()}, {24 + n: v for n, v in small.items()})
    folder = tmp_path / "unpacked"
    folder.mkdir()
    with pytest.raises(zipfile.BadZipFile):
        archives._extract(tmp_path / "lies.zip", folder)
    assert (folder / "a.txt").stat().st_size <= 1000
    with pytest.raises(TpukitError, match="cannot be unpacked"):
        archives.unpack(tmp_path / "lies.zip", tmp_path / "here/target")


def test_a_name_of_a_tar_that_would_fill_the_memory_is_not_read(tmp_path):
    header = member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=1 << 40).tobuf(tarfile.GNU_FORMAT)
    with gzip.open(tmp_path / "bad.tar.gz", "wb") as file:
        file.write(header + bytes(10_240))
    with pytest.raises(TpukitError, match="a header of 1099511627776 bytes"):
        archives.unpack(tmp_path / "bad.tar.gz", tmp_path / "here/target")


def test_what_a_killed_process_left_is_gone_after_the_next_and_nothing_else(tmp_path):
    archive = make_archive(tmp_path / "set.zip", {"a.txt": "1"})
    target = tmp_path / "here/set.v1"
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom tpukit.host import archives\n"
        "archives._extract = lambda *_: os.kill(os.getpid(), 9)\narchives.unpack(*map(Path, sys.argv[1:]))"
    )
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", program, archive, target], cwd=ROOT)
        assert ran.returncode == -9
    (left,) = target.parent.iterdir()  # the second and the third removed what the one before had left
    start = left.name.removesuffix(f"{left.name.split('.')[-2]}.partial")
    for name in (left.name.replace(platform.node(), "elsewhere"), f"{start}xx.partial", ".set.v1.original", f"x{left.name}"):
        (target.parent / name).mkdir()
    (target.parent / f"{start}afileaaa.partial").write_text("a file")
    (target.parent / f"{start}alinkaaa.partial").symlink_to(tmp_path)
    kept = {*target.parent.iterdir()} - {left}
    with files.atomic_folder(target.with_name("set")) as other, files.atomic_folder(target) as same:  # of a process that lives
        archives.unpack(archive, target)
        assert {*target.parent.iterdir()} == kept | {other, same, target}
        shutil.rmtree(target)
    assert archive.exists()


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_an_archive_cut_short_leaves_nothing_behind(tmp_path, ending):
    archive = make_archive(tmp_path / f"cut{ending}", {f"{i}.txt": os.urandom(500).hex() for i in range(20)})
    archive.write_bytes(archive.read_bytes()[:3000])
    with pytest.raises(TpukitError, match="cannot be unpacked.*again"):
        archives.unpack(archive, tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("where", ["header", "content"])
def test_one_changed_byte_of_a_tar_is_an_error_and_no_smaller_or_other_set(tmp_path, where):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for number in range(4):
            archive.addfile(member(f"{number}.txt", size=600), io.BytesIO(b"x" * 600))
    data = bytearray(gzip.compress(raw.getvalue(), 0))  # not compressed: the bytes stand there as they are
    data[data.index(b"2.txt") if where == "header" else data.index(b"xxx")] = ord("y")
    (tmp_path / "set.tar.gz").write_bytes(data)
    with pytest.raises(TpukitError, match="header in it is damaged|CRC"):
        archives.unpack(tmp_path / "set.tar.gz", tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


def patched(archive, local, central):
    """A .zip with one entry in which some bytes of its two headers are others. local, central: offset -> byte."""
    data = bytearray(archive.read_bytes())
    for start, changes in ((data.index(b"PK\3\4"), local), (data.index(b"PK\1\2"), central)):
        for offset, value in changes.items():
            data[start + offset] = value
    archive.write_bytes(data)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: patched(path, dict.fromkeys(range(35, 60), 255), {}), "invalid block type.*again"),
        (lambda path: patched(path, {6: 1}, {8: 1}), "encrypted.*pack it again.*without a password"),
        (lambda path: patched(path, {8: 99}, {10: 99}), "compression method.*pack it again"),
        (lambda path: path.write_bytes(b"no archive"), "not a zip file.*copy or download it again"),
    ],
    ids=["damaged", "encrypted", "unknown", "no archive"],
)
def test_an_archive_that_cannot_be_read_is_explained_and_leaves_nothing_behind(tmp_path, damage, words):
    with zipfile.ZipFile(tmp_path / "bad.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", os.urandom(500).hex())
    damage(tmp_path / "bad.zip")
    with pytest.raises(TpukitError, match=f"bad.zip cannot be unpacked.*{words}"):
        archives.unpack(tmp_path / "bad.zip", tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:3000], lambda data: b"", lambda data: data[:200] + b"x" * 300 + data[500:]],
    ids=["cut short", "empty", "changed"],
)
def test_a_damaged_mnist_says_so(tmp_path, damage):
    values = dict.fromkeys(("x_train", "x_test"), np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8))
    np.savez_compressed(tmp_path / "mnist.npz", **values, y_train=np.arange(5), y_test=np.arange(5))
    path = tmp_path / "mnist.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TpukitError, match="MNIST files are damaged.*again"):
        mnist.read_split(tmp_path, "train")


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: make_synthetic("mnist", folder / "mnist", size=12),
        lambda folder: simulator.simulate(folder / "eit", samples=1, test_samples=0, progress=False),
        lambda folder: archives.unpack(make_archive(folder.parent / "a.zip", {"a.txt": "1"}), folder / "a"),
    ],
    ids=["synthetic", "simulator", "unpack"],
)
def test_a_folder_that_cannot_be_made_asks_for_another_one(tmp_path, write):
    (tmp_path / "taken").write_text("a file, where a folder is needed")
    with pytest.raises(TpukitError, match=r"cannot write in .*taken.*\((file exists|not a directory).*choose another folder"):
        write(tmp_path / "taken")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), files.atomic_folder(tmp_path / "above/folder") as work:
        (work / "half").touch()
        assert not (tmp_path / "above/folder").exists()
        raise RuntimeError("the process fell over")
    assert os.listdir(tmp_path / "above") == []
    with files.atomic_folder(tmp_path / "above/folder") as work:
        (work / "all").touch()
    assert os.listdir(tmp_path / "above") == ["folder"] and os.listdir(tmp_path / "above/folder") == ["all"]


def test_two_processes_may_write_the_same_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with files.atomic_file(path) as file:
        file.write(b"one")
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 7)
            files.write_atomic(path, "two")
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["file"]


def test_a_user_without_a_name_is_called_by_number(tmp_path, monkeypatch):
    def nameless():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.delenv("TPUKIT_CACHE")
    assert files.cache_folder().name == f"tpukit-{os.getuid()}"
    with files.file_lock(tmp_path / "file"):
        pass


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    files.write_atomic(path, "old")
    with pytest.raises(RuntimeError), files.atomic_file(path) as file:
        file.write(b"half of the ne")
        raise RuntimeError("the process fell over")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_drive_is_mounted_on_colab_and_elsewhere_it_is_a_clear_no_op(colab, here, capsys):
    asked = []

    def mount(place):
        asked.append(place)
        colab.drive.mkdir(parents=True)

    assert mount_drive(colab, mount) == colab.drive and asked == [str(colab.drive.parent)]
    assert mount_drive(colab, mount) == colab.drive and len(asked) == 1
    assert mount_drive(here, mount) is None and len(asked) == 1
    assert "only Colab can mount it" in capsys.readouterr().out


def test_a_drive_that_the_user_refuses_to_mount_does_not_stop_the_notebook(colab, capsys):
    def refuse(place):
        raise ValueError("mount failed: credential propagation was unsuccessful")

    assert isinstance(colab, Environment) and mount_drive(colab, refuse) is None
    assert "not mounted (mount failed" in capsys.readouterr().out


# Weights


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))


@pytest.mark.parametrize("ending", [".pkl", ".tar", ".pth", ".pt", ".safetensors"])
@pytest.mark.parametrize("wrap", ["bare", "state_dict", "module."])
def test_weights_load_from_every_form_that_is_published(tmp_path, model, ending, wrap):
    state = {n: v + 1 for n, v in model.state_dict().items()}
    path = tmp_path / f"weights{ending}"
    named = {f"module.{n}": v for n, v in state.items()} if wrap == "module." else state
    if ending == ".safetensors":
        from safetensors.torch import save_file

        save_file(named, path)
    else:
        torch.save({"state_dict": named, "epoch": 3} if wrap == "state_dict" else named, path)
    weights.load(model, path)
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())


def test_weights_of_another_model_are_refused_naming_the_first_differences(tmp_path, model):
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(2, 2))
    torch.save(other.state_dict(), tmp_path / "other.pth")
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(TpukitError, match="another model") as error:
        weights.load(model, tmp_path / "other.pth")
    assert "0.weight: shape (2, 3, 3, 3) in the file, (2, 1, 3, 3) in the model" in str(error.value)
    assert "2.weight: not in the model" in str(error.value)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_a_pickle_that_would_run_code_is_refused_and_never_run(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pkl")
    with pytest.raises(TpukitError, match="could run code, so it was not opened"):
        weights.load(model, tmp_path / "evil.pkl")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["missing.pth", "damaged.pth", "empty.pth", "damaged.safetensors", "list.pth"])
def test_weight_files_that_are_none_say_so(tmp_path, model, name):
    (tmp_path / "damaged.pth").write_bytes(b"not a weight file")
    (tmp_path / "empty.pth").touch()
    (tmp_path / "damaged.safetensors").write_bytes(b"not a weight file")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(TpukitError, match=f"weights .*{name}"):
        weights.load(model, tmp_path / name)


def test_a_workloads_own_fallback_folder_is_taken_for_a_missing_path_and_said(here, capsys):
    with pytest.raises(TpukitError, match=r"gone does not exist, nor does data\."):
        find_dataset(here, "eit", "gone", fallback="data")
    Path("data").mkdir()
    assert find_dataset(here, "eit", "gone", fallback="data") == Path("data")
    assert "data (because gone does not exist)" in capsys.readouterr().out
    assert find_dataset(here, "eit", fallback="data") == Path("data")


def test_the_key_of_a_folder_is_that_of_its_contents(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path / "cache"))
    first, copy, other, renamed = (tmp_path / name for name in ("first", "copy", "other", "renamed"))
    for folder, name, text in (
        (first, "a.npz", "one"),
        (copy, "a.npz", "one"),
        (other, "a.npz", "two"),
        (renamed, "b.npz", "one"),
    ):
        folder.mkdir()
        (folder / name).write_text(text)
        os.utime(folder / name, (1, 1))
        (folder / "notes.txt").write_text(str(folder))
    key = lambda folder: arrays.content_key(folder, like=("*.npz",))  # noqa: E731
    assert key(first) == key(copy) and len({key(first), key(other), key(renamed)}) == 3
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", lambda path: pytest.fail("read again"))
        assert key(first) == key(copy)
    before = key(first)
    (first / "a.npz").write_text("new")
    assert key(first) != before
