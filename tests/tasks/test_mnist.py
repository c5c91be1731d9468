"""Reading MNIST."""

import gzip
import hashlib
import http.server
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import refuses
from tpukit import MNIST, find_dataset
from tpukit.host import downloads
from tpukit.tasks import mnist_data
from tpukit.tasks.mnist_data import read_split


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:3000], lambda data: b"", lambda data: data[:200] + b"x" * 300 + data[500:]],
    ids=["cut short", "empty", "changed"],
)
def test_a_damaged_mnist_is_named(tmp_path, damage):
    values = dict.fromkeys(
        ("x_train", "x_test"), np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    )
    np.savez_compressed(tmp_path / "mnist.npz", **values, y_train=np.arange(5), y_test=np.arange(5))
    path = tmp_path / "mnist.npz"
    path.write_bytes(damage(path.read_bytes()))
    with refuses(tmp_path):
        read_split(tmp_path, "train")


def idx(values):
    """An array of uint8 as the bytes of an IDX file."""
    return bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


@pytest.mark.parametrize("folder, ending", [("", ""), ("raw", ".gz"), ("MNIST/raw", "")])
def test_the_original_files_are_read_packed_or_not(tmp_path, folder, ending):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (5, 28, 28), np.uint8), rng.integers(0, 10, 5, np.uint8)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
        data = gzip.compress(idx(values)) if ending else idx(values)
        (tmp_path / folder / f"t10k-{kind}-ubyte{ending}").write_bytes(data)
    batch = read_split(tmp_path, "test").batch(np.arange(5))
    assert np.array_equal(batch["image"][:, 0], images) and np.array_equal(batch["label"], labels)
    with refuses(tmp_path, "mnist.npz"):
        read_split(tmp_path, "train")


IMAGES, LABELS = np.zeros((6, 28, 28), np.uint8), np.arange(6)


@pytest.mark.parametrize(
    "images, labels, what",
    [
        (IMAGES, LABELS[:4], "6 images and 4 labels"),
        (IMAGES[:4], LABELS, "4 images and 6 labels"),
        (IMAGES, LABELS + 200, "labels are int64"),
        (IMAGES, LABELS - 1, "from 0 to 9"),
        (IMAGES, LABELS / 0.5, "labels are float64"),
        (IMAGES, LABELS.astype(str), "labels are <U"),
        (IMAGES, np.eye(10, dtype=np.uint8)[:6], "(6, 10)"),
        (IMAGES[:, ::2, ::2], LABELS, "(6, 14, 14)"),
        (IMAGES.reshape(6, -1), LABELS, "(6, 784)"),
        (IMAGES.astype(complex), LABELS, "complex"),
        (IMAGES / 255, LABELS, "images are float64"),
        (np.array(3), LABELS, "images are int64 ()"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_mnist_npz_of_other_arrays_is_refused_by_what_they_are(images, labels, what, tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=IMAGES, y_test=LABELS)
    with refuses("mnist.npz", what):
        read_split(tmp_path, "train")
    assert len(read_split(tmp_path, "test")) == 6


# The download: torchvision's own class, and a server on this host in the place of the internet.


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves the folder `www`, where torchvision looks for MNIST; with .folder and .asked, the requests so
    far."""
    from torchvision.datasets import MNIST as Published

    monkeypatch.delenv("TPUKIT_OFFLINE")
    served = SimpleNamespace(folder=tmp_path / "www", asked=[])
    served.folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=served.folder)

        def log_message(self, _, request, *rest):
            served.asked.append(request)

    opened = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=opened.serve_forever)
    thread.start()
    monkeypatch.setattr(Published, "mirrors", [f"http://127.0.0.1:{opened.server_port}/"])
    yield served
    opened.shutdown()
    thread.join()
    opened.server_close()


@pytest.fixture
def publish(server, monkeypatch):
    """Puts the four files of MNIST on the server. Returns the function; known: whether their SHA-256 are the
    ones expected."""
    from torchvision.datasets import MNIST as Published

    def put(splits, known=True):
        md5, sha256 = [], {}
        for part, (images, labels) in splits.items():
            for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
                name, data = f"{part}-{kind}-ubyte", idx(values)
                packed = gzip.compress(data, 1)
                (server.folder / f"{name}.gz").write_bytes(packed)
                md5.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
                sha256[name] = hashlib.sha256(data).hexdigest()
        monkeypatch.setattr(Published, "resources", md5)
        if known:
            monkeypatch.setattr(mnist_data, "SHA256", sha256)
        return sha256

    return put


def few_digits():
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (2, 12, 28, 28), np.uint8), rng.integers(0, 10, (2, 12), np.uint8)
    return dict(zip(("train", "t10k"), zip(images, labels)))


def test_the_real_set_is_downloaded_once_and_read(server, publish, here, tmp_path, capsys):
    splits = few_digits()
    publish(splits)
    found = find_dataset(here, "mnist")
    printed = capsys.readouterr()
    assert found == here.outputs / "datasets/mnist-downloaded" and printed.err == ""
    assert "downloading" in printed.out and "checksums verified" in printed.out
    for split, part in (("train", "train"), ("test", "t10k")):
        batch = read_split(found, split).batch(np.arange(12))
        assert np.array_equal(batch["image"][:, 0], splits[part][0])
        assert np.array_equal(batch["label"], splits[part][1])
    assert not list(found.rglob("*.gz"))
    server.asked.clear()
    assert find_dataset(here, "mnist") == found and not server.asked
    assert "downloading" not in capsys.readouterr().out


def test_the_checksums_are_those_of_the_original_files(server, publish, real_data, here):
    with np.load(real_data / "mnist/mnist.npz") as real:
        parts = (("train", "train"), ("t10k", "test"))
        splits = {part: (real[f"x_{name}"], real[f"y_{name}"]) for part, name in parts}
    assert publish(splits, known=False) == mnist_data.SHA256
    assert "downloaded" in find_dataset(here, "mnist").name


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-20])


def corrupt(path):
    path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)


@pytest.mark.parametrize("damage", [cut_short, corrupt, Path.unlink], ids=["cut short", "corrupt", "missing"])
def test_a_damaged_download_leaves_nothing_and_a_synthetic_set_takes_its_place(
    server, publish, here, damage, capsys
):
    publish(few_digits())
    damage(server.folder / "t10k-labels-idx1-ubyte.gz")
    assert find_dataset(here, "mnist", size=12).name == "mnist-synthetic-12"
    assert "no download: http://127.0.0.1" in capsys.readouterr().out
    assert [path.name for path in (here.outputs / "datasets").iterdir()] == ["mnist-synthetic-12"]


def test_files_that_torchvision_takes_and_that_are_not_the_original_ones_are_refused(
    server, publish, here, capsys
):
    publish(few_digits(), known=False)
    assert "synthetic" in find_dataset(here, "mnist", size=12).name
    assert "train-images-idx3-ubyte" in capsys.readouterr().out
    assert [path.name for path in (here.outputs / "datasets").iterdir()] == ["mnist-synthetic-12"]


def test_without_torchvision_the_set_is_synthetic_and_the_reason_is_printed(
    server, here, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    assert "synthetic" in find_dataset(here, "mnist", size=12).name
    assert "torchvision" in capsys.readouterr().out and not server.asked


def test_no_test_reaches_the_internet(here, capsys):
    assert "synthetic" in find_dataset(here, "mnist", size=12).name
    assert "TPUKIT_OFFLINE" in capsys.readouterr().out


@pytest.mark.parametrize("silent", ["name", "server"])
def test_a_network_that_does_not_answer_costs_no_more_than_the_timeout(silent, here, monkeypatch, capsys):
    from torchvision.datasets import MNIST as Published

    monkeypatch.delenv("TPUKIT_OFFLINE")
    monkeypatch.setattr(downloads, "ANSWER_S", 0.3)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts, and says nothing
        monkeypatch.setattr(Published, "mirrors", [f"http://127.0.0.1:{listening.getsockname()[1]}/"])
        if silent == "name":  # a look-up that no timeout of a socket can end
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(30))
        start = time.monotonic()
        with refuses("0.3 s"):
            MNIST.download(here.outputs)
        assert time.monotonic() - start < 10
        ended.set()
    assert not here.outputs.exists()


def test_a_download_that_stalls_is_given_up(publish, here, tmp_path, monkeypatch, capsys):
    from torchvision.datasets import MNIST as Published

    publish(few_digits())
    monkeypatch.setattr(downloads, "STALL_S", 0.3)
    monkeypatch.setattr(downloads, "check_reachable", lambda url: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(Published, "mirrors", [f"http://127.0.0.1:{listening.getsockname()[1]}/"])
        start = time.monotonic()
        assert "synthetic" in find_dataset(here, "mnist", size=12).name
        assert time.monotonic() - start < 10 and "timed out" in capsys.readouterr().out
    assert socket.getdefaulttimeout() is None
