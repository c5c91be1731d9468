"""The file of a measurement: written, read, damaged, foreign; the names of hardware."""

import dataclasses
import json

import pytest

from tests.tools.measure.samples import measurement, row
from tpukit import MNIST, TpukitError
from tpukit.host.environment import detect
from tpukit.tools import measure
from tpukit.tools.measure import Measurement, build_measurement


def test_a_file_is_read_as_it_was_written_and_is_small(tmp_path):
    one = measurement(rows=[row(32), dict(batch_size=64, fits=False, why="out of memory")])
    one.write(tmp_path / "deep/one.json")
    assert Measurement.read(tmp_path / "deep/one.json") == one
    assert (tmp_path / "deep/one.json").stat().st_size < 4000
    old = json.loads((tmp_path / "deep/one.json").read_text())
    del old["engine"]  # as earlier versions wrote it, for the default engine
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Measurement.read(tmp_path / "old.json") == one
    assert one.table().rows[1][2:4] == ("does not fit", "out of memory")


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda f: f.pop("format"), "format"),
        (lambda f: f.pop("chips"), "chips is None"),
        (lambda f: f.update(chips="8"), "chips is '8'"),
        (lambda f: f.update(cores=0), "cores is 0"),
        (lambda f: f.update(samples=10**400), r"samples is 10{50,70}$"),
        (lambda f: f.update(rows={}), "rows is {}"),
        (lambda f: f.update(rows=[dict(batch_size=8, fits=False, why="full")]), "no batch size fits"),
        (lambda f: f.update(rows=[3]), r"rows\[0\]"),
        (lambda f: f["rows"][0].pop("step_ms"), r"rows\[0\] .*step_ms is None"),
        (lambda f: f["rows"][0].update(step_ms=float("nan")), "step_ms is nan"),
        (lambda f: f["rows"][0].update(step_ms=float("inf")), "step_ms is inf"),
        (lambda f: f["rows"][0].update(step_ms=0), "step_ms is 0"),
        (lambda f: f["rows"][0].update(fits="yes"), "fits is 'yes'"),
        (lambda f: f["rows"][0].update(fits=False), "why is None"),
        (lambda f: f["rows"][0].update(batch_size=True), "batch_size is True"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(change, named, tmp_path):
    path = tmp_path / "one.json"
    measurement().write(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(TpukitError, match=f"one.json.*{named}"):
        Measurement.read(path)


@pytest.mark.parametrize(
    "content", ["{", "[]", "null", "\xff", "[" * 100_000, '{"a":' * 100_000, "9" * 10_000, None], ids=range(8)
)
def test_a_foreign_or_missing_file_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "one.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(TpukitError, match="one.json"):
        Measurement.read(tmp_path / "one.json")


@pytest.mark.parametrize(
    "accelerator, device, expected",
    [
        ("tpu", "v5litepod-8", "TPU v5e"),
        ("tpu", "v5e-1", "TPU v5e"),
        ("tpu", "v6e-1", "TPU v6e"),
        ("tpu", "v5p-8", "TPU v5p"),
        ("tpu", "v4-8", "TPU v4"),
        ("tpu", "TPU", "TPU"),
        ("cuda", "Tesla T4", "T4"),
        ("cuda", "Tesla P100-PCIE-16GB", "P100"),
        ("cuda", "Tesla V100-SXM2-16GB", "V100"),
        ("cuda", "NVIDIA A100-SXM4-40GB", "A100"),
        ("cuda", "NVIDIA L4", "L4"),
        ("cuda", "NVIDIA H100 80GB HBM3", "H100"),
        ("cuda", "NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("cuda", "NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
        ("cuda", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("cuda", "NVIDIA GeForce GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti"),
        ("xla", "CPU XLA device", "CPU"),
        ("cpu", "x86_64, 2 cores", "CPU"),
    ],
)
def test_hardware_has_the_name_that_the_price_table_uses(accelerator, device, expected):
    env = dataclasses.replace(detect({}), accelerator=accelerator, device_name=device)
    assert measure.hardware_of(env) == expected


@pytest.mark.parametrize(
    "host, accelerator, device, cores, expected",
    [
        (
            "local",
            "cpu",
            "with an engine",
            1,
            ("mnist-cpu-torch-compile-default-channels-last-yes.json", "local", 1),
        ),
        ("kaggle", "cuda", "Tesla T4", 2, ("mnist-t4-x2-kaggle.json", "Kaggle", 2)),
        ("colab", "cuda", "Tesla T4", 1, ("mnist-t4-colab.json", "Colab", 1)),
        ("local", "cuda", "Tesla T4", 1, ("mnist-t4.json", "local", 1)),
        ("local", "cpu", "x86_64, 2 cores", 2, ("mnist-cpu.json", "local", 1)),
        ("local", "xla", "CPU XLA device", 2, ("mnist-cpu-xla.json", "local", 1)),
        ("tpu-vm", "tpu", "v5litepod-8", 8, ("mnist-tpu-v5e-x8-google-cloud.json", "Google Cloud", 8)),
        # two cores a chip
        ("tpu-vm", "tpu", "v3-8", 8, ("mnist-tpu-v3-x8-google-cloud.json", "Google Cloud", 4)),
        ("tpu-vm", "tpu", "v2-8", 8, ("mnist-tpu-v2-x8-google-cloud.json", "Google Cloud", 4)),
        # a TPU VM that does not say so
        ("local", "tpu", "TPU", 4, ("mnist-tpu-x4-google-cloud.json", "Google Cloud", 4)),
    ],
)
def test_a_file_names_the_place_and_counts_the_chips_as_the_price_table_does(
    host, accelerator, device, cores, expected, digits, tmp_path
):
    env = dataclasses.replace(detect({}), host=host, accelerator=accelerator, device_name=device, cores=cores)
    engine = dict(torch_compile="default", channels_last="yes") if device == "with an engine" else {}
    task = MNIST(dataset_dir=digits, **engine)
    result = dict(cores=cores, precision="fp32", samples=200)
    found = build_measurement(task, env, result, [row()])
    assert (measure.file_for(tmp_path, task, env).name, found.place, found.chips) == expected
