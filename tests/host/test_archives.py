"""Archives: unpacked whole, nothing outside, nothing but regular files."""

import gzip
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.conftest import ROOT, refuses
from tpukit import TpukitError
from tpukit.host import archives, files


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
    with refuses(deep, 100):
        archives.unpack(deep, tmp_path / "out/set")
    assert list((tmp_path / "out").iterdir()) == []
    whole = make_archive(tmp_path / f"whole{ending}", {"a/" * 99 + "b": "x"})
    assert len(list(archives.unpack(whole, tmp_path / "out/set").rglob("*"))) == 99


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


OUTSIDE = [
    "../outside.txt",
    "{outside}",
    "a/../../outside.txt",
    "..\\outside.txt",
    "a\\..\\..\\outside.txt",
    "C:outside.txt",
    "//host/share/outside.txt",
    "a/.. /outside.txt",
]


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_archive_that_leads_outside_is_refused_and_nothing_is_written(tmp_path, ending, name):
    name = name.format(outside=tmp_path / "outside.txt")
    archive = make_archive(tmp_path / f"bad{ending}", {"good.txt": "1", name: "2"})
    with refuses(archive, repr(name)):
        archives.unpack(archive, tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == [] and not list(tmp_path.glob("**/*outside.txt"))


def tar_of(path, *members, **how):
    """A .tar.gz of TarInfo objects, without content but for regular files, which hold as many x as their size
    says."""
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


SPARSE = {
    "GNU.sparse.major": "0",
    "GNU.sparse.minor": "1",
    "GNU.sparse.map": "0,4",
    "GNU.sparse.size": "1000000000000",
}


BAD_MEMBERS = {
    "link": member("bad", tarfile.SYMTYPE, "/etc"),
    "inner link": member("bad", tarfile.SYMTYPE, "good.txt"),
    "hard link": member("bad", tarfile.LNKTYPE, "top/good.txt"),
    "outer hard link": member("bad", tarfile.LNKTYPE, "../../outside.txt"),
    "pipe": member("bad", tarfile.FIFOTYPE),
    "tty": member("bad", tarfile.CHRTYPE),
    "disk": member("bad", tarfile.BLKTYPE),
    "sparse": member("bad", tarfile.GNUTYPE_SPARSE),
    "unknown": member("bad", b"V"),
    "pax": member("bad", size=4, pax_headers=SPARSE),
    "negative": member("bad", size=4, pax_headers={"size": "-1024"}),
}


@pytest.mark.parametrize("bad", BAD_MEMBERS)
def test_a_tar_gives_regular_files_and_folders_only(tmp_path, bad):
    path, top = tmp_path / "bad.tar.gz", member("top", tarfile.DIRTYPE)
    tar_of(path, top, member("top/good.txt", size=1), BAD_MEMBERS[bad])
    with pytest.raises(TpukitError, match="'bad'|header"):  # some Pythons refuse -1024
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
    with refuses(archive, "link"):
        archives.unpack(archive, tmp_path / "here/target")
    assert not list(tmp_path.glob("**/key.txt"))


@pytest.mark.parametrize("kind", [0o120777, 0o010644, 0o020644, 0o060644])
def test_a_zip_gives_regular_files_and_folders_only(tmp_path, kind):
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        info = zipfile.ZipInfo("bad")
        info.external_attr = kind << 16
        archive.writestr(info, "/etc")
    with refuses("bad.zip", "'bad'"):
        archives.unpack(tmp_path / "bad.zip", tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_an_archive_decides_nothing_but_names_and_contents(tmp_path, ending):
    path, long = tmp_path / f"set{ending}", "n" * 200
    # The last of a name counts, as when tar itself unpacks.
    names = [f"set/./{long}/tool", "set/a.txt", "set/a.txt"]
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
    modes = {name: oct(about.st_mode) for name, about in found.items()}
    assert modes == {long: "0o40750", f"{long}/tool": "0o100640", "a.txt": "0o100640"}
    assert found["a.txt"].st_size == 2 and {about.st_uid for about in found.values()} == {os.getuid()}


def test_a_zip_written_with_backslashes_gives_folders(tmp_path):
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for name in ("set\\images\\", "set\\images\\a.png"):
            archive.writestr(zipfile.ZipInfo(name), "" if name.endswith("\\") else "1")
    folder = archives.unpack(tmp_path / "set.zip", tmp_path / "unpacked")
    assert [str(p.relative_to(folder)) for p in folder.rglob("*.png")] == ["images/a.png"]


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
@pytest.mark.parametrize(
    "holds", [{"big.bin": "0" * 2_000_000}, {f"{n}.txt": "" for n in range(300)}], ids=["big", "many"]
)
def test_an_archive_that_the_disk_cannot_hold_is_refused_beforehand(tmp_path, ending, holds, monkeypatch):
    archive = make_archive(tmp_path / f"bomb{ending}", holds)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    monkeypatch.setattr(archives, "_extract", lambda *_: pytest.fail("it was unpacked"))
    with refuses(archive, "0.00 GiB"):
        archives.unpack(archive, tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


def test_a_file_that_is_larger_than_its_archive_says_is_an_error_and_not_read_on(tmp_path):
    with zipfile.ZipFile(tmp_path / "lies.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", bytes(3_000_000))
    small = dict(zip(range(4), (1000).to_bytes(4, "little")))
    patched(
        tmp_path / "lies.zip", {22 + n: v for n, v in small.items()}, {24 + n: v for n, v in small.items()}
    )
    folder = tmp_path / "unpacked"
    folder.mkdir()
    with pytest.raises(zipfile.BadZipFile):
        archives._extract(tmp_path / "lies.zip", folder)
    assert (folder / "a.txt").stat().st_size <= 1000
    with refuses(tmp_path / "lies.zip"):
        archives.unpack(tmp_path / "lies.zip", tmp_path / "here/target")


def test_a_name_of_a_tar_that_would_fill_the_memory_is_not_read(tmp_path):
    header = member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=1 << 40).tobuf(tarfile.GNU_FORMAT)
    with gzip.open(tmp_path / "bad.tar.gz", "wb") as file:
        file.write(header + bytes(10_240))
    with refuses(tmp_path / "bad.tar.gz", 1 << 40):
        archives.unpack(tmp_path / "bad.tar.gz", tmp_path / "here/target")


def test_what_a_killed_process_left_is_gone_after_the_next_and_nothing_else(tmp_path):
    archive, target = make_archive(tmp_path / "set.zip", {"a.txt": "1"}), tmp_path / "here/set.v1"
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom tpukit.host import archives\n"
        "archives._extract = lambda *_: os.kill(os.getpid(), 9)\narchives.unpack(*map(Path, sys.argv[1:]))"
    )
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", program, archive, target], cwd=ROOT)
        assert ran.returncode == -9
    (left,) = target.parent.iterdir()  # the second and the third removed what the one before had left
    start = left.name.removesuffix(f"{left.name.split('.')[-2]}.partial")
    elsewhere = left.name.replace(platform.node(), "elsewhere")
    for name in (elsewhere, f"{start}xx.partial", ".set.v1.original", f"x{left.name}"):
        (target.parent / name).mkdir()
    (target.parent / f"{start}afileaaa.partial").write_text("a file")
    (target.parent / f"{start}alinkaaa.partial").symlink_to(tmp_path)
    kept = {*target.parent.iterdir()} - {left}
    # Two of a process that lives.
    with files.atomic_folder(target.with_name("set")) as other, files.atomic_folder(target) as same:
        archives.unpack(archive, target)
        assert {*target.parent.iterdir()} == kept | {other, same, target}
        shutil.rmtree(target)
    assert archive.exists()


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_an_archive_cut_short_leaves_nothing_behind(tmp_path, ending):
    archive = make_archive(tmp_path / f"cut{ending}", {f"{i}.txt": os.urandom(500).hex() for i in range(20)})
    archive.write_bytes(archive.read_bytes()[:3000])
    with refuses(archive):
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
    with pytest.raises(TpukitError, match="set.tar.gz.*(header|CRC)"):
        archives.unpack(tmp_path / "set.tar.gz", tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []


def patched(archive, local, central):
    """A .zip with one entry in which some bytes of its two headers are others. local, central: offset ->
    byte."""
    data = bytearray(archive.read_bytes())
    for start, changes in ((data.index(b"PK\3\4"), local), (data.index(b"PK\1\2"), central)):
        for offset, value in changes.items():
            data[start + offset] = value
    archive.write_bytes(data)


DAMAGE = {
    "invalid block type": lambda path: patched(path, dict.fromkeys(range(35, 60), 255), {}),
    "password": lambda path: patched(path, {6: 1}, {8: 1}),
    "compression method": lambda path: patched(path, {8: 99}, {10: 99}),
    "not a zip file": lambda path: path.write_bytes(b"no archive"),
}


@pytest.mark.parametrize("cause", DAMAGE)
def test_an_archive_that_cannot_be_read_is_explained_and_leaves_nothing_behind(tmp_path, cause):
    with zipfile.ZipFile(tmp_path / "bad.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", os.urandom(500).hex())
    DAMAGE[cause](tmp_path / "bad.zip")
    with refuses(tmp_path / "bad.zip", cause):
        archives.unpack(tmp_path / "bad.zip", tmp_path / "here/target")
    assert list((tmp_path / "here").iterdir()) == []
