"""Models of transformers, found: in a folder, in the cache of the Hugging Face hub, or downloaded.

No code of a model's own is run (`trust_remote_code` is never True), and nothing is unpickled. Imports no
torch; transformers and peft where they are used."""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from tpukit.host import downloads
from tpukit.host.errors import TpukitError, first_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MULTIPLE = 128  # of the vocabulary of random weights: a TPU pads to it anyway
# Where LoRA puts its adapters, by the `model_type` of a config: all matrices of the layers.
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = dict(
    gpt2=("c_attn", "c_proj", "c_fc"), llama=_LLAMA, qwen2=_LLAMA, qwen3=_LLAMA, gemma3_text=_LLAMA
)


def shapes() -> dict[str, dict[str, Any]]:
    """The configs that travel with tpukit, by the model's name."""
    return tomllib.loads(Path(__file__).with_name("shapes.toml").read_text())


def find_folder(name: str, *, with_weights: bool) -> Path:
    """The folder of a model: a folder itself, or what the Hugging Face hub has of that name, from its cache
    or downloaded. with_weights: else only config and tokenizer. Raises TpukitError where there is none."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise TpukitError(f"model {name!r}: no such folder, and no name of a model on the Hugging Face hub")
    library: Any = imported("huggingface_hub")
    wanted = ["*.json", "*.jinja", *(["*.safetensors"] if with_weights else [])]  # no code, no pickles
    download = functools.partial(
        library.snapshot_download, name, allow_patterns=wanted, ignore_patterns=["*/*"]
    )
    try:
        folder = Path(download(local_files_only=True))
        if (folder / "config.json").is_file() and (not with_weights or weight_files(folder)):
            return folder
    except (TpukitError, library.errors.LocalEntryNotFoundError):
        pass  # not here, or not all of it
    try:
        downloads.check_reachable(library.constants.ENDPOINT)
        return Path(download())
    except library.errors.GatedRepoError as error:
        raise TpukitError(
            f"{name} is gated: accept its terms on its page on the Hugging Face hub, then give your token to"
            " this session (`hf auth login`, or HF_TOKEN among the secrets)"
        ) from error
    except library.errors.RepositoryNotFoundError as error:
        raise TpukitError(
            f"{name}: the Hugging Face hub has no model of this name that you may read"
        ) from error
    except Exception as error:  # of the hub, of its HTTP library, or an answer that does not come
        raise TpukitError(
            f"{name} is not on this machine and cannot be downloaded ({first_line(error)}): switch the"
            " internet on, or give a folder with config.json, tokenizer.json and model.safetensors"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors files of a model's folder. Raises TpukitError where one is missing."""
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        index = _read_json(folder / INDEX).get("weight_map")
        names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
    paths = [folder / Path(name).name for name in names]
    if missing := [path.name for path in paths if not path.is_file()] or not paths:
        pickles = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
        why = f"only {pickles[0]}, a pickle, which could run code" if pickles else f"no {missing}"
        raise TpukitError(
            f"{folder} has {why}: weights are read from .safetensors files only (save_pretrained of"
            " transformers writes them)"
        )
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TpukitError(f"{path} cannot be read ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise TpukitError(f"{path} holds no settings but a {type(content).__name__}")
    return content


def imported(name: str) -> Any:
    """A package of the extra `text`."""
    # Else they import torch_xla, which sets PJRT_DEVICE, and from then on this would be a machine with XLA.
    os.environ.setdefault("USE_TORCH_XLA", "0")
    try:
        package = __import__(name)
    except Exception as error:  # not installed, or made for another torch
        raise TpukitError(
            f"language models need {name} ({first_line(error)}): pip install transformers peft"
        ) from error
    if name == "transformers":
        package.logging.set_verbosity_error()
        package.logging.disable_progress_bar()
    return package


def read_config(name: str, folder: Path | None) -> Any:
    """The config of transformers, of a model's folder or of the `shapes`. Raises TpukitError for a model that
    is not of the `FAMILIES`, or needs code of its own."""
    settings = _read_json(folder / "config.json") if folder else dict(shapes()[name])
    family = settings.pop("model_type", None)
    if family not in FAMILIES:
        own = " with code of its own (trust_remote_code), never run here" if "auto_map" in settings else ""
        raise TpukitError(f"{name} is a {family!r} model{own}: tpukit trains {', '.join(FAMILIES)}")
    if settings.pop("quantization_config", None):
        raise TpukitError(f"{name} is quantized, so that it cannot be trained: take what it was made from")
    settings.pop("auto_map", None)
    transformers = imported("transformers")
    try:
        config = transformers.AutoConfig.for_model(family, **settings)
    except Exception as error:  # transformers raises many types
        raise TpukitError(f"{name}: its config.json is damaged ({first_line(error)})") from error
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout"):
        if hasattr(config, key):
            setattr(config, key, 0.0)  # a recomputed layer has to equal itself
    return config
