"""GPT-2 124M on a GPU: tokens a second and FLOP by tpukit's loop, and by a loop in the manner of nanoGPT's.

The rows are random words, one document each. The loop beside it follows nanoGPT (Andrej Karpathy): the
network of GPT-2 with flash attention over whole rows, bf16 by autocast, fused AdamW, gradients clipped to 1,
batches copied from pinned memory, with and without torch.compile. FLOP are 6 for each parameter and token and
12 x layers x width x length for attention, as nanoGPT counts them; the peak is 989 TFLOP/s, of an H100 or
H200 in bf16 without sparsity."""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from tpukit import LanguageModel, Run, train
from tpukit.devices import open_runtime
from tpukit.host.environment import detect

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


def decayed_groups(network: nn.Module) -> list[dict]:
    """Return the parameters for AdamW, of which matrices alone decay."""
    matrices = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    return [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]


def by_hand(compiled: bool) -> list[float]:
    """Return the seconds of each `LOG_EVERY` steps of the loop in the manner of nanoGPT's."""
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


def by_tpukit() -> list[float]:
    """Return the same of `train`, by its own records."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        task = LanguageModel(
            dataset_dir=make_rows(folder, BATCH * STEPS + 64),
            model_name=str(folder / "gpt2"),
            pretrained="no",
            sequence_length=LENGTH,
            batch_size=BATCH,
            epochs=1,
            samples=0,
            log_every=LOG_EVERY,
            gradient_checkpointing=False,
        )
        run = Run.open(folder / "run", task)
        run.echo = False
        train(task, run, runtime=open_runtime(detect(), task.precision), progress=False)
        return [record["speed"]["seconds"] for record in run.records("train")]


def make_rows(folder: Path, count: int) -> Path:
    """Write texts of random words, each as long as a row, and GPT-2's shape with a tokenizer of these words.
    Return the folder of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    vocabulary = {f"w{n}": n for n in range(WORDS - 1)} | {"<end>": WORDS - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    made.save_pretrained(folder / "gpt2")
    GPT2Config().save_pretrained(folder / "gpt2")
    for part, number in (("train", count), ("test", 32)):
        (folder / "rows" / part).mkdir(parents=True)
        numbers = np.random.default_rng(number).integers(WORDS - 1, size=(number, LENGTH - 1))
        lines = [json.dumps(dict(text=" ".join(f"w{n}" for n in row))) for row in numbers]
        (folder / "rows" / part / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks.text_gpu needs a GPU, and torch finds none here")
    flops = 6 * sum(p.numel() for p in GPT().parameters()) + 12 * LAYERS * WIDTH * LENGTH  # of a token
    for way, function in (
        ("tpukit", by_tpukit),
        ("plain", lambda: by_hand(False)),
        ("compiled", lambda: by_hand(True)),
    ):
        # Of a captured step the peak leaves out the graph's own memory, which tpukit had before it counts.
        torch.cuda.reset_peak_memory_stats()
        times = function()
        step_s = statistics.median(times[2:]) / LOG_EVERY  # the first 40 steps warm up
        rate = BATCH * LENGTH / step_s
        row = dict(
            device=torch.cuda.get_device_name(),
            way=way,
            step_ms=round(1e3 * step_s, 2),
            tokens_per_s=round(rate),
            mfu=round(rate * flops / PEAK, 3),
            first_s=round(times[0], 1),
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
        )
        print("ROW " + json.dumps(row), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
