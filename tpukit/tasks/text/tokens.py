"""Tokenizers: a model's own, or the bytes of UTF-8. No code of a tokenizer's own is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpukit.host.errors import TpukitError, first_line
from tpukit.tasks.text import hub

BYTES = "bytes"
END = "<|endoftext|>"


def load(name: str, folder: Path | None) -> Any:
    """A tokenizer of transformers. name: auto, for that in the model's folder, or bytes where there is none;
    bytes; else a folder or a name on the Hugging Face hub. Raises TpukitError where it cannot be had."""
    transformers = hub.imported("transformers")
    if name == BYTES or (name == "auto" and folder is None):
        return _bytes_tokenizer(transformers)
    folder = hub.find_folder(name, with_weights=False) if name != "auto" else folder
    assert folder is not None
    if not (folder / "tokenizer.json").is_file():
        raise TpukitError(f"{folder} has no tokenizer.json: name another tokenizer, or tokenizer='{BYTES}'")
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise many types
        raise TpukitError(f"the tokenizer in {folder} cannot be read ({first_line(error)})") from error
    if tokenizer.eos_token_id is None:
        raise TpukitError(f"the tokenizer in {folder} has no token for the end of a text (eos_token)")
    return tokenizer


def _bytes_tokenizer(transformers: Any) -> Any:
    """256 tokens, one for each byte, and one for the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def continuation(tokenizer: Any, tokens: Sequence[int], prompt: int) -> tuple[str, str]:
    """(the text of the first `prompt` tokens, the text of those after them, up to the end of a turn)."""
    ends = set(tokenizer.all_special_ids)
    written = list(tokens[prompt:])
    stop = next((number for number, token in enumerate(written) if token in ends), len(written))
    first, second = (
        tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:prompt], written[:stop])
    )
    return first, second
