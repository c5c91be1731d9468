"""The packed library: the same from a clone, an installed tpukit and an unpacked copy; equal files, equal
bytes."""

import io
import shutil
import subprocess
import sys
import tarfile

from tests.conftest import ROOT
from tpukit.tools import pack

PRINT = "import hashlib; from tpukit.tools import pack; print(hashlib.sha256(pack.library()).hexdigest())"


def names_in(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_a_clone_packs_its_code_its_licence_and_the_files_for_renting(tmp_path):
    archive = pack.library({"pyeit/LICENSE.txt": b"BSD"})
    files = names_in(archive)
    assert files["tpukit/tools/pack.py"] == (ROOT / "tpukit/tools/pack.py").read_bytes()
    assert files["tpukit/LICENSE"] == (ROOT / "LICENSE").read_bytes() and files["pyeit/LICENSE.txt"] == b"BSD"
    assert any(name.startswith("docs/sky/") for name in files)
    assert not [name for name in files if "__pycache__" in name]
    assert pack.library({"pyeit/LICENSE.txt": b"BSD"}) == archive


def test_an_installed_tpukit_and_an_unpacked_copy_pack_the_same(tmp_path):
    """Both without a pyproject.toml around; a LICENSE beside the package is another's."""
    ours = (ROOT / "LICENSE").read_bytes()
    digests = set()
    for name in ("installed", "unpacked"):
        site = tmp_path / name
        shutil.copytree(ROOT / "tpukit", site / "tpukit", ignore=shutil.ignore_patterns("__pycache__"))
        (site / "LICENSE").write_text("another package's")
        if name == "installed":
            info = site / "tpukit-9.9.dist-info"
            (info / "licenses").mkdir(parents=True)
            (info / "licenses/LICENSE").write_bytes(ours)
            (info / "METADATA").write_text("Metadata-Version: 2.4\nName: tpukit\nVersion: 9.9\n")
            (info / "RECORD").write_text("tpukit-9.9.dist-info/licenses/LICENSE,,\n")
        else:
            (site / "tpukit/LICENSE").write_bytes(ours)
        command = [sys.executable, "-c", PRINT]
        ran = subprocess.run(
            command, cwd=site, env=dict(PYTHONPATH=str(site)), capture_output=True, text=True
        )
        digests.add(ran.stdout or ran.stderr)
    assert len(digests) == 1 and len(digests.pop().strip()) == 64


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
