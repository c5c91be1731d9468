"""GPT-2 124M on a GPU: tokens a second and FLOP by tpukit's loop, and by a loop in the manner of nanoGPT's.

`python -m benchmarks.text_gpu [PARTS]`, some of tpukit, recomputed, plain, compiled, lora; by default all.
The rows are random words, one document each. The loop beside it follows nanoGPT (Andrej Karpathy): the
network of GPT-2 with flash attention over whole rows, bf16 by autocast, fused AdamW, gradients clipped to 1,
batches copied from pinned memory, with and without torch.compile. FLOP are 6 for each parameter and token and
12 x layers x width x length for attention, as nanoGPT counts them; the peak is 989 TFLOP/s, of an H100 or
H200 in bf16 without sparsity."""

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks.text import decayed_groups
from tpukit import LanguageModel, Run, train
from tpukit.devices import open_runtime
from tpukit.host.environment import detect
from tpukit.tasks.text import hub

VOCABULARY, LAYERS, HEADS, WIDTH, LENGTH, BATCH = 50304, 12, 12, 768, 1024, 16
WORDS = 50257
STEPS, LOG_EVERY = 120, 20
PEAK = 989e12


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 124M, whose head is its embedding of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, rows, labels):
        x = self.tokens(rows) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def by_hand(compiled: bool) -> list[float]:
    """Seconds of each `LOG_EVERY` steps of the loop in the manner of nanoGPT's."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    network = GPT().cuda()
    optimizer = torch.optim.AdamW(decayed_groups(network), lr=6e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(network) if compiled else network
    stream = np.random.default_rng(0).integers(WORDS, size=1_000_000, dtype=np.uint16)

    def batch():
        starts = torch.randint(len(stream) - LENGTH, (BATCH,)).tolist()
        pairs = [torch.stack([_row(stream, start + shift) for start in starts]) for shift in (0, 1)]
        return [rows.pin_memory().to("cuda", non_blocking=True) for rows in pairs]

    times, (rows, labels) = [], batch()
    for step in range(STEPS):
        if step % LOG_EVERY == 0:
            torch.cuda.synchronize()
            times.append(time.perf_counter())
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(rows, labels)
        rows, labels = batch()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return np.diff([*times, time.perf_counter()]).tolist()


def _row(stream, start):
    return torch.from_numpy(stream[start : start + LENGTH].astype(np.int64))


def by_tpukit(folder: Path, *, model_name: str = "gpt2", batch_size: int = BATCH, **settings) -> list[float]:
    """The same of `train`, by its own records."""
    data = make_rows(folder, batch_size * STEPS + 64)
    shutil.copy(hub.find_folder(model_name, "config") / "config.json", folder / "words")
    settings |= dict(epochs=1, samples=0, log_every=LOG_EVERY, sequence_length=LENGTH, pretrained="no")
    settings |= dict(model_name=str(folder / "words"), batch_size=batch_size)
    task = LanguageModel(dataset_dir=data, **settings)
    run = Run.open(folder / f"run-{time.time_ns()}", task)
    train(task, run, runtime=open_runtime(detect(), task.precision), progress=False)
    return [record["speed"]["seconds"] for record in run.records("train")]


def make_rows(folder: Path, count: int) -> Path:
    """Texts of random words, each as long as a row, and a tokenizer of these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    data = folder / f"rows-{count}"
    if not data.exists():
        vocabulary = {f"w{n}": n for n in range(WORDS - 1)} | {"<end>": WORDS - 1}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
        made.save_pretrained(folder / "words")
        for part, number in (("train", count), ("test", 32)):
            (data / part).mkdir(parents=True)
            numbers = np.random.default_rng(number).integers(WORDS - 1, size=(number, LENGTH - 1))
            lines = [json.dumps(dict(text=" ".join(f"w{n}" for n in row))) for row in numbers]
            (data / part / "rows.jsonl").write_text("\n".join(lines))
    return data


def measured(function) -> dict[str, float]:
    """Milliseconds of a step (the median of every `LOG_EVERY` steps but the first 40), and more. peak_gib: of
    a captured step it leaves out the graph's own memory, which tpukit had before it began to count."""
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    times = function()
    step_s = statistics.median(times[2:]) / LOG_EVERY
    return dict(
        step_ms=1e3 * step_s,
        first_s=times[0],
        whole_s=time.perf_counter() - began,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
    )


def main(*parts: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        ways = dict(
            tpukit=lambda: by_tpukit(folder, gradient_checkpointing=False),
            recomputed=lambda: by_tpukit(folder),
            plain=lambda: by_hand(False),
            compiled=lambda: by_hand(True),
            lora=lambda: by_tpukit(folder, model_name="Qwen/Qwen3-0.6B", adapter="lora", batch_size=8),
        )
        head = dict(torch=torch.__version__, device=torch.cuda.get_device_name())
        print(json.dumps(head), flush=True)
        flops = 6 * sum(p.numel() for p in GPT().parameters()) + 12 * LAYERS * WIDTH * LENGTH
        for name in parts or ways:
            row = measured(ways[name])
            rate = (8 if name == "lora" else BATCH) * LENGTH / (row["step_ms"] / 1e3)
            row |= dict(tokens_per_s=rate) | (
                {} if name == "lora" else dict(tflops=rate * flops / 1e12, mfu=rate * flops / PEAK)
            )
            print(
                json.dumps({"way": name} | {key: float(f"{value:.4g}") for key, value in row.items()}),
                flush=True,
            )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
