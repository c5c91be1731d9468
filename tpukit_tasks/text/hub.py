"""Find models of transformers and their tokenizers. No code of theirs is run (`trust_remote_code` is never
True), and nothing is unpickled. Imports no torch; transformers and peft when they are used."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from tpukit.host.errors import TpukitError, explained, reading
from tpukit_tasks import downloads

# By the `model_type` of a config: those whose logits are tested to be transformers', and why others are not.
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma3_text", "mistral", "ministral", "smollm3", "phi3")
FAMILIES += ("olmo2", "granite")
REFUSED = {
    **dict.fromkeys(
        ("gemma2", "recurrent_gemma"), "its soft caps on attention and logits are not computed here"
    ),
    **dict.fromkeys(
        ("gemma3", "mistral3", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "it reads images, too"
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "mixtral", "olmoe"), "its experts take batches of any shape"),
}
SHAPES = Path(__file__).with_name("shapes")  # configs of published models, and all but the weights of TINY
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout")
TINY = "tiny"  # a GPT of four layers, with a token for each byte of UTF-8, and one for the end of a text


def imported(name: str) -> Any:
    """Import a package of the extra `text`."""
    # Else it imports torch_xla, which sets PJRT_DEVICE, and from then on this would be a machine with XLA.
    os.environ.setdefault("USE_TORCH_XLA", "0")
    with explained(f"language models need {name} (pip install transformers peft)"):
        package = __import__(name)
    if name == "transformers":
        package.logging.set_verbosity_error()
        package.logging.disable_progress_bar()
    return package


def find_folder(name: str, wanted: Literal["config", "tokenizer", "weights"]) -> Path:
    """Return a folder that has at least what is wanted of a model: the folder `name`, that of the name in
    `SHAPES`, or what the Hugging Face hub has under it. Raises TpukitError if there is none."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if wanted != "weights" and (SHAPES / name / f"{wanted}.json").is_file():
        return SHAPES / name
    weights = ["*.safetensors"] if wanted == "weights" else []
    return downloads.from_hub(name, "*.json", "*.jinja", *weights)  # no code, no pickles


def read_config(folder: Path) -> Any:
    """Read the config of a model, as transformers has it. Raises TpukitError for a model that is not of the
    `FAMILIES`, or needs code of its own."""
    kind = imported("transformers").AutoConfig
    wrong = f"{folder} has no config.json for a model of transformers without code of its own"
    with reading(folder, wrong, TpukitError):
        options = dict.fromkeys(DROPOUTS, 0.0)  # a layer that is computed twice has to equal itself
        config = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    if why := _why_refused(config):
        kind = f"{config.model_type!r} model"
        raise TpukitError(f"{folder} is a {kind}: {why}; tpukit trains {', '.join(FAMILIES)}, not quantized")
    if getattr(config, "activation_function", None) == "gelu_new":  # the same in a dozen passes over memory
        config.activation_function = "gelu_pytorch_tanh"
    if getattr(config, "head_dim", None) is None:  # as GPT-2 and Qwen 2 have it
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _why_refused(config):
    """Return why a model of a config is not trained, or ""."""
    if config.model_type not in FAMILIES:
        return REFUSED.get(config.model_type, "its family is not one that is tested")
    if getattr(config, "quantization_config", None):
        return "it is quantized"
    if (scaling := getattr(config, "logits_scaling", 1)) != 1:  # of Granite
        return f"its logits are divided by {scaling} (logits_scaling), which is not computed here"
    if "dynamic" in json.dumps(getattr(config, "rope_parameters", None) or {}):
        return "its positions are scaled by the length of each text (dynamic), which needs a graph for each"
    return ""


def most_positions(config: Any) -> int:
    """Return how many tokens the model of a config takes: of one whose positions have two scales (longrope),
    as many as the first is for, since the second would be another graph."""
    rope = getattr(config, "rope_parameters", None) or {}
    has_two = rope.get("rope_type") == "longrope"
    return rope["original_max_position_embeddings"] if has_two else config.max_position_embeddings


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model, by its folder or its name. Raises TpukitError if that has none."""
    kind, folder = imported("transformers").PreTrainedTokenizerFast, find_folder(name, "tokenizer")
    with reading(folder, f"{name} has no tokenizer.json that can be read", TpukitError):
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise TpukitError(f"the tokenizer of {name} has no token for the end of a text (eos_token)")
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that transformers 4 loads, too. It knows neither the class that 5 names, nor a list
    of special tokens under the name that 5 has for it."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | dict(tokenizer_class="PreTrainedTokenizerFast")
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def read_ends(folder: Path, config: Any) -> list[int | None]:
    """Return the tokens after which a published model stops, by its generation_config.json or its config; a
    None if that names none."""
    path, ends = folder / "generation_config.json", config.eos_token_id
    if path.is_file():
        with reading(path, f"{path} is not JSON", TpukitError):
            ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", ends)
    return ends if isinstance(ends, list) else [ends]
