"""The key of a folder's contents."""

import os

import pytest

from tpukit.host import arrays, files


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

    def key(folder):
        return arrays.content_key(folder, like=("*.npz",))

    assert key(first) == key(copy) and len({key(first), key(other), key(renamed)}) == 3
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", lambda path: pytest.fail("read again"))
        assert key(first) == key(copy)
    before = key(first)
    (first / "a.npz").write_text("new")
    assert key(first) != before
