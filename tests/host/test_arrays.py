"""Arrays that processes share."""

import numpy as np

from tpukit.host import arrays


def test_mapped_arrays_are_made_once_and_again_when_what_they_are_made_from_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TPUKIT_CACHE", str(tmp_path / "cache"))
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
    assert arrays.mapped("set", "one", make)["a"].tolist() == [0, 1, 2, 3, 4]
    assert "every process keeps its own copy" in capsys.readouterr().out
