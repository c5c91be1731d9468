"""A language model as tpukit trains it, next to a loop by hand, with and without torch.compile, and to TRL's
trainer: `python -m benchmarks.text ROUNDS`.

On a GPU the models are GPT-2 124M (16 rows of 1024 tokens), and LoRA of Qwen3-0.6B's shape (8 rows), in bf16;
on a T4 a quarter of the rows, in fp16; on a CPU small models, on one thread. Weights are random, and so are
the words of the rows, each of which is one document. The loop by hand follows nanoGPT (Andrej Karpathy):
attention over whole rows, autocast, fused AdamW, gradients clipped to 1; its GPT-2 is written out here, else
the network is of transformers. Each round times the same steps of all, in turn; a first round warms up."""

import dataclasses
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks.loops import Timed
from benchmarks.rows import compare, print_row
from benchmarks.steps import open_runtime
from tpukit import LanguageModel, train
from tpukit.devices.runtime import keep_freed_memory

os.environ["USE_TORCH_XLA"] = "false"  # else TRL trains on an XLA device, if torch_xla is installed
WARM_UP, STEPS = 20, 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOCK = time.perf_counter
if DEVICE == "cpu":  # the CPU's time, so that other processes matter less
    WARM_UP, STEPS, CLOCK = 5, 20, time.process_time
# A T4 has no bf16, and 15 GiB, which the larger batches fill.
IS_SMALL = DEVICE == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
HALF, DTYPE, SHARE = ("fp16", torch.float16, 4) if IS_SMALL else ("bf16", torch.bfloat16, 1)


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2, whose head is its embedding of tokens."""

    def __init__(self, config) -> None:
        super().__init__()
        width = config.n_embd
        self.tokens, self.places = nn.Embedding(config.vocab_size, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, config.n_head) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, rows, labels):
        x = self.tokens(rows) + self.places.weight[: rows.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


class LoRA(nn.Module):
    """A model of transformers with adapters of peft."""

    def __init__(self, task: LanguageModel) -> None:
        import peft

        super().__init__()
        self.net = peft.get_peft_model(base_model(task), adapter(task))

    def forward(self, rows, labels):
        logits = self.net(rows).logits
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def base_model(task: LanguageModel) -> nn.Module:
    import transformers

    options = dict(attn_implementation="sdpa", dtype=DTYPE)
    return transformers.AutoModelForCausalLM.from_config(task.config, **options)


def adapter(task: LanguageModel):
    import peft

    shape = dict(r=task.lora_rank, lora_alpha=2 * task.lora_rank, target_modules="all-linear")
    return peft.LoraConfig(**shape, task_type="CAUSAL_LM")


def make_task(folder: Path, *, lora: bool) -> LanguageModel:
    """Write texts of random words, each as long as a row, and a model's config with a tokenizer of these
    words. Return the task that trains on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast, Qwen3Config

    words, length, size = (300, 128, 8) if DEVICE == "cpu" else (50257, 1024, (8 if lora else 16) // SHARE)
    config = GPT2Config(n_layer=4, n_head=4, n_embd=128) if DEVICE == "cpu" else GPT2Config()
    if lora and DEVICE == "cuda":
        words, shape = 151_936, dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
        shape |= dict(num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
        config = Qwen3Config(**shape)
    vocabulary = {f"w{n}": n for n in range(words - 1)} | {"<end>": words - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    whole.save_pretrained(folder / "model")
    config.save_pretrained(folder / "model")
    for part, count in dict(train=size * (WARM_UP + STEPS), test=32).items():
        (folder / "rows" / part).mkdir(parents=True)
        numbers = np.random.default_rng(count).integers(words - 1, size=(count, length - 1))
        lines = [json.dumps(dict(text=" ".join(f"w{n}" for n in row))) for row in numbers]
        (folder / "rows" / part / "rows.jsonl").write_text("\n".join(lines))
    return LanguageModel(
        dataset_dir=folder / "rows",
        model_name=str(folder / "model"),
        pretrained="no",
        adapter="lora" if lora else "none",
        precision=HALF if lora or DEVICE == "cuda" else "fp32",
        sequence_length=length,
        batch_size=size,
        epochs=1,
        eval_every=2,
        samples=0,
        log_every=WARM_UP,
        gradient_checkpointing="no",
    )


def batch_of(task: LanguageModel) -> dict[str, torch.Tensor]:
    """Return all rows, and what is to be learned of them, on the host."""
    data, _ = task.datasets()
    whole = data.batch(np.arange(len(data)))
    return {name: torch.from_numpy(whole[name]).long() for name in ("tokens", "labels")}


def by_hand(task: LanguageModel, compiled: bool = False) -> float:
    """Return the seconds of a step of a loop written by hand."""
    keep_freed_memory()  # as tpukit does, or the system would clear each step's memory anew
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    network = (LoRA(task) if task.uses_lora else GPT(task.config)).to(DEVICE)
    trained = [p for p in network.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.ndim > 1], weight_decay=0.1)]
    groups += [dict(params=[p for p in trained if p.ndim <= 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=task.lr, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(network) if compiled else network
    scaler = torch.amp.GradScaler(DEVICE, enabled=HALF == "fp16")
    times = []
    batches = zip(*(values.split(task.batch_size) for values in batch_of(task).values()))
    for batch in batches:
        note_time(times)
        if DEVICE == "cuda":
            batch = [values.pin_memory().to(DEVICE, non_blocking=True) for values in batch]
        with torch.autocast(DEVICE, DTYPE, enabled=task.precision != "fp32"):
            loss = forward(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    note_time(times)
    return (times[-1] - times[WARM_UP]) / STEPS


def note_time(times: list[float]) -> None:
    """Note the time before a step; before the first that counts and after the last, once all is done."""
    if DEVICE == "cuda" and len(times) in (WARM_UP, WARM_UP + STEPS):
        torch.cuda.synchronize()
    times.append(CLOCK())


def by_trl(task: LanguageModel) -> float:
    """Return the same of TRL's trainer."""
    import datasets
    import transformers
    import trl

    times = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *arguments, **keywords):
            note_time(times)

        def on_train_end(self, *arguments, **keywords):
            note_time(times)

    rows = datasets.table.InMemoryTable.from_pydict(dict(input_ids=batch_of(task)["tokens"].tolist()))
    with tempfile.TemporaryDirectory() as folder:
        quiet = dict(report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True)
        sizes = dict(per_device_train_batch_size=task.batch_size, max_length=task.length)
        ways = dict(gradient_checkpointing=False, **{HALF: True}, use_cpu=DEVICE == "cpu")
        ways |= dict(dataset_kwargs=dict(skip_prepare_dataset=True))  # the rows are tokens already
        trainer = trl.SFTTrainer(
            base_model(task),
            trl.SFTConfig(folder, max_steps=WARM_UP + STEPS, learning_rate=task.lr, **sizes, **ways, **quiet),
            train_dataset=datasets.Dataset(rows, fingerprint="rows"),
            processing_class=transformers.AutoTokenizer.from_pretrained(task.model_name),
            peft_config=adapter(task),
            callbacks=[Clock()],
        )
        trainer.train()
    return (times[-1] - times[WARM_UP]) / STEPS


def by_tpukit(task: LanguageModel, choice: str = "auto") -> float:
    """Return the same of tpukit, between its records."""
    with tempfile.TemporaryDirectory() as folder:
        task = dataclasses.replace(task, compile=choice)
        run = Timed.open(folder, task)
        run.echo, run.times, run.clock = False, [], CLOCK
        train(task, run, runtime=open_runtime(DEVICE, task.precision), progress=False)
        return (run.times[-1] - run.times[0]) / STEPS


def contenders(task: LanguageModel) -> dict:
    found = {"by hand": by_hand, "tpukit": by_tpukit}
    if DEVICE == "cuda":
        found["by hand, torch.compile"] = lambda task: by_hand(task, compiled=True)
        found["tpukit, compile yes"] = lambda task: by_tpukit(task, "yes")
    if task.uses_lora and all(map(importlib.util.find_spec, ("trl", "datasets"))):
        found["TRL"] = by_trl
    return found


def main(rounds: str) -> None:
    torch.set_num_threads(1 if DEVICE == "cpu" else torch.get_num_threads())
    for lora in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            task = make_task(Path(folder), lora=lora)
            ways = contenders(task)
            step_s = {name: [] for name in ways}
            for number in range(int(rounds) + 1):
                for name in random.sample(list(ways), len(ways)):
                    step_s[name].append(ways[name](task))
                if number in (1, int(rounds)):  # so that a run which is cut leaves figures
                    print_rows(task, step_s)


def print_rows(task: LanguageModel, step_s: dict[str, list[float]]) -> None:
    """Print the rows of the rounds so far. step_s: way -> seconds of a step, for each round."""
    for name in step_s:
        compared = compare(step_s[name][1:], step_s["by hand"][1:])
        tokens_per_s = round(1e3 * task.batch_size * task.length / compared["ms_per_step"])
        row = dict(device=DEVICE, adapter=task.adapter, way=name)
        print_row(**row, **compared, tokens_per_s=tokens_per_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
