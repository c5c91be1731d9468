"""Archives: unpacked whole or refused, and no links."""

import errno
import shutil
import zipfile

import pytest

from tests.conftest import refuses
from tpukit.data import archives


def make_archive(path, entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries.items():
            archive.writestr(name, text)
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
        ("set.zip", ["set/set/a.txt", "set/b.txt"], ["b.txt", "set/a.txt"]),  # not a part: taken off, once
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


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "a/../../outside", "..\\outside", "C:\\outside", "//host/outside"]
)
def test_an_archive_with_a_name_that_leads_outside_is_refused(name, tmp_path):
    refuse(make_archive(tmp_path / "bad.zip", {"good..txt": "1", name: "2"}), "1 of its names", repr(name))


def test_an_archive_makes_no_links(tmp_path):
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    folder = archives.unpack(
        make_archive(tmp_path / "links.zip", {link: "/etc", "a..b": "1"}), tmp_path / "here"
    )
    assert (folder / "link").read_text() == "/etc" and not (folder / "link").is_symlink()


def test_an_archive_that_the_disk_cannot_hold_leaves_nothing(tmp_path, monkeypatch):
    def fill(archive, folder):
        (folder / "half").touch()
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", fill)
    archive = make_archive(tmp_path / "large.zip", {"a.txt": "1"})
    folder = tmp_path / "here"
    with refuses(folder / "target", "MiB free"):
        archives.unpack(archive, folder / "target")
    assert list(folder.iterdir()) == []


def test_an_archive_with_more_than_the_disk_has_room_for_is_refused_before_it_is_unpacked(
    tmp_path, monkeypatch
):
    archive = make_archive(tmp_path / "bomb.zip", dict.fromkeys(("a.bin", "b.bin"), bytes(60 * 2**20)))
    assert archive.stat().st_size < 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 100 * 2**20))
    monkeypatch.setattr(zipfile.ZipFile, "extractall", lambda *_: pytest.fail("it is unpacked"))
    refuse(archive, "120 MiB", "100 MiB")


def test_no_more_of_an_archive_is_unpacked_than_it_says(tmp_path, monkeypatch):
    path = make_archive(tmp_path / "lies.zip", {"a.bin": bytes(2**20)})
    size, written = (2**20).to_bytes(4, "little"), []
    path.write_bytes(path.read_bytes().replace(size, (10).to_bytes(4, "little")))
    copy = shutil.copyfileobj

    def counted(source, target):
        copy(source, target)
        written.append(target.tell())

    monkeypatch.setattr(shutil, "copyfileobj", counted)
    refuse(path, "CRC")
    assert sum(written) <= 10


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("first, second", [("a/b.txt", "a/b.txt"), ("a/b.txt", "a/./b.txt"), ("b", "./b")])
def test_an_archive_with_two_entries_for_one_path_is_refused(first, second, tmp_path):
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive:
        for name in (first, second, "a/", "a/"):
            archive.writestr(name, "")
    refuse(tmp_path / "twice.zip", "1 of its names", repr(first))


def test_an_archive_that_cannot_be_read_is_explained(tmp_path):
    archive = tmp_path / "bad.zip"
    archive.write_bytes(b"no archive")
    refuse(archive, "not a zip file", "unpack it yourself")
