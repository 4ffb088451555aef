"""Gradients of fake quantization, against torch's own operator, surrogates under autograd, and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from quark.compat.torch_names.shorthand_specs import Int8PerTensorSpec, TQTSpec
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.scales import QParams
from quark.core.spec import LayerSpec, Learning, ScaleType, TensorSpec, spec
from quark.errors import ConfigError
from quark.torch import ModelQuantizer
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer, lower_tensor
from quark.torch.config.tensor.enums import Dtype, QSchemeType, RoundType
from quark.torch.config.tensor.observer_classes import LSQObserver, ObserverBase, PerTensorMinMaxObserver, TQTObserver
from quark.torch.config.tensor.tensor_config import QTensorConfig
from quark.torch.layers.fake_quant import FakeQuantize

LSQ, TQT = Learning.lsq, Learning.tqt


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantizer(tensor: TensorSpec, scale: torch.Tensor, zero: torch.Tensor | None = None) -> FakeQuantize:
    made = FakeQuantize(tensor)
    made.store(QParams(scale, zero))
    return made


def backward(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the gradient of x for the loss sum(weight * output)."""
    x = x.clone().requires_grad_()
    y = module(x)
    (weight * y).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_stops_where_values_are_cut_off_as_in_torch(dtype: torch.dtype) -> None:
    x, weight, scale = values(64, 32), values(64, 32, seed=1), torch.tensor(0.17)
    tensor = spec("int4")
    y, gradient = backward(quantizer(tensor, scale, torch.tensor(0.0)), x.to(dtype), weight.to(dtype))
    theirs = x.to(dtype).float().requires_grad_()
    expected = torch.fake_quantize_per_tensor_affine(theirs, float(scale), 0, -8, 7)
    (weight.to(dtype).float() * expected).sum().backward()
    assert torch.equal(y, expected.detach().to(dtype))
    assert torch.equal(gradient.float(), theirs.grad)  # type: ignore[arg-type]
    assert 0.1 < float((gradient == 0).float().mean()) < 0.5


@pytest.mark.parametrize(
    "tensor",
    [
        spec("int8", dynamic=True),
        spec("fp4_e2m1", PerGroup(-1, 32), scale_type=ScaleType.float8_e8m0fnu, dynamic=True),
        spec("bfloat16"),
        spec("fp4_e2m1", PerGroup(-1, 16), scale_spec=spec("fp8_e4m3"), dynamic=True),
    ],
    ids=str,
)
def test_scales_that_follow_the_tensor_cut_nothing_off(tensor: TensorSpec) -> None:
    module = FakeQuantize(tensor)
    if tensor.scale_spec:
        module.scale_2 = torch.tensor(0.01)
    weight = values(8, 64, seed=1)
    assert torch.equal(backward(module, values(8, 64), weight)[1], weight)


LEARNED = {
    "int4": spec("int4", learning=LSQ),
    "int4-channel": spec("int4", PerChannel(0), learning=LSQ),
    "int3-group": spec("int3", PerGroup(-1, 16), learning=LSQ),
    "uint4": spec("uint4", symmetric=False, learning=LSQ),
    "fp8": spec("fp8_e4m3", learning=LSQ),
}


def surrogate(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float, tensor: TensorSpec) -> torch.Tensor:
    """Clip, round with the identity's gradient, scale: what the papers differentiate; in float64."""
    low, high = tensor.dtype.min - zero, tensor.dtype.max - zero
    clipped = torch.minimum(torch.maximum(x / scale, torch.as_tensor(low)), torch.as_tensor(high))
    unit = fake_quantize(clipped.detach().float(), QParams(torch.tensor(1.0)), spec("fp8_e4m3")).double()
    rounded = unit if tensor.dtype.is_float else clipped.detach().round()
    return (clipped + (rounded - clipped).detach()) * scale


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("is_weight", [True, False])
def test_lsq_is_its_surrogate(name: str, is_weight: bool) -> None:
    tensor = LEARNED[name]
    x, weight = values(8, 32), values(8, 32, seed=1)
    params = compute_qparams(x, tensor)
    params = QParams(params.scale * 0.6, params.zero_point)
    module = quantizer(tensor, params.scale, params.zero_point)
    assert [key for key, _ in module.named_parameters()] == ["learned"]
    leaf = nn.Parameter(x.clone()) if is_weight else x.clone().requires_grad_()
    (weight * module(leaf)).sum().backward()

    split = tensor.split
    scale = split.to_blocks(params.scale, (8, 32)).double().requires_grad_()
    zero: torch.Tensor | float = 0.0
    if not tensor.symmetric and params.zero_point is not None:
        zero = split.to_blocks(params.zero_point, (8, 32)).double()
    theirs = x.double().requires_grad_()
    y = split.unblock(surrogate(split.blocks(theirs), scale, zero, tensor), (8, 32))
    (weight * y).sum().backward()
    sharing = x.numel() // params.scale.numel() // (1 if is_weight else 8)
    g = 1 / math.sqrt(max(1, sharing * tensor.dtype.max))
    assert torch.allclose(leaf.grad.double(), theirs.grad)  # type: ignore[union-attr, arg-type]
    expected = g * scale.grad.reshape(params.scale.shape)  # type: ignore[union-attr]
    assert torch.allclose(module.learned.grad.double(), expected, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
    assert torch.equal(module(x), fake_quantize(x, params, tensor))


def test_lsq_is_the_finite_difference_of_its_surrogate() -> None:
    """Moving the step, with what rounding adds to each value held."""
    tensor = LEARNED["int4"]
    x, weight, s, h = values(40, 25).double(), values(40, 25, seed=1).double(), 0.21, 1e-6
    held = (x / s).clamp(-8, 7).round() - (x / s).clamp(-8, 7)

    def loss(step: float) -> float:
        return float((weight * step * ((x / step).clamp(-8, 7) + held)).sum())

    module = quantizer(tensor, torch.tensor(s), torch.tensor(0.0))
    backward(module, x.float(), weight.float())
    numeric = (loss(s + h) - loss(s - h)) / (2 * h) / math.sqrt(25 * 7)
    assert float(module.learned.grad) == pytest.approx(numeric, rel=1e-4)  # type: ignore[union-attr, arg-type]


def test_tqt_is_equation_8_of_its_paper() -> None:
    tensor = spec("int4", learning=TQT)
    x, weight = values(64, 32), values(64, 32, seed=1)
    # 7.5 steps of 0.23 is a threshold of 1.725, so the scale is 2^1 / 2^3.
    module = quantizer(tensor, torch.tensor(0.23), torch.tensor(0.0))
    assert float(module.trained.detach()) == pytest.approx(math.log2(1.725)) and float(module.scale) == 0.25  # type: ignore[arg-type]
    y, gradient = backward(module, x, weight)
    rounded = (x / 0.25).round()
    inside = (rounded >= -8) & (rounded <= 7)
    slope = 0.25 * math.log(2) * torch.where(inside, rounded - x / 0.25, rounded.clamp(-8, 7))
    assert torch.equal(y, rounded.clamp(-8, 7) * 0.25)
    assert torch.equal(gradient, weight * inside)
    assert torch.allclose(module.trained.grad, (weight * slope).sum(), rtol=1e-4)  # type: ignore[union-attr, arg-type]


def test_training_and_settling() -> None:
    module = quantizer(LEARNED["int4"], torch.tensor(0.5), torch.tensor(0.0))
    with torch.no_grad():
        module.learned.fill_(0.25)  # type: ignore[union-attr]
    assert module.params is not None and float(module.params.scale) == 0.25
    x = values(8, 8)
    before = module(x).detach()
    restored = FakeQuantize(module.spec)
    restored.store(QParams(torch.tensor(1.0), torch.tensor(0.0)))
    restored.load_state_dict(module.state_dict())
    assert torch.equal(restored(x), before)
    module.stop_learning()
    module.stop_learning()
    assert module.learned is None and torch.equal(module(x), before) and not list(module.parameters())
    with torch.no_grad():
        restored.learned.fill_(-1.0)  # type: ignore[union-attr]
    assert bool(torch.isfinite(restored(x)).all()) and float(restored.scale) > 0  # type: ignore[arg-type]


@pytest.mark.slow
def test_compiled_and_exported_models_compute_the_same_and_a_compiled_one_trains() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layer = LayerSpec(weight=spec("int4"), input=spec("int4"))
    x = values(4, 8)
    model = ModelQuantizer(QConfig(global_quant_config=config_of_layer(layer))).quantize_model(model, [x])
    model(x).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def trained(observer: type[ObserverBase], dtype: Dtype = Dtype.int8, **options: object) -> QTensorConfig:
    values = {"qscheme": QSchemeType.per_tensor, "symmetric": True, "scale_type": ScaleType.float, "is_dynamic": False}
    return QTensorConfig(dtype, observer, round_method=RoundType.half_even, **{**values, **options})  # type: ignore[arg-type]


def test_configs_lower_to_what_is_trained() -> None:
    lsq = lower_tensor(trained(LSQObserver, qscheme=QSchemeType.per_channel, ch_axis=0))
    assert lsq == spec("int8", PerChannel(0), observer="mean_magnitude", learning=LSQ)
    assert lower_tensor(trained(TQTObserver)) == spec("int8", PerTensor(), observer="three_sigma", learning=TQT)
    assert lower_tensor(trained(TQTObserver), live=True) == spec("int8", observer="kl_j", learning=TQT)
    given = trained(TQTObserver, qat_spec=TQTSpec(threshold_init_meth="_3sd"))  # type: ignore[arg-type]
    assert lower_tensor(given, live=True) == spec("int8", observer="three_sigma", learning=TQT)
    assert QTensorConfig.from_dict(trained(LSQObserver).to_dict()) == trained(LSQObserver)


def test_what_cannot_be_trained_is_refused() -> None:
    minmax = Int8PerTensorSpec().to_quantization_spec()
    for message, make in {
        "goes with observer_cls=TQTObserver": lambda: QTensorConfig(**{**vars(minmax), "qat_spec": TQTSpec()}),
        "expected a TQTSpec, got str": lambda: trained(TQTObserver, qat_spec="tqt"),
        "trains a static scale": lambda: trained(LSQObserver, is_dynamic=True),
        "trains symmetric integers": lambda: trained(TQTObserver, symmetric=False),
        "TQTObserver does not belong to qscheme per_channel": lambda: trained(
            TQTObserver, qscheme=QSchemeType.per_channel, ch_axis=0
        ),
        "learns one static float32 scale": lambda: lower_tensor(trained(LSQObserver, scale_type=ScaleType.float16)),
    }.items():
        with pytest.raises(ConfigError, match=message):
            make()
    assert minmax.observer_cls is PerTensorMinMaxObserver
