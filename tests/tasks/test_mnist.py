"""Reading MNIST, and downloading it: by torchvision's own class, from a server on this host in the place of
the internet."""

import gzip
import hashlib
import http.server
import socket
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tpukit import MNIST, find_dataset
from tpukit_tasks import downloads
from tpukit_tasks.mnist_data import read_digit, read_split

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 28, 28), np.uint8)
LABELS = np.arange(6)


def write_idx(folder, part, *, packed):
    """A split's two IDX files."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, values in {"images-idx3": IMAGES, "labels-idx1": np.uint8(LABELS)}.items():
        content = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes() + values.tobytes()
        path = folder / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(content, 1) if packed else content)


@pytest.mark.parametrize("folder, packed", [("", False), ("MNIST/raw", True)])
def test_the_original_files_are_read_packed_or_not(tmp_path, folder, packed):
    write_idx(tmp_path / folder, "t10k", packed=packed)
    batch = read_split(tmp_path, "test").batch(np.arange(6))
    assert np.array_equal(batch["image"][:, 0], IMAGES) and np.array_equal(batch["label"], LABELS)
    with refuses(tmp_path, "mnist.npz"):
        read_split(tmp_path, "train")


@pytest.mark.parametrize(
    "images, labels, what",
    [
        (IMAGES, LABELS[:4], "labels int64 (4,)"),
        (IMAGES, LABELS + 200, "labels int64 (6,)"),
        (IMAGES, LABELS - 1, "from 0 to 9"),
        (IMAGES, LABELS.astype(str), "labels <U"),
        (IMAGES, np.eye(10, dtype=np.uint8)[:6], "(6, 10)"),
        (IMAGES.reshape(6, -1), LABELS, "(6, 784)"),
        (IMAGES / 255, LABELS, "images float64"),
        (np.array(3), LABELS, "images int64 ()"),
    ],
)
def test_an_mnist_npz_of_other_arrays_or_a_damaged_one_is_refused(images, labels, what, tmp_path):
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=IMAGES, y_test=LABELS)
    with refuses(path, what):
        read_split(tmp_path, "train")
    assert len(read_split(tmp_path, "test")) == 6
    data = path.read_bytes()
    for damaged in (data[:3000], b"", data[:200] + b"x" * 300 + data[500:]):
        path.write_bytes(damaged)
        with refuses(path, "damaged"):
            read_split(tmp_path, "train")


def test_a_users_photo_of_a_digit_is_read_upright_and_white_on_black(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    Image.fromarray(255 - IMAGES[0] // 2).save(tmp_path / "photo.png", exif=exif)
    assert np.array_equal(read_digit(tmp_path / "photo.png"), np.rot90(IMAGES[0] // 2, -1))


@pytest.mark.parametrize("ink", [0, 255])
def test_a_digit_that_is_drawn_on_nothing_is_seen_whatever_its_colour(ink, tmp_path):
    opacity = np.where(IMAGES[0] > 200, 255, 0).astype(np.uint8)
    planes = [np.full((28, 28), ink, np.uint8)] * 3 + [opacity]
    Image.fromarray(np.dstack(planes)).save(tmp_path / "drawn.png")
    assert np.array_equal(read_digit(tmp_path / "drawn.png"), opacity)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves the packed files of a small MNIST, where torchvision looks for it: with their .folder, and
    .asked, the requests so far."""
    from torchvision.datasets import MNIST as Published

    monkeypatch.delenv("TPUKIT_OFFLINE")
    served = SimpleNamespace(folder=tmp_path / "www", asked=[])
    for part in ("train", "t10k"):
        write_idx(served.folder, part, packed=True)
    sums = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in served.folder.iterdir()]
    monkeypatch.setattr(Published, "resources", sums)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=served.folder)

        def log_message(self, _, request, *rest):
            served.asked.append(request)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(Published, "mirrors", [f"http://127.0.0.1:{opened.server_port}/"])
        yield served
        opened.shutdown()
        thread.join()


def test_the_real_set_is_downloaded_once_and_read(server, here, capsys):
    found = find_dataset("mnist", env=here)
    printed = capsys.readouterr()
    assert found == here.outputs / "datasets/mnist-downloaded" and printed.err == ""
    assert "downloading" in printed.out and "checksums verified" in printed.out
    for split in ("train", "test"):
        batch = read_split(found, split).batch(np.arange(6))
        assert np.array_equal(batch["image"][:, 0], IMAGES) and np.array_equal(batch["label"], LABELS)
    assert not list(found.rglob("*.gz"))
    server.asked.clear()
    assert find_dataset("mnist", env=here) == found and not server.asked
    assert "downloading" not in capsys.readouterr().out


def without_torchvision(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda path, _: path.write_bytes(path.read_bytes()[:-20] + b"x" * 20), "http://127.0.0.1"),
        (without_torchvision, "torchvision"),
        (lambda _, monkeypatch: monkeypatch.setenv("TPUKIT_OFFLINE", "1"), "TPUKIT_OFFLINE"),
    ],
    ids=["changed", "without torchvision", "offline"],
)
def test_a_download_that_fails_leaves_nothing_and_a_synthetic_set_takes_its_place(
    server, here, spoil, reason, monkeypatch, capsys
):
    spoil(server.folder / "t10k-labels-idx1-ubyte.gz", monkeypatch)
    assert find_dataset("mnist", size=12, env=here).name == "mnist-synthetic-12"
    _, _, said = capsys.readouterr().out.partition("not downloaded: ")
    assert reason in said
    assert [path.name for path in (here.outputs / "datasets").iterdir()] == ["mnist-synthetic-12"]
    assert bool(server.asked) == ("torchvision" not in reason and "OFFLINE" not in reason)


@pytest.mark.parametrize("silent", ["name", "server", "in the midst"])
def test_a_network_that_does_not_answer_costs_no_more_than_the_timeout(silent, here, monkeypatch, capsys):
    from torchvision.datasets import MNIST as Published

    monkeypatch.delenv("TPUKIT_OFFLINE")
    monkeypatch.setattr(downloads, "ANSWER_S", 0.3)
    monkeypatch.setattr(downloads, "STALL_S", 0.3)
    if silent == "in the midst":
        monkeypatch.setattr(downloads, "check_reachable", lambda url: None)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts, and says nothing
        monkeypatch.setattr(Published, "mirrors", [f"http://127.0.0.1:{listening.getsockname()[1]}/"])
        if silent == "name":  # a look-up that no timeout of a socket can end
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(60))
        start = time.monotonic()
        with refuses("timed out" if silent == "in the midst" else "0.3 s"):
            MNIST.download(here.outputs)
        assert time.monotonic() - start < 40
        ended.set()
    assert socket.getdefaulttimeout() is None
