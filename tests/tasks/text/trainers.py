"""TRL's trainer on the CPU, for the tests that compare with it."""

import itertools

import pytest

from tpukit_tasks.text import hub


def make_trainer(monkeypatch, folder, rows, lora=None, **settings):
    """TRL's trainer for the model in a folder, which has prepared rows as its `train_dataset`. lora: the rank
    of adapters of all matrices."""
    transformers = pytest.importorskip("transformers")
    trl = pytest.importorskip("trl", reason="what tpukit is compared with (pip install trl==1.16.0)")
    datasets, numbers = pytest.importorskip("datasets"), itertools.count()
    hasher = datasets.fingerprint.Hasher  # which cannot hash all of pyarrow's types
    monkeypatch.setattr(hasher, "hash", classmethod(lambda kind, value: f"{next(numbers):016x}"))
    monkeypatch.setattr(hasher, "update", lambda self, value: None)
    # On the CPU, also if this process has opened an XLA device.
    accelerate = pytest.importorskip("accelerate")
    for module in (accelerate.state, transformers.training_args, transformers.trainer):
        monkeypatch.setattr(module, "is_torch_xla_available", lambda **_: False)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    settings = dict(report_to=[], use_cpu=True, bf16=False, max_length=None) | settings
    options = trl.SFTConfig(str(folder.parent / "out"), gradient_checkpointing=False, **settings)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapter = None
    if lora:
        peft = pytest.importorskip("peft")
        kinds = dict(target_modules="all-linear", task_type="CAUSAL_LM")
        adapter = peft.LoraConfig(r=lora, lora_alpha=2 * lora, **kinds)
    rows, tokenizer = datasets.Dataset.from_list(rows), hub.load_tokenizer(str(folder))
    options = dict(args=options, train_dataset=rows, processing_class=tokenizer, peft_config=adapter)
    return trl.SFTTrainer(plain, **options)
