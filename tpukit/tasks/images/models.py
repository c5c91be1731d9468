"""The networks: timm's by name, torchvision's where timm is not installed, and where their pretrained weights
are."""

import difflib
import functools
import os
from pathlib import Path
from typing import NamedTuple

from tpukit.host import downloads, environment, files
from tpukit.host.errors import TpukitError, first_line
from tpukit.runs import weights

WEIGHT_ENDINGS = (".safetensors", ".pth", ".pt", ".bin")
KAGGLE_DEPTH = 6  # folders between /kaggle/input and a file of weights
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class Network(NamedTuple):
    """What a library says of one of its networks."""

    library: str
    name: str
    size: int
    """Side of the images that it was made for, in pixels."""
    fixed_size: bool
    """Whether it has to be told of another size when it is made."""
    mean: tuple
    std: tuple
    classes: int
    """Of the pretrained head; 0: it has none."""
    heads: tuple = ()
    """Names of the last layers; torchvision does not say."""
    repository: str = ""
    """Of the pretrained weights on the Hugging Face hub."""
    url: str = ""


@functools.cache
def describe(name):
    """The `Network` of a name. Raises TpukitError with the nearest names where there is none."""
    try:
        import timm
    except ImportError:
        return _describe_torchvision(name)
    if not timm.is_model(name):
        raise _unknown(name, "timm", timm.list_models())
    try:
        cfg = timm.get_pretrained_cfg(name)
    except RuntimeError:  # the part after the dot names no weights of this network
        known = timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True)
        raise _unknown(name, "timm", known) from None
    if cfg is None:  # of a network without pretrained weights
        return Network("timm", name, 224, False, **IMAGENET, classes=1000)
    heads = (cfg.classifier,) if isinstance(cfg.classifier, str) else tuple(cfg.classifier or ())
    return Network(
        "timm", name, cfg.input_size[-1], cfg.fixed_input_size, tuple(cfg.mean), tuple(cfg.std), cfg.num_classes, heads,
        cfg.hf_hub_id or "", cfg.url or "",
    )  # fmt: skip


def _describe_torchvision(name):
    try:
        from torchvision import models
    except Exception as error:  # not installed, or made for another torch
        raise TpukitError(
            f"neither timm nor torchvision can be imported ({first_line(error)}): pip install timm"
        ) from error
    known = models.list_models(module=models)  # without those of segmentation and detection
    if name not in known:
        raise _unknown(name, "torchvision, as timm is not installed,", known)
    found = models.get_model_weights(name).DEFAULT
    transforms = found.transforms()
    size, mean, std = transforms.crop_size[0], tuple(transforms.mean), tuple(transforms.std)
    return Network(
        "torchvision",
        name,
        size,
        name.startswith("vit_"),
        mean,
        std,
        len(found.meta["categories"]),
        url=found.url,
    )


def _unknown(name, library, known):
    nearest = difflib.get_close_matches(name, known, 4, 0.5)
    hint = (
        f"the nearest: {', '.join(nearest)}" if nearest else f"there are {len(known)}, resnet18 for instance"
    )
    return TpukitError(f"no model {name!r} in {library}: {hint}")


def build(network, classes, size, pretrained=None, *, keep_head=False):
    """The torch.nn.Module, on the CPU, that gives logits (B, classes) for images (B, 3, size, size).

    pretrained: file of weights, or None for random ones. A head of another number of classes is left out of
    it, unless keep_head. Raises TpukitError where the network cannot be made for this size, or the file is of
    another network."""
    state = None if pretrained is None else weights.read(pretrained)
    options = (
        dict(img_size=size)
        if network.library == "timm" and network.fixed_size and size != network.size
        else {}
    )
    options |= dict(image_size=size) if network.library == "torchvision" and network.fixed_size else {}
    try:
        model = _make(network, classes, options)
    except Exception as error:  # libraries raise many types
        raise TpukitError(
            f"{network.name} cannot be made for images of {size}x{size} pixels: {first_line(error)}"
        ) from error
    _check_output(model, network, classes, size)
    if state is not None:
        heads = network.heads or (_last_layer(model),)
        if not keep_head:
            _replace_heads(state, model.state_dict(), heads)
        try:
            model = _load(network, model, classes, options, state, keep_head)
        except Exception as error:
            raise TpukitError(
                f"weights {pretrained} do not fit {network.name}: {first_line(error)}"
            ) from error
    return model


def _make(network, classes, options):
    if network.library == "timm":
        import timm

        return timm.create_model(network.name, num_classes=classes, **options)
    from torchvision import models

    return models.get_model(network.name, num_classes=classes, **options)


def _load(network, model, classes, options, state, keep_head):
    """The model with a state dict in it; timm adapts the names of older files, and the positions of another
    image size."""
    if network.library == "timm":
        import timm

        # The numbers of classes agree, so that timm leaves nothing out and checks every name.
        given = dict(state_dict=state, num_classes=classes, custom_load=False)
        if not keep_head:
            given["label_offset"] = 0
        return timm.create_model(
            network.name, pretrained=True, num_classes=classes, pretrained_cfg_overlay=given, **options
        )
    model.load_state_dict(state)
    return model


def _replace_heads(state, own, heads):
    """Put the fresh layers of a model (its state dict) into the state dict of a file, where theirs have
    another size."""
    for name in (f"{head}.{part}" for head in heads for part in ("weight", "bias")):
        if name in own and (name not in state or state[name].shape != own[name].shape):
            state[name] = own[name]


def _last_layer(model):
    import torch

    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))
    ]
    return layers[-1]


def _check_output(model, network, classes, size):
    """Raise TpukitError where a network does not turn an image into one row of logits. Computes nothing."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            shape = tuple(model.eval()(torch.zeros(1, 3, size, size)).shape)
    except Exception as error:
        raise TpukitError(
            f"{network.name} takes no images of {size}x{size} pixels ({first_line(error)}); its own size is"
            f" {network.size}"
        ) from error
    model.train()
    if shape != (1, classes):
        raise TpukitError(
            f"{network.name} gives {shape} for an image, not {(1, classes)}: choose a network for"
            " classification"
        )


def find_pretrained(network, wanted, dataset_dir=None):
    """(file of pretrained weights or None, a sentence for the log).

    wanted: auto, yes, no, or a file. Looked for in the caches of timm and torchvision, in Kaggle's inputs
    (not in dataset_dir), then on the internet. Raises TpukitError where `yes` finds none."""
    if wanted == "no":
        return None, f"{network.name}: random weights, as pretrained='no' asks for"
    if wanted not in ("auto", "yes"):
        return (
            Path(wanted),
            f"{network.name}: pretrained weights of {wanted}; a head of other classes is replaced",
        )
    path = _cached(network) or _in_kaggle_inputs(network, dataset_dir)
    why_not = "none are published"
    if path is None and (network.repository or network.url):
        try:
            path = _download(network)
        except TpukitError as error:
            why_not = str(error)
    if path:
        return (
            Path(path),
            f"{network.name}: pretrained weights of {path}; a head of other classes is replaced",
        )
    if wanted == "yes":
        raise TpukitError(
            f"no pretrained weights of {network.name} ({why_not}): switch the internet on, attach them as a"
            " Kaggle input, or give a file as pretrained=PATH"
        )
    return None, f"{network.name}: random weights, because no pretrained ones are here ({why_not})"


def _cached(network):
    if network.repository:
        from huggingface_hub import try_to_load_from_cache

        for name in ("model.safetensors", "pytorch_model.bin"):
            if isinstance(path := try_to_load_from_cache(network.repository, name), str):
                return path
    if network.url:
        import torch

        path = Path(torch.hub.get_dir()) / "checkpoints" / network.url.rpartition("/")[2]
        if path.is_file():
            return path
    return None


def _in_kaggle_inputs(network, dataset_dir):
    """A file of weights that bears the network's name, itself or in one of the folders above it; None on
    other hosts."""
    env = environment.detect()
    if env.host != "kaggle":
        return None
    names = {_plain(network.name), _plain(network.name.partition(".")[0])}
    for place, folders, found in os.walk(env.inputs):
        place = Path(place)
        depth = len(place.relative_to(env.inputs).parts)
        is_dataset = dataset_dir is not None and place.resolve() == Path(dataset_dir).resolve()
        folders[:] = [] if is_dataset or depth >= KAGGLE_DEPTH else sorted(folders)
        above = {_plain(part) for part in place.relative_to(env.inputs).parts}
        for name in sorted(found):
            if name.endswith(WEIGHT_ENDINGS) and names & {*above, _plain(Path(name).stem)}:
                return place / name
    return None


def _plain(name):
    return name.lower().replace("-", "_")


def _download(network):
    """The file of the pretrained weights, from the internet to the library's own cache. Raises
    TpukitError."""
    if network.repository:
        from huggingface_hub import hf_hub_download

        url = f"https://huggingface.co/{network.repository}"
        downloads.check_reachable(url)
        try:
            return hf_hub_download(network.repository, "model.safetensors")
        except Exception as error:  # of the hub and of its HTTP library
            raise TpukitError(f"{url}: {first_line(error)}") from error
    import torch

    downloads.check_reachable(network.url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / network.url.rpartition("/")[2]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.file_lock(path):
            torch.hub.download_url_to_file(network.url, str(path))
    except Exception as error:
        raise TpukitError(f"{network.url}: {first_line(error)}") from error
    return path


def layers(model):
    """Lists of parameter names, from the input to the output: timm's layers, elsewhere the children of the
    model."""
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        groups = group_parameters(model, model.group_matcher(coarse=False))
        return [groups[number] for number in sorted(groups)]
    groups = {}
    for name, _ in model.named_parameters():
        groups.setdefault(name.partition(".")[0], []).append(name)
    return list(groups.values())
