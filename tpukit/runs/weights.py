"""Weight files of any kind, read without running code from them."""

import contextlib
import hashlib
import json
import os
import pickle
import re
from pathlib import Path

from tpukit.host.errors import Damaged, TpukitError, first_line


def local(path):
    """The file of a path, or of an address (s3://, gs://, hf://), which is downloaded once."""
    from tpukit.runs import places  # which imports this file

    address = places.address_of(path)
    return places.fetch(address) if address else Path(path)


def read(path):
    """name -> CPU tensor from a .safetensors, .pth, .pt, .pkl or .tar file, or the address of one.

    Takes a bare state dict, or one under `state_dict`, `model` or `net`; a `module.` prefix (DataParallel) is
    dropped. Raises TpukitError for a missing or damaged file and for a pickle that would run code: it is
    never run."""
    import torch

    path = local(path)
    if not path.is_file():
        raise TpukitError(f"weights {path}: no such file")
    with _explain_damage(path):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            check_embedded_sha256(path)
            content = load_file(path)
        else:
            content = load_tensors(path)
    for key in ("state_dict", "model", "net"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        raise TpukitError(
            f"weights {path}: expected a state dict (name -> tensor), got {type(content).__name__}"
        )
    for name, tensor in content.items():
        is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not is_dense or tensor.is_quantized or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
            raise TpukitError(
                f"weights {path}: {name} is no plain tensor ({kind}): save it as one (`.to_dense()`,"
                " `.dequantize()`)"
            )
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}


def load_tensors(path):
    """What `torch.save` wrote: tensors, numbers, strings, and nests of them. Code is never run: raises
    UnpicklingError where a file asks for more, and TpukitError for a torch that cannot refuse it."""
    import torch

    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 6):
        raise TpukitError(
            f"torch {torch.__version__} can run code from a weight file even with weights_only=True"
            " (CVE-2025-32434): install torch 2.6 or newer"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        message = str(error)
        if "weights_only" not in message:
            raise
        # torch goes on to recommend weights_only=False, which would run the code.
        found = re.search(r"GLOBAL (\S+)|(TorchScript archive|legacy \.tar)", message)
        asked = found[1] or found[2] if found else "something that is not a tensor"
        raise pickle.UnpicklingError(f"this pickle asks to load {asked}, which could run code") from None


def load(model, path):
    """Load a weight file into a model. Raises TpukitError naming the first entries that differ."""
    new, own = read(path), model.state_dict()
    if different := differences(new, own):
        raise TpukitError(f"weights {path} belong to another model: {different}")
    model.load_state_dict({name: new.get(name, tensor) for name, tensor in own.items()})


def differences(new, own):
    """How the weights of a file differ from those of a model, in words; "" where neither names nor shapes do.

    new, own: name -> tensor."""
    # Counters of batch norm do not change what a model computes; old files lack them.
    missing = [n for n in own if n not in new and not n.endswith("num_batches_tracked")]
    unknown = [n for n in new if n not in own]
    shapes = [n for n in own if n in new and own[n].shape != new[n].shape]
    if not (missing or unknown or shapes):
        return ""
    lines = [
        f"  {n}: shape {tuple(new[n].shape)} in the file, {tuple(own[n].shape)} in the model"
        for n in shapes[:3]
    ]
    lines += [f"  {n}: missing in the file" for n in missing[:3]]
    lines += [f"  {n}: not in the model" for n in unknown[:3]]
    counts = f"{len(shapes)} other shapes, {len(missing)} missing, {len(unknown)} unknown of {len(own)}"
    return f"{counts}. First differences:\n" + "\n".join(lines)


def metadata(path):
    """dict of the strings kept with the weights in a .safetensors file; empty for any other file. `read`
    checks its SHA-256."""
    from safetensors import safe_open

    path = local(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    with _explain_damage(path), safe_open(path, "pt") as file:
        found = file.metadata() or {}
    if "workload" in found:  # as earlier versions call the task
        found["task"] = found["workload"]
    return found


def epoch_of(path):
    """The epoch (from 0) at which a run kept its best.safetensors, or None for a file from elsewhere."""
    epoch = metadata(path).get("epoch", "")
    return int(epoch) if re.fullmatch(r"[0-9]{1,9}", epoch) else None


@contextlib.contextmanager
def _explain_damage(path):
    """Context manager: raise whatever reading a weight file raises as a TpukitError."""
    try:
        yield
    except TpukitError:
        raise
    except pickle.UnpicklingError as error:
        raise TpukitError(
            f"weights {path}: {error}, so it was not opened. Ask its author for a plain state dict or a"
            " .safetensors file."
        ) from error
    except Exception as error:  # torch and safetensors raise many types for a damaged file
        raise TpukitError(f"weights {path}: damaged or not a weight file ({first_line(error)})") from error


# The SHA-256 embedded in the metadata of a run's .safetensors: that of the file with zeros in the digest's
# place

EMBEDDED = b'"tpukit.sha256":"%b"'
ZEROS = b"0" * 64


def serialize(tensors, metadata):
    """The bytes of a .safetensors file with its SHA-256 embedded. tensors: name -> CPU tensor. metadata: name
    -> str."""
    from safetensors.torch import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = save(contiguous, metadata={**metadata, "tpukit.sha256": ZEROS.decode()})
    digest = hashlib.sha256(data).hexdigest().encode()
    return data.replace(EMBEDDED % ZEROS, EMBEDDED % digest, 1)


def check_embedded_sha256(path):
    """Raise Damaged where a .safetensors file has no whole header, or has changed since its SHA-256 was
    embedded. Others have none."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = file.read(8)
        header = file.read(min(size, int.from_bytes(length, "little")))
        try:
            json.loads(header)
        except (ValueError, RecursionError) as error:
            raise Damaged(f"weights {path}: damaged or not a weight file (its header is not JSON)") from error
        found = re.search(EMBEDDED % rb"([0-9a-f]{64})", header)
        if not found and not re.search(rb'"tpukit|sha256"', header):  # one of which a flipped bit leaves
            return
        original = hashlib.sha256(
            length + (header.replace(found[0], EMBEDDED % ZEROS, 1) if found else header)
        )
        while part := file.read(1 << 20):
            original.update(part)
    if not found or original.hexdigest().encode() != found[1]:
        raise Damaged(f"weights {path}: damaged (its {size} bytes do not match the SHA-256 embedded in it)")
