"""Networks by name, where their pretrained weights are found, and which files are refused."""

import functools
import http.server
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import refuses
from tpukit import ImageClassifier
from tpukit_tasks.images.models import build, describe, find_pretrained

timm = pytest.importorskip("timm")


@pytest.fixture
def without_timm(monkeypatch):
    """As where timm is not installed."""
    monkeypatch.setitem(sys.modules, "timm", None)
    describe.cache_clear()
    yield
    describe.cache_clear()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Weights of test_vit with five classes, and its state dict."""
    path = tmp_path_factory.mktemp("weights") / "five.safetensors"
    state = timm.create_model("test_vit", num_classes=5).state_dict()
    save_file(state, path)
    return path, state


def test_a_network_says_its_size_and_how_its_images_are_normalised():
    vit = describe("vit_small_patch16_224")
    assert (vit.size, vit.mean, vit.fixed_size) == (224, (0.5, 0.5, 0.5), True)
    assert vit.published.startswith("timm/vit_small_patch16_224")


NEAREST = {"resnet-18": "resnet18", "vit_smal_patch16_224": "vit_small_patch16_224", "": "resnet18"}
NEAREST |= {"resnet18.a1_in2k": "resnet18.a1_in1k"}  # and weights that it has not


@pytest.mark.parametrize("name, nearest", NEAREST.items())
def test_an_unknown_name_gets_the_nearest_ones(name, nearest):
    with refuses(repr(name), nearest):
        describe(name)


@pytest.mark.parametrize("name, size", [("test_convnext2", 20), ("test_vit", 100)])
def test_a_size_that_a_network_does_not_take_is_refused_before_training(name, size):
    with refuses(name, f"{size}x{size}", "160"):
        build(describe(name), 3, size)


HEAD = {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "classes, size, changed", [(3, 160, HEAD), (5, 160, set()), (3, 64, HEAD | {"pos_embed"})]
)
def test_pretrained_weights_are_taken_but_for_a_head_of_other_classes_and_positions_of_another_size(
    classes, size, changed, file
):
    path, wanted = file
    model = build(describe("test_vit"), classes, size, path)
    found = model.state_dict()
    assert {name for name in found if not torch.equal(found[name], wanted[name])} == changed
    assert model.training


@pytest.mark.parametrize("name", ["test_convnext", "test_resnet"])
def test_a_file_of_another_network_is_refused(name, file):
    with refuses(name, "five.safetensors"):
        build(describe(name), 3, 160, file[0])


def test_weights_are_found_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    network = describe("test_vit")
    snapshot = tmp_path / f"models--{network.published.replace('/', '--')}"
    (snapshot / "snapshots/abc").mkdir(parents=True)
    (snapshot / "refs").mkdir()
    (snapshot / "refs/main").write_text("abc")
    (snapshot / "snapshots/abc/model.safetensors").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    path, note = find_pretrained(network, "auto")
    assert path == snapshot / "snapshots/abc/model.safetensors" and str(path) in note
    assert find_pretrained(network, "no")[0] is None


def test_of_several_processes_that_need_the_same_weights_one_downloads_them(tmp_path, monkeypatch):
    """Threads here: each opens the lock's file anew, as a process does."""
    monkeypatch.delenv("TPUKIT_OFFLINE")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    (tmp_path / "weights.pth").write_bytes(b"weights")
    asked = []

    class Server(http.server.SimpleHTTPRequestHandler):
        def log_message(self, form, *values):
            asked.append(self.command)

    serve = functools.partial(Server, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server, ThreadPoolExecutor(4) as pool:
        pool.submit(server.serve_forever)
        url = f"http://127.0.0.1:{server.server_port}/weights.pth"
        network = describe("test_vit")._replace(published=url)
        paths = {path for path, _ in pool.map(find_pretrained, [network] * 3, ["yes"] * 3)}
        server.shutdown()
    assert [path.read_bytes() for path in paths] == [b"weights"] and asked.count("GET") == 1


def test_without_internet_the_log_says_that_weights_are_random_and_yes_is_an_error():
    path, note = find_pretrained(describe("vit_small_patch16_224"), "auto")
    assert path is None and "random weights" in note and "TPUKIT_OFFLINE" in note
    with refuses("vit_small_patch16_224", "TPUKIT_OFFLINE", "pretrained=PATH"):
        find_pretrained(describe("vit_small_patch16_224"), "yes")


def test_torchvisions_networks_serve_where_timm_is_missing(without_timm, tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    network = describe("resnet18")
    assert (network.library, network.size) == ("torchvision", 224)
    with refuses("'resnet-18'", "torchvision", "resnet18"):
        describe("resnet-18")
    with refuses("vit_b_16", "30x30"):
        build(describe("vit_b_16"), 3, 30)
    state = build(network, 5, 32).state_dict()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save(state, tmp_path / "checkpoints" / network.published.rpartition("/")[2])
    path, _ = find_pretrained(network, "auto")
    found = build(network, 3, 32, path).state_dict()
    assert found["fc.weight"].shape == (3, 512) and torch.equal(found["conv1.weight"], state["conv1.weight"])
    task = ImageClassifier(model_name="resnet18", image_size=32)
    assert task.head(task.model()) == ["fc.weight", "fc.bias"]


def test_the_head_of_a_network_is_the_layer_that_gives_the_logits():
    task = ImageClassifier(model_name="test_convnext", image_size=64)
    assert task.head(task.model()) == ["head.fc.weight", "head.fc.bias"]
