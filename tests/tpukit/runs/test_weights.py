"""Weight files: every published form, damaged ones, and ones that would run code."""

import argparse
import datetime
import os
import re
import tarfile

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.conftest import refuses
from tpukit import MNIST, Run, TpukitError
from tpukit.runs import weights


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))


def with_prefix(prefix):
    return lambda state: {f"{prefix}{name}": value for name, value in state.items()}


FORMS = {  # as published weights, compiled models, trainers and scripts have a state dict
    "bare": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "module.": with_prefix("module."),
    "_orig_mod.": with_prefix("_orig_mod."),
    "of Lightning": lambda state: {"state_dict": with_prefix("model._orig_mod.")(state)},
    "model_state_dict": lambda state: {"model_state_dict": state, "epoch": 3},
    "state_dict in model": lambda state: {"model": {"state_dict": state}, "epoch": 3},
    "numbers": lambda state: {"net": state, "iou": np.float64(0.5), "ok": np.bool_(True), "n": np.int16(7)},
    "settings": lambda state: {"model": state, "args": argparse.Namespace(lr=np.float32(0.1), name="a")},
}
FILES = [(".pth", form) for form in FORMS]
FILES += [(ending, "state_dict") for ending in (".pkl", ".tar", ".pt")]
FILES += [(".safetensors", form) for form in ("bare", "module.")]


@pytest.mark.parametrize("ending, form", FILES)
def test_weights_load_from_every_form_that_is_published(ending, form, tmp_path, model):
    state = {n: v + 1 for n, v in model.state_dict().items()}
    path = tmp_path / f"weights{ending}"
    if ending == ".safetensors":
        from safetensors.torch import save_file

        save_file(FORMS[form](state), path)
    else:
        torch.save(FORMS[form](state), path)
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


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_integers_of_quantized_weights_are_not_taken_for_the_weights(dtype, tmp_path, model):
    state = {n: (100 * v).to(dtype) if v.is_floating_point() else v for n, v in model.state_dict().items()}
    torch.save(state, tmp_path / "quantized.pth")
    with refuses(f"0.weight: {dtype} in the file, torch.float32 in the model"):
        weights.load(model, tmp_path / "quantized.pth")
    counters = {
        n: v.float() for n, v in model.state_dict().items()
    }  # as model.float() leaves them, or half()
    torch.save(counters, tmp_path / "counters.pth")
    weights.load(model, tmp_path / "counters.pth")


def names_of(kind, state):
    return with_prefix("module.")(state) | ({"n_averaged": torch.tensor(7)} if kind == "torchvision" else {})


def checkpoint_of(kind, used, other):
    """A checkpoint as a trainer writes it, with two sets of weights."""
    adam = {"state": {0: {"step": torch.ones(1), "exp_avg": torch.ones(2, 1, 3, 3)}}, "param_groups": []}
    rest = dict(optimizer=adam, epoch=3, rng_state={"cpu": torch.zeros(8)}, args=argparse.Namespace(lr=0.1))
    return (
        rest
        | {
            "timm": dict(arch="resnet18", state_dict=used, state_dict_ema=other),
            "torchvision": dict(model=used, model_ema=names_of(kind, other)),
            "MMEngine": dict(meta={"epoch": 3}, state_dict=used, ema_state_dict=names_of(kind, other)),
            "D-FINE": dict(model=used, ema={"module": other, "updates": 9}),
            "Lightning": dict(state_dict=with_prefix("model.")(used), **{"teacher._orig_mod": other}),
            "two nets": dict(net_b=other, model=used, name="x"),
            "one": dict(model=used),
        }[kind]
    )


OTHERS = {
    "timm": ("state_dict", "state_dict_ema"),
    "torchvision": ("model", "model_ema"),
    "MMEngine": ("state_dict", "ema_state_dict"),
    "D-FINE": ("model", "ema"),
    "Lightning": ("state_dict", "teacher._orig_mod"),
    "two nets": ("model", "net_b"),
    "one": None,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_of_several_weights_in_a_file_it_is_said_which_are_used(kind, tmp_path, model, capsys):
    used = {name: value + 1 for name, value in model.state_dict().items()}
    other = {name: value + 2 for name, value in model.state_dict().items()}
    torch.save(checkpoint_of(kind, used, other), tmp_path / "both.pth")
    weights.load(model, tmp_path / "both.pth")
    assert all(torch.equal(value, used[name]) for name, value in model.state_dict().items())
    told = capsys.readouterr().out
    if OTHERS[kind] is None:
        assert told == ""
    else:
        name, second = OTHERS[kind]
        assert f"has {name} and {second}: {name} is used" in told and len(told.splitlines()) == 1


# What a Lightning module has beside its network, by name: all are of one kind with it in the file.
BESIDE = {
    "a metric": ["accuracy.total", "val_accuracy.total"],
    "a loss": ["criterion.weight"],
    "nothing": [],
}


@pytest.mark.parametrize("kind", BESIDE)
def test_the_network_of_a_lightning_module_is_loaded_without_its_losses_and_metrics(
    kind, tmp_path, model, capsys
):
    used = {name: value + 1 for name, value in model.state_dict().items()}
    beside = {name: torch.tensor(3) for name in BESIDE[kind]}
    torch.save({"state_dict": with_prefix("model.net.")(used) | beside}, tmp_path / "last.ckpt")
    weights.load(model, tmp_path / "last.ckpt")
    assert torch.equal(model[0].weight, used["0.weight"])
    told = capsys.readouterr().out
    assert ("model.net.* is the network" in told) == bool(beside) and all(name in told for name in beside)


def test_of_two_networks_in_a_module_and_of_a_larger_one_none_is_taken_for_the_network(tmp_path, model):
    state = model.state_dict()
    two = with_prefix("student.")(state) | with_prefix("teacher.")(state)
    larger = with_prefix("net.")(state | {"2.weight": torch.ones(2)}) | {"accuracy.total": torch.ones(1)}
    for content in (two, larger):
        torch.save({"state_dict": content}, tmp_path / "last.ckpt")
        with refuses(tmp_path / "last.ckpt", "belong to another model"):
            weights.load(model, tmp_path / "last.ckpt")


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


NO_WEIGHTS = {
    "missing.pth": (None, "no such file"),
    ".": (None, "a folder; name the file in it"),
    "damaged.pth": (b"not a weight file", "damaged"),
    "damaged.safetensors": (b"not a weight file", "damaged"),
    "empty.pth": (b"", "damaged"),
    "times.pth": ({"model": {}, "saved": datetime.datetime(2026, 1, 1)}, "asks to load datetime.datetime"),
    "sparse.pth": ({"a": torch.ones(1).to_sparse()}, "a is no plain tensor"),
    "list.pth": ([1, 2], "a list:"),
    "numbers.pth": ({0: torch.ones(1)}, "a dict of 0"),
    "gan.pth": ({"generator": {"a": torch.ones(1)}, "step": 3}, "generator, step"),
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_a_file_without_weights_is_named_with_what_it_has(name, tmp_path, model):
    content, words = NO_WEIGHTS[name]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with refuses(tmp_path / name, words):
        weights.load(model, tmp_path / name)


@pytest.mark.parametrize("address", ["s3://bucket/w.pth", "https://me:secret@host/w.pth"])
def test_weights_at_an_address_are_refused_before_a_run_is_made(address, tmp_path):
    for use in (lambda: weights.read(address), lambda: Run.open(tmp_path / "run", MNIST(weights=address))):
        with pytest.raises(TpukitError, match="download") as refused:
            use()
        assert "secret" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["all types", "none"])
def test_weights_are_written_one_tensor_at_a_time_in_the_bytes_that_safetensors_writes(form):
    torch.manual_seed(0)
    state = {
        "image.weight": torch.rand(3, 2, 5, 5).to(memory_format=torch.channels_last),
        "a": torch.rand(7).double(),
        "half": torch.rand(3, 5).bfloat16(),
        "count": torch.tensor(7),
        "flag": torch.tensor([True, False, True]),
        "nothing": torch.rand(0, 4),
        "part": torch.arange(20.0).view(4, 5)[:, 1:3],
    }
    about = {"class": "小猫 \"'"}  # one, because the library shuffles several
    state = state if form == "all types" else {}
    blocks = [bytes(block) for block in weights.serialize(state, about)]
    whole = save({name: tensor.contiguous() for name, tensor in state.items()}, metadata=about)
    assert b"".join(blocks) == whole and len(blocks) == 1 + len(state)
