"""Where am I, and what is wrong: told from environment variables and files that the tests lay out."""

import dataclasses
import os
import subprocess
import sys

import pytest

from tpukit import TpukitError, detect
from tpukit import environment as module
from tpukit.tools import doctor

KAGGLE_TPU = {
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive", "KAGGLE_URL_BASE": "https://www.kaggle.com", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ISTPUVM": "1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_PROCESS_ADDRESSES": "local",
}  # fmt: skip
COLAB_TPU = {
    "COLAB_RELEASE_TAG": "release-colab_1", "COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
}  # fmt: skip


def add_chips(root, count):
    for index in range(count):
        device = root / f"sys/bus/pci/devices/0000:00:{index:02x}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text("0x0063\n")
    other = root / "sys/bus/pci/devices/0000:01:00.0"
    other.mkdir(parents=True)
    (other / "vendor").write_text("0x1ae0\n")
    (other / "device").write_text("0x0042\n")  # Google's network card, not a chip


@pytest.fixture
def versions(monkeypatch):
    """Set what seems to be installed: versions(torch="2.9.0", ...)."""

    def pretend(**installed):
        wanted = {name.replace("_cpu", "-cpu"): version for name, version in installed.items()}
        real = module.version_of
        monkeypatch.setattr(module, "version_of", lambda p: wanted.get(p) if p in module.PACKAGES else real(p))

    return pretend


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that nvidia-smi lists these GPUs."""
    return lambda *names: monkeypatch.setattr(module, "nvidia_gpus", lambda environ: list(names))


def test_colab_tpu(tmp_path, versions):
    add_chips(tmp_path, 1)
    versions(torch="2.9.0+cpu", torch_xla="2.9.0", libtpu="0.0.21")
    env = detect(COLAB_TPU, tmp_path)
    assert (env.host, env.accelerator, env.cores, env.device_name) == ("colab", "tpu", 1, "v5e-1")
    assert env.outputs == tmp_path / "content/outputs" and env.drive == tmp_path / "content/drive/MyDrive"
    assert env.require("tpu") is env
    with pytest.raises(TpukitError, match="asked for 8 cores, found 1"):
        env.require("tpu", cores=8)


def test_kaggle_tpu_has_eight_chips(tmp_path, versions):
    add_chips(tmp_path, 8)
    versions(torch="2.8.0", torch_xla="2.8.0")
    env = detect(KAGGLE_TPU, tmp_path)
    assert (env.host, env.accelerator, env.cores) == ("kaggle", "tpu", 8)
    assert env.outputs == tmp_path / "kaggle/working/outputs" and env.require("tpu", cores=8) is env


def test_a_colab_gpu_has_the_empty_tpu_variable_and_is_no_tpu(tmp_path, versions, gpu):
    versions(torch="2.11.0+cu128")
    gpu("Tesla T4")
    env = detect({"COLAB_RELEASE_TAG": "x", "COLAB_TPU_1VM": ""}, tmp_path)
    assert (env.accelerator, env.device_name) == ("cuda", "Tesla T4")
    with pytest.raises(TpukitError, match="Change runtime type") as error:
        env.require("tpu")
    assert "torch_xla is not installed" not in str(error.value)


def test_the_cpu_xla_device_is_chosen_by_its_variable_only(tmp_path, versions):
    versions(torch="2.9.0", torch_xla="2.9.0")
    assert detect({"PJRT_DEVICE": "CPU"}, tmp_path).accelerator == "xla"
    assert detect({}, tmp_path).accelerator == "cpu"
    versions(torch="2.9.0")
    assert detect({"PJRT_DEVICE": "CPU"}, tmp_path).accelerator == "cpu"


@pytest.mark.parametrize(
    "environ, menu",
    [
        ({"COLAB_RELEASE_TAG": "x"}, "Runtime > Change runtime type"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "Accelerator > TPU v5e-8"),
        ({"TPU_NAME": "node"}, "pip install 'torch_xla"),
        ({}, "open the notebook on Colab or Kaggle"),
    ],
)
def test_requiring_a_tpu_where_there_is_none_names_the_menu_of_the_host(environ, menu, tmp_path, versions, gpu):
    versions(torch="2.9.0")
    gpu()
    with pytest.raises(TpukitError) as error:
        detect(environ, tmp_path).require("tpu")
    assert menu in str(error.value)


@pytest.mark.parametrize("name", ["COLAB_TPU_ADDR", "XRT_TPU_CONFIG", "XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_what_an_old_guide_left_set_is_explained_and_doctor_and_migrate_say_the_same(name, tmp_path, versions, gpu):
    from tpukit.tools.migrate.rules import OLD_VARIABLES

    versions(torch="2.9.0")
    gpu()
    with pytest.raises(TpukitError, match=f"{name} is set: it .*Instead: ") as error:
        detect({name: "10.0.0.2:8470"}, tmp_path).require("tpu")
    assert OLD_VARIABLES[name] in str(error.value)
    check = find(examine({name: "1"}, tmp_path), "variable", doctor.WARNING if "BF16" in name else doctor.NOTE)
    assert check.found.startswith(f"{name}=1: ") and check.mend.removeprefix("unset it. ") in OLD_VARIABLES[name]


@pytest.mark.parametrize(
    "visible, names",
    [
        (None, ["Tesla T4", "NVIDIA A100"]),
        ("1", ["NVIDIA A100"]),
        ("1, 0", ["NVIDIA A100", "Tesla T4"]),
        ("5", []),
        ("GPU-8932f937", ["Tesla T4"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_gpus_are_those_that_the_process_may_use(visible, names, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Tesla T4'\necho 'NVIDIA A100'\n")
    program.chmod(0o755)
    environ = dict(PATH=str(tmp_path)) | ({} if visible is None else dict(CUDA_VISIBLE_DEVICES=visible))
    assert module.nvidia_gpus(environ) == names


def test_chips_are_those_that_torch_xla_knows():
    tpu = pytest.importorskip("torch_xla._internal.tpu")
    assert tpu._GOOGLE_PCI_VENDOR_ID == module.GOOGLE_PCI_VENDOR
    assert set(tpu._TPU_PCI_DEVICE_IDS) <= set(module.TPU_PCI_DEVICES)


def test_a_gpu_that_is_required_and_missing_names_the_menu_and_a_wrong_name_is_refused(tmp_path, versions, gpu):
    versions(torch="2.9.0")
    gpu()
    with pytest.raises(TpukitError, match="T4 GPU"):
        detect({"COLAB_RELEASE_TAG": "x"}, tmp_path).require("cuda")
    with pytest.raises(TpukitError, match="choose 'tpu', 'cuda'"):
        detect({}, tmp_path).require("gpu")


def test_no_secret_of_the_host_is_kept_or_printed(tmp_path):
    env = detect({**COLAB_TPU, "COLAB_JUPYTER_TOKEN": "s3cret", "TPU_API_KEY": "s3cret", "HF_TOKEN": "s3cret"}, tmp_path)
    assert env.variables["TPU_ACCELERATOR_TYPE"] == "v5e-1"
    assert "s3cret" not in f"{env} {env.variables} {dataclasses.asdict(env)}"


def test_an_environment_prints_as_a_table(tmp_path):
    env = detect({"COLAB_RELEASE_TAG": "x"}, tmp_path)
    for text in ("colab", "accelerator", "not mounted", sys.version.split()[0]):
        assert text in " ".join(str(env).split()) and text in env._repr_html_()


# Doctor


def find(checks, what, level):
    found = [c for c in checks if c.what == what and c.level == level]
    assert found, f"no {level} about {what} in\n{doctor.table(checks)}"
    return found[0]


@pytest.fixture(autouse=True)
def imports_work(monkeypatch, request):
    if "real_imports" not in request.keywords:
        monkeypatch.setattr(doctor, "import_problem", lambda package, environ: None)


def examine(environ, root):
    return doctor.examine(environ=environ, root=root)


def test_a_healthy_colab_tpu_blocks_nothing(tmp_path, versions):
    add_chips(tmp_path, 1)
    (tmp_path / "content/drive/MyDrive").mkdir(parents=True)
    versions(torch="2.9.0+cpu", torch_xla="2.9.0", libtpu="0.0.21")
    checks = examine(COLAB_TPU, tmp_path)
    assert not doctor.blocked(checks)
    find(checks, "accelerator", doctor.OK), find(checks, "drive", doctor.OK)
    assert "means 4 chips, 1 here" in find(checks, "variable", doctor.NOTE).found


def test_versions_that_do_not_match_block(tmp_path, versions):
    versions(torch="2.11.0", torch_xla="2.9.0")
    check = find(examine({}, tmp_path), "torch_xla", doctor.BLOCKS)
    assert "2.9.0 does not match torch 2.11.0" in check.found and "2.11.0" in check.mend


def test_tensorflow_beside_torch_xla_is_a_warning_and_tensorflow_cpu_is_not(tmp_path, versions):
    versions(torch="2.9.0", torch_xla="2.9.0", tensorflow="2.19.0")
    assert "tensorflow-cpu" in find(examine({}, tmp_path), "tensorflow", doctor.WARNING).mend
    versions(torch="2.9.0", torch_xla="2.9.0", tensorflow="2.19.0", tensorflow_cpu="2.19.0")
    assert not [c for c in examine({}, tmp_path) if c.what == "tensorflow"]


def test_a_chip_held_by_another_process_names_it(tmp_path, versions):
    add_chips(tmp_path, 1)
    versions(torch="2.9.0", torch_xla="2.9.0")
    process = tmp_path / "proc/4242"
    (process / "fd").mkdir(parents=True)
    (process / "cmdline").write_bytes(b"python\0train_old.py\0--name=caf\xe9\0--token=s3cret\0")  # no UTF-8
    os.symlink("/dev/vfio/0", process / "fd/7")
    check = find(examine(COLAB_TPU, tmp_path), "chip", doctor.BLOCKS)
    assert "process 4242 (python train_old.py) holds /dev/vfio/0" in check.found and "kill 4242" in check.mend
    assert "s3cret" not in check.found


def test_a_lock_left_behind_is_named_only_where_a_chip_is(tmp_path, versions):
    versions(torch="2.9.0", torch_xla="2.9.0")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/libtpu_lockfile").touch()
    assert not [c for c in examine({}, tmp_path) if c.what == "chip"]
    add_chips(tmp_path, 1)
    assert "rm " in find(examine(COLAB_TPU, tmp_path), "chip", doctor.WARNING).mend


def test_variables_of_kaggle_and_of_old_guides_are_explained(tmp_path, versions):
    add_chips(tmp_path, 8)
    versions(torch="2.8.0", torch_xla="2.8.0")
    checks = examine({**KAGGLE_TPU, "XLA_USE_BF16": "1", "COLAB_TPU_ADDR": "10.0.0.2"}, tmp_path)
    notes = " ".join(c.found + c.mend for c in checks if c.what == "variable")
    for text in (
        "TPU_PROCESS_ADDRESSES=local",
        "os.environ.pop('TPU_PROCESS_ADDRESSES')",
        "COLAB_TPU_ADDR",
        "TPU Node runtime",
    ):
        assert text in notes
    assert "autocast" in find(checks, "variable", doctor.WARNING).mend


@pytest.mark.parametrize(
    "environ, chips, installed, found",
    [
        ({"PJRT_DEVICE": "TPU"}, 0, dict(torch="2.9.0", torch_xla="2.9.0"), "no TPU chip is on the PCI bus"),
        ({"PJRT_DEVICE": "CUDA"}, 0, dict(torch="2.9.0", torch_xla="2.9.0"), "PJRT_DEVICE=CUDA"),
        ({"TPU_NAME": "n"}, 4, dict(torch="2.9.0"), "4 TPU chips are here, but torch_xla is not installed"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, 0, dict(torch="2.9.0"), "batch run got no accelerator"),
    ],
)
def test_an_accelerator_that_cannot_be_used_blocks(environ, chips, installed, found, tmp_path, versions, gpu):
    if chips:
        add_chips(tmp_path, chips)
    gpu()
    versions(**installed)
    checks = examine(environ, tmp_path)
    assert found in find(checks, "accelerator", doctor.BLOCKS).found and doctor.blocked(checks)


def test_a_cpu_build_of_torch_beside_a_gpu_blocks_and_a_p100_is_warned_of(tmp_path, versions, gpu):
    gpu("Tesla P100-PCIE-16GB")
    versions(torch="2.9.0+cpu")
    checks = examine({}, tmp_path)
    assert "has no CUDA" in find(checks, "torch", doctor.BLOCKS).found
    assert "T4 x2" in find(checks, "gpu", doctor.WARNING).mend


def test_missing_torch_missing_libtpu_full_disk_and_little_memory_are_told(tmp_path, versions, monkeypatch):
    add_chips(tmp_path, 1)
    versions(torch_xla="2.9.0")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 13000000 kB\nMemAvailable:    900000 kB\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    usage = type("Usage", (), dict(free=100 * 2**20))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    checks = examine(COLAB_TPU, tmp_path)
    for what in ("torch", "libtpu", "disk"):
        find(checks, what, doctor.BLOCKS)
    for what in ("shared memory", "memory"):
        find(checks, what, doctor.WARNING)
    assert "mount_drive" in find(checks, "drive", doctor.NOTE).mend


@pytest.mark.real_imports
def test_a_torch_that_cannot_be_imported_is_told_with_its_mend(tmp_path, versions, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('_XLAC.so: undefined symbol: _ZN5torch')")
    versions(torch="2.9.0")
    check = find(examine({**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path), "torch", doctor.BLOCKS)
    assert "undefined symbol" in check.found and "do not match" in check.mend


@pytest.mark.real_imports
def test_doctor_answers_and_ends_with_1_where_torch_is_broken(tmp_path):
    import json

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    command = [sys.executable, "-m", "tpukit", "doctor"]
    broken = {**os.environ, "PYTHONPATH": str(tmp_path)}
    plain = subprocess.run(command, env=broken, capture_output=True, text=True)
    assert plain.returncode == 1 and "libcudart" in plain.stdout and "Traceback" not in plain.stderr
    machine = subprocess.run([*command, "--json"], env=broken, capture_output=True, text=True)
    told = json.loads(machine.stdout)
    assert machine.returncode == 1 and told["blocked"] and told["host"] in ("local", "colab", "kaggle", "tpu-vm")
