"""Training gives back what int4 lost on the digits, in eager and in graph mode; what is frozen is what was trained."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.spec import LayerSpec, Learning, spec
from quark.torch import ModelQuantizer, load_params, save_params
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import lower_layer
from quark.torch.config.tensor.enums import QuantizationMode
from quark.torch.config.tensor.observer_classes import TQTObserver
from quark.torch.layers.fake_quant import FakeQuantize
from tests.models.graphs import exported
from tests.models.torch_zoo import ROOT, mlp

pytestmark = pytest.mark.slow

LSQ, TQT = (
    QConfig.from_dict(
        {
            "global_quant_config": {
                role: {
                    "dtype": "int4", "observer_cls": observer, "qscheme": "per_tensor", "is_dynamic": False,
                    "symmetric": True, "round_method": "half_even", "scale_type": "float",
                }
                for role in ("weight", "input_tensors")
            }
        }
    )
    for observer in ("LSQObserver", "TQTObserver")
)  # fmt: skip


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "examples" / "models")
    return importlib.import_module("qat")


@pytest.mark.parametrize("mode", list(QuantizationMode), ids=lambda mode: mode.name)
def test_two_epochs_recover_what_int4_lost(example: ModuleType, mode: QuantizationMode) -> None:
    training, held_out = example.digits()
    reference = example.accuracy(example.float_model(), *held_out)
    model = example.quantized(training[0], example.SCALES["LSQ"], mode)
    before = example.accuracy(model, *held_out)
    example.train(model, *training, epochs=2)
    after = example.accuracy(model, *held_out)
    assert reference > 99 and before < reference - 2 and after > reference - 0.5
    images = held_out[0][:64]
    with torch.no_grad():
        trained = model(images)
        assert torch.equal(ModelQuantizer.freeze(model)(images), trained)
    assert not [name for name, _ in model.named_parameters() if "quantizer" in name]


def step(model: nn.Module) -> None:
    """One step of training that moves everything."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(5))
    model.train()
    (model(x) ** 2).mean().backward()
    optimizer.step()
    model.eval()


def quantized(mode: QuantizationMode) -> tuple[nn.Module, torch.Tensor]:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(4))
    model: nn.Module = mlp() if mode is QuantizationMode.eager_mode else exported(mlp(), x)
    config = QConfig(global_quant_config=LSQ.global_quant_config, quant_mode=mode)
    return ModelQuantizer(config).quantize_model(model, [x]), x


@pytest.mark.parametrize("mode", list(QuantizationMode), ids=lambda mode: mode.name)
def test_a_step_moves_weights_and_scales_and_files_hold_the_result(mode: QuantizationMode, tmp_path: Path) -> None:
    model, x = quantized(mode)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert len([name for name in before if name.endswith("_quantizer.learned")]) == 4
    step(model)
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    with torch.no_grad():
        trained = model(x)
    if mode is QuantizationMode.eager_mode:
        path = save_params(model, "trained", export_dir=tmp_path, compressed=True)
        loaded = load_params(mlp(), path, tmp_path / "trained.safetensors")
    else:
        path = save_params(model, "trained", (x,), export_dir=tmp_path, quant_mode=mode)
        loaded = load_params(pth_path=str(path), quant_mode=mode)
    with torch.no_grad():
        assert torch.equal(loaded(x), trained)
        assert torch.equal(ModelQuantizer.freeze(model, quantize=False)(x), trained)
        assert torch.equal(ModelQuantizer.freeze(model)(x), trained)
        assert torch.equal(ModelQuantizer.freeze(model)(x), trained)


@pytest.mark.parametrize("mode", list(QuantizationMode), ids=lambda mode: mode.name)
def test_the_documented_loop_over_tqt_observers_trains_their_thresholds(mode: QuantizationMode) -> None:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(4))
    model: nn.Module = mlp() if mode is QuantizationMode.eager_mode else exported(mlp(), x)
    config = QConfig(global_quant_config=TQT.global_quant_config, quant_mode=mode)
    model = ModelQuantizer(config).quantize_model(model, [x])
    found = [module._log_threshold for module in model.modules() if isinstance(module, TQTObserver)]
    named = [value for name, value in model.named_parameters() if "observer._log_threshold" in name]
    assert len(found) == 4 and list(map(id, found)) == list(map(id, named))
    before, untrained = [value.detach().clone() for value in found], model(x).detach()
    optimizer = torch.optim.Adam(found, 1.0)
    (model(x) ** 2).mean().backward()
    optimizer.step()
    assert all(not torch.equal(new, old) for new, old in zip(found, before, strict=True))
    assert not torch.equal(model(x), untrained)
    trained = model(x).detach()
    assert torch.equal(copy.deepcopy(model)(x), trained)
    frozen = ModelQuantizer.freeze(model)
    assert torch.equal(frozen(x), trained) and not [m for m in frozen.modules() if isinstance(m, TQTObserver)]


def test_both_modes_take_the_same_step() -> None:
    models: list[Any] = []
    for mode in QuantizationMode:
        model, _ = quantized(mode)
        step(model)
        models.append(dict(model.named_parameters()))
    eager, graph = models
    assert eager.keys() == graph.keys()
    for name, value in eager.items():
        assert torch.equal(value, graph[name]), name


def test_a_quantizer_that_two_tensors_share_learns_from_both() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    layer = LayerSpec(input=spec("int4", observer="mean_magnitude", learning=Learning.lsq))
    assert lower_layer(LSQ.global_quant_config).input == layer.input
    x, y = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)).unbind()
    # A sum beside no convolution is quantized where the config names it.
    named = {"*": LSQ.global_quant_config}
    model = ModelQuantizer(
        QConfig(LSQ.global_quant_config, layer_quant_config=named, quant_mode=QuantizationMode.fx_graph_mode)
    ).quantize_model(torch.export.export(Sum(), (x, y)).module(), [(x, 3 * y)])
    (name,) = [name for name, _ in model.named_parameters()]
    shared = model.get_submodule(name.removesuffix(".learned"))
    assert isinstance(shared, FakeQuantize) and shared.learned is not None
    gradients = []
    for inputs in ((x, 0 * y), (0 * x, 3 * y), (x, 3 * y)):
        shared.learned.grad = None
        model(*inputs).sum().backward()
        gradients.append(shared.learned.grad.clone())  # type: ignore[union-attr, attr-defined]
    assert torch.allclose(gradients[0] + gradients[1], gradients[2], rtol=1e-4)
