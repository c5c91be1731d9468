"""Weight files: every published form, damaged ones, and ones that would run code."""

import argparse
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import refuses
from tpukit import MNIST, Run, TpukitError
from tpukit.runs import weights


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))


@pytest.mark.parametrize("ending", [".pkl", ".tar", ".pth", ".pt", ".safetensors"])
@pytest.mark.parametrize("wrap", ["bare", "state_dict", "module."])
def test_weights_load_from_every_form_that_is_published(tmp_path, model, ending, wrap):
    state = {n: v + 1 for n, v in model.state_dict().items()}
    path = tmp_path / f"weights{ending}"
    named = {f"module.{n}": v for n, v in state.items()} if wrap == "module." else state
    if ending == ".safetensors":
        from safetensors.torch import save_file

        save_file(named, path)
    else:
        torch.save({"state_dict": named, "epoch": 3} if wrap == "state_dict" else named, path)
    weights.load(model, path)
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())


def test_weights_of_another_model_are_refused_naming_the_first_differences(tmp_path, model):
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(2, 2))
    torch.save(other.state_dict(), tmp_path / "other.pth")
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(TpukitError) as error:
        weights.load(model, tmp_path / "other.pth")
    assert re.search(r"0\.weight: .*\(2, 3, 3, 3\).*\(2, 1, 3, 3\)", str(error.value))
    assert "2.weight" in str(error.value)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("kind", ["pickle", "legacy", "script"])
def test_weights_that_would_run_code_are_refused_without_advice_to_run_it_and_never_run(
    kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.pt"
    if kind == "pickle":
        torch.save({"state_dict": Evil()}, path)
    elif kind == "script":
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)
    else:
        with tarfile.open(path, "w") as tar:
            for name in ("sys_info", "storages", "tensors", "pickle"):
                (tmp_path / name).write_bytes(b"")
                tar.add(tmp_path / name, name)
    with pytest.raises(TpukitError) as refused:
        weights.read(path)
    assert str(path) in str(refused.value) and "weights_only" not in str(refused.value)
    assert ("mkdir" in str(refused.value)) == (kind == "pickle") and not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "name", ["missing.pth", "damaged.pth", "empty.pth", "damaged.safetensors", "list.pth"]
)
def test_missing_and_damaged_weight_files_are_named(tmp_path, model, name):
    (tmp_path / "damaged.pth").write_bytes(b"not a weight file")
    (tmp_path / "empty.pth").touch()
    (tmp_path / "damaged.safetensors").write_bytes(b"not a weight file")
    torch.save([1, 2], tmp_path / "list.pth")
    with refuses(tmp_path / name):
        weights.load(model, tmp_path / name)


@pytest.mark.parametrize(
    "place", ["s3://bucket/w.pth", Path("hf://me/model/w.pth"), "https://me:secret@host/w.pth"]
)
def test_weights_at_an_address_are_refused_before_a_run_is_made(place, tmp_path):
    for use in (lambda: weights.read(place), lambda: Run.open(tmp_path / "run", MNIST(weights=place))):
        with pytest.raises(TpukitError, match="download") as refused:
            use()
        assert "secret" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_odd_weights_from_elsewhere_are_explained_or_taken(tmp_path):
    from safetensors.torch import save_file

    torch.save({0: torch.ones(1)}, tmp_path / "numbers.pt")
    with refuses(tmp_path / "numbers.pt"):
        weights.read(tmp_path / "numbers.pt")
    for epoch in ("²", "٣", "9" * 5000):
        save_file(dict(a=torch.ones(1)), tmp_path / "odd.safetensors", metadata=dict(epoch=epoch))
        assert weights.epoch_of(tmp_path / "odd.safetensors") is None
        assert weights.read(tmp_path / "odd.safetensors")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {f"_orig_mod.{name}": value for name, value in state.items()},
        lambda state: {"state_dict": {f"model._orig_mod.{name}": value for name, value in state.items()}},
        lambda state: {"model_state_dict": state, "epoch": 3},
        lambda state: {"net": state, "iou": np.float64(0.5), "epoch": np.int64(3), "ok": np.bool_(True)},
        lambda state: {"model": state, "args": argparse.Namespace(lr=np.float32(0.1), name="a")},
    ],
)
def test_weights_load_as_compiled_models_trainers_and_scripts_save_them(wrap, tmp_path, model):
    state = {name: value + 1 for name, value in model.state_dict().items()}
    torch.save(wrap(state), tmp_path / "weights.pth")
    weights.load(model, tmp_path / "weights.pth")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_hash_in_the_metadata_of_another_program_is_not_taken_for_ours(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "w.safetensors"
    save_file(dict(a=torch.ones(1)), path, metadata={"modelspec.hash_sha256": "0x" + "0" * 64})
    assert weights.read(path)["a"] == 1


def test_a_dict_without_weights_is_refused_with_the_keys_that_it_has(tmp_path):
    torch.save({"generator": {"a": torch.ones(1)}, "step": 3}, tmp_path / "gan.pth")
    with refuses("generator, step", "state_dict"):
        weights.read(tmp_path / "gan.pth")
