"""Experts of one shape, solved at once: what each alone would give, in bounded memory, and errors that name one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark.core.granularity import PerChannel, PerGroup
from quark.core.solvers import gptq
from quark.core.spec import LayerSpec, TensorSpec, spec
from quark.errors import CalibrationError
from quark.torch import ModelQuantizer
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.calibration import experts as moe
from quark.torch.calibration.experts import reached_together
from quark.torch.config.algo_configs import AlgoConfig, GPTAQConfig, GPTQConfig, QronosConfig
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.passes import UnfusedExperts
from tests.models.families import family

INT3 = spec("int3", PerGroup(-1, 16), symmetric=False)
SOLVERS: dict[str, AlgoConfig] = {
    "gptq": GPTQConfig(refine_passes=2),
    "groups on the way": GPTQConfig(desc_act=False, static_groups=False, group_aware_order=True),
    "gptaq": GPTAQConfig(),
    "qronos": QronosConfig(inside_layer_modules=[], model_decoder_layers=""),
}
DATA = [torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def solved(name: str, algorithm: AlgoConfig, weight: TensorSpec = INT3, exclude: tuple[str, ...] = ()) -> nn.Module:
    layer = config_of_layer(LayerSpec(weight=weight))
    config = QConfig(global_quant_config=layer, exclude=["@output_head", *exclude], algo_config=[algorithm])
    return ModelQuantizer(config).quantize_model(family(name), DATA)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """The same weights, but for a row of one layer, where rounding in another order takes a value over a tie.

    The rest of that row follows from that value, and so does what the layers that read it are given.
    """
    others, with_tie = quantized_layers(expected), ""
    for name, layer in quantized_layers(found).items():
        if with_tie and reads(name, with_tie):
            continue
        weight, other = (cast_weight(one) for one in (layer, others[name]))
        wrong = ~torch.isclose(weight, other, rtol=1e-4, atol=1e-6)
        if float(wrong.float().mean()) > 0.002:
            assert int(wrong.any(1).sum()) == 1, name
            assert not with_tie, (name, with_tie)
            with_tie = name


def reads(name: str, other: str) -> bool:
    """Whether a layer gets what another one computes: within its expert, and behind its block."""
    (block, expert), (other_block, other_expert) = ((int(x.split(".")[2]), x.rpartition(".")[0]) for x in (name, other))
    return block > other_block or expert == other_expert or (block == other_block and "experts" not in other)


def cast_weight(layer: Any) -> torch.Tensor:
    return layer.weight.detach()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many Hessians each call of the solver was given."""
    seen: list[int] = []
    factor = gptq.factor

    def counted(hessian: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(len(hessian) if hessian.ndim == 3 else 1)
        return factor(hessian, *args, **options)

    monkeypatch.setattr(gptq, "factor", counted)
    return seen


# Coarse grids: with 8 bits, sums in another order take values of several rows over a tie.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "weight"),
    [*((solver, INT3) for solver in SOLVERS), ("gptq", spec("fp4_e2m1")), ("qronos", spec("int4", PerChannel(0)))],
    ids=str,
)
def test_experts_are_solved_at_once_as_each_alone(
    solver: str, weight: TensorSpec, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = solved("qwen3_moe", SOLVERS[solver], weight)
    assert batches == [1, 1, 4, 4] * 2  # q/k/v, o, gate/up of four experts, down of four experts; two blocks
    monkeypatch.setattr(moe, "AT_ONCE", 0)
    del batches[:]
    alone = solved("qwen3_moe", SOLVERS[solver], weight)
    assert set(batches) == {1}
    assert_same(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize("exclude", [("*experts.1.*",), ("*experts.2.gate_proj", "*experts.0.down_proj")])
def test_experts_that_are_not_alike_are_solved_with_those_that_are(
    exclude: tuple[str, ...], batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = solved("qwen3_moe", GPTQConfig(), exclude=exclude)
    assert batches == ([1, 1, 3, 3] if len(exclude) == 1 else [1, 1, 3, 1, 3]) * 2
    monkeypatch.setattr(moe, "AT_ONCE", 0)
    assert_same(together, solved("qwen3_moe", GPTQConfig(), exclude=exclude))


@pytest.mark.slow
def test_no_more_experts_are_in_flight_than_fit(batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = solved("qwen3_moe", GPTQConfig())
    experts = next(m for m in whole.modules() if isinstance(m, UnfusedExperts))
    groups = [("attention",), *[(f"e.{i}.gate_proj", f"e.{i}.up_proj") for i in range(4)]]
    columns, rows = experts.get_submodule("0.gate_proj").weight.shape[::-1]  # type: ignore[union-attr, misc]
    monkeypatch.setattr(moe, "AT_ONCE", 3 * 8 * columns * (columns + 2 * rows))
    assert reached_together(experts, "e", groups) == {(False, 0): {0: 1, 1: 2, 2: 3}}
    monkeypatch.setattr(moe, "AT_ONCE", 2 * 8 * columns * (columns + 2 * rows))
    assert reached_together(experts, "e", groups) == {(False, 0): {0: 1, 1: 2}, (False, 2): {2: 3, 3: 4}}
    del batches[:]
    parts = solved("qwen3_moe", GPTQConfig())
    assert batches[:4] == [1, 1, 2, 2]
    assert_same(parts, whole)


def shifted(monkeypatch: pytest.MonkeyPatch, layer: str, share: float) -> None:
    """Take a share of its mean diagonal from the second moments of a layer, which are then not positive definite."""
    moments = InputGroup._moments

    def less(group: InputGroup, *sides: Any) -> torch.Tensor:
        found = moments(group, *sides)
        return found - share * found.diagonal().mean() * torch.eye(len(found)) if layer in str(group) else found

    monkeypatch.setattr(InputGroup, "_moments", less)


@pytest.mark.slow
def test_an_expert_that_needs_more_damping_gets_it_alone(batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "OF_FEW", 0.0)  # what so few tokens add is more than the share below
    plain = solved("qwen3_moe", GPTQConfig())
    shifted(monkeypatch, "layers.1.mlp.experts.2.down_proj", 0.05)
    del batches[:]
    together = solved("qwen3_moe", GPTQConfig())
    assert batches[-5:] == [4, 1, 1, 1, 1]
    monkeypatch.setattr(moe, "AT_ONCE", 0)
    assert_same(together, solved("qwen3_moe", GPTQConfig()))
    changed, before = quantized_layers(together), quantized_layers(plain)
    name = "model.layers.1.mlp.experts.{}.down_proj".format
    assert torch.equal(cast_weight(changed[name(1)]), cast_weight(before[name(1)]))
    assert not torch.equal(cast_weight(changed[name(2)]), cast_weight(before[name(2)]))


def test_experts_with_few_tokens_and_with_many_are_solved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: dict[int, bool] = {}
    at_least = gptq.damping_at_least

    def noted(given: Any, diagonal: torch.Tensor, tokens: int) -> Any:
        found = at_least(given, diagonal, tokens)
        raised[tokens] = isinstance(found, torch.Tensor)
        return found

    monkeypatch.setattr(gptq, "damping_at_least", noted)
    monkeypatch.setattr(gptq, "OF_FEW", 0.024)
    together = solved("qwen3_moe", GPTQConfig())
    del raised[max(raised)]  # other layers read all tokens
    assert {*raised.values()} == {True, False}, raised
    monkeypatch.setattr(moe, "AT_ONCE", 0)
    assert_same(together, solved("qwen3_moe", GPTQConfig()))


@pytest.mark.slow
def test_the_expert_that_cannot_be_solved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = config_of_layer(LayerSpec(weight=INT3))
    config = QConfig(global_quant_config=layer, exclude=["@output_head"], algo_config=[GPTQConfig()])
    shifted(monkeypatch, "experts.3.w2", 9.0)
    with pytest.raises(CalibrationError, match=r"^\S*layers\.0\.mlp\.experts\.3\.w2: .*not positive definite"):
        ModelQuantizer(config).quantize_model(family("mixtral"), DATA)
