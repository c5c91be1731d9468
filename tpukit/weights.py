"""Reading weight files of any kind without running code from them."""

import pickle
from pathlib import Path

from tpukit.errors import TpukitError, first_line


def read(path):
    """name -> CPU tensor from a .safetensors, .pth, .pt, .pkl or .tar file.

    Takes a bare state dict, or one under `state_dict`, `model` or `net`; a `module.` prefix (DataParallel) is dropped.
    Raises TpukitError for a missing or damaged file and for a pickle that would run code: it is never run.
    """
    import torch

    path = Path(path)
    if not path.is_file():
        raise TpukitError(f"weights {path}: no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = str(error)
        start = what.find("Unsupported global: GLOBAL ")
        name = what[start + 27 :].split()[0] if start >= 0 else "something that is not a tensor"
        raise TpukitError(
            f"weights {path}: this pickle asks to load {name}, which could run code, so it was not opened. "
            "Ask its author for a plain state dict or a .safetensors file."
        ) from error
    except Exception as error:  # torch and safetensors raise many types for a damaged file
        raise TpukitError(f"weights {path}: damaged or not a weight file ({first_line(error)})") from error
    for key in ("state_dict", "model", "net"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise TpukitError(f"weights {path}: expected a state dict (name -> tensor), got {type(content).__name__}")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}


def load(model, path):
    """Load a weight file into a model. Raises TpukitError naming the first entries that differ."""
    new, own = read(path), model.state_dict()
    # Counters of batch norm do not change what a model computes; old files lack them.
    missing = [n for n in own if n not in new and not n.endswith("num_batches_tracked")]
    unknown = [n for n in new if n not in own]
    shapes = [n for n in own if n in new and own[n].shape != new[n].shape]
    if missing or unknown or shapes:
        lines = [f"  {n}: shape {tuple(new[n].shape)} in the file, {tuple(own[n].shape)} in the model" for n in shapes[:3]]
        lines += [f"  {n}: missing in the file" for n in missing[:3]] + [f"  {n}: not in the model" for n in unknown[:3]]
        raise TpukitError(
            f"weights {path} belong to another model ({len(shapes)} other shapes, {len(missing)} missing, "
            f"{len(unknown)} unknown of {len(own)}). First differences:\n" + "\n".join(lines)
        )
    model.load_state_dict({name: new.get(name, tensor) for name, tensor in own.items()})


def metadata(path):
    """dict of the strings that were kept with the weights in a .safetensors file; empty for a file from elsewhere."""
    from safetensors import safe_open

    if Path(path).suffix != ".safetensors" or not Path(path).is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except Exception as error:  # safetensors raises many types for a damaged file
        raise TpukitError(f"weights {path}: damaged or not a weight file ({first_line(error)})") from error


def epoch_of(path):
    """The epoch (from 0) at which a run kept its best.safetensors, or None for a file from elsewhere."""
    epoch = metadata(path).get("epoch")
    return int(epoch) if epoch and epoch.isdigit() else None
