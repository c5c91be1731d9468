"""The file of a measurement: written, read, damaged, foreign; the names of hardware."""

import dataclasses
import json

import pytest

from tests.tools.measure.samples import measurement
from tpukit import MNIST, TpukitError
from tpukit.host.environment import detect
from tpukit.tools.measure import timing


def test_a_file_is_read_as_it_was_written_and_is_small(tmp_path):
    several = [measurement(), measurement(batch_size=64, engine=dict(data_on="host"))]
    timing.write(tmp_path / "deep/one.json", several)
    assert timing.read(tmp_path / "deep/one.json") == several
    assert (tmp_path / "deep/one.json").stat().st_size < 4000
    assert timing.table(several).rows[1][:6] == (
        *("T4, data_on=host, fp16", "Kaggle", "64", "0.0", "100", "90 to 110"),
    )


def test_a_file_of_an_earlier_version_is_read(tmp_path):
    rows = [dataclasses.asdict(measurement()) | dict(fits=True), dict(batch_size=64, fits=False, why="OOM")]
    shared = {name: rows[0].pop(name) for name in ("hardware", "chips", "cores", "recipe", "samples", "task")}
    content = dict(shared, format=timing.FORMAT, rows=rows)
    del rows[0]["engine"]  # which the first versions did not write
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert timing.read(tmp_path / "old.json") == [measurement()]


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(chips=None), "chips is None"),
        (dict(chips="8"), "chips is '8'"),
        (dict(cores=0), "cores is 0"),
        (dict(samples=10**400), r"samples is 10{50,70}$"),
        (dict(recipe=[]), r"recipe is \[\]"),
        (dict(fits=False), "no batch size fits"),
        (dict(step_ms=float("nan")), "step_ms is nan"),
        (dict(step_ms=float("inf")), "step_ms is inf"),
        (dict(step_ms=0), "step_ms is 0"),
        (dict(batch_size=True), "batch_size is True"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(change, named, tmp_path):
    path = tmp_path / "one.json"
    rows = [dataclasses.asdict(measurement()) | change]
    path.write_text(json.dumps(dict(format=timing.FORMAT, rows=rows)))
    with pytest.raises(TpukitError, match=f"one.json.*{named}"):
        timing.read(path)


FOREIGN = ["{", "[]", "null", "\xff", "[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "{}", None]
FOREIGN += [
    f'{{"format": "{timing.FORMAT}", "rows": {rows}}}' for rows in ("null", "{}", "[]", "[3]", "[{}]")
]


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_or_missing_file_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "one.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(TpukitError, match="one.json"):
        timing.read(tmp_path / "one.json")


@pytest.mark.parametrize(
    "accelerator, device, expected",
    [
        ("tpu", "v5litepod-8", "TPU v5e"),
        ("tpu", "v5e-1", "TPU v5e"),
        ("tpu", "v5p-8", "TPU v5p"),
        ("tpu", "TPU", "TPU"),
        ("cuda", "Tesla T4", "T4"),
        ("cuda", "Tesla P100-PCIE-16GB", "P100"),
        ("cuda", "NVIDIA A100-SXM4-40GB", "A100"),
        ("cuda", "NVIDIA L4", "L4"),
        ("cuda", "NVIDIA H100 80GB HBM3", "H100"),
        ("cuda", "NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
        ("cuda", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("cuda", "NVIDIA GeForce GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti"),
        ("xla", "CPU XLA device", "CPU"),
        ("cpu", "x86_64, 2 cores", "CPU"),
    ],
)
def test_hardware_has_the_name_that_the_price_table_uses(accelerator, device, expected):
    env = dataclasses.replace(detect({}), accelerator=accelerator, device_name=device)
    assert timing.hardware_of(env) == expected


@pytest.mark.parametrize(
    "host, accelerator, device, cores, name, place, chips",
    [
        ("kaggle", "cuda", "Tesla T4", 2, "mnist-t4-x-2-kaggle.json", "Kaggle", 2),
        ("colab", "cuda", "Tesla T4", 1, "mnist-t4-colab.json", "Colab", 1),
        ("local", "cpu", "x86_64, 2 cores", 2, "mnist-cpu-x-2-local.json", "local", 1),
        ("local", "xla", "CPU XLA device", 1, "mnist-cpu-xla-device-local.json", "local", 1),
        ("tpu-vm", "tpu", "v5litepod-8", 8, "mnist-tpu-v5e-x-8-google-cloud.json", "Google Cloud", 8),
        # two cores a chip
        ("tpu-vm", "tpu", "v3-8", 8, "mnist-tpu-v3-x-8-google-cloud.json", "Google Cloud", 4),
        # a TPU VM that does not say so
        ("local", "tpu", "TPU", 4, "mnist-tpu-x-4-google-cloud.json", "Google Cloud", 4),
    ],
)
def test_a_file_names_the_place_and_counts_the_chips_as_the_price_table_does(
    host, accelerator, device, cores, name, place, chips
):
    env = dataclasses.replace(detect({}), host=host, accelerator=accelerator, device_name=device)
    found = timing.describe(MNIST(), env, cores)
    assert (found.file_name, found.place, found.chips) == (name, place, chips)
