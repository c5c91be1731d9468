"""The packed library: equal files, equal bytes; a cell unpacks it."""

import io
import subprocess
import sys
import tarfile

from release import pack
from tests.conftest import ROOT


def names_in(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_a_clone_packs_its_code_and_its_licence():
    archive = pack.library({"pyeit/LICENSE.txt": b"BSD"})
    files = names_in(archive)
    assert files["tpukit/leaves.py"] == (ROOT / "tpukit/leaves.py").read_bytes()
    assert files["tpukit/LICENSE"] == (ROOT / "LICENSE").read_bytes() and files["pyeit/LICENSE.txt"] == b"BSD"
    assert not [name for name in files if "__pycache__" in name]
    assert pack.library({"pyeit/LICENSE.txt": b"BSD"}) == archive


def test_a_cell_unpacks_what_was_packed_and_a_damaged_one_says_so(tmp_path):
    source = pack.cell(pack.library())["source"]
    text = f"{source}\nimport tpukit; print(tpukit.__path__[0])"
    command = [sys.executable, "-S", "-"]  # without what is installed here
    environ = dict(HOME=str(tmp_path))
    ran = subprocess.run(command, input=text, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert ran.stdout.startswith(str(tmp_path / ".cache/tpukit")), ran.stderr
    place = text.index('ARCHIVE = """') + 500
    broken = text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :]
    ran = subprocess.run(command, input=broken, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert "is damaged: download" in ran.stderr
