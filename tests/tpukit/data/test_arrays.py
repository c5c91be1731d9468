"""Arrays that processes share, and the key of a folder's contents."""

import contextlib
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import refuses
from tpukit.data import arrays
from tpukit.host import files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path / "cache"))


def test_the_key_of_a_folder_is_that_of_its_contents(tmp_path, monkeypatch):
    def key(folder, name="a.npz", text="one"):
        folder = tmp_path / folder
        if not folder.exists():
            folder.mkdir()
            (folder / name).write_text(text)
            os.utime(folder / name, (1, 1))
            (folder / "notes.txt").write_text(str(folder))
        return arrays.content_key(sorted(folder.glob("*.npz")))

    first = key("first")
    assert first == key("copy") and len({first, key("other", text="two"), key("renamed", "b.npz")}) == 3
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", lambda path: pytest.fail("read again"))
        assert key("first") == first
    (tmp_path / "first/a.npz").write_text("new")
    assert key("first") != first


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.npz").symlink_to("/proc/self/mem")
    with refuses(tmp_path / "a.npz", "cannot be read now", "errno 5"):
        arrays.content_key([tmp_path / "a.npz"])


def test_mapped_arrays_are_made_once_and_again_when_what_they_are_made_from_changes(tmp_path, monkeypatch):
    made = []

    def make():
        made.append(1)
        return dict(a=np.arange(5))

    for key in ("one", "one", "two"):
        array = arrays.mapped("set", key, make)["a"]
        assert array.tolist() == [0, 1, 2, 3, 4] and not array.flags.writeable
    assert len(made) == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path / "file"))
    with refuses(tmp_path / "file", "TPUKIT_CACHE"):
        arrays.mapped("set", "one", make)


def cut(path):
    path.write_bytes(path.read_bytes()[:140])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_mapped_arrays_that_are_damaged_are_refused_until_their_folder_is_deleted(damage, tmp_path):
    values = dict(labels=np.arange(5), images=np.zeros((5, 2)))
    arrays.mapped("set", "key", lambda: values)
    [path] = tmp_path.glob("cache/set-*/labels.npy")
    damage(path)
    with refuses(path.parent, "is damaged, so delete it"):
        arrays.mapped("set", "key", lambda: values)
    shutil.rmtree(path.parent)
    found = arrays.mapped("set", "key", lambda: values)
    assert found.keys() == values.keys() and found["labels"].tolist() == [0, 1, 2, 3, 4]
    arrays.mapped("set", "key", lambda: pytest.fail("made again, though it is whole"))


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@AS_ROOT
@pytest.mark.parametrize("part", ["", "labels.npy", "whole.json"])
def test_an_array_that_another_user_put_into_the_cache_is_refused(part, tmp_path):
    arrays.mapped("set", "key", lambda: dict(labels=np.arange(5)))
    [folder] = tmp_path.glob("cache/set-*")
    planted = folder / part
    os.chown(planted, 12345, 12345)
    with refuses(planted, "12345", "TPUKIT_CACHE"):
        arrays.mapped("set", "key", lambda: pytest.fail("made again"))
    os.chown(planted, 0, 0)
    assert arrays.mapped("set", "key", dict)["labels"].tolist() == [0, 1, 2, 3, 4]


@AS_ROOT
def test_a_cache_that_root_made_is_used_by_others():
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPUKIT_CACHE", cache)
        os.chmod(cache, 0o755)
        arrays.mapped("set", "key", lambda: dict(labels=np.arange(5)))
        os.seteuid(12345)
        try:
            assert arrays.mapped("set", "key", dict)["labels"].tolist() == [0, 1, 2, 3, 4]
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("mode, refused", [(0o777, True), (0o1777, False), (0o775, False)])
def test_a_cache_folder_that_all_can_write_to_is_refused_unless_it_is_sticky(mode, refused, tmp_path):
    (tmp_path / "cache").mkdir()
    os.chmod(tmp_path / "cache", mode)
    with refuses(tmp_path / "cache", "TPUKIT_CACHE", "chmod") if refused else contextlib.nullcontext():
        assert arrays.mapped("set", "key", lambda: dict(a=np.arange(5)))["a"].tolist() == [0, 1, 2, 3, 4]


def test_what_all_can_write_to_is_refused_and_not_made_with_any_umask(tmp_path):
    before = os.umask(0)
    try:
        for _ in range(2):
            arrays.mapped("set", "key", lambda: dict(a=np.arange(5)))
    finally:
        os.umask(before)
    for path in tmp_path.glob("cache/set-*/*.npy"):
        path.chmod(0o666)
        with refuses(path, "chmod"):
            arrays.mapped("set", "key", dict)


def test_an_interrupted_mapping_leaves_nothing(tmp_path):
    with pytest.raises(ValueError):
        arrays.mapped("set", "key", lambda: dict(a=np.arange(5), b=np.array([{}], object)))
    assert not list(tmp_path.glob("cache/*set-*"))
    assert arrays.mapped("set", "key", lambda: dict(a=np.arange(5)))["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "values", [b"no array", pickle.dumps({}), np.array([{}], object)], ids=["text", "pickle", "objects"]
)
def test_what_numpy_would_unpickle_is_refused_without_its_advice_to_do_so(tmp_path, values):
    path = tmp_path / "values.npy"
    path.write_bytes(values) if isinstance(values, bytes) else np.save(path, values, allow_pickle=True)
    with pytest.raises(ValueError) as error:
        arrays.load(path)
    assert "allow_pickle" not in str(error.value)
