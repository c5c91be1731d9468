"""What doctor finds wrong on a machine, and how to fix it."""

import importlib.metadata
import os
import platform
import re
import sys

import pytest

from tests.tpukit.host.machines import COLAB_TPU, KAGGLE_TPU, add_chips, nvidia_smi
from tpukit.host import environment
from tpukit_tools import doctor
from tpukit_tools.doctor import BLOCKS, NOTE, OK, WARNING

COLAB_GPU = {"COLAB_RELEASE_TAG": "x", "COLAB_TPU_1VM": ""}
KAGGLE_GPU = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
XLA_29 = dict(torch="2.9.0", torch_xla="2.9.0", libtpu="0.0.21.1")
XLA_28 = dict(torch="2.8.0", torch_xla="2.8.0", libtpu="0.0.17")
TPU = dict(torch="2.13.0", torch_tpu="0.2.0", libtpu="0.0.52")


def find(checks, what, level):
    found = [c for c in checks if c.what == what and c.level == level]
    assert found, f"no {level} about {what} in\n{doctor.table(checks)}"
    return found[0]


@pytest.fixture(autouse=True)
def imports_work(monkeypatch, request):
    if "real_imports" not in request.keywords:
        monkeypatch.setattr(doctor, "error_of", lambda code: "")


def examine(environ, root):
    return doctor.examine(environ=environ, root=root)


# The images of Colab and Kaggle by their own lists of August 2026, none of which has tyro: name -> variables,
# chips, Python, what is installed, the libtpu that torch_xla names.
IMAGES = {
    "colab tpu": (COLAB_TPU, 1, "3.13.15", XLA_29, "0.0.21"),
    "kaggle tpu": (KAGGLE_TPU, 8, "3.12.13", XLA_28, "0.0.17"),
    "colab gpu": (COLAB_GPU, 0, "3.13.15", dict(torch="2.11.0+cu128"), None),
    "kaggle gpu": (KAGGLE_GPU, 0, "3.12.13", dict(torch="2.10.0+cu128"), None),
}


@pytest.fixture
def image(tmp_path, monkeypatch, gpu):
    """Make this process look like one of an image, and return the checks: image(name), image(name,
    libtpu=None)."""

    def pretend(name, **other):
        environ, chips, python, installed, wanted = IMAGES[name]
        packages = dict.fromkeys(set(doctor.NEEDED) - {"tyro"}, "1.0") | installed | other
        monkeypatch.setattr(environment, "version_of", packages.get)
        requires = [f"libtpu=={wanted}; extra == 'tpu'"]
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
        monkeypatch.setattr(platform, "python_version", lambda: python)
        usage = type("Usage", (), dict(free=50 * 2**30))
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
        gpu(*(["Tesla T4"] if not chips else []))
        if chips:
            add_chips(tmp_path, chips)
        for folder in ("content", "kaggle/working", "proc"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text("MemAvailable:   40000000 kB\n")
        return examine(environ, tmp_path)

    return pretend


@pytest.mark.parametrize(
    "name, more",
    [
        ("colab tpu", ["torch_xla ok", "drive note"]),
        ("kaggle tpu", ["torch_xla ok"]),
        ("colab gpu", ["drive note"]),
        ("kaggle gpu", []),
    ],
)
def test_doctor_says_of_an_untouched_image_exactly_what_is_so(name, more, image):
    checks = image(name)
    common = ["python ok", "packages note", "torch ok", "accelerator ok", "disk ok", "memory ok"]
    assert sorted(f"{c.what} {c.level}" for c in checks) == sorted(common + more), f"{doctor.table(checks)}"
    assert "tyro" in find(checks, "packages", NOTE).fix


@pytest.mark.parametrize("name", ["colab tpu", "kaggle tpu"])
@pytest.mark.parametrize("package", ["torch", "torch_xla", "libtpu"])
@pytest.mark.parametrize("version", [None, "2.5.1", "0.0.30"])
def test_doctor_never_tells_to_install_over_an_image(name, package, version, image):
    checks = image(name, **{package: version})
    worse = [c for c in checks if c.level in (BLOCKS, WARNING) and c.what != "packages"]
    assert worse and all("fresh session" in c.fix for c in worse)
    assert not [c.fix for c in checks if re.search(r"pip install.*\b(torch|torch_xla|libtpu)\b", c.fix)]


XLA = dict(torch="2.9.0", torch_xla="2.9.0")
BATCH_RUN = {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}


# What is installed, chips, variables -> what is found, how bad, and words of it or its fix; without a level
# it is not mentioned.
@pytest.mark.parametrize(
    "installed, chips, environ, what, level, words",
    [
        ({}, 0, {}, "torch", BLOCKS, ["pip install torch"]),
        (dict(torch="2.5.1"), 0, {}, "torch", BLOCKS, ["CVE-2025-32434"]),
        (dict(torch="2.6.0"), 0, {}, "torch", WARNING, []),
        (dict(torch="2.8.0"), 0, {}, "torch", OK, []),
        (XLA, 0, {}, "torch_xla", OK, []),  # also where only its version is known
        # a torch_xla 2.11 is not to be had
        (XLA | dict(torch="2.11.0"), 0, {}, "torch_xla", BLOCKS, ["match torch 2.11.0", "torch~=2.9.0"]),
        (dict(torch="2.7.1", torch_xla="2.7.0"), 0, {}, "torch_xla", BLOCKS, ["2.8 or 2.9", "torch~=2.9.0"]),
        (XLA_28, 8, dict(KAGGLE_KERNEL_RUN_TYPE="x"), "variable", NOTE, ["TPU_SKIP_MDS_QUERY=1", "2,4,1"]),
        (XLA, 1, {}, "libtpu", BLOCKS, ["torch_xla[tpu]"]),
        (TPU, 0, {}, "torch_tpu", OK, []),
        (TPU | XLA, 0, KAGGLE_GPU, "torch_tpu", NOTE, ["not used"]),
        (XLA | TPU, 0, {}, "torch_xla", NOTE, ["torch_tpu"]),
        (XLA | dict(tensorflow="2.19.0"), 0, {}, "tensorflow", WARNING, ["tensorflow-cpu"]),
        (XLA | dict(tensorflow="2.19.0", tensorflow_cpu="2.19.0"), 0, {}, "tensorflow", None, []),
        (XLA, 0, {"PJRT_DEVICE": "TPU"}, "accelerator", BLOCKS, ["no TPU chip is on the PCI bus"]),
        (XLA, 0, {"PJRT_DEVICE": "CUDA"}, "accelerator", BLOCKS, ["PJRT_DEVICE=CUDA"]),
        (dict(torch="2.9.0"), 4, {"TPU_NAME": "n"}, "accelerator", BLOCKS, ["4 TPU chips found"]),
        (dict(torch="2.9.0"), 0, BATCH_RUN, "accelerator", BLOCKS, ["batch run got no accelerator"]),
        (dict(torch="2.9.0"), 0, KAGGLE_GPU, "accelerator", WARNING, ["Kaggle: Settings"]),
        (dict(torch="2.9.0"), 0, {}, "accelerator", NOTE, ["slowly"]),
        (XLA, 8, {"PJRT_DEVICE": "CPU"}, "accelerator", WARNING, ["unset PJRT_DEVICE"]),
        (XLA_28, 8, KAGGLE_TPU | {"XLA_USE_BF16": "1"}, "variable", WARNING, ["autocast"]),
        (XLA_28, 8, KAGGLE_TPU | {"COLAB_TPU_ADDR": "10.0.0.2"}, "variable", None, []),
    ],
)
def test_a_machine_is_judged_by_its_versions_chips_and_variables(
    installed, chips, environ, what, level, words, tmp_path, versions, gpu, monkeypatch
):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    if chips:
        add_chips(tmp_path, chips)
    gpu()
    versions(**installed)
    checks = examine(environ, tmp_path)
    if level is None:
        assert not [check for check in checks if check.what == what]
        return
    check = find(checks, what, level)
    assert all(word in f"{check.found} {check.fix}" for word in words), check
    assert doctor.blocked(checks) or level != BLOCKS


def test_a_chip_held_by_another_process_names_it(tmp_path, versions):
    add_chips(tmp_path, 1)
    versions(torch="2.9.0", torch_xla="2.9.0")
    for number in (4242, 99):
        process = tmp_path / f"proc/{number}"
        (process / "fd").mkdir(parents=True)
        # no UTF-8
        (process / "cmdline").write_bytes(b"python\0train_old.py\0--name=caf\xe9\0--token=s3cret\0")
        os.symlink("/dev/vfio/0", process / "fd/7")
    check = find(examine(COLAB_TPU, tmp_path), "chip", BLOCKS)
    assert "kill 99 4242" in check.fix and "s3cret" not in check.found
    for number in (4242, 99):
        assert f"process {number} (python train_old.py) holds /dev/vfio/0" in check.found


def test_a_full_disk_little_memory_and_a_drive_that_is_not_mounted_are_told(tmp_path, versions, monkeypatch):
    versions(torch="2.9.0")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 13000000 kB\nMemAvailable:    900000 kB\n")
    usage = type("Usage", (), dict(free=100 * 2**20))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    checks = examine(COLAB_GPU, tmp_path)
    assert "--run" in find(checks, "disk", BLOCKS).fix
    find(checks, "memory", WARNING)
    assert "mount_drive" in find(checks, "drive", NOTE).fix


def test_a_disk_of_kaggle_has_what_kaggle_allows_and_not_what_it_says(tmp_path, versions, monkeypatch):
    versions(torch="2.9.0")
    usage = type("Usage", (), dict(free=5 * 2**40))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert "68.0 GiB free" in find(examine(KAGGLE_GPU, tmp_path), "disk", OK).found
    (tmp_path / "kaggle/working/run").mkdir(parents=True)
    assert "19.5 GiB free" in find(examine(KAGGLE_GPU, tmp_path), "disk", OK).found
    with open(tmp_path / "kaggle/working/run/large", "wb") as file:
        os.truncate(file.fileno(), 18 * 2**30)  # takes no room here
    assert "1.5 GiB free" in find(examine(KAGGLE_GPU, tmp_path), "disk", WARNING).found
    assert f"{5 * 2**10:.1f} GiB" in find(examine(COLAB_GPU, tmp_path), "disk", OK).found


# What is imported


def fake_torch(bad):
    """The source of a torch that sees two GPUs. bad: device -> its error."""
    return f"""
class cuda:
    device_count = staticmethod(lambda: 2)

def ones(size, device):
    if device in {bad!r}:
        raise RuntimeError({bad!r}[device])
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A function: let a process of its own find packages of these sources."""

    def add(**sources):
        for name, source in sources.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return add


@pytest.mark.real_imports
@pytest.mark.parametrize(
    "bad, reason, fix",
    [
        ({}, "", ""),
        ({"cuda:1": "no kernel image is available\nfor x"}, "no kernel image is available", "T4 x2"),
        ({"cuda:0": "CUDA unknown error"}, "CUDA unknown error", "fresh session"),
        ({"cuda:0": "not compiled with CUDA"}, "not compiled with CUDA", "fresh session"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_reported_with_its_cause(
    bad, reason, fix, tmp_path, versions, packages
):
    versions(torch="2.11.0")
    packages(torch=fake_torch(bad))
    environ = nvidia_smi(tmp_path, ["GPU 0: Tesla P100 (UUID: GPU-1b7f2c11)"]) | KAGGLE_GPU
    checks = examine(environ | dict(PJRT_DEVICE=""), tmp_path)
    if not bad:
        assert not [c for c in checks if c.what == "gpu"], doctor.table(checks)
        return
    check = find(checks, "gpu", BLOCKS)
    assert check.found.endswith(f"Tesla P100: {reason}") and fix in check.fix


@pytest.mark.real_imports
@pytest.mark.parametrize(
    "source, level, found",
    [
        ("import atexit, os; atexit.register(os._exit, 3)", OK, "2.9.0"),
        ("import os; os._exit(7)", BLOCKS, "code 7"),
        ("import time; time.sleep(99)", BLOCKS, "within 8 s"),
        ("raise ImportError('undefined symbol')", BLOCKS, "undefined symbol"),
    ],
)
def test_an_import_that_fails_ends_python_or_hangs_is_the_fault_of_its_package_alone(
    source, level, found, packages, versions, monkeypatch, tmp_path
):
    monkeypatch.setattr(doctor, "TRY_TIMEOUT_S", 8 if "sleep" in source else 60)
    versions(torch="2.9.0", torch_xla="2.9.0")
    packages(torch="print('noise')", torch_xla=source)
    checks = examine({}, tmp_path)
    assert found in find(checks, "torch_xla", level).found and find(checks, "torch", OK)


def test_doctor_answers_where_the_parser_of_the_command_line_is_missing(monkeypatch, capsys):
    from tpukit_tools import cli

    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["doctor"]) in (0, 1)
    assert "Checks" in capsys.readouterr().out
