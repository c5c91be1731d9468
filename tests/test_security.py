"""SECURITY.md says nothing that no test holds; no training listens where another machine could reach it."""

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PAGE = ROOT / ".github/SECURITY.md"
# What runs in a process of its own: a training, then where each of its processes listens.
PROGRAM = """
import json, os, sys
from pathlib import Path
from tpukit import MNIST, Run, launch, train

LISTENS = "0A"  # a socket's state in /proc

def listening():
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            opened.add(os.readlink(f"/proc/self/fd/{name}"))
    addresses = []
    for table in Path("/proc/self/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in opened:
                addresses.append(fields[1].partition(":")[0])
    return addresses

def watched(task, run, runtime=None):
    result = train(task, run, runtime=runtime, progress=False)
    (run.path / f"listening-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(listening()))
    return result

if __name__ == "__main__":
    task = MNIST(dataset_dir=Path(sys.argv[1]), epochs=1, batch_size=8, channels=4)
    run = Run.open(Path(sys.argv[2]), task)
    launch(watched, task, run, cores=int(sys.argv[3]))
"""
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="where a process listens is read from Linux's /proc")
@pytest.mark.parametrize("cores", [1, 2])
def test_a_training_listens_nowhere_and_its_cores_on_the_loopback_alone(cores, digits, tmp_path, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", digits, tmp_path / "run", str(cores)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    files = sorted((tmp_path / "run").glob("listening-*.json"))
    assert len(files) == cores, ran.stderr[-2000:]
    addresses = [address for path in files for address in json.loads(path.read_text())]
    assert bool(addresses) == (cores > 1)
    assert set(addresses) <= {*LOOPBACK}


def sentences():
    return re.findall(r"^- (.*(?:\n  .*)*)", PAGE.read_text(), flags=re.MULTILINE)


def test_every_sentence_of_what_holds_names_its_test():
    assert len(sentences()) >= 12
    for sentence in sentences():
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", sentence), sentence


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE.read_text())
    assert len(named) == len(set(named))
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), flags=re.MULTILINE), f"{path}::{name}"
