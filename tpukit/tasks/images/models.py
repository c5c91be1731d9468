"""Networks of timm by name, and where their pretrained weights are."""

import copy
import difflib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit.host.errors import TpukitError, explained, first_line
from tpukit.runs import weights
from tpukit.tasks import downloads

if TYPE_CHECKING:
    from torch.nn import Module


class Network(NamedTuple):
    """timm's description of one of its networks."""

    name: str
    size: int
    """Side of the images that it was made for, in pixels."""
    fixed_size: bool
    """Whether it has to be told of another size when it is made."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    published: str
    """The repository of the pretrained weights on the Hugging Face hub; empty: there is none."""


@functools.cache
def describe(name: str) -> Network:
    """The `Network` of a name. Raises TpukitError with the nearest names for an unknown one."""
    with explained("timm is missing (switch the internet on, and run pip install timm)"):
        import timm
    known = {*timm.list_models(), *timm.list_models(pretrained=True)}
    # timm knows its older names, too, and of one with a dot only the part before it.
    if name not in known and ("." in name or not timm.is_model(name)):
        nearest = ", ".join(difflib.get_close_matches(name, known, 4, 0.5)) or "resnet18"
        raise TpukitError(f"no model {name!r} in timm, which has {len(known)}; the nearest: {nearest}")
    config = timm.get_pretrained_cfg(name) or timm.models.PretrainedCfg()
    mean, std, published = tuple(config.mean), tuple(config.std), config.hf_hub_id or ""
    return Network(name, config.input_size[-1], config.fixed_input_size, mean, std, published)


def build(network: Network, classes: int, size: int, pretrained: Path | None = None) -> "Module":
    """The module, on the CPU, that gives logits (B, classes) for images (B, 3, size, size).

    pretrained: file of weights, or None for random ones. A head of another number of classes is left out of
    it. Raises TpukitError if the network cannot be made for this size, or the file is of another network."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    own_size = f"its own size is {network.size}"
    with explained(f"{network.name} cannot classify images of {size}x{size} pixels, {own_size}"):
        model = _make(network, classes, size)
        trial = copy.deepcopy(model)  # whose batch norms count
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():  # computes nothing
            trial(torch.zeros(2, 3, size, size))
    if pretrained is None:
        return model
    state, own = weights.read(pretrained), model.state_dict()
    for name in [f"{head}.{part}" for head in heads(model) for part in ("weight", "bias")]:
        if name in own and (name not in state or state[name].shape != own[name].shape):
            state[name] = own[name]
    try:
        return _make(network, classes, size, state)
    except Exception as error:  # timm raises many types
        different = weights.differences(state, own) or first_line(error)
        raise TpukitError(f"weights {pretrained} do not fit {network.name}: {different}") from error


def heads(model: "Module") -> list[str]:
    """Return the names of the layers that give the logits, as timm says."""
    config: Any = model.default_cfg
    named = config["classifier"]
    return [named] if isinstance(named, str) else list(named)


def _make(network, classes, size, state=None):
    """The model in training mode, with the weights of a state dict or random ones."""
    import timm

    options = dict(img_size=size) if network.fixed_size and size != network.size else {}
    if state is not None:
        # timm adapts the names of older files, and positions to another image size. The numbers of classes
        # agree, so that it leaves nothing out and checks every name.
        loaded = dict(state_dict=state, num_classes=classes, label_offset=0, custom_load=False)
        options |= dict(pretrained=True, pretrained_cfg_overlay=loaded)
    return timm.create_model(network.name, num_classes=classes, **options)


def find_pretrained(network: Network, wanted: str) -> tuple[Path | None, str]:
    """(file of pretrained weights or None, a sentence for the log).

    wanted: auto, yes, no, or a file. Looked for in the cache of the Hugging Face hub, then on the internet.
    Raises TpukitError if `yes` finds none."""
    if wanted == "no":
        return None, f"{network.name}: random weights, as pretrained='no' asks for"
    try:
        path = Path(wanted) if wanted not in ("auto", "yes") else _find_published(network)
    except TpukitError as error:
        if wanted == "yes":
            raise TpukitError(
                f"no pretrained weights of {network.name} ({error}): switch the internet on, or give a file"
                " as pretrained=PATH"
            ) from error
        return None, f"{network.name}: random weights, because no pretrained ones are here ({error})"
    return path, f"{network.name}: pretrained weights of {path}; a head of other classes is replaced"


def _find_published(network):
    """Return the file of the published weights, which may have to be downloaded. Raises TpukitError."""
    if not network.published:
        raise TpukitError("none are on the Hugging Face hub")
    return downloads.from_hub(network.published, "model.safetensors") / "model.safetensors"
