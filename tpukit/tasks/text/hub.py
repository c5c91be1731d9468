"""Models of transformers and their tokenizers: in a folder, in the cache of the Hugging Face hub, or
downloaded.

No code of a model's own is run (`trust_remote_code` is never True), and nothing is unpickled. Imports no
torch; transformers and peft where they are used."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from tpukit.host import downloads
from tpukit.host.errors import TpukitError, explained

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma3_text")  # by the `model_type` of a config
BYTES = "bytes"
END = "<|endoftext|>"  # of a text, after the 256 bytes


def shapes() -> dict[str, dict[str, Any]]:
    """The configs that travel with tpukit, by the model's name."""
    return tomllib.loads(Path(__file__).with_name("shapes.toml").read_text())


def imported(name: str) -> Any:
    """A package of the extra `text`."""
    # Else they import torch_xla, which sets PJRT_DEVICE, and from then on this would be a machine with XLA.
    os.environ.setdefault("USE_TORCH_XLA", "0")
    with explained(f"language models need {name} (pip install transformers peft)"):
        package = __import__(name)
    if name == "transformers":
        package.logging.set_verbosity_error()
        package.logging.disable_progress_bar()
    return package


def find_folder(name: str, *, with_weights: bool) -> Path:
    """The folder of a model: a folder itself, or what the Hugging Face hub has of that name, downloaded or
    from its cache. with_weights: else only config and tokenizer. Raises TpukitError where there is none."""
    folder = Path(name).expanduser()
    if (folder / "adapter_config.json").is_file():
        raise TpukitError(f"{folder} holds an adapter: as model_name, give the model that it is for")
    if folder.is_dir():
        return folder
    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if with_weights else [])]  # no code, no pickles
    return downloads.from_hub(name, *patterns)


def read_config(name: str, folder: Path | None) -> Any:
    """The config of transformers, of a model's folder or of the `shapes`. Raises TpukitError for a model that
    is not of the `FAMILIES`, or needs code of its own."""
    kind = imported("transformers").AutoConfig
    with explained(f"{name} has no config.json for a model of transformers without code of its own"):
        if folder is None:
            config = kind.for_model(**shapes()[name])
        else:
            config = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if config.model_type not in FAMILIES:
        raise TpukitError(f"{name} is a {config.model_type!r} model: tpukit trains {', '.join(FAMILIES)}")
    if getattr(config, "quantization_config", None):
        raise TpukitError(f"{name} is quantized, so that it cannot be trained: take what it was made from")
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout"):
        if hasattr(config, key):
            setattr(config, key, 0.0)  # a recomputed layer has to equal itself
    return config


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, by its folder or its name on the hub. bytes: 256 tokens, one for each byte of
    UTF-8, and one for the end of a text. Raises TpukitError where it cannot be had."""
    kind = imported("transformers").PreTrainedTokenizerFast
    if name == BYTES:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return kind(tokenizer_object=tokenizer, eos_token=END)
    folder = find_folder(name, with_weights=False)
    with explained(f"{name} has no tokenizer.json that can be read (tokenizer={BYTES!r} needs none)"):
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise TpukitError(f"the tokenizer of {name} has no token for the end of a text (eos_token)")
    return tokenizer
