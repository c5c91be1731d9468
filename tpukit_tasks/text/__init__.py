"""Language models: pretraining on texts, fine-tuning on conversations, by transformers and peft.

torch, transformers and peft are imported where they are used, so that the help of the command line need not
wait for them. Shapes: B batch, T tokens of a row."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from tpukit.host import environment
from tpukit.host.errors import TpukitError, explained
from tpukit.runs import weights
from tpukit.runs.settings import require_at_least, require_shares, setting
from tpukit.training.task import Task
from tpukit_tasks import finite
from tpukit_tasks.splits import SPLITS
from tpukit_tasks.text import conversations, data, hub, reading, sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor, optim

    from tpukit.devices.runtime import Runtime
    from tpukit.host.environment import Environment
    from tpukit_tasks.text.network import Network

MULTIPLE = 128  # the vocabulary of random weights is a multiple of it: a TPU pads to it anyway
FEW = 16  # tokens of a text that begin a sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(Task):
    """A language model of transformers, fine-tuned on your conversations or pretrained on your texts.

    dataset_dir: a file or a folder of text files, or of .jsonl files (in each line `messages`, or `prompt`
    and `completion`, or `text`), in train/ and test/ or not."""

    name: ClassVar[str] = "text"
    dataset: ClassVar[str] = "my-text"
    needs_own_data: ClassVar[bool] = True
    dataset_parts: ClassVar[tuple[str, ...]] = tuple(SPLITS)
    synthetic_size: ClassVar[int] = 60
    synthesize = staticmethod(reading.write_demo)
    score: ClassVar[str] = "log_likelihood"
    score_names: ClassVar[dict[str, str]] = dict(
        test_loss="cross entropy of a test token, nats", perplexity="perplexity of the test set"
    )
    evaluation_keys: ClassVar[tuple[str, ...]] = ()

    # What has no description here has that of `Task`.
    epochs: int = setting(3, free=True)
    batch_size: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Global batch size: rows of `sequence_length` tokens in one optimizer step, over all cores. None: 16, or
    fewer for a small training set, so that an epoch has about fifty steps."""
    lr: float = 5e-4
    """Learning rate of AdamW (betas 0.9 and 0.95)."""
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_epochs: float = 0.1
    clip_norm: float | None = 1.0
    weight_decay: float = 0.1
    """Weight decay of AdamW; not for biases and norms."""
    model_name: str = hub.TINY
    """The name of a model on the Hugging Face hub (gpt2, Qwen/Qwen3-0.6B), a folder that save_pretrained of
    transformers wrote, or tiny, a GPT of four layers with random weights, whose tokens are bytes."""
    pretrained: Literal["auto", "yes", "no"] = "auto"
    """Start from the model's weights (yes, and auto for all but tiny), or from random ones of its shape."""
    adapter: Literal["auto", "lora", "none"] = "auto"
    """lora: train small matrices next to those of the layers; all else is frozen, in bf16. none: train all
    weights. auto: lora for pretrained weights."""
    lora_rank: int = 16
    """Rank of the matrices of LoRA."""
    lora_alpha: float | None = None
    """What the matrices are scaled by, times `lora_rank`. None: twice the rank."""
    lora_dropout: float = 0.0
    """Share of the inputs of LoRA's matrices that each step sets to zero."""
    lora_targets: tuple[str, ...] = ()
    """Layers that get matrices of LoRA, by the ends of their names, such as q_proj and v_proj. Empty: all
    linear layers but the head."""
    learn_questions: bool = False
    """Learn all of a conversation, rather than the assistant's answers alone."""
    sequence_length: int | None = None
    """Tokens in a row; texts are packed into rows, conversations stay whole. None: 1024, or the model's limit
    if that is less; for a small training set fewer, which hold its longest conversation."""
    test_share: float = 0.1
    """Share to hold out for testing if the data has no test split: of the documents, evenly spaced, or of the
    rows if there are text files."""
    gradient_checkpointing: Literal["auto", "yes", "no"] = setting("auto", free=True)
    """yes: compute each layer again for the backward pass: a third more time for a fraction of the memory.
    auto: if this machine's memory asks for it; a GPU takes micro-batches instead if these are enough."""
    samples: int = setting(4, free=True)
    """Texts to generate at each evaluation, from the beginnings of test rows."""
    new_tokens: int = setting(64, free=True)
    """Tokens of each generated text, at most half of what the model takes."""
    temperature: float = setting(0.0, free=True)
    """What the logits are divided by before a token of a generated text is drawn. 0: always the most probable
    one."""
    top_p: float = setting(1.0, free=True)
    """Draw from the most probable tokens whose probabilities add up to this, where `temperature` is not 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "lora_rank", "sequence_length", "new_tokens")
        require_at_least(self, 0, "weight_decay", "samples", "temperature")
        if not 0 < self.top_p <= 1:
            raise TpukitError(f"top_p={self.top_p!r}: it must be more than 0, and at most 1")
        require_shares(self, "test_share", "lora_dropout")
        if self.lora_dropout == 1:
            raise TpukitError("lora_dropout=1.0: it must be less than 1, or LoRA's matrices see nothing")
        for name in ("lora_alpha", "lora_dropout", "lora_targets"):
            if getattr(self, name) and not self.uses_lora:
                raise TpukitError(
                    f"{name}={getattr(self, name)!r}: all weights train, so there is no LoRA; choose"
                    " adapter='lora', or leave it out"
                )

    def choose_settings(self, env: Environment) -> Self:
        """Return the task with a batch size and a row length for its texts, by the sizes of their files.

        Args:
            env: this machine, whose cores share a batch evenly.

        Returns:
            The task, which keeps what it was given."""
        chosen: dict[str, int] = {}
        if self.batch_size is None:
            rows, _ = self._fitting_sizes
            shares = env.cores * self.micro_batches
            chosen["batch_size"] = shares * math.ceil(rows / shares)
        if self.sequence_length is None:
            chosen["sequence_length"] = self._fitting_sizes[1]
        task = dataclasses.replace(self, **chosen) if chosen else self
        return task._fit_memory(env) if self.gradient_checkpointing == "auto" else task

    def _fit_memory(self, env: Environment) -> Self:
        """Return the task with a choice of gradient_checkpointing, by a count of what a step keeps. With more
        micro-batches a GPU holds fewer rows at a time; of a TPU's step they would make a larger graph."""
        from tpukit_tasks.text import memory

        assert self.batch_size is not None
        rows = self.batch_size // env.cores
        parts = [n for n in range(self.micro_batches, rows + 1) if n % self.micro_batches == rows % n == 0]
        if env.accelerator != "cuda":
            parts = parts[:1]
        with explained(f"the model of {self.model_name} cannot be made"):
            fixed, row = memory.step_bytes(self.config, self._lora, self.length, self.precision != "fp32")
        fitting = (n for n in parts if fixed + rows // n * row <= memory.SHARE * memory.device_bytes(env))
        if fits := next(fitting, 0):
            return dataclasses.replace(self, gradient_checkpointing="no", micro_batches=fits)
        return dataclasses.replace(self, gradient_checkpointing="yes")

    @functools.cached_property
    def _fitting_sizes(self) -> tuple[int, int]:
        """(rows of a batch, tokens of a row) that suit the data."""
        config = hub.read_config(hub.find_folder(self.model_name, "config"))  # a run opens without weights
        tokenizer = None if self.dataset_dir is None else self._tokenizer
        bytes_per_token = 1 if self.model_name == hub.TINY else 4
        sizes = hub.most_positions(config), bytes_per_token, self.sequence_length
        return data.fitting_sizes(self.dataset_dir, tokenizer, *sizes)

    # Model and tokenizer

    @property
    def is_pretrained(self) -> bool:
        """True if the model starts from published weights."""
        return self.pretrained == "yes" or (self.pretrained == "auto" and self.model_name != hub.TINY)

    @property
    def uses_lora(self) -> bool:
        """True if LoRA's matrices train, and all else is frozen."""
        return self.adapter == "lora" or (self.adapter == "auto" and self.is_pretrained)

    @property
    def _is_planned(self) -> bool:
        """Return whether there is nothing to train on or to predict with: then no weights are looked for."""
        return self.dataset_dir is None and self.weights is None

    @functools.cached_property
    def _folder(self) -> Path:
        """The folder of the model's config, and of its weights if these are loaded."""
        is_loaded = self.is_pretrained and not self._is_planned
        return hub.find_folder(self.model_name, "weights" if is_loaded else "config")

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return hub.load_tokenizer(self.model_name)

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Tokens after which nothing is written: what ends the learned turns, what the published model stops
        at, and the end of a text."""
        tokenizer = self._tokenizer
        _, turn_end = conversations.turn_end(tokenizer, tokenizer.chat_template)
        published = hub.read_ends(self._folder, self.config) if self.is_pretrained else []
        ends = [turn_end, *published, tokenizer.eos_token_id]
        return list(dict.fromkeys(end for end in ends if end is not None))

    @functools.cached_property
    def config(self) -> Any:
        """The model's config, of transformers."""
        config = hub.read_config(self._folder)
        count = config.vocab_size if self._is_planned else len(self._tokenizer)
        if not self.is_pretrained:
            config.vocab_size = MULTIPLE * math.ceil(count / MULTIPLE)
            config.pad_token_id = config.bos_token_id = config.eos_token_id = None
        if count > config.vocab_size:
            raise TpukitError(
                f"the tokenizer has {count} tokens, {self.model_name} takes {config.vocab_size}: they do"
                " not fit; take the model's own tokenizer, or start from random weights (pretrained='no')"
            )
        return config

    @property
    def length(self) -> int:
        """T, the tokens of a row."""
        length, most = self.sequence_length, hub.most_positions(self.config)
        if length and length > most:
            raise TpukitError(f"sequence_length={length}: {self.model_name} takes at most {most}")
        return length or self._fitting_sizes[1]

    @property
    def _new(self) -> int:
        """Tokens that are written, at most half of what the model takes."""
        return min(self.new_tokens, max(1, hub.most_positions(self.config) // 2))

    def model(self, dtype: torch.dtype | None = None) -> Network:
        """Make the network.

        Args:
            dtype: dtype of all weights but an adapter's; None: bfloat16 with LoRA, else float32."""
        from tpukit_tasks.text import network

        if self.weights and self.uses_lora and not self.is_pretrained:
            raise TpukitError(
                f"{self.weights} is an adapter (adapter='lora') of random weights (pretrained='no'), which no"
                " file keeps: train one of pretrained weights, or all weights (adapter='none')"
            )
        folder = self._folder if self.is_pretrained and not self._is_planned else None
        options: Any = dict(recompute=self.gradient_checkpointing == "yes", dtype=dtype)
        return network.build(self.config, folder, lora=self._lora, **options)

    @property
    def _lora(self) -> dict[str, Any] | None:
        """peft's settings of LoRA, None without it."""
        if not self.uses_lora:
            return None
        alpha = 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        targets = list(self.lora_targets) or "all-linear"
        dropout = dict(lora_dropout=self.lora_dropout)
        return dict(r=self.lora_rank, lora_alpha=alpha, target_modules=targets) | dropout

    def optimizer(self, model: Network) -> optim.Optimizer:
        from tpukit.devices.optimizers import adamw

        return adamw(model, self.lr, self.weight_decay, betas=(0.9, 0.95))

    def rates(self, model: Any, runtime: Runtime, samples_per_s: float) -> dict[str, float]:
        """Return the tokens per second, over all cores."""
        return {"tokens per second": samples_per_s * self.length}

    def export_folder(self, model: Network, to: str, folder: Path) -> float:
        """Write a trained model for `tpukit export`.

        Args:
            model: the trained model, on the CPU.
            to: "peft", its adapter alone, or "transformers", the whole.
            folder: an empty folder.

        Returns:
            The largest difference of its logits, loaded without tpukit.

        Raises:
            TpukitError: if there is no adapter to write."""
        import torch

        if to == "peft" and not self.uses_lora:
            raise TpukitError("the model has no adapter, all its weights were trained: choose transformers")
        whole, tokenizer = self.model(torch.float32).eval(), copy.copy(self._tokenizer)
        whole.load_state_dict(model.state_dict())
        if to == "transformers":
            print(
                "for Ollama, with llama.cpp's code: python convert_hf_to_gguf.py FOLDER --outfile model.gguf"
                "\nand: ollama create NAME -f Modelfile (a text file: FROM ./model.gguf)"
            )
        tokenizer.chat_template = tokenizer.chat_template or conversations.TEMPLATE
        return whole.export(tokenizer, self._ends, to, folder, self.model_name)

    # Data

    def datasets(self) -> tuple[data.TextSet, data.TextSet]:
        assert self.dataset_dir is not None  # see `check_dataset_dir`
        batch_size = self.choose_settings(environment.detect()).batch_size
        assert batch_size is not None
        options: Any = dict(learns_all=self.learn_questions)
        place, tokenizer = Path(self.dataset_dir), self._tokenizer
        train, test = data.open_sets(place, tokenizer, self.length, self.test_share, **options)
        steps = self.max_steps or self.epochs * (len(train) // batch_size)
        size, learned = train.sizes.mean(), train.targets.sum() / train.sizes.sum()
        used = size / self.length
        train.notes += (
            f"\n{steps} optimizer steps, of {batch_size} rows of {self.length} ({used:.0%} used), will"
            f" see {round(steps * batch_size * size)} tokens, {learned:.0%} of them learned"
        )
        if steps < data.FEWEST_STEPS:
            train.notes += (
                f"\nWARNING: fewer than {data.FEWEST_STEPS} optimizer steps hardly learn: use more epochs, a"
                " smaller batch_size, or more data"
            )
        return train, test

    def data_signature(self, data: data.TextSet) -> dict[str, str]:
        return {"texts, tokenizer or their packing": data.signature}

    def metadata(self, data: data.TextSet) -> dict[str, str]:
        return dict(learned="conversations" if data.is_chat else "texts")

    def example(self, count: int) -> dict[str, np.ndarray]:
        shape, share = (count, self.length), np.full(count, 1 / self.length, np.float32)
        tokens = np.random.default_rng(0).integers(self.config.vocab_size, size=shape, dtype=np.int32)
        return dict(tokens=tokens, labels=tokens, documents=np.ones_like(tokens), share=share)

    # Loss and predictions

    def loss(self, model: Network, batch: dict[str, Tensor], epoch: Any) -> Tensor:
        """Return the sum of the cross entropies of these rows' labels, as their part of a step whose loss is
        the mean over all its labels: those of other cores and micro-batches, too."""
        from tpukit_tasks.text.loss import cross_entropy

        hidden = model(batch["tokens"], batch["documents"])
        loss, _ = cross_entropy(hidden, model.head, batch["labels"])
        return loss * batch["share"].mean() / len(hidden)

    def predict(self, model: Network, batch: dict[str, Tensor], epoch: Any = None) -> dict[str, Tensor]:
        """Return for each row: loss (B,), summed over count (B,) labels; and written (B, L), of which prompt
        (B,) tokens are to be continued: up to the first answer, or a few of a text."""
        import torch

        from tpukit_tasks.text.loss import cross_entropy

        _, losses = cross_entropy(model(batch["tokens"], batch["documents"]), model.head, batch["labels"])
        is_learned, rows = batch["labels"] >= 0, batch["tokens"]
        room = min(self._new, hub.most_positions(self.config) - self.length)
        rows = torch.cat([rows, torch.zeros_like(rows[:, :room])], 1)  # for an answer at a row's end
        before = is_learned.int().argmax(1)  # 0 in a text
        prompt = (before + 1).where(before > 0, FEW).clamp(max=rows.shape[1] - 1)
        return dict(loss=losses, count=is_learned.sum(1), written=rows, prompt=prompt)

    def predictor(self, model: Network, runtime: Runtime, epoch: int | None = None) -> Any:
        """Return a function that predicts a batch of a test set and continues the first rows of the set, or
        that continues a batch of prompts, see `read_files`."""
        from tpukit_tasks.text import network

        score, left, rng = super().predictor(model, runtime, epoch), self.samples, None
        ends, options = sorted({*self._ends, *self._tokenizer.all_special_ids}), {}
        if self.temperature:
            rng = np.random.default_rng(self.seed)
            options["draw"] = functools.partial(sampling.draw, temperature=self.temperature, top_p=self.top_p)
        write = functools.partial(network.write, model, runtime, new=self._new, ends=ends, **options)

        def predict(batch):
            nonlocal left
            if "written" in batch:
                return dict(batch, written=write(batch["written"], batch["prompt"], draws=batch.get("draws")))
            found: Any = score(batch)
            if left > 0:
                left -= len(batch["tokens"])
                draws = rng and runtime.put(rng.random(found["written"].shape, np.float32))
                return dict(found, written=write(found["written"], found["prompt"], draws=draws))
            return dict(found, prompt=runtime.put(np.zeros(len(batch["tokens"]), np.int32)))

        return predict

    # Scores and texts

    def evaluate(self, predictions: Any) -> dict[str, Any]:
        """Return log_likelihood of a token (nats); test_loss, its negative; perplexity; tokens, how many were
        predicted; not_finite, the rows whose loss is NaN or infinite, if there are any: then the scores are,
        too; samples, a list of dict(prompt, written). Without a token to predict the scores are NaN."""
        loss, count, not_finite, samples = 0.0, 0, 0, []
        for found, batch in predictions:
            losses = found["loss"][batch["valid"]].double()
            loss += float(losses.sum())
            not_finite += int((~losses.isfinite()).sum())
            count += int(found["count"][batch["valid"]].sum())
            if len(samples) < self.samples:
                samples += self._texts(found)
        mean = loss / count if count else math.nan
        scores: dict[str, Any] = dict(log_likelihood=-mean, test_loss=mean)
        scores["perplexity"] = math.exp(min(mean, 700.0)) if math.isfinite(mean) else mean
        if not_finite:
            scores["not_finite"] = not_finite
        return dict(scores, tokens=count, samples=samples[: self.samples])

    @staticmethod
    def verdict(scores: dict, last: dict) -> str:
        return finite.verdict(scores)

    def _texts(self, found: dict[str, Any]) -> list[dict[str, str]]:
        """Return dict(prompt, written) of each row that was continued; written: up to the end of a turn."""
        ends, texts = {*self._ends, *self._tokenizer.all_special_ids}, []
        for row, prompt in zip(np.asarray(found["written"]).tolist(), np.asarray(found["prompt"]).tolist()):
            if prompt:
                new = itertools.takewhile(lambda token: token not in ends, row[prompt : prompt + self._new])
                parts = self._tokenizer.batch_decode([row[:prompt], list(new)], skip_special_tokens=True)
                texts.append(dict(zip(("prompt", "written"), parts)))
        return texts

    def panels(self, batch: Any, prediction: Any = None) -> list[list[tuple[str, Any]]]:
        texts = [] if prediction is None else self._texts(prediction)
        if not texts:
            return [[("", self._tokenizer.decode(row))] for row in np.asarray(batch["tokens"])]
        shown = [f"{one['prompt']}\n\n{legible(one['written'])}" for one in texts]
        return [[("a prompt, and what was written", text)] for text in shown]

    def read_files(self, paths: Any, best: Path) -> tuple[dict[str, np.ndarray], list[str]]:
        """Read prompts: each text file is one; of a .jsonl file each line, with prompt or messages. After a
        training on texts alone, a text file or a `prompt` is a text, too, and no chat."""
        is_chat = weights.metadata(best).get("learned") != "texts"
        read = functools.partial(conversations.read_prompts, tokenizer=self._tokenizer, is_chat=is_chat)
        prompts = [prompt for path in paths for prompt in read(path)]
        size = max(self.length, min(data.LENGTH, hub.most_positions(self.config)))
        most = size - self._new
        rows, lengths = np.zeros((len(prompts), size), np.int32), np.zeros(len(prompts), np.int32)
        for number, (name, ids) in enumerate(prompts):
            if not 0 < len(ids) <= most:
                raise TpukitError(f"{name}: it must have from 1 to {most} tokens, and has {len(ids)}")
            rows[number, : len(ids)], lengths[number] = ids, len(ids)
        batch, names = dict(written=rows, prompt=lengths), [name for name, _ in prompts]
        if self.temperature:
            batch["draws"] = sampling.draws_of(names, size, self.seed)
        return batch, names

    def results(self, batch: Any, predictions: Any) -> list[dict[str, str]]:
        """Return prompt and written."""
        return self._texts(predictions)


def legible(text: str) -> str:
    """Return a text to show: of a model that writes bytes at random, a word about it; else without what
    cannot be printed."""
    odd = {one for one in text if not (one.isprintable() or one.isspace())} | {"\ufffd"}
    if 4 * sum(one in odd for one in text) > len(text):
        return "(random bytes)"
    return "".join("\ufffd" if one in odd else one for one in text)
