"""The packed library: equal files, equal bytes; a cell unpacks it."""

import io
import subprocess
import sys
import tarfile

import pytest

from release import pack
from tests.conftest import ROOT

OTHERS = {"pyeit/LICENSE.txt": b"BSD"}


@pytest.fixture(scope="module")
def archive():
    return pack.library(OTHERS)


def test_a_clone_packs_its_code_and_its_licence_and_equal_files_give_equal_bytes(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    assert files["tpukit/leaves.py"] == (ROOT / "tpukit/leaves.py").read_bytes()
    assert files["tpukit/LICENSE"] == (ROOT / "LICENSE").read_bytes() and files["pyeit/LICENSE.txt"] == b"BSD"
    assert not [name for name in files if "__pycache__" in name]
    assert pack.library(OTHERS) == archive


def test_a_cell_unpacks_what_was_packed_and_a_damaged_one_says_so(archive, tmp_path):
    def run(source):
        command = [sys.executable, "-S", "-"]  # without what is installed here
        environ = dict(HOME=str(tmp_path / "home"))
        return subprocess.run(
            command, input=source, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
        )

    (tmp_path / "home").mkdir()
    source = f"{pack.cell(archive)['source']}\nimport tpukit; print(tpukit.__path__[0])"
    place = source.index('ARCHIVE = """') + 500
    broken = source[:place] + ("0" if source[place] != "0" else "1") + source[place + 1 :]
    assert "is damaged: download" in run(broken).stderr and not (tmp_path / "home/.cache").exists()
    ran = run(source)
    assert ran.stdout.startswith(str(tmp_path / "home/.cache/tpukit")), ran.stderr
