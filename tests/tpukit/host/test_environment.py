"""Where am I: read from environment variables and files that the tests lay out."""

import contextlib
import dataclasses
import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import loaded_by, refuses
from tests.tpukit.host.machines import COLAB_TPU, KAGGLE_TPU, add_chips, nvidia_smi
from tpukit import TpukitError, detect
from tpukit.devices import open_runtime, runtime_class
from tpukit.host import environment as module


@pytest.mark.parametrize(
    "environ, chips, host, name, outputs",
    [
        (COLAB_TPU, 1, "colab", "v5e-1", "content/outputs"),
        (KAGGLE_TPU, 8, "kaggle", "v5litepod-8", "kaggle/working/outputs"),
    ],
)
def test_a_tpu_is_found_and_required_with_as_many_cores_as_it_has(
    environ, chips, host, name, outputs, tmp_path, versions
):
    add_chips(tmp_path, chips)
    versions(torch="2.9.0+cpu", torch_xla="2.9.0", libtpu="0.0.21")
    env = detect(environ, tmp_path)
    assert (env.host, env.accelerator, env.cores, env.device_name) == (host, "tpu", chips, name)
    assert env.outputs == tmp_path / outputs and env.require("tpu", cores=chips) is env
    assert env.drive == (tmp_path / "content/drive/MyDrive" if host == "colab" else None)
    with refuses("16 cores", f"found {chips}", name):
        env.require("tpu", cores=16)


@pytest.mark.parametrize(
    "torch, torch_xla, newer, libtpu, backend, fits",
    [
        ("2.9.0+cpu", "2.9.0", None, "0.0.21", "torch_xla", True),
        ("2.11.0", "2.9.0", None, "0.0.21", "torch_xla", False),
        ("2.13.0+cpu", None, "0.2.0", "0.0.52", "torch_tpu", True),
        ("2.15.0", "2.9.0", "0.2.0", "0.0.50", "torch_tpu", True),  # both, of which torch_xla does not fit
        ("2.9.0", "2.9.0", "0.2.0", "0.0.52", "torch_xla", True),  # both, of which torch_xla fits
        ("2.9.0", None, None, None, "cpu", False),
    ],
)
def test_the_backend_of_a_tpu_and_whether_it_fits_are_known(
    torch, torch_xla, newer, libtpu, backend, fits, tmp_path, versions
):
    add_chips(tmp_path, 8)
    versions(torch=torch, torch_xla=torch_xla, torch_tpu=newer, libtpu=libtpu)
    env = detect(KAGGLE_TPU, tmp_path)
    assert env.backend == backend and (f"through {backend}" in str(env)) == (env.accelerator == "tpu")
    named = "neither torch_xla nor torch_tpu" if backend == "cpu" else f"{backend} "
    with contextlib.nullcontext() if fits else refuses(named, "fresh session"):
        assert env.require("tpu", cores=8) is env


@pytest.mark.parametrize("environ, backend", [({"PJRT_DEVICE": "CPU"}, "torch_xla"), ({}, "cuda")])
def test_only_a_tpu_is_opened_by_the_newer_package(environ, backend, tmp_path, versions, gpu):
    versions(torch="2.13.0", torch_xla="2.9.0", torch_tpu="0.2.0", libtpu="0.0.52")
    gpu("Tesla T4")
    assert detect(environ, tmp_path).backend == backend


def test_a_colab_gpu_has_the_empty_tpu_variable_and_is_no_tpu(tmp_path, versions, gpu):
    versions(torch="2.11.0+cu128")
    gpu("Tesla T4")
    env = detect({"COLAB_RELEASE_TAG": "x", "COLAB_TPU_1VM": ""}, tmp_path)
    assert (env.accelerator, env.device_name) == ("cuda", "Tesla T4")
    with pytest.raises(TpukitError) as error:
        env.require("tpu")
    assert module.TPU_MENU["colab"] in str(error.value) and "torch_xla" not in str(error.value)


def test_the_cpu_xla_device_is_chosen_by_its_variable_only(tmp_path, versions):
    versions(torch="2.9.0", torch_xla="2.9.0")
    assert detect({"PJRT_DEVICE": "CPU"}, tmp_path).accelerator == "xla"
    assert detect({}, tmp_path).accelerator == "cpu"
    versions(torch="2.9.0")
    assert detect({"PJRT_DEVICE": "CPU"}, tmp_path).accelerator == "cpu"


@pytest.mark.parametrize(
    "environ, accelerator, menu",
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "tpu", "Accelerator > TPU v5e-8"),
        ({"TPU_NAME": "node"}, "tpu", "pip install 'torch_xla"),
        ({}, "tpu", "open the notebook on Colab or Kaggle"),
        ({"COLAB_RELEASE_TAG": "x"}, "cuda", module.GPU_MENU["colab"]),
        ({}, "npu", "'tpu', 'gpu'"),  # no such accelerator
        ({}, "tpu", 'ACCELERATOR = "any"'),  # the setting that takes what is here
    ],
)
def test_requiring_what_is_not_here_names_the_menu_of_the_host(
    environ, accelerator, menu, tmp_path, versions, gpu
):
    versions(torch="2.9.0")
    gpu()
    with refuses(menu):
        detect(environ, tmp_path).require(accelerator)


@pytest.mark.parametrize("chips, cards", [(8, []), (0, ["Tesla T4", "Tesla T4"])])
def test_cpu_means_the_processor_for_this_process_and_its_children_until_another_is_required(
    chips, cards, tmp_path, versions, gpu, monkeypatch
):
    monkeypatch.setenv("TPUKIT_ACCELERATOR", "")  # so that the test leaves none behind
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    add_chips(tmp_path, chips)
    versions(torch="2.9.0", torch_xla="2.9.0", libtpu="0.0.21")
    gpu(*cards)
    here = functools.partial(detect, root=tmp_path)
    found = here()
    assert found.accelerator in ("tpu", "cuda") and found.require("any") is found
    chosen = found.require("cpu", cores=3)
    assert chosen.accelerator == "cpu" and "TPUKIT_ACCELERATOR=cpu" in chosen.device_name
    assert here() == chosen and os.environ["TPUKIT_ACCELERATOR"] == "cpu"  # which a child inherits
    monkeypatch.setattr(module, "detect", here)
    assert here().require("any") == found and "TPUKIT_ACCELERATOR" not in os.environ
    found.require("cpu")
    assert here().require(found.accelerator) == found == here()


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", "", "a/"])
def test_the_name_of_a_run_cannot_lead_out_of_the_outputs_folder(name, tmp_path):
    env = detect({}, tmp_path)
    with refuses(repr(name)):
        env.run_folder(name)
    assert env.run_folder("mine") == env.outputs / "mine"
    assert env.run_folder("mine", "elsewhere") == Path("elsewhere/mine")
    number: Any = 7  # as papermill gives it
    assert env.run_folder(number, number) == Path("7/7")


@pytest.mark.parametrize("cores", ["two", "2", 1.5])
def test_a_number_of_cores_that_is_none_is_refused(cores, tmp_path):
    with refuses("CORES in a notebook", repr(cores)):
        detect({}, tmp_path).require("any", cores=cores)


def test_any_takes_what_is_here_and_names_the_menus_where_a_hosted_session_has_no_accelerator(
    tmp_path, versions, gpu, capsys
):
    versions(torch="2.9.0")
    gpu()
    for environ, menus in (({}, ""), ({"COLAB_RELEASE_TAG": "x"}, "T4 GPU")):
        env = detect(environ, tmp_path)
        assert env.require("cpu") is env and capsys.readouterr().out == ""
        assert env.require("any", cores=8) is env and env.require("ANY") is env
        assert menus in (out := capsys.readouterr().out) and bool(out) == bool(menus)


LISTED = [
    "WARNING: infoROM is corrupted \udce9",  # not UTF-8
    "GPU 0: Tesla T4 (UUID: GPU-1b7f2c11-0a6e-4c6e)",
    "GPU 1: NVIDIA A100 (UUID: GPU-8932f937-d72c-4106)",
    "  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4)",
    "  MIG 1g.5gb      Device  1: (UUID: MIG-c7384736-a75d)",
]
VISIBLE = {
    None: ["Tesla T4", "NVIDIA A100"],
    "1, 0": ["Tesla T4", "NVIDIA A100"],  # two, whatever their names
    "0,-1,1": ["Tesla T4"],
    "GPU-1b7f2c11,GPU-8932f937": ["Tesla T4", "NVIDIA A100"],
    "MIG-c7384736": ["Tesla T4"],
    "": [],
}


@pytest.mark.parametrize("visible", VISIBLE)
def test_the_gpus_are_those_that_cuda_shows_to_the_process(visible, tmp_path):
    environ = nvidia_smi(tmp_path, LISTED) | ({} if visible is None else dict(CUDA_VISIBLE_DEVICES=visible))
    assert module.nvidia_gpus(environ) == VISIBLE[visible]


@pytest.mark.parametrize(
    "files, cores",
    [(["vfio/vfio", "vfio/0", "vfio/1"], 2), (["accel0", "accel1", "accel/accel0"], 2), ([], 0)],
)
def test_where_the_pci_bus_is_hidden_chips_are_counted_by_their_device_files(
    files, cores, tmp_path, versions, gpu
):
    versions(torch="2.9.0", torch_xla="2.9.0", libtpu="0.0.21")
    gpu()
    for name in files:
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    env = detect({"PJRT_DEVICE": "TPU"}, tmp_path)
    assert (env.accelerator, env.cores) == ("tpu", cores)
    assert detect({}, tmp_path).accelerator == "cpu"  # not only TPUs use vfio


def test_chips_are_those_that_torch_xla_knows():
    tpu = pytest.importorskip("torch_xla._internal.tpu")
    assert tpu._GOOGLE_PCI_VENDOR_ID == module.GOOGLE_PCI_VENDOR
    assert set(tpu._TPU_PCI_DEVICE_IDS) <= set(module.TPU_PCI_DEVICES)


def test_an_environment_prints_as_a_table_and_keeps_no_secret_of_the_host(tmp_path):
    secret = dict.fromkeys(("COLAB_JUPYTER_TOKEN", "TPU_API_KEY", "HF_TOKEN"), "s3cret")
    env = detect({**COLAB_TPU, **secret}, tmp_path)
    assert "s3cret" not in f"{env} {dataclasses.asdict(env)}"
    for text in ("colab", "accelerator", "not mounted", sys.version.split()[0]):
        assert text in " ".join(str(env).split()) and text in env._repr_html_()


WARNING = (
    "WARNING: could not determine TPU worker hostnames or IP addresses, please set env var"
    " `TPU_WORKER_HOSTNAMES`"
)


@pytest.mark.parametrize("on_bus, kind", [(True, "v5litepod-8"), (False, "")])
def test_a_warning_in_place_of_a_variables_value_is_neither_several_hosts_nor_a_device(
    on_bus, kind, tmp_path, versions
):
    versions(torch="2.8.0", torch_xla="2.8.0", libtpu="0.0.17")
    if on_bus:
        add_chips(tmp_path, 8)
    broken = dict(KAGGLE_TPU, TPU_WORKER_HOSTNAMES=WARNING, TPU_ACCELERATOR_TYPE=WARNING, PJRT_DEVICE="TPU")
    mended = dict(TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE=kind)
    assert module.failed_lookups(broken, tmp_path) == mended
    whole = dict(TPU_WORKER_HOSTNAMES="host-0,host-1", TPU_ACCELERATOR_TYPE="v6e-1")
    assert module.failed_lookups(whole, tmp_path) == {}
    env = detect(broken, tmp_path)
    assert env.device_name == (kind or "TPU") and "WARNING" not in str(env)


KAGGLE = dict(KAGGLE_KERNEL_RUN_TYPE="Interactive", ISTPUVM="1", TPU_PROCESS_ADDRESSES="local")


@pytest.mark.parametrize("environ, chips, folder, kind, bounds", [
    (KAGGLE, 8, "", "v5litepod-8", "2,4,1"),
    ({}, 8, "kaggle/working", "v5litepod-8", "2,4,1"),  # a shell that has inherited nothing
    ({"COLAB_RELEASE_TAG": "x"}, 1, "", "v5litepod-1", "1,1,1"),
    ({}, 8, "", None, None),  # a TPU VM, which asks its metadata server
    (KAGGLE, 0, "", None, None),
    (KAGGLE | {"TPU_WORKER_ID": "0"}, 8, "", None, None),  # somebody has chosen
])  # fmt: skip
def test_a_hosted_shell_without_the_variables_of_its_chips_gets_them(
    environ, chips, folder, kind, bounds, tmp_path, versions, monkeypatch
):
    versions(torch="2.8.0", torch_xla="2.8.0", libtpu="0.0.17")
    add_chips(tmp_path, chips)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    wanted = dict(
        TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE=kind, TPU_WORKER_ID="0", TPU_HOST_BOUNDS="1,1,1"
    )
    wanted |= dict(TPU_WORKER_HOSTNAMES="localhost", TPU_CHIPS_PER_HOST_BOUNDS=bounds)
    assert module.failed_lookups(environ, tmp_path) == (wanted if kind else {})
    # what this process imports and starts reads them
    monkeypatch.setattr(os, "environ", dict(environ))
    assert detect(root=tmp_path).cores == (chips or 1)
    assert os.environ == environ | (wanted if kind else {})


def test_a_torch_xla_before_2_8_is_refused_with_what_is_needed(versions, tmp_path):
    versions(torch="2.7.1", torch_xla="2.7.0")
    env = detect({"PJRT_DEVICE": "CPU"}, tmp_path)
    for use in (lambda: env.require("any"), lambda: open_runtime(env), lambda: runtime_class(env)):
        with refuses("torch_xla 2.7.0 is too old", "2.8 or 2.9"):
            use()


def test_chips_without_libtpu_are_no_reason_to_compute_on_the_cpu(versions, tmp_path, monkeypatch):
    versions(torch="2.9.0", torch_xla="2.9.0")
    add_chips(tmp_path, 8)
    monkeypatch.setattr(module, "tpu_chips", lambda root: ["0x0063"] * 8)
    monkeypatch.setattr(module, "has_libtpu", lambda: False)
    # As torch_xla leaves it, and where PJRT_DEVICE was set before
    for environ in (KAGGLE_TPU | {"PJRT_DEVICE": "CPU"}, COLAB_TPU, {"PJRT_DEVICE": "TPU"}):
        env = detect(environ, tmp_path)
        fix = "fresh session" if env.host != "local" else "pip install 'torch_xla[tpu]==2.9.0'"
        for use in (lambda: env.require("tpu"), lambda: open_runtime(env), lambda: runtime_class(env)):
            with refuses("no libtpu", "CPU", fix):
                use()


def test_libtpu_is_looked_for_where_torch_xla_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    packages = {}
    monkeypatch.setattr(module.importlib.util, "find_spec", packages.get)
    assert not module.has_libtpu()
    packages["libtpu"] = SimpleNamespace()
    assert module.has_libtpu()
    packages.clear()
    packages["torch_xla"] = SimpleNamespace(origin=tmp_path / "__init__.py")
    assert not module.has_libtpu()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtpu.so").touch()
    assert module.has_libtpu(), "bundled"
    packages.clear()
    # The last: torch_xla looks where the system does, and says itself what it lacks.
    for variables in (dict(TPU_LIBRARY_PATH="/lib/libtpu.so"), dict(PJRT_DEVICE="TPU")):
        monkeypatch.setattr(os, "environ", variables)
        assert module.has_libtpu()


@pytest.mark.parametrize("pci_id, name", [("0x0063", "v5litepod-8"), ("0x006f", "v6e-8"), ("0x005e", "TPU")])
def test_a_tpu_that_no_variable_names_is_known_by_its_pci_id(pci_id, name, tmp_path, versions):
    versions(torch="2.9.0", torch_xla="2.9.0", libtpu="0.0.21")
    add_chips(tmp_path, 8)
    for device in tmp_path.glob("sys/bus/pci/devices/0000:00:*/device"):
        device.write_text(pci_id)
    assert detect({}, tmp_path).device_name == name


PARTS = {  # what is used alone -> the words that it prints
    'print(tpukit.detect().require("any"))': "Environment",
    "assert tpukit.mount_drive() is None": "only Colab can mount it",
    'tpukit.find_dataset("IRSTD-1k")': "found in ./datasets",
    'tpukit.find_dataset("mine", "datasets/IRSTD-1k")': "the given path",
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_host_loads_650_lines_of_code_at_most_and_no_torch(part, tmp_path):
    (tmp_path / "datasets/IRSTD-1k").mkdir(parents=True)
    program = f"import sys, tpukit\n{part}\nassert 'torch' not in sys.modules"
    elsewhere = {name: value for name, value in os.environ.items() if name != "COLAB_RELEASE_TAG"}
    printed, _, lines = loaded_by(program, tmp_path, elsewhere)
    assert PARTS[part] in printed and lines <= 650
