"""Folds are found in models of any architecture, proved, and leave the model's function as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.core.granularity import PerChannel
from quark.core.spec import LayerSpec, spec
from quark.errors import ConfigError
from quark.torch import ModelQuantizer
from quark.torch.algorithms.scaling.find_folds import Discovery, _Search, _sibling
from quark.torch.algorithms.scaling.float64_forward import Exact
from quark.torch.algorithms.scaling.fold import Fold, Refusal
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.config.named_algorithms import ALGO_CONFIGS
from quark.torch.model.blocks import Call, find_blocks, record_calls
from quark.torch.model.passes import prepare
from tests.models.architectures import build, token_ids
from tests.models.families import family
from tests.models.torch_zoo import token_batches

QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
VALUES = {"self_attn.o_proj": ("self_attn.v_proj", 16)}
GATED = {"mlp.down_proj": ("mlp.up_proj", 64)}
LLAMA = {QKV: ("input_layernorm", 32), "mlp.gate_proj mlp.up_proj": ("post_attention_layernorm", 32)} | VALUES | GATED
GEMMA2 = {
    QKV: ("input_layernorm", 32), "mlp.gate_proj mlp.up_proj": ("pre_feedforward_layernorm", 32)
} | VALUES | GATED  # fmt: skip


def experts(gate: str, up: str, down: str, width: int) -> dict[str, tuple[str, int] | str]:
    """Four experts behind one norm, each with a fold of its own."""
    names = [f"mlp.experts.{index}" for index in range(4)]
    readers = " ".join(f"{name}.{leaf}" for name in names for leaf in (gate, up))
    inner = {f"{name}.{down}": (f"{name}.{up}", width) for name in names}
    return {QKV: ("input_layernorm", 32), readers: ("post_attention_layernorm", 32)} | VALUES | inner


TABLE: dict[str, dict[str, tuple[str, int] | str]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA2,
    "phi": {
        f"{QKV} mlp.fc1": ("input_layernorm", 32),
        "self_attn.dense": ("self_attn.v_proj", 32),
        "mlp.fc2": "does not scale with 'mlp.fc1'",
    },
    "phi3": {
        "self_attn.qkv_proj": ("input_layernorm", 32),
        "self_attn.o_proj": ("self_attn.qkv_proj", 16),
        "mlp.gate_up_proj": ("post_attention_layernorm", 32),
        "mlp.down_proj": ("mlp.gate_up_proj", 64),
    },
    "falcon": {
        "self_attention.query_key_value mlp.dense_h_to_4h": ("input_layernorm", 32),
        "self_attention.dense": ("self_attention.query_key_value", 8),
        "mlp.dense_4h_to_h": "does not scale with 'mlp.dense_h_to_4h'",
    },
    "falcon_new": {
        "self_attention.query_key_value": ("ln_attn", 32),
        "self_attention.dense": ("self_attention.query_key_value", 16),
        "mlp.dense_h_to_4h": ("ln_mlp", 32),
        "mlp.dense_4h_to_h": "does not scale with 'mlp.dense_h_to_4h'",
    },
    "gpt_neox": {
        "attention.query_key_value": ("input_layernorm", 32),
        "attention.dense": ("attention.query_key_value", 32),
        "mlp.dense_h_to_4h": ("post_attention_layernorm", 32),
        "mlp.dense_4h_to_h": "does not scale with 'mlp.dense_h_to_4h'",
    },
    "opt": {
        "self_attn.k_proj self_attn.v_proj self_attn.q_proj": ("self_attn_layer_norm", 32),
        "self_attn.out_proj": ("self_attn.v_proj", 32),
        "fc1": ("final_layer_norm", 32),
        "fc2": ("fc1", 64),
    },
    "bert": {
        "attention.self.query attention.self.key attention.self.value": "outside of the block",
        "attention.output.dense": ("attention.self.value", 32),
        "intermediate.dense": "'attention.output.LayerNorm' is read by 'output.LayerNorm' as well",
        "output.dense": "does not scale with 'intermediate.dense'",
    },
    "gpt2": {
        "attn.c_attn": ("ln_1", 32),
        "attn.c_proj": ("attn.c_attn", 32),
        "mlp.c_fc": ("ln_2", 32),
        "mlp.c_proj": "does not scale with 'mlp.c_fc'",
    },
    "mixtral": experts("w1", "w3", "w2", 64),
    "qwen3_moe": experts("gate_proj", "up_proj", "down_proj", 32),
}
"""Architecture -> layers -> (producer, its channels that carry a scale), or a part of the reason."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_folds_of_each_architecture_keep_its_outputs(name: str) -> None:
    model, ids = build(name), token_ids()
    prepare(model, lambda layer: True)
    blocks = find_blocks(model)
    calls = record_calls(model, blocks, [ids])
    before = model(ids).logits.detach()
    discovery = Discovery()
    for block in blocks:
        (call,), module = calls[block], model.get_submodule(block)
        found = discovery.folds(module, call.args, call.kwargs)
        assert {key(item): summary(item) for item in found} == described(TABLE[name], found)
        for item in found:
            if isinstance(item, Fold):
                s = item.feasible(torch.rand(len(item.rows)) * 3 + 0.3)
                item.apply(module, s)
    assert torch.allclose(model(ids).logits, before, atol=2e-4 * float(before.abs().max()))


def key(item: Fold | Refusal) -> str:
    """The layers, experts in the order of their number."""
    return " ".join(sorted(item.layers) if "experts" in item.layers[0] else item.layers)


def summary(item: Fold | Refusal) -> tuple[str, int] | str:
    if isinstance(item, Refusal):
        return item.reason
    return item.producer, len(item.rows[item.rows >= 0].unique())


def described(table: dict, found: list) -> dict:
    """The table, with the whole reason where a part of it is what was found."""
    reasons = {key(item): item.reason for item in found if isinstance(item, Refusal)}
    return {
        layers: reasons[layers] if isinstance(expected, str) and expected in reasons.get(layers, "") else expected
        for layers, expected in table.items()
    }


@pytest.mark.slow
def test_a_gain_of_one_plus_weight_is_measured() -> None:
    folds = {name: folds_of(name) for name in ("llama", "gemma")}
    offsets = {name: found[0].offsets for name, found in folds.items()}
    assert offsets == {"llama": {"weight": 0.0}, "gemma": {"weight": 1.0}}


def test_channels_of_grouped_queries_share_a_scale() -> None:
    fold = next(f for f in folds_of("llama") if f.layers == ("self_attn.o_proj",))
    s = fold.feasible(torch.rand(32) + 0.5)
    heads = s.view(2, 2, 8)  # two heads of queries for each of values
    assert torch.equal(heads[:, 0], heads[:, 1]) and len(s.unique()) == 16
    largest = fold.shared(torch.arange(32.0)).view(2, 2, 8)
    assert torch.equal(largest[:, 0], torch.arange(32.0).view(2, 2, 8)[:, 1])


def folds_of(name: str, **options: object) -> list:
    model = build(name)
    first = find_blocks(model)[0]
    (call,) = record_calls(model, [first], [token_ids()])[first]
    return Discovery().folds(model.get_submodule(first), call.args, call.kwargs)


class Leaky(nn.Module):
    """The norm's output is also what the block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + torch.tanh(self.fc(x))


def test_a_tensor_that_is_used_elsewhere_is_refused() -> None:
    (refusal,) = Discovery().folds(Leaky(), (torch.randn(1, 12, 16),), {})
    assert isinstance(refusal, Refusal) and "changes the output of the block" in refusal.reason


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class Router(nn.Module):
    """A matrix that is no nn.Linear; never chooses the last expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)[:, :2].softmax(-1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), Router()
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).view(-1, 16)
        weights = self.router(flat)
        chosen, result = weights.argmax(-1), torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            if len(rows):
                result.index_add_(0, rows, expert(flat[rows]) * weights[rows, index, None])
        return x + result.view_as(x)


def test_experts_share_the_fold_of_their_norm_also_those_without_tokens() -> None:
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(1, 40, 16)
    before = model(x)
    found = Discovery().folds(model, (x,), {})
    producers = {fold.producer: fold for fold in found}
    assert set(producers) == {"norm", "experts.0.up", "experts.1.up", "experts.2.up"}
    assert producers["norm"].others == ("router",)
    assert set(producers["norm"].layers) == {f"experts.{i}.{leaf}" for i in range(3) for leaf in ("gate", "up")}
    for fold in found:
        fold.apply(model, fold.feasible(torch.rand(len(fold.rows)) + 0.5))
    assert torch.allclose(model(x), before, atol=1e-5)
    torch.manual_seed(0)
    reference = Mixture()
    assert torch.allclose(model.experts[2](model.norm(x)), reference.experts[2](reference.norm(x)), atol=1e-5), (
        "the expert without tokens is folded as well"
    )


@pytest.mark.parametrize("leaf", ["w1", "w2", "w3"])
def test_the_sibling_of_an_idle_experts_layer_has_its_name(leaf: str) -> None:
    called = [f"experts.{index}.{other}" for index in (0, 1) for other in ("w1", "w2", "w3")]
    assert _sibling(f"experts.7.{leaf}", called) == f"experts.0.{leaf}"
    assert _sibling("experts.7", ["experts.2", "other.3"]) == "experts.2"
    assert _sibling("up.w4", called) is None


def test_a_fold_that_a_config_names_is_honoured_or_refused() -> None:
    model = build("llama")
    first = find_blocks(model)[0]
    (call,) = record_calls(model, [first], [token_ids()])[first]
    block = model.get_submodule(first)
    item = {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"}
    (fold,) = Discovery().explicit(block, call.args, call.kwargs, [item])
    assert fold.producer == "mlp.up_proj" and fold.layers == ("mlp.down_proj",)
    for wrong, message in [
        (item | {"prev_op": "mlp.gate_proj"}, "does not scale with 'mlp.gate_proj'"),
        (item | {"prev_op": "mlp.ups"}, "no module 'mlp.ups'.*mlp.up_proj"),
        (item | {"prev_op": "input_layernorm", "layers": ["self_attn.q_proj"]}, "read by 'self_attn.k_proj'"),
        (item | {"prev_op": "post_attention_layernorm"}, "does not come before it"),
        (item | {"layers": ["mlp"]}, "names linear layers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Discovery().explicit(block, call.args, call.kwargs, [wrong])


def test_proofs_read_a_half_precision_block_in_float64() -> None:
    model = build("qwen2").to(torch.bfloat16)
    first = find_blocks(model)[0]
    (call,) = record_calls(model, [first], [token_ids()])[first]
    found = Discovery().folds(model.get_submodule(first), call.args, call.kwargs)
    assert all(isinstance(item, Fold) for item in found)
    assert model.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32


class Conditioned(nn.Module):
    """A table that reads row numbers, and a layer that reads one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.row, self.out = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.row(self.table(label).sum(0)))  # type: ignore[no-any-return]


def test_a_table_and_a_layer_of_one_row_stand_beside_folds() -> None:
    block = Conditioned()
    args = torch.randn(2, 3, 8), torch.tensor([1, 4])
    _, inputs = Exact(block, args, {}).run(watch=["table", "row", "out"])
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {"row": (1, 8), "out": (6, 8)}
    found = Discovery().folds(block, args, {})
    assert all(isinstance(item, Refusal) for item in found)


def test_a_block_of_a_known_structure_is_proved_again() -> None:
    model, discovery = Leaky(), Discovery()
    call = Call((torch.randn(1, 12, 16),), {})
    discovery.folds(model, call.args, call.kwargs)
    wrong = Fold("norm", ("fc",), (), torch.arange(16), {"weight": 0.0, "bias": 0.0})
    discovery._known = {key: [wrong] for key in discovery._known}
    (item,) = discovery.folds(Leaky(), call.args, call.kwargs)
    assert isinstance(item, Refusal)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["smoothquant", "awq", "rotation"])
def test_latent_attention_with_splits_of_heads(algorithm: str) -> None:
    """DeepSeek-V3 takes queries and keys apart within each head."""
    model, reference = family("deepseek_v3"), family("deepseek_v3")
    layer = config_of_layer(LayerSpec(weight=spec("int16", PerChannel(0))))
    config = QConfig(global_quant_config=layer, exclude=["lm_head"], algo_config=[ALGO_CONFIGS[algorithm]()])
    (ids,) = token_batches(1)
    with torch.no_grad():
        expected = reference(ids).logits
        found = ModelQuantizer(config).quantize_model(model, token_batches())(ids).logits
    # 16 bits leave 1e-4; a wrong fold would leave nothing.
    assert float((found - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_in_float64_is_that_of_its_weight_in_float64(bias: bool) -> None:
    layer = nn.Linear(24, 150, bias=bias).bfloat16()  # more rows than are converted at once
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (found,), _ = Exact(layer, (x,), {}).run()
    with torch.no_grad():
        expected = nn.functional.linear(x, layer.weight.double(), layer.bias.double() if bias else None)
    assert found.dtype == torch.float64 and torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_named_folds_are_sought_in_one_block_of_a_structure_and_proved_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sought: list[str] = []
    candidate = _Search.candidate

    def noted(self: _Search, layers: tuple[str, ...], producer: str | None = None) -> Fold | Refusal:
        sought.append(str(producer))
        return candidate(self, layers, producer)

    monkeypatch.setattr(_Search, "candidate", noted)
    discovery, item = Discovery(), {"prev_op": "0", "layers": ["1"], "inp": "1"}
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        (fold,) = discovery.explicit(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 70)), (x,), {}, [item])
        assert isinstance(fold, Fold)
    assert sought == ["0"]
