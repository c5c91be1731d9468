"""Weight files of any kind, read without running code from them."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.host.environment import release
from tpukit.host.errors import Damaged, TpukitError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ADDRESS = re.compile(r"([a-z0-9+]{2,}):", re.I)  # how one begins, such as s3://bucket/file, and no path


def local(path: str | Path) -> Path:
    """The path of a weight file. Raises TpukitError for an address, without showing it: it may hold a
    secret."""
    if found := ADDRESS.match(str(path)):
        raise TpukitError(f"{found[1]}: weights are read from a file, not from an address: download it first")
    return Path(path)


def read(path: str | Path) -> "dict[str, Tensor]":
    """name -> CPU tensor from a .safetensors, .pth, .pt, .pkl or .tar file.

    Takes a bare state dict, or one under `state_dict`, `model` or `net`; a `module.` prefix (DataParallel) is
    dropped. Raises TpukitError for a missing or damaged file and for a pickle that would run code: it is
    never run."""
    import torch

    path = local(path)
    if not path.is_file():
        raise TpukitError(f"weights {path}: no such file")
    with explain_damage(path):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            check_embedded_sha256(path)
            content = load_file(path)
        else:
            content = load_tensors(path)
    for key in ("state_dict", "model", "net"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    values = content if isinstance(content, dict) else {}
    if not values or not all(isinstance(name, str) and torch.is_tensor(values[name]) for name in values):
        raise TpukitError(f"weights {path}: no state dict (name -> tensor), but a {type(content).__name__}")
    for name, tensor in values.items():
        is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not is_dense or tensor.is_quantized or tensor.is_nested:
            raise TpukitError(
                f"weights {path}: {name} is no plain tensor ({tensor.layout} on {tensor.device}, quantized:"
                f" {tensor.is_quantized}): save it as one (`.to_dense()`, `.dequantize()`)"
            )
    return {name.removeprefix("module."): tensor for name, tensor in values.items()}


def load_tensors(path: Path) -> Any:
    """What `torch.save` wrote: pytrees of tensors, numbers and strings. Code is never run: raises Damaged for
    a file that asks for more, and TpukitError for a torch that cannot refuse it."""
    import torch

    if release(torch.__version__) < (2, 6):
        raise TpukitError(
            f"torch {torch.__version__} can run code from a weight file even with weights_only=True"
            " (CVE-2025-32434): install torch 2.6 or newer"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if "weights_only" not in str(error):
            raise
        # torch goes on to recommend weights_only=False, which would run the code.
        found = re.search(r"GLOBAL (\S+)|(TorchScript archive|legacy \.tar)", str(error))
        asked = found[1] or found[2] if found else "something that is not a tensor"
        raise Damaged(
            f"weights {path}: this pickle asks to load {asked}, which could run code, so it was not opened."
            " Ask for a state dict or a .safetensors file"
        ) from None


def load(model: "torch.nn.Module", path: str | Path) -> None:
    """Load a weight file into a model. Raises TpukitError naming the first entries that differ."""
    loaded, expected = read(path), model.state_dict()
    if different := differences(loaded, expected):
        raise TpukitError(f"weights {path} belong to another model: {different}")
    model.load_state_dict({name: loaded.get(name, tensor) for name, tensor in expected.items()})


def differences(loaded: "Mapping[str, Tensor]", expected: "Mapping[str, Tensor]") -> str:
    """How weights differ from those of a model, in words; "" if neither names nor shapes do."""
    lines = [f"  {name}: not in the model" for name in loaded if name not in expected]
    for name, tensor in expected.items():
        if name in loaded and loaded[name].shape != tensor.shape:
            shapes = f"{tuple(loaded[name].shape)} in the file, {tuple(tensor.shape)} in the model"
            lines.append(f"  {name}: shape {shapes}")
        # Counters of batch norm do not change what a model computes; old files lack them.
        elif name not in loaded and not name.endswith("num_batches_tracked"):
            lines.append(f"  {name}: missing in the file")
    first = "\n".join(lines[:3] + lines[3:][-6:])
    return f"{len(lines)} differences in {len(expected)} tensors, such as:\n{first}" if lines else ""


def metadata(path: str | Path) -> dict[str, str]:
    """The strings kept with the weights in a .safetensors file; empty for any other file. `read` checks its
    SHA-256."""
    from safetensors import safe_open

    path = local(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    with explain_damage(path), safe_open(path, "pt") as file:
        found = file.metadata() or {}
    if "workload" in found:  # as earlier versions call the task
        found["task"] = found["workload"]
    return found


def epoch_of(path: str | Path) -> int | None:
    """The epoch (from 0) at which a run kept its best.safetensors, or None for a file from elsewhere."""
    found = re.fullmatch("[0-9]{1,9}", metadata(path).get("epoch", ""))
    return int(found[0]) if found else None


@contextlib.contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Context manager: raise whatever reading a weight file raises as Damaged."""
    try:
        yield
    except TpukitError:
        raise
    except Exception as error:  # torch and safetensors raise many types for a damaged file
        raise Damaged(f"weights {path}: damaged or not a weight file ({first_line(error)})") from error


# The SHA-256 in the metadata of a run's .safetensors: that of the file with zeros in the digest's place

EMBEDDED = b'"tpukit.sha256":"%b"'
ZEROS = b"0" * 64


def serialize(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> bytes:
    """The bytes of a .safetensors file of CPU tensors with its SHA-256 embedded."""
    from safetensors.torch import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = save(contiguous, metadata={**metadata, "tpukit.sha256": ZEROS.decode()})
    digest = hashlib.sha256(data).hexdigest().encode()
    return data.replace(EMBEDDED % ZEROS, EMBEDDED % digest, 1)


def check_embedded_sha256(path: Path) -> None:
    """Raise Damaged if a .safetensors file is missing, has no whole header, or is not what its embedded
    SHA-256 says, if it has one."""
    with explain_damage(path):
        data = path.read_bytes()
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        json.loads(header)
    found = re.search(EMBEDDED % rb"([0-9a-f]{64})", header)
    is_whole = found and hashlib.sha256(data.replace(found[1], ZEROS, 1)).hexdigest().encode() == found[1]
    # Without one the file is of elsewhere, unless something of it is left, as by a flipped bit in its name.
    if not is_whole and (found or re.search(rb'"tpukit|sha256"', header)):
        raise Damaged(
            f"weights {path}: damaged (its {len(data)} bytes do not match the SHA-256 embedded in it)"
        )
