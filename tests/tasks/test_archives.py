"""Archives: unpacked whole, nothing outside, nothing but regular files."""

import gzip
import io
import os
import shutil
import tarfile
import zipfile

import pytest

from tests.conftest import refuses
from tpukit.tasks import archives

ENDINGS = pytest.mark.parametrize("ending", [".zip", ".tar.gz"])


def make_archive(path, entries):
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in entries.items():
                archive.writestr(name, text)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in entries.items():
                archive.addfile(member(name, size=len(text)), io.BytesIO(text.encode()))
    return path


def member(name, kind=tarfile.REGTYPE, link="", size=0, **more):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    for field, value in more.items():
        setattr(info, field, value)
    return info


def tar_of(path, *members):
    """A .tar.gz of TarInfo objects, without content but for regular files, which hold as many x as their size
    says."""
    with tarfile.open(path, "w:gz") as archive:
        for info in members:
            archive.addfile(info, io.BytesIO(b"x" * info.size) if info.isreg() else None)
    return path


def refuse(archive, *data):
    """Assert that an archive is refused with these data, and that nothing of it was or is written."""
    folder = archive.parent / "here"
    with refuses(archive, *data):
        archives.unpack(archive, folder / "target")
    assert list(folder.iterdir()) == [] and not list(archive.parent.glob("**/*outside*"))


@pytest.mark.parametrize(
    "name, entries, found",
    [
        ("train.zip", ["train/0.npz", "train/1.npz"], ["train/0.npz", "train/1.npz"]),  # a part of the set
        ("eit.tar.gz", ["train/0.npz"], ["train/0.npz"]),
        ("set.zip", ["set/set/a.txt", "set/b.txt"], ["b.txt", "set/a.txt"]),  # not a part: taken off, once
        ("set.tar.gz", ["set/a.txt"], ["a.txt"]),
    ],
)
def test_a_top_folder_is_taken_off_unless_it_belongs_to_the_dataset(name, entries, found, tmp_path):
    path = make_archive(tmp_path / name, dict.fromkeys(entries, "x"))
    folder = archives.unpack(path, tmp_path / "unpacked", parts=("train", "test"))
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*")) == found
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_zip_of_macos_is_unpacked_without_what_macos_puts_next_to_its_folder(tmp_path):
    names = ["set/images/a.png", "__MACOSX/set/images/._a.png", ".DS_Store"]
    path = make_archive(tmp_path / "set.zip", dict.fromkeys(names, "x"))
    folder = archives.unpack(path, tmp_path / "unpacked", parts=("images",))
    assert [each.name for each in folder.iterdir()] == ["images"]


class Unmarked(zipfile.ZipInfo):
    """An entry whose name is in `encoding`, and that does not say so."""

    encoding = "cp437"

    def _encodeFilenameFlags(self):  # of zipfile
        return self.filename.encode(self.encoding), 0


@pytest.mark.parametrize(
    "encoding, names",
    [
        ("utf-8", ["训练集/猫/1.png", "café/ü.png"]),  # as macOS packs
        ("gb2312", ["训练集/猫/1.png", "测试集/狗/1.png"]),  # as a Chinese Windows does
        ("cp437", ["Mädchen/1.png", "été/ñ.png"]),  # as zip's specification says
    ],
)
def test_names_in_a_zip_that_does_not_say_their_encoding_are_read(encoding, names, tmp_path, monkeypatch):
    monkeypatch.setattr(Unmarked, "encoding", encoding)
    path = make_archive(tmp_path / "set.zip", {Unmarked(name): name for name in names})
    folder = archives.unpack(path, tmp_path / "unpacked")
    assert {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.png")} == {
        name: name for name in names
    }


OUTSIDE = ["../outside", "{}/outside", "a/../../outside", "..\\outside", "//host/share/outside"]


@ENDINGS
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_archive_that_leads_outside_is_refused(tmp_path, ending, name):
    name = name.format(tmp_path)
    refuse(make_archive(tmp_path / f"bad{ending}", {"good.txt": "1", name: "2"}), repr(name))


BAD_MEMBERS = {
    "inner link": member("bad", tarfile.SYMTYPE, "good.txt"),
    "hard link": member("bad", tarfile.LNKTYPE, "top/good.txt"),
    "pipe": member("bad", tarfile.FIFOTYPE),
    "device": member("bad", tarfile.BLKTYPE),
    "negative": member("bad", size=4, pax_headers={"size": "-1024"}),
}


@pytest.mark.parametrize("bad", BAD_MEMBERS)
def test_a_tar_gives_regular_files_and_folders_only(tmp_path, bad):
    top = member("top", tarfile.DIRTYPE), member("top/good.txt", size=1)
    archive = tar_of(tmp_path / "bad.tar.gz", *top, BAD_MEMBERS[bad])
    refuse(archive, "" if bad == "negative" else "'bad'")  # which some Pythons refuse themselves


@pytest.mark.parametrize("kind", [0o120777, 0o010644])
def test_a_zip_gives_regular_files_and_folders_only(tmp_path, kind):
    info = zipfile.ZipInfo("bad")
    info.external_attr = kind << 16
    refuse(make_archive(tmp_path / "bad.zip", {info: "/etc"}), "'bad'")


def test_links_that_only_together_lead_outside_write_nothing(tmp_path):
    # CVE-2025-4517: links so long that the check resolves another path than the system does.
    deep, names = "d" * 247, "abcdefghijklmnop"
    members, path = [], ""
    for name in names:
        members += [member(f"{path}{deep}", tarfile.DIRTYPE), member(f"{path}{name}", tarfile.SYMTYPE, deep)]
        path += f"{deep}/"
    end = f"{'/'.join(names)}/{'l' * 254}"
    members += [
        member(end, tarfile.SYMTYPE, "../" * len(names)),
        member("escape", tarfile.SYMTYPE, f"{end}/../outside"),
        member("escape/outside.txt", size=1),
    ]
    refuse(tar_of(tmp_path / "bad.tar.gz", *members), "link")


@ENDINGS
@pytest.mark.parametrize(
    "holds", [{"big.bin": "0" * 2_000_000}, {f"{n}.txt": "" for n in range(300)}], ids=["big", "many"]
)
def test_an_archive_that_the_disk_cannot_hold_is_refused_beforehand(tmp_path, ending, holds, monkeypatch):
    archive = make_archive(tmp_path / f"bomb{ending}", holds)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    for module, kind in ((zipfile, "ZipFile"), (tarfile, "TarFile")):
        monkeypatch.setattr(getattr(module, kind), "extractall", lambda *_: pytest.fail("it was unpacked"))
    refuse(archive, "0.00 GiB")


def patched(archive, local, central):
    """A .zip with one entry in which some bytes of its two headers are others. local, central: offset ->
    byte."""
    data = bytearray(archive.read_bytes())
    for start, changes in ((data.index(b"PK\3\4"), local), (data.index(b"PK\1\2"), central)):
        for offset, value in changes.items():
            data[start + offset] = value
    archive.write_bytes(data)


def test_a_file_that_is_larger_than_its_archive_says_is_an_error_and_not_read_on(tmp_path):
    archive = make_archive(tmp_path / "lies.zip", {"a.txt": bytes(3_000_000)})
    size = (1000).to_bytes(4, "little")
    patched(archive, dict(enumerate(size, 22)), dict(enumerate(size, 24)))
    refuse(archive, "a.txt")


@pytest.mark.parametrize("byte", [b"2.txt", b"xxx"], ids=["header", "content"])
def test_one_changed_byte_of_a_tar_is_an_error_and_no_smaller_or_other_set(byte, tmp_path):
    path = tar_of(tmp_path / "set.tar.gz", *[member(f"{number}.txt", size=600) for number in range(4)])
    # Not compressed: the bytes stand there as they are.
    data = bytearray(gzip.compress(gzip.decompress(path.read_bytes()), 0))
    data[data.index(byte)] = ord("y")
    path.write_bytes(data)
    refuse(path, "cannot be unpacked")
    path.write_bytes(data[:3000])  # cut short
    refuse(path, "cannot be unpacked")


def test_a_tar_gives_no_right_that_it_asks_for(tmp_path):
    folder = archives.unpack(
        tar_of(tmp_path / "set.tar.gz", member("set/tool", size=1, mode=0o6777, uid=1, gid=1)),
        tmp_path / "unpacked",
    )
    status = (folder / "tool").stat()
    assert status.st_mode & 0o6022 == 0 and status.st_uid == os.getuid()


DAMAGE = {
    "password": lambda path: patched(path, {6: 1}, {8: 1}),
    "not a zip file": lambda path: path.write_bytes(b"no archive"),
}


@pytest.mark.parametrize("cause", DAMAGE)
def test_an_archive_that_cannot_be_read_is_explained(tmp_path, cause):
    archive = make_archive(tmp_path / "bad.zip", {"a.txt": os.urandom(500).hex()})
    DAMAGE[cause](archive)
    refuse(archive, cause)
