"""Archives: unpacked whole or refused, and no links."""

import errno
import zipfile

import pytest

from tests.conftest import refuses
from tpukit.tasks import archives


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


def test_an_archive_that_cannot_be_read_is_explained(tmp_path):
    archive = tmp_path / "bad.zip"
    archive.write_bytes(b"no archive")
    refuse(archive, "not a zip file", "unpack it yourself")
