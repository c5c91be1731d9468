"""Reading MNIST."""

import gzip

import numpy as np
import pytest

from tests.conftest import refuses
from tpukit.workloads import mnist


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:3000], lambda data: b"", lambda data: data[:200] + b"x" * 300 + data[500:]],
    ids=["cut short", "empty", "changed"],
)
def test_a_damaged_mnist_is_named(tmp_path, damage):
    values = dict.fromkeys(("x_train", "x_test"), np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8))
    np.savez_compressed(tmp_path / "mnist.npz", **values, y_train=np.arange(5), y_test=np.arange(5))
    path = tmp_path / "mnist.npz"
    path.write_bytes(damage(path.read_bytes()))
    with refuses(tmp_path):
        mnist.read_split(tmp_path, "train")


@pytest.mark.parametrize("folder, ending", [("", ""), ("raw", ".gz"), ("MNIST/raw", "")])
def test_the_original_files_are_read_packed_or_not(tmp_path, folder, ending):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (5, 28, 28), np.uint8), rng.integers(0, 10, 5, np.uint8)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
        data = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes() + values.tobytes()
        (tmp_path / folder / f"t10k-{kind}-ubyte{ending}").write_bytes(gzip.compress(data) if ending else data)
    batch = mnist.read_split(tmp_path, "test").batch(np.arange(5))
    assert np.array_equal(batch["image"][:, 0], images) and np.array_equal(batch["label"], labels)
    with refuses(tmp_path, "mnist.npz"):
        mnist.read_split(tmp_path, "train")
