"""Weight files of any kind, read without running code from them."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.host.text import say
from tpukit.runs import manifest
from tpukit.runs.tensors import explain_damage, load_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor


KEYS = ("state_dict", "model_state_dict", "model", "net")
COUNTER = "num_batches_tracked"
PREFIXES = ("module.", "_orig_mod.", "model.")  # added by DataParallel, torch.compile, Lightning


def local(path: str | Path) -> Path:
    """Return the path of a weights file. Raises TpukitError for an address, which may hold a password."""
    return files.local_path(path, "weights are read from a file: download it first")


def find(path: str | Path) -> Path:
    """Return the path of a weights file that is there. Raises TpukitError for one that is not, for a folder,
    and for an address."""
    path = local(path)
    with explain_damage(path):
        if not path.is_file():
            folder = "a folder; name the file in it, of a run best.safetensors"
            raise TpukitError(f"weights {path}: {folder if path.is_dir() else 'no such file'}")
    return path


def read(path: str | Path) -> "dict[str, Tensor]":
    """Return name -> CPU tensor of a .safetensors, .pth, .pt, .pkl or .tar file.

    Takes a bare state dict, or one under one of `KEYS`, and says so if the file has others of that size,
    such as averaged weights; the prefixes of wrappers (`PREFIXES`) are dropped.
    Raises TpukitError for a missing or damaged file (the best weights of a run have a SHA-256), for one that
    cannot be read now, and for a pickle that would run code: it is never run."""
    import torch

    path = find(path)
    with explain_damage(path):
        # By Python, because the readers of torch and safetensors take an error of the disk for damage.
        data = manifest.read_best(path) if path.name == manifest.BEST else files.read_bytes(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load as load_safetensors

            content: Any = load_safetensors(data)
        else:
            content = load_tensors(io.BytesIO(data))
    for key in KEYS * 2:  # {"model": {"state_dict": ...}}, too
        if _is_dict(content) and _is_dict(content.get(key)):
            if others := ", ".join(str(name) for name in content if _is_as_large(content, name, key)):
                say(f"weights {path} has {key} and {others}: {key} is used (to use another, save it alone)")
            content = content[key]
    if not _is_state_dict(content):
        keys = f" of {', '.join(map(str, content)):.200}" if _is_dict(content) else ""
        raise TpukitError(
            f"weights {path}: no state dict (name -> tensor), but a {type(content).__name__}{keys}: save the"
            " state dict alone, or under state_dict"
        )
    for name, tensor in content.items():
        is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not is_dense or tensor.is_quantized or tensor.is_nested:
            raise TpukitError(f"weights {path}: {name} is no plain tensor (use .to_dense() or .dequantize())")
    return _without_prefixes(content)


def _is_dict(content: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(content, dict)


def _is_state_dict(content: object) -> "TypeGuard[dict[str, Tensor]]":
    import torch

    return _is_dict(content) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    )


def _is_as_large(content: "dict[Any, Any]", name: Any, key: str) -> bool:
    """Return True if an entry is a state dict, or holds one, of at least half as many tensors as another."""
    value = content[name]
    inner = [value, *value.values()] if name != key and _is_dict(value) else []
    return any(_is_state_dict(one) and 2 * len(one) >= len(content[key]) for one in inner)


def _without_prefixes(content: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Return the tensors without the prefixes that all their names begin with."""
    for prefix in PREFIXES:
        if content and all(name.startswith(prefix) for name in content):
            return _without_prefixes({name.removeprefix(prefix): value for name, value in content.items()})
    return content


def load(model: "torch.nn.Module", path: str | Path) -> None:
    """Load a weight file into a model. Raises TpukitError naming the first entries that differ."""
    expected = model.state_dict()
    loaded = part_of_network(read(path), expected, path)
    if different := differences(loaded, expected):
        raise TpukitError(
            f"weights {path} belong to another model (see --model-name, --network): {different}"
        )
    model.load_state_dict({name: loaded.get(name, tensor) for name, tensor in expected.items()})


def part_of_network(
    loaded: "dict[str, Tensor]", expected: "Mapping[str, Tensor]", path: Path | str
) -> "dict[str, Tensor]":
    """Return the tensors of a network that a file has in one part: of a Lightning module, which may have
    losses and metrics beside it, and then say so. Return all if no part fits, or several.

    expected: the network's, of which neither shapes nor counters of batch norm matter."""
    names = {name for name in expected if not name.endswith(COUNTER)}
    owners = {".".join(name.split(".")[:depth]) + "." for name in loaded for depth in (1, 2, 3)}
    parts = {o: {n.removeprefix(o): t for n, t in loaded.items() if n.startswith(o)} for o in owners}
    fitting = [o for o, part in parts.items() if names <= part.keys() <= {*expected}]
    if len(fitting) != 1:
        return loaded
    if others := [name for name in loaded if not name.startswith(fitting[0])]:
        left_out = f"{len(others)} other tensors ({', '.join(others[:3])})"
        say(f"weights {path}: {fitting[0]}* is the network; left out are {left_out}")
    return parts[fitting[0]]


def differences(loaded: "Mapping[str, Tensor]", expected: "Mapping[str, Tensor]") -> str:
    """Describe how weights differ from those of a model; "" if neither names nor shapes do."""
    # Counters of batch norm do not change what a model computes; old files lack them.
    missing = [n for n in expected if n not in loaded and not n.endswith(COUNTER)]
    unknown = [n for n in loaded if n not in expected]
    shapes = [n for n in expected if n in loaded and expected[n].shape != loaded[n].shape]
    common = [n for n in expected if n in loaded and not n.endswith(COUNTER)]
    kinds = [n for n in common if expected[n].is_floating_point() != loaded[n].is_floating_point()]
    if not (missing or unknown or shapes or kinds):
        return ""
    sizes = {n: (tuple(loaded[n].shape), tuple(expected[n].shape)) for n in shapes[:3]}
    lines = [f"  {n}: shape {ours} in the file, {theirs} in the model" for n, (ours, theirs) in sizes.items()]
    lines += [f"  {n}: {loaded[n].dtype} in the file, {expected[n].dtype} in the model" for n in kinds[:3]]
    lines += [f"  {n}: missing in the file" for n in missing[:3]]
    lines += [f"  {n}: not in the model" for n in unknown[:3]]
    others = f"{len(shapes)} other shapes, {len(kinds)} other types"
    counts = f"{others}, {len(missing)} missing, {len(unknown)} unknown of {len(expected)}"
    return f"{counts}. First differences:\n" + "\n".join(lines)


def metadata(path: str | Path) -> dict[str, str]:
    """Return the strings kept with the weights in a .safetensors file; empty for any other file."""
    from safetensors import safe_open

    path = local(path)
    if path.suffix != ".safetensors" or not files.exists(path):
        return {}
    with explain_damage(path):
        open(path, "rb").close()  # safetensors takes each error of the disk for a missing file
        opened: Any = safe_open(path, "pt")
        with opened as file:
            return file.metadata() or {}


def epoch_of(path: str | Path) -> int | None:
    """Return the epoch (from 0) at which a run kept its best.safetensors, or None for a file from
    elsewhere."""
    epoch = metadata(path).get("epoch", "")
    return int(epoch) if re.fullmatch(r"[0-9]{1,9}", epoch) else None


def serialize(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Generate the bytes of a .safetensors file of CPU tensors, the header and then one tensor at a time, so
    that no second copy of the weights is in memory."""
    import torch
    from safetensors.torch import save

    # A file of the same names and types without values: its header has their order and the names of types.
    empty = save({name: tensor.new_empty(0) for name, tensor in tensors.items()}, metadata=dict(metadata))
    header, end = json.loads(empty[8:]), 0
    names = [name for name in header if name != "__metadata__"]
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name].update(shape=list(tensors[name].shape), data_offsets=[start, end])
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # values start at a multiple of 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
