"""The network: equal to plain transformers and peft, with documents that do not see each other."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import refuses
from tests.tasks.text.small import CONFIGS, plain_model, task_of, write_config, write_model
from tpukit_tasks.text import hub, network
from tpukit_tasks.text.loss import cross_entropy as in_parts

peft = pytest.importorskip("peft")
TOKENS = torch.randint(300, (3, 20), generator=torch.Generator().manual_seed(0))
ONE = torch.ones_like(TOKENS)
OF_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OF_PHI = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
TARGETS = dict.fromkeys(CONFIGS, OF_LLAMA) | dict(
    gpt2=("c_attn", "c_proj", "c_fc"), phi3=OF_PHI, **{"phi3 longrope": OF_PHI}
)  # all matrices of the layers


@pytest.fixture(params=CONFIGS)
def family(request):
    return request.param


def network_of(plain, recompute=False):
    """The network with the weights of a plain model."""
    built = network.build(copy.deepcopy(plain.config), None, lora=None, recompute=recompute)
    built.causal.load_state_dict(plain.state_dict())
    return built.train()


def assert_same_as_plain(ours, plain):
    """Compare the logits of some tokens, and compute the gradients of their loss."""
    logits = plain(TOKENS[:, :-1]).logits
    cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum").backward()
    hidden = ours(TOKENS[:, :-1], ONE[:, :-1])
    # Relative to the largest logit: float32 is up to 7e-7 off the float64 of the same model, on either side.
    atol = 2e-6 * float(logits.abs().max())
    torch.testing.assert_close(hidden @ ours.head.t(), logits, rtol=0, atol=atol)
    in_parts(hidden, ours.head, TOKENS[:, 1:])[0].backward()


def assert_same_gradients(found, expected):
    for name, parameter in expected.items():
        assert (found[name].grad is None) == (parameter.grad is None)
        if parameter.grad is not None:
            atol = 1e-5 * max(float(parameter.grad.abs().max()), 1)
            torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("recompute", [True, False])
def test_on_a_tpu_logits_and_gradients_are_those_of_plain_transformers(
    recompute, family, tmp_path, monkeypatch
):
    """In three parts of the queries. With layers that are computed again and without; the test of LoRA has
    what a GPU computes."""
    plain = plain_model(family, tmp_path)
    ours = network_of(plain, recompute=recompute)
    monkeypatch.setattr(network, "is_on_xla", lambda tensor: True)
    monkeypatch.setattr(network, "PART", 8)
    assert_same_as_plain(ours, plain)
    assert_same_gradients(dict(ours.causal.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("on_tpu", [False, True])
def test_logits_are_those_of_plain_transformers_to_a_millionth_of_the_largest(
    family, on_tpu, tmp_path, monkeypatch
):
    """In float64, but for norms and positions, which transformers computes in float32: measured 3e-7."""
    monkeypatch.setattr(network, "is_on_xla", lambda tensor: on_tpu)
    plain = plain_model(family, tmp_path).eval().double()
    ours = network_of(plain).eval().double()
    ours.causal.load_state_dict(plain.state_dict())  # copied to float32 before
    with torch.no_grad():
        logits = plain(TOKENS).logits
        difference = (ours(TOKENS, ONE) @ ours.head.t() - logits).abs().max() / logits.abs().max()
    assert difference < 1e-6 and logits.dtype == torch.float64


def test_the_gelu_of_gpt2_in_one_kernel_is_that_of_its_config(tmp_path):
    import transformers

    plain = plain_model("gpt2", tmp_path).eval()
    published = transformers.AutoConfig.from_pretrained(tmp_path)
    assert published.activation_function == "gelu_new" != plain.config.activation_function
    theirs = transformers.AutoModelForCausalLM.from_config(published).eval()
    theirs.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_lora_gives_the_logits_and_gradients_of_peft_itself(family, tmp_path):
    plain = plain_model(family, tmp_path)
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(TARGETS[family]), task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(copy.deepcopy(plain), settings).train()
    ours = network.build(copy.deepcopy(plain.config), None, lora=3)
    assert {p.dtype for p in ours.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    ours = network.build(
        copy.deepcopy(plain.config), None, lora=3, recompute=True, dtype=torch.float32
    ).train()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)  # B is zero at first
    ours.net.load_state_dict(theirs.state_dict())
    assert_same_as_plain(ours, theirs)
    assert_same_gradients(dict(ours.net.named_parameters()), dict(theirs.named_parameters()))


class Kept:
    """The most numbers per pair of two positions that a tensor has which is kept for the backward pass."""

    def __init__(self, length):
        self.length, self.most = length, 0

    def __call__(self, tensor):
        if tensor.shape[-2:].numel() >= self.length**2 // 4 and tensor.shape[-1] >= self.length // 2:
            self.most = max(self.most, tensor[..., 0, 0].numel())
        return tensor


def test_on_a_tpu_no_weight_of_the_attention_is_kept_for_the_backward_pass(tmp_path, monkeypatch):
    """Only the mask is, which is the same for all heads."""
    length, found = 64, []
    config = hub.read_config(write_config(tmp_path, n_positions=length, n_head=4))
    ours = network.build(config, None, lora=None).train()
    monkeypatch.setattr(network, "is_on_xla", lambda tensor: True)
    monkeypatch.setattr(network, "PART", 16)
    tokens = torch.zeros(1, length, dtype=torch.long)
    for again in (network.recomputed, lambda function, *tensors: function(*tensors)):
        monkeypatch.setattr(network, "recomputed", again)
        kept = Kept(length)
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            ours(tokens, torch.ones_like(tokens))
        found.append(kept.most)
    assert found == [1, 4]


class CastsToFloat32(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.number += (kwargs or {}).get("dtype") == torch.float32
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_take_inputs_in_half_precision_as_they_are_and_compute_the_same_bits(autocast, tmp_path):
    config = hub.read_config(write_config(tmp_path))
    ours = network.build(config, None, lora=3, recompute=True).train()
    theirs = copy.deepcopy(ours)
    theirs.adapters = []  # peft casts
    found, casts = [], []
    for model in (ours, theirs):
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        with CastsToFloat32() as counted:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(TOKENS, ONE).square().sum()
            loss.backward()
        casts.append(counted.number)
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(gradient.abs().sum() > 0 for gradient in found[0])
    assert all(map(torch.equal, *found))
    assert casts[0] < casts[1] - len(ours.adapters) if autocast else casts[0] == casts[1]


def test_packed_documents_give_what_each_gives_alone(family, tmp_path):
    ours = network_of(plain_model(family, tmp_path)).eval()
    documents = torch.tensor([[1] * 4 + [2] * 9 + [3] * 7] * 3)
    packed = ours(TOKENS, documents)
    parts = [ours(part, torch.ones_like(part)) for part in TOKENS.split([4, 9, 7], 1)]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed, ours(TOKENS, ONE), atol=1e-2), "the documents do not matter"


def test_the_state_is_what_trains_and_comes_back(tmp_path):
    whole, lora = (
        network.build(hub.read_config(write_config(tmp_path)), None, lora=lora) for lora in (None, 2)
    )
    assert len(whole.state_dict()) == len(list(whole.parameters())), "the tied head is there twice"
    names = lora.state_dict()
    assert names and all("lora_" in name for name in names)
    with torch.no_grad():
        changed = {name: value + 1 for name, value in names.items()}
    lora.load_state_dict(changed)
    assert all(torch.equal(lora.state_dict()[name], changed[name]) for name in changed)
    with pytest.raises(RuntimeError, match="missing or unknown"):
        lora.load_state_dict({})


def test_a_tied_head_stays_tied_on_another_device(tmp_path, xla):
    model = network.build(hub.read_config(write_config(tmp_path)), None, lora=None)
    moved = xla.to_device(model)
    assert moved.head.device.type == "xla" and moved.head is moved.causal.get_input_embeddings().weight


PUBLISHED = {  # parameters
    "gpt2": 124_439_808,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shapes_that_travel_with_tpukit_have_the_published_numbers_of_parameters(name):
    assert {str(path.parent.relative_to(hub.SHAPES)) for path in hub.SHAPES.rglob("config.json")} == {
        "tiny",
        *PUBLISHED,
    }
    with torch.device("meta"):
        model = network.build(hub.read_config(hub.find_folder(name, "config")), None, lora=None)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


# Models that are refused


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(model_type="mamba"), ("mamba", "qwen3", "not one that is tested")),
        (dict(model_type="gemma2"), ("gemma2", "soft caps")),
        (dict(model_type="gemma3"), ("gemma3", "images")),
        (dict(model_type="qwen3_moe"), ("qwen3_moe", "experts")),
        (dict(model_type="granite", logits_scaling=8.0), ("granite", "logits_scaling")),
        (
            dict(model_type="llama", rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)),
            ("llama", "dynamic"),
        ),
        (dict(model_type="own", auto_map=dict(AutoConfig="own.Config")), ("custom code",)),
        (dict(quantization_config=dict(bits=4)), ("quantized",)),
        (dict(n_head=5), ("cannot be made",)),
        (dict(n_layer="many"), ("config.json",)),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_trained_is_refused(changes, told, tmp_path):
    with refuses(*told):
        config = hub.read_config(write_config(tmp_path, **changes))
        network.build(config, None, lora=None)


def test_of_two_scales_of_positions_rows_stay_within_the_first(tmp_path):
    config = hub.read_config(write_config(tmp_path, "phi3 longrope"))
    assert hub.most_positions(config) == 64 and config.max_position_embeddings == 128
    with refuses("at most 64"):
        _ = task_of(tmp_path, sequence_length=65).length


def test_a_folder_with_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with refuses("has no config.json"):
        hub.read_config(hub.find_folder(str(tmp_path), "config"))


def test_code_in_a_models_folder_is_never_run(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "own.py").write_text("raise SystemExit('run')")
    settings: Any = dict(auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    settings |= dict(attn_implementation="someone/kernels", _attn_implementation="someone/kernels")
    write_config(folder, **settings)
    built = network.build(hub.read_config(folder), folder, lora=None)
    assert built.causal.config._attn_implementation == network.ATTENTION


def test_weights_in_a_pickle_are_refused_and_missing_ones_named(tmp_path):
    folder = write_model(tmp_path / "model")
    config = hub.read_config(write_config(folder, n_layer=3))
    with refuses("do not fit", "h.2"):
        network.build(config, folder, lora=None)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with refuses("no file named model.safetensors"):
        network.build(hub.read_config(write_config(folder)), folder, lora=None)


def test_a_name_without_internet_a_gated_and_an_unknown_one_are_told_in_a_sentence(monkeypatch):
    library = pytest.importorskip("huggingface_hub")
    for name in ("Qwen/Qwen3-0.6B", "no/such/folder"):
        with refuses(name, "TPUKIT_OFFLINE", "not on this machine"):
            hub.find_folder(name, "weights")
    monkeypatch.setattr(hub.downloads, "check_reachable", lambda url: None)
    response = type("Response", (), dict(headers={}, status_code=403, request=None))()
    for kind, told in (
        (library.errors.GatedRepoError, "accept its terms"),
        (library.errors.RepositoryNotFoundError, "check its name"),
    ):

        def download(name, *, local_files_only=False, **_):
            if local_files_only:
                raise library.errors.LocalEntryNotFoundError("not here")
            raise kind("secret words of the hub", response=response)

        monkeypatch.setattr(library, "snapshot_download", download)
        with refuses(told, "google/gemma-3-1b-pt"):
            hub.find_folder("google/gemma-3-1b-pt", "weights")


def test_of_a_hub_neither_code_nor_pickles_are_downloaded(monkeypatch, tmp_path):
    library = pytest.importorskip("huggingface_hub")
    asked = []

    def download(name, *, allow_patterns, ignore_patterns, local_files_only=False):
        asked.append((*allow_patterns, *ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(library, "snapshot_download", download)
    write_config(tmp_path)
    assert hub.find_folder("gpt2", "tokenizer") == tmp_path
    assert asked == [("*.json", "*.jinja", "*/*")] and hub.find_folder("gpt2", "weights") == tmp_path
    assert asked[1] == ("*.json", "*.jinja", "*.safetensors", "*/*")


def test_on_a_gpu_without_bf16_what_is_frozen_is_kept_in_what_its_autocast_computes(family, tmp_path):
    """Matrices in fp16, all else in fp32, so that the states between layers are in fp32."""
    config = hub.read_config(write_config(tmp_path, family))
    torch.manual_seed(0)
    ours = network.build(config, None, lora=3).eval()
    theirs = copy.deepcopy(ours)
    theirs.adapt_to(torch.bfloat16)
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16, torch.float32}
    ours.adapt_to(torch.float16)
    assert {p.dtype for p in ours.parameters()} == {torch.float16, torch.float32}
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        found, expected = (model(TOKENS, ONE).float() for model in (ours, theirs.float()))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)  # 2**-11 an operation, some dozens
    assert found.isfinite().all() and expected.abs().max() > 0.5


class Passes(TorchDispatchMode):
    """Operations that write a tensor of some shape, but for products."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.names = shape, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.numel() == self.shape.numel():
            self.names.append(function.overloadpacket.__name__)
        return out


def test_an_adapter_adds_its_product_in_place(tmp_path):
    config = hub.read_config(write_config(tmp_path, "llama"))
    layer = network.build(config, None, lora=3).adapters[0]
    passes = []
    for forward in (layer.forward, lambda x: type(layer).forward(layer, x)):
        x = torch.ones(2, 50, layer.in_features)
        with (
            torch.autocast("cpu", torch.bfloat16),
            Passes(torch.Size((2, 50, layer.out_features))) as counted,
        ):
            forward(x)
        passes.append([name for name in counted.names if name in ("mul", "add", "addmm_")])
    assert passes == [["addmm_"], ["mul", "add"]]
