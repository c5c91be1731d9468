"""What a machine gets as torch from the Makefile: CPU wheels where no NVIDIA driver is. Package indexes on
loopback hold wheels without content."""

import functools
import http.server
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from tests.conftest import ROOT

LINUX = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (LINUX and shutil.which("make")), reason="needs make, on Linux on x86-64"),
]
PINNED = {"torch": "2.9.0", "torchvision": "0.24.0"}
# The build backend of the project that is installed: its wheel, too, has no content.
BACKEND = """
import wheels
def build_editable(folder, *_):
    return wheels.write(folder, "tpukit", "0.1.0")
"""
WHEELS = """
import zipfile
def write(folder, name, version):
    path = f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(f"{folder}/{path}", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path
"""


@pytest.fixture
def write(tmp_path):
    """A function that writes a wheel without content: write(folder, name, version)."""
    names = {}
    exec(WHEELS, names)
    return names["write"]


@pytest.fixture
def serve(tmp_path, write):
    """A function that serves an index of wheels, {name: [version, ...]}, and returns its address."""
    servers = []

    def start(label, wheels):
        for name, versions in wheels.items():
            (tmp_path / label / name).mkdir(parents=True)
            for version in versions:
                write(tmp_path / label / name, name, version)
        handler = functools.partial(Quiet, directory=tmp_path / label)
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def project(tmp_path):
    """A folder with this Makefile, whose requirements are torch and torchvision alone."""
    folder = tmp_path / "project"
    (folder / "backend").mkdir(parents=True)
    (folder / "backend/wheels.py").write_text(WHEELS)
    (folder / "backend/backend.py").write_text(BACKEND)
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["backend"]\n'
    (folder / "pyproject.toml").write_text(system + '[project]\nname = "tpukit"\nversion = "0.1.0"\n')
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    kept = [line for line in lines if line.split("==")[0] in PINNED]
    assert kept == [f"{name}=={version}" for name, version in PINNED.items()]
    (folder / "requirements.txt").write_text("\n".join([*kept, "other"]) + "\n")
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.count("--timeout 10 ") == 1  # the time to wait for an index that does not answer
    (folder / "Makefile").write_text(makefile.replace("--timeout 10 ", "--timeout 2 "))
    python = folder / "python"  # makes an environment without a pip of its own, which takes seconds
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n"-m venv .venv")'
        f" {sys.executable} -m venv --without-pip .venv || exit; pip=.venv/bin/pip;"
        f" printf '#!/bin/sh\\nexec {sys.executable} -m pip --python .venv/bin/python \"$@\"\\n' > $pip;"
        f' chmod +x $pip;;\n*) exec {sys.executable} "$@";;\nesac\n'
    )
    python.chmod(0o755)
    return folder


def install(project, plain, cpu, *variables, path=""):
    """Run the Makefile's installation. Returns (versions that are installed, what was printed)."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environ |= dict(PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL=plain, PIP_NO_CACHE_DIR="1", NO_PROXY="*")
    environ["PATH"] = path + os.environ["PATH"]
    command = ["make", ".venv/installed", "PYTHON=./python", f"CPU_INDEX={cpu}", *variables]
    ran = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = [
        folder.name.removesuffix(".dist-info") for folder in project.glob(".venv/lib/*/*/torch*.dist-info")
    ]
    return dict(name.split("-") for name in found), ran.stdout + ran.stderr


CUDA = {name: [version] for name, version in PINNED.items()} | {"other": ["1.0"]}
CPU = {name: [f"{version}+cpu", "9.9.9+cpu"] for name, version in PINNED.items()}


def test_a_machine_without_an_nvidia_driver_gets_the_cpu_wheels_and_keeps_them(project, serve):
    found, said = install(project, serve("plain", CUDA), serve("cpu", CPU), "NVIDIA=")
    assert found == {name: f"{version}+cpu" for name, version in PINNED.items()}
    assert "\nno CPU wheels" not in said


@pytest.mark.parametrize("cpu", ["no host", "no answer", "torch alone"])
def test_without_cpu_wheels_the_plain_ones_are_installed_with_a_word(cpu, project, serve):
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and never answers
    address = {
        "no host": "http://download.invalid/whl/cpu",
        "no answer": f"http://127.0.0.1:{silent.getsockname()[1]}/whl/cpu",
    }.get(cpu) or serve("cpu", dict(torch=CPU["torch"]))
    found, said = install(project, serve("plain", CUDA), address, "NVIDIA=")
    silent.close()
    assert found == PINNED
    assert said.count(f"\nno CPU wheels from {address}") == 1
    assert (project / ".venv/cpu.log").read_text()


def test_an_nvidia_driver_gets_the_plain_wheels(project, serve, tmp_path):
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    cpu = serve("cpu", CPU)
    found, said = install(project, serve("plain", CUDA), cpu, path=f"{tool.parent}:")
    assert found == PINNED and cpu not in said


def test_a_torch_of_ones_own_is_installed_as_it_is_named(project, serve):
    plain = serve("plain", CUDA | {name: ["9.9.9", "1.0"] for name in PINNED})
    found, said = install(project, plain, serve("cpu", CPU), "NVIDIA=", "TORCH=torch==1.0 torchvision==1.0")
    assert found == {"torch": "1.0", "torchvision": "1.0"}
    assert "no CPU wheels" not in said


@pytest.mark.parametrize("system", ["Darwin-arm64", "Linux-aarch64"])
def test_where_pytorch_has_no_cpu_wheels_of_their_own_none_are_asked_for(system, tmp_path):
    name, machine = system.split("-")
    (tmp_path / "uname").write_text(f'#!/bin/sh\ntest "$1" = -s && echo {name} || echo {machine}\n')
    (tmp_path / "uname").chmod(0o755)
    environ = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = ["make", "-n", "-B", "-C", ROOT, ".venv/installed", "NVIDIA="]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert "-r .venv/requirements.txt" in told and "whl/cpu" not in told
