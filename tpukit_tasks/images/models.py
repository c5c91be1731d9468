"""Networks by name, of timm or, if that is not installed, of torchvision; and where their pretrained weights
are."""

import contextlib
import copy
import difflib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tpukit.host import files
from tpukit.host.errors import TpukitError, Unreadable, explained, first_line
from tpukit.runs import weights
from tpukit_tasks import downloads

if TYPE_CHECKING:
    from torch.nn import Module


class Network(NamedTuple):
    """A library's description of one of its networks."""

    library: str
    name: str
    size: int
    """Side of the images that it was made for, in pixels."""
    fixed_size: bool
    """Whether it has to be told of another size when it is made."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    published: str
    """The pretrained weights: a repository of the Hugging Face hub or an address; empty: there are none."""


@functools.cache
def describe(name: str) -> Network:
    """The `Network` of a name. Raises TpukitError with the nearest names for an unknown one."""
    try:
        import timm
    except ImportError:
        return _describe_torchvision(name)
    known = {*timm.list_models(), *timm.list_models(pretrained=True)}
    if not timm.is_model(name):  # it knows older names, too
        _require_known(name, known, "timm")
    try:
        config = timm.get_pretrained_cfg(name) or timm.models.PretrainedCfg()
    except RuntimeError:  # the part after the dot names no weights of this network
        _require_known(name, known, "timm")
        raise
    mean, std, published = tuple(config.mean), tuple(config.std), str(config.hf_hub_id or config.url or "")
    return Network("timm", name, config.input_size[-1], config.fixed_input_size, mean, std, published)


def _describe_torchvision(name):
    with explained("neither timm nor torchvision can be imported (pip install timm)"):
        from torchvision import models
    known = models.list_models(module=models)  # without those of segmentation and detection
    _require_known(name, known, "torchvision (timm is not installed)")
    published = models.get_model_weights(name)["DEFAULT"]
    images = published.transforms()
    fixed_size, mean, std = name.startswith("vit_"), tuple(images.mean), tuple(images.std)
    return Network("torchvision", name, images.crop_size[0], fixed_size, mean, std, published.url)


def _require_known(name, known, library):
    if name not in known:
        nearest = ", ".join(difflib.get_close_matches(name, known, 4, 0.5)) or "resnet18"
        raise TpukitError(f"no model {name!r} in {library}, which has {len(known)}; the nearest: {nearest}")


def build(
    network: Network, classes: int, size: int, pretrained: Path | None = None, *, replace_head: bool = False
) -> "Module":
    """The module, on the CPU, that gives logits (B, classes) for images (B, 3, size, size).

    pretrained: file of weights, or None for random ones. A head of another number of classes is left out of
    it, and with replace_head any. Raises TpukitError if the network cannot be made for this size, or the file
    is of another network."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    own_size = f"its own size is {network.size}"
    with explained(f"{network.name} cannot classify images of {size}x{size} pixels, {own_size}"):
        model = _make(network, classes, size)
        trial = copy.deepcopy(model)  # a copy, because batch norms count
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():  # computes nothing
            trial(torch.zeros(2, 3, size, size))
    if pretrained is None:
        return model
    own = model.state_dict()
    state = weights.part_of_network(weights.read(pretrained), own, pretrained)
    for name in [f"{head}.{part}" for head in heads(model) for part in ("weight", "bias")]:
        if name in own and (replace_head or name not in state or state[name].shape != own[name].shape):
            state[name] = own[name]
    try:
        return _make(network, classes, size, state)
    except Exception as error:  # timm and torchvision raise many types
        different = weights.differences(state, own) or first_line(error)
        raise TpukitError(
            f"weights {pretrained} do not fit {network.name}; if they are another network's, name it"
            f" (--model-name, MODEL in a notebook): {different}"
        ) from error


def outputs(network: Network, file: Path) -> int | None:
    """Return how many classes a file of weights has; None if it is of another network."""
    model = _make(network, 1, network.size)
    with contextlib.redirect_stdout(None):  # what there is to say is said where they are loaded
        state = weights.part_of_network(weights.read(file), model.state_dict(), file)
    last = tuple(f"{head}." for head in heads(model))
    below, expected = (
        {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
        for tensors in (state, model.state_dict())
    )
    if weights.differences(below, expected):
        return None
    counts = [len(state[f"{head}weight"]) for head in last if f"{head}weight" in state]
    return counts[0] if counts else None


def heads(model: "Module") -> list[str]:
    """Return the names of the layers that give the logits. timm says which, of torchvision it is the last."""
    import torch

    if named := getattr(model, "default_cfg", {}).get("classifier"):
        return [named] if isinstance(named, str) else list(named)
    kinds = torch.nn.Linear, torch.nn.Conv2d
    return [name for name, module in model.named_modules() if isinstance(module, kinds)][-1:]


def _make(network, classes, size, state=None):
    """The model in training mode, with the weights of a state dict or random ones."""
    if network.library == "timm":
        import timm

        options = dict(img_size=size) if network.fixed_size and size != network.size else {}
        if state is not None:
            # timm adapts the names of older files, and positions to another image size. The numbers of
            # classes agree, so that it leaves nothing out and checks every name.
            loaded = dict(state_dict=state, num_classes=classes, label_offset=0, custom_load=False)
            options |= dict(pretrained=True, pretrained_cfg_overlay=loaded)
        return timm.create_model(network.name, num_classes=classes, **options)
    from torchvision import models

    options = dict(image_size=size) if network.fixed_size else {}
    model = models.get_model(network.name, num_classes=classes, **options)
    if state is not None:
        model.load_state_dict(state)
    return model


def find_pretrained(network: Network, wanted: str) -> tuple[Path | None, str]:
    """(file of pretrained weights or None, a sentence for the log).

    wanted: auto, yes, no, or a file. Looked for in the library's cache, then on the internet. Raises
    TpukitError if `yes` finds none."""
    if wanted == "no":
        return None, f"{network.name}: random weights, because pretrained='no'"
    try:
        path = Path(wanted) if wanted not in ("auto", "yes") else _find_published(network)
    except Unreadable:  # they may be there
        raise
    except TpukitError as error:
        if wanted == "yes":
            raise TpukitError(
                f"no pretrained weights of {network.name}: {error}, or give a file as pretrained=PATH"
            ) from error
        return None, f"{network.name}: random weights, because {error}"
    note = f"{network.name}: pretrained weights from {path}; the last layer is replaced if its classes differ"
    return path, note


def _find_published(network):
    """The file of the published weights, in the library's own cache or downloaded to it. Raises
    TpukitError."""
    import torch

    if not network.published:
        raise TpukitError("none are published")
    with explained(network.published):
        if "://" not in network.published:
            return downloads.from_hub(network.published, "model.safetensors") / "model.safetensors"
        path = Path(torch.hub.get_dir(), "checkpoints", network.published.rpartition("/")[2])
        with files.file_lock(path):  # only one of several processes downloads it
            if not files.exists(path):
                downloads.check_reachable(network.published)
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.hub.download_url_to_file(network.published, str(path))
        return path
