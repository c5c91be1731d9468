"""The task as a whole: one graph, resuming, prediction, export, and what does not fit."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.conftest import checkpoint, refuses
from tests.tasks.text.small import (
    CHAT,
    END,
    HEAD,
    START,
    everything,
    opened,
    task_of,
    write_config,
    write_family,
    write_lines,
    write_model,
)
from tests.tpukit.training.conftest import train_in
from tpukit import LanguageModel, Run, detect, export, predict, train
from tpukit import test as score_run
from tpukit.devices.distributed import World
from tpukit.devices.runtime import Runtime
from tpukit.host import environment
from tpukit.inference.trained import task_of as task_of_run
from tpukit.reporting import display
from tpukit.runs import weights
from tpukit.training.data import BatchLoader, training_index_batches
from tpukit.training.prediction import predict_test_images
from tpukit.training.step import TrainingStep, add_gradients
from tpukit_tasks.text import conversations, data, hub, reading
from tpukit_tools import cli

pytest.importorskip("peft")


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """Conversations of many lengths, as lines: 60."""
    rows = [dict(prompt=f"{n}" * (1 + n % 5), completion="abc" * (1 + n % 4)) for n in range(60)]
    return write_lines(tmp_path_factory.mktemp("data") / "chats.jsonl", *rows)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with pretrained weights and a chat template."""
    return write_model(tmp_path_factory.mktemp("model") / "gpt", chat=CHAT)


LORA = dict(pretrained="auto", lora_rank=2, lr=1e-2, sequence_length=64)


@pytest.fixture(scope="module")
def finished(chats, model, tmp_path_factory):
    """(task, run) of two epochs of LoRA."""
    task = task_of(model, chats, **LORA, epochs=2)
    return task, train_in(tmp_path_factory.mktemp("finished") / "run", task, Runtime("cpu"))


# Training


@pytest.mark.parametrize("family", ["gpt2", pytest.param("phi3 longrope", marks=pytest.mark.nightly)])
def test_xla_trains_an_adapter_as_the_cpu_does_by_one_compiled_graph_of_each_kind_whatever_the_lengths(
    family, chats, tmp_path, cpu, xla
):
    model = write_model(tmp_path / "model", family, chat=CHAT)
    task = task_of(model, chats, epochs=2, log_every=1, **LORA)
    ours, other = (train_in(tmp_path / str(device), task, device) for device in (cpu, xla))
    losses = [[record["loss"] for record in run.records("train")] for run in (ours, other)]
    np.testing.assert_allclose(*losses, rtol=2e-2)
    assert losses[0][-1] < losses[0][0]
    compiled = [event["what"] for event in other.records("compile") if event["programs"]]
    assert sorted(compiled) == sorted(set(compiled)) and {"step", "predict", "write_token"} <= set(compiled)
    assert all(event["programs"] == 1 for event in other.records("compile")), other.records("compile")
    assert not xla.counters()["fallbacks"]


def test_the_loss_is_the_mean_over_the_tokens_that_are_learned(tmp_path):
    for number in range(9):  # several in a row, of which the first tokens are not predicted
        (tmp_path / f"train-{number}.txt").write_text("abc" * number)
    (tmp_path / "test.txt").write_text("abc")
    task = task_of(write_config(tmp_path / "m"), tmp_path, sequence_length=63, gradient_checkpointing="no")
    rows, _ = task.datasets()
    batch = {name: torch.as_tensor(values) for name, values in everything(rows).items()}
    network = task.model()
    logits = network(batch["tokens"], batch["documents"]) @ network.head.t()
    expected = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten().long(), ignore_index=-1)
    torch.testing.assert_close(task.loss(network, batch, 0), expected, rtol=1e-5, atol=1e-5)


def test_micro_batches_give_the_gradients_of_the_whole_batch(chats, tmp_path, cpu):
    found = []
    for parts in (1, 4):
        task = task_of(write_config(tmp_path), chats, sequence_length=63, micro_batches=parts, batch_size=8)
        torch.manual_seed(0)
        step = TrainingStep(task, cpu, task.model())
        step.compile()
        step(cpu.put_batch(task.datasets()[0].batch(np.arange(8))), 0)
        found.append({name: p.grad for name, p in step.model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cores, parts", [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_the_loss_of_a_step_is_the_mean_over_its_own_labels_on_all_cores_and_in_all_micro_batches(
    cores, parts, tmp_path
):
    lengths = [*range(32, 63, 2)]  # of which no two fit into a row
    rows = [dict(prompt="a" * (length - 1 - n), completion="b" * (n + 1)) for n, length in enumerate(lengths)]
    write_lines(tmp_path / "train.jsonl", *rows)
    write_lines(tmp_path / "test.jsonl", rows[0])
    options: Any = dict(sequence_length=63, batch_size=8, micro_batches=parts)
    task = task_of(write_config(tmp_path / "m"), tmp_path, gradient_checkpointing="no", **options)
    rows, _ = task.datasets()
    torch.manual_seed(0)
    model = task.model()
    for spec in training_index_batches(len(rows), 8, seed=0, epoch=0):
        whole = {name: torch.as_tensor(values) for name, values in rows.batch(spec.indices).items()}
        logits = model(whole["tokens"], whole["documents"]) @ model.head.t()
        mean = cross_entropy(logits.flatten(0, 1), whole["labels"].flatten().long(), ignore_index=-1)
        expected = torch.autograd.grad(mean, model.parameters())
        losses, gradients = [], []
        for rank in range(cores):
            runtime = Runtime("cpu", world=World(rank, cores))
            batch = next(BatchLoader(rows, runtime, workers=0).batches([spec]))
            optimizer = task.optimizer(model)
            optimizer.zero_grad()
            losses.append(add_gradients(task, task.loss, model, optimizer, runtime, batch, 0))
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(torch.stack(losses).mean(), mean.detach(), rtol=1e-5, atol=0)
        for ours, wanted in zip(zip(*gradients), expected, strict=True):
            torch.testing.assert_close(torch.stack(ours).mean(0), wanted, rtol=1e-4, atol=1e-6)


def test_a_run_is_not_resumed_on_other_texts_or_tokens(chats, tmp_path, cpu):
    task = task_of(write_config(tmp_path / "m"), chats, epochs=1, samples=0)
    train_in(tmp_path / "run", task, cpu)
    other = tmp_path / "other.jsonl"
    other.write_text(chats.read_text().replace("abc", "abd"))
    with refuses("other texts, tokenizer or their packing"):
        train_in(tmp_path / "run", dataclasses.replace(task, dataset_dir=other, epochs=2), cpu)


def test_every_setting_of_a_training_works_together(chats, model, tmp_path, cpu):
    first = "net.base_model.model.transformer.h.0"
    task = task_of(model, chats, **LORA | dict(freeze=(first,), ema_decay=0.5))
    task = dataclasses.replace(task, micro_batches=2, patience=2, epochs=1)
    torch.manual_seed(task.seed)
    before = task.model().state_dict()
    after = checkpoint(train_in(tmp_path / "run", task, cpu))["model"]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if first not in name}
    with refuses("leaves nothing to train"):
        train_in(tmp_path / "none", dataclasses.replace(task, freeze=("net",)), cpu)


# What comes out


def test_a_run_says_what_was_written_and_how_fast(finished, capsys, cpu):
    task, run = finished
    scores = run.records("evaluation")[-1]["scores"]
    assert scores["log_likelihood"] == -scores["test_loss"] and scores["test_loss"] < 5
    assert scores["perplexity"] == pytest.approx(np.exp(scores["test_loss"]))
    samples = scores["samples"]
    assert len(samples) == 2 and all(one["prompt"].endswith("<assistant>") for one in samples)
    assert run.records("train")[-1]["speed"]["rates"]["tokens per second"] > 0
    display.show_report(run)
    unwritten = dataclasses.replace(task, samples=0, weights=run.best())
    batch, predictions = predict_test_images(run, unwritten, 2)
    assert not predictions["prompt"].any()
    assert [row[0][0] for row in unwritten.panels(batch, predictions)] == ["", ""]
    batch, predictions = predict_test_images(run, task, 20)
    assert len(task.panels(batch, predictions)) >= 2
    assert len(predictions["loss"]) == len(predictions["prompt"])
    assert "tokens per second" in capsys.readouterr().out
    best = min(record["scores"]["test_loss"] for record in run.records("evaluation"))
    assert score_run(task, run, runtime=cpu, progress=False)["test_loss"] == pytest.approx(best)


def test_prompts_are_continued(finished, tmp_path, capsys):
    _, run = finished
    (tmp_path / "one.txt").write_text("111")
    (tmp_path / "two.jsonl").write_text('{"prompt": "22"}\n{"messages": [{"role": "user", "content": "3"}]}')
    files = [str(tmp_path / "one.txt"), str(tmp_path / "two.jsonl")]
    assert (
        cli.main(["predict", str(run.path), *files, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 0
    )
    found = json.loads((tmp_path / "out/predictions.json").read_text())
    assert [one["prompt"] for one in found] == [f"<user>{text}</s><assistant>" for text in ("111", "22", "3")]
    again = predict(run.best(), files, progress=False, batch_size=1)  # the file alone
    assert again[0]["written"].startswith(found[0]["written"]) and len(again) == 3
    assert "picture" not in found[0] and not (tmp_path / "out/pictures").exists(), "of texts"


def test_an_adapter_and_the_merged_model_load_without_tpukit(finished, model, tmp_path):
    import peft
    import transformers

    task, run = finished
    exported = [export(run, to=to, out=tmp_path / to) for to in ("peft", "transformers")]
    assert all(one.is_equal() for one in exported) and "kB" in str(exported[0])
    assert not list(tmp_path.rglob("*.bin")) and (tmp_path / "peft/adapter_model.safetensors").is_file()
    task = task_of_run(run.config, run.path)
    ours: Any = dataclasses.replace(task, weights=run.best())
    ours = ours.model(torch.float32)
    weights.load(ours, run.best())
    numbers = torch.arange(24)[None]
    expected = ours(numbers, torch.ones_like(numbers)) @ ours.head.t()
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "transformers")
    assert not torch.allclose(base(numbers).logits, expected, atol=1e-2), "the training changed nothing"
    torch.testing.assert_close(merged(numbers).logits, expected, rtol=1e-4, atol=1e-4)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    torch.testing.assert_close(adapted(numbers).logits, expected, rtol=1e-4, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "transformers")
    assert tokenizer("a")["input_ids"] == [65] or tokenizer.decode(tokenizer("a")["input_ids"]) == "a"
    assert tokenizer.eos_token_id in merged.generation_config.eos_token_id
    written = json.loads((tmp_path / "peft/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast", "which transformers 4 has, too"
    assert "hf upload" in str(exported[0]) and "peft" in str(exported[0])


def test_special_tokens_are_written_under_the_name_that_transformers_4_and_5_read(tmp_path):
    tokenizer = write_family(tmp_path / "model", "qwen3")
    hub.save_tokenizer(tokenizer, tmp_path / "saved")
    written = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert set(written["additional_special_tokens"]) == {START, END, HEAD}
    assert "extra_special_tokens" not in written, "which transformers 4 reads as a dict"
    assert hub.load_tokenizer(str(tmp_path / "saved")).tokenize(START) == [START]


def test_what_ends_the_learned_turns_ends_what_is_written_and_exported(tmp_path):
    import transformers

    folder = write_model(tmp_path / "model", chat=CHAT.replace("</s>", "<end>"))
    tokenizer = hub.load_tokenizer(str(folder))
    tokenizer.add_special_tokens(dict(additional_special_tokens=["<end>", "<other>"]))
    tokenizer.save_pretrained(folder)
    end, other = tokenizer.convert_tokens_to_ids(["<end>", "<other>"])
    path = folder / "generation_config.json"
    path.write_text(json.dumps(dict(eos_token_id=other, do_sample=True, top_k=7)))
    task = task_of(folder, tmp_path, **LORA)
    written = np.array([[*tokenizer("ab")["input_ids"], end, 66, 0, 0, 0, 0]])
    found = task.results(None, dict(written=written, prompt=np.array([1])))
    assert found == [dict(prompt="a", written="b")]
    for to in ("peft", "transformers"):
        task.export_folder(task.model(), to, tmp_path / to)
        kept = transformers.GenerationConfig.from_pretrained(tmp_path / to)
        assert kept.eos_token_id == [end, other, tokenizer.eos_token_id] and kept.top_k == 7
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / to)
        assert loaded.chat_template == tokenizer.chat_template


def test_the_layers_and_the_scale_of_lora_can_be_chosen_and_are_exported(tmp_path, capsys):
    folder, options = write_model(tmp_path / "model", "qwen2"), LORA | dict(sequence_length=64)
    task = task_of(folder, tmp_path, **options, lora_targets=("q_proj", "v_proj"), lora_alpha=5.0)
    model = task.model()
    assert {name.split(".")[-4] for name in model.trained} == {"q_proj", "v_proj"}
    task.export_folder(model, "peft", tmp_path / "peft")
    kept = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert kept["lora_alpha"] == 5 and set(kept["target_modules"]) == {"q_proj", "v_proj"}
    task.export_folder(task.model(), "transformers", tmp_path / "transformers")
    assert "convert_hf_to_gguf.py" in capsys.readouterr().out
    with refuses("lora_targets", "c_attn"):
        task_of(folder, tmp_path, **options, lora_targets=("c_attn",)).model()


def test_the_template_of_a_base_model_is_exported_with_it(tmp_path):
    import transformers

    task = task_of(write_model(tmp_path / "model"), tmp_path, **LORA)
    task.export_folder(task.model(), "peft", tmp_path / "peft")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "peft")
    assert tokenizer.chat_template == conversations.TEMPLATE


@pytest.mark.parametrize(
    "count, tokens, more",
    [(20, 70, 0), (20, 90, 0), (200, 290, 0), (60, 520, 0), (400, 600, 0), (200, 110, 70), (400, 150, 150)],
)
def test_little_of_the_rows_of_a_small_set_is_empty_and_each_holds_its_longest_conversation(
    count, tokens, more, tmp_path, tokenizer
):
    """more: tokens that every tenth conversation has more than the others."""
    sizes = [tokens - 10 - n % 9 + more * (n % 10 == 0) for n in range(count)]
    rows = [dict(prompt="p" * size, completion="c" * 9) for size in sizes]
    path = write_lines(tmp_path / "chats.jsonl", *rows)
    batch, length = data.fitting_sizes(path, tokenizer, 2048, 1)
    train_set, test_set = opened(path, tokenizer, length, test_share=0.1)
    assert "longer than a row" not in train_set.notes
    assert train_set.sizes.mean() / length > 0.7 and len(train_set) + len(test_set) >= min(count, 50)
    assert len(train_set) // batch >= min(count * 0.9, 45)
    assert data.fitting_sizes(path, tokenizer, 2048, 1, length=1024)[1] == 1024


def test_bytes_at_random_are_shown_as_such_and_any_language_as_it_is(tmp_path):
    task = task_of(write_model(tmp_path / "model"), tmp_path)
    tokenizer = hub.load_tokenizer("tiny")
    a_third = "." * 16 + 8 * "\x11"
    cases = [("你好 é\n", "你好 é\n"), ("", ""), ("a\x01\x02\ufffd", "(random bytes)")]
    cases += [(a_third, "(random bytes)"), ("Hello, Ada!\x07", "Hello, Ada!\ufffd")]
    for text, shown in cases:
        ids = tokenizer(text)["input_ids"]
        batch = dict(written=np.array([[65, *ids, 256]]), prompt=np.array([1]))
        found = dict(batch, written=np.pad(batch["written"], ((0, 0), (0, 20))))
        task = dataclasses.replace(task, new_tokens=len(ids) + 1)
        assert task.panels({}, found)[0][0][1] == f"b\n\n{shown}" or not text


SENTENCE = "The capital of France is Paris. It is a city of two million people with the Louvre. "


def test_rows_and_batches_fit_the_training_set_unless_they_are_given(tmp_path, monkeypatch):
    folder = write_config(tmp_path / "m", n_positions=1024)
    monkeypatch.setattr(hub, "TINY", str(folder))  # a model whose tokens are bytes
    options: Any = dict(model_name=str(folder), pretrained="no")
    sizes = {}
    for count in (20, 1000, 20_000):
        rows = [dict(prompt=f"Question {n}: what is it?", completion=SENTENCE) for n in range(count)]
        path = write_lines(tmp_path / f"{count}.jsonl", *rows)
        task = LanguageModel(dataset_dir=path, **options).choose_settings(detect())
        sizes[count] = task.batch_size, task.sequence_length
    assert sizes[20][0] == 1 and sizes[1000][0] >= 8 and sizes[20_000] == (16, 1024)
    task = LanguageModel(dataset_dir=tmp_path / "20.jsonl", **options)
    train_set, test_set = task.datasets()
    assert (len(train_set), len(test_set)) == (18, 2), "a conversation in a row"
    assert "54 optimizer steps, of 1 rows of " in train_set.notes and "% used)" in train_set.notes
    assert "WARNING" not in train_set.notes
    assert "WARNING" in dataclasses.replace(task, epochs=2).datasets()[0].notes
    assert "% of them learned" in train_set.notes
    given = dataclasses.replace(task, batch_size=16, sequence_length=512, gradient_checkpointing="no")
    assert given.choose_settings(detect()) is given and given.length == 512
    without_data = LanguageModel(**options).choose_settings(detect())
    assert (without_data.batch_size, without_data.sequence_length) == (16, 1024), "as for a plan"


def test_a_batch_is_for_the_cores_where_the_run_opens_and_later_sessions_keep_it(tmp_path, monkeypatch, cpu):
    folder = write_config(tmp_path / "m", n_positions=64)
    path = write_lines(tmp_path / "a.jsonl", *[dict(text=f"{n}: {SENTENCE}") for n in range(40)])
    options: Any = dict(model_name=str(folder), pretrained="no", epochs=1, samples=0, num_workers=0)

    def on(cores):
        here = dataclasses.replace(detect(), cores=cores)
        monkeypatch.setattr(environment, "detect", lambda: here)

    def refuse(place):
        raise AssertionError(f"{place} is read")

    on(8)
    with monkeypatch.context() as patch:
        patch.setattr(reading, "find_texts", refuse)
        task = LanguageModel(dataset_dir=path, **options)
    assert task.batch_size is None, "constructed where there are eight"
    on(3)
    run = Run.open(tmp_path / "run", task)
    assert [run.config["settings"][name] for name in ("batch_size", "sequence_length")] == [3, 64]
    train(task, run, runtime=cpu, progress=False)
    on(8)
    with monkeypatch.context() as patch:
        patch.setattr(reading, "find_texts", refuse)
        again = Run.open(run.path, LanguageModel(dataset_dir=path, **options))
    assert again.config == run.config and again.config["settings"]["batch_size"] == 3
    with refuses("batch_size: the run has 3, the task 8"):
        Run.open(run.path, dataclasses.replace(task, batch_size=8))


def test_a_sample_shows_the_whole_prompt_up_to_the_answer(tmp_path, cpu):
    rows = [dict(prompt=f"{n % 10}" * 200, completion="abc") for n in range(20)]
    path = write_lines(tmp_path / "long.jsonl", *rows)
    folder = write_model(tmp_path / "model", chat=CHAT, n_positions=256)
    task = task_of(folder, path, **LORA | dict(sequence_length=256))
    batch = cpu.put(everything(task.test_set()))
    samples = task.results(batch, task.predictor(task.model().eval(), cpu)(batch))
    assert [one["prompt"] for one in samples] == [f"<user>{n}</s><assistant>" for n in ("0" * 200, "0" * 200)]


def test_what_cannot_be_exported_is_told(finished, trained, tmp_path):
    _, run = finished
    with refuses("onnx", "peft, transformers"):
        export(run, to="onnx")
    with refuses("transformers", "onnx"):
        export(trained[1], to="transformers")
    with refuses("exists"):
        export(run, to="peft", out=tmp_path)


# What does not fit


def test_a_tokenizer_with_more_tokens_than_the_model_takes_is_refused(model, chats, tmp_path):
    small = write_model(tmp_path / "small", vocab_size=200)
    with refuses("257", "200", "do not fit"):
        task_of(small, chats, **LORA).datasets()
    with refuses("at most 64"):
        task_of(model, chats, **LORA | dict(sequence_length=65)).datasets()
    (tmp_path / "small/tokenizer.json").unlink()
    with refuses("tokenizer.json"):
        task_of(small, chats, **LORA).datasets()


def test_a_prompt_file_is_a_chat_only_if_the_run_learned_chats(chats, model, tmp_path, cpu):
    (tmp_path / "text.txt").write_text("Once upon a time. " * 9)
    (tmp_path / "prompt.txt").write_text("Once")
    options: Any = LORA | dict(epochs=1, samples=0, batch_size=1, test_share=0.5)
    for place, wanted in ((tmp_path / "text.txt", "Once"), (chats, "<user>Once</s><assistant>")):
        run = train_in(tmp_path / place.stem, task_of(model, place, **options), cpu)
        assert predict(run, [tmp_path / "prompt.txt"], progress=False)[0]["prompt"] == wanted


def test_a_prompt_that_leaves_no_room_is_refused(finished, tmp_path):
    _, run = finished
    (tmp_path / "long.txt").write_text("x" * 100)
    with refuses("long.txt", "from 1 to 58"):
        predict(run, [tmp_path / "long.txt"], progress=False)
