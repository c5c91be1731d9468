"""How the tests start an emulated TPU, or why not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COMPILERS, ROOT
from tpukit import TpukitError
from tpukit_tools import emulate

PROGRAMS = str(Path(__file__).with_name("programs.py"))
CACHES = (COMPILERS, Path.home() / ".cache" / "tpukit")


class Emulator:
    """Runs Python on emulated chips. The plugin is in a cache that outlives the tests; what the command
    caches goes with them."""

    def __init__(self, plugins: Path):
        self.plugins = plugins

    def start(self, chips, *arguments, outer=None, **variables):
        """Return the started `tpukit emulate`. outer: variables of its own."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TPUKIT_CACHE": str(self.plugins), **(outer or {})}
        own = dict(TPUKIT_CACHE=os.environ["TPUKIT_CACHE"], **variables)
        command = ["-m", "tpukit", "emulate", f"v5e-{chips}", "env", *(f"{k}={v}" for k, v in own.items())]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        pipes["start_new_session"] = True  # as a terminal's command: Ctrl-C is for its group
        return subprocess.Popen(
            [sys.executable, *command, sys.executable, *map(str, arguments)], env=environ, **pipes
        )

    def run(self, chips, *arguments, code=0, timeout_s=500, **options):
        """Return what a Python that ended with `code` printed."""
        process = self.start(chips, *arguments, **options)
        try:
            text, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        assert process.returncode == code, text
        return text


def answers(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def folder_of(process):
    """The folder of an emulation that runs a command."""
    (command,) = children(process.pid)
    variables = Path(f"/proc/{command}/environ").read_text().split("\0")
    return Path(dict(v.split("=", 1) for v in variables if "=" in v)["TPUKIT_EMULATE_DIRECTORY"])


@pytest.fixture(scope="session")
def can_emulate():
    """Skip where a process cannot have mounts of its own, or there is no torch_xla or C compiler."""
    pytest.importorskip("torch_xla", reason="torch_xla has wheels for Linux x86_64 only")
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    with emulate.working_folder() as work:
        try:
            assert emulate.run(["true"], dict(os.environ), emulate.make_bus(work / "bus", 1), "") == 0
        except TpukitError as error:
            pytest.skip(str(error))


@pytest.fixture
def emulator(can_emulate, request):
    found = [cache for cache in CACHES if (cache / emulate.plugin_folder().name).is_dir()]
    if not found and not request.node.get_closest_marker("nightly"):
        pytest.skip("XLA's CPU plugin is not installed; the nightly tests install it")
    return Emulator(found[0] if found else COMPILERS)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Chats, and a model with random weights and a chat template."""
    from tests.tasks.text import small

    folder = tmp_path_factory.mktemp("texts")
    small.write_model(folder / "model", "llama", chat=small.CHAT, max_position_embeddings=256)
    rows = [dict(prompt=f"{n}" * (1 + n % 5), completion="abc" * (1 + n % 4)) for n in range(200)]
    small.write_lines(folder / "chats.jsonl", *rows)
    return folder
