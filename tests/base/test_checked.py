"""Configs of both flows under the hands of their users: assignments, changed lists, what a quantizer sees of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark.base.checked import snapshot
from quark.compat.torch_names.export_config import ExporterConfig, JsonExporterConfig
from quark.compat.torch_names.shorthand_specs import FP8E4M3PerTensorSpec, Int8PerTensorSpec
from quark.errors import ConfigError
from quark.onnx import QConfig as OnnxConfig
from quark.onnx import QLayerConfig as OnnxLayer
from quark.onnx.config.algo_configs import AdaRoundConfig
from quark.onnx.config.legacy import Config, QuantizationConfig
from quark.onnx.config.tensor_specs import Int8Spec, UInt8Spec
from quark.onnx.quantizer import ModelQuantizer as OnnxQuantizer
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.algo_configs import AWQConfig
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.tensor.enums import Dtype


def torch_config() -> QConfig:
    return QConfig(QLayerConfig(weight=Int8PerTensorSpec()), exclude=["a"])


def onnx_config() -> OnnxConfig:
    return OnnxConfig(OnnxLayer(input_tensors=UInt8Spec(), weight=Int8Spec()), exclude=["a"])


ASSIGNED: list[tuple[Any, str, Any, Any]] = [
    (torch_config, "keep_prequantized_layers", False, False),
    (torch_config, "exclude", ("b", "c"), ["b", "c"]),
    (torch_config, "algo_config", AWQConfig(), [AWQConfig()]),
    (torch_config, "softmax_quant_spec", FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec().to_quantization_spec()),
    (lambda: torch_config().global_quant_config.weight, "dtype", "int4", Dtype.int4),
    (AWQConfig, "scaling_layers", [{"prev_op": "n"}], [{"prev_op": "n"}]),
    (JsonExporterConfig, "kv_cache_group", ["*k_proj"], ["*k_proj"]),
    (lambda: ExporterConfig().json_export_config, "min_kv_scale", 0.5, 0.5),
    (onnx_config, "exclude", ("b",), ["b"]),
    (onnx_config, "use_external_data_format", True, True),
    (onnx_config, "extra_options", {"WeightsOnly": True}, {"WeightsOnly": True}),
    (AdaRoundConfig, "num_iterations", 7, 7),
    (QuantizationConfig, "per_channel", True, True),
]


@pytest.mark.parametrize(
    ("make", "name", "value", "found"), ASSIGNED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_field_takes_what_the_constructor_takes(make: Any, name: str, value: Any, found: Any) -> None:
    config = make()
    setattr(config, name, value)
    assert getattr(config, name) == found


WRONG: list[tuple[Any, str, Any, str]] = [
    (torch_config, "exclude", [5], r"QConfig.exclude: expected list\[str\], got \[5\]"),
    (torch_config, "exclude", ["@heads"], "unknown selector '@heads'"),
    (torch_config, "exclud", [], "QConfig has no field 'exclud'. Did you mean 'exclude'"),
    (torch_config, "gpu_resident_blocks", 2, "is for quant_flow=QuantFlow.per_block"),
    (lambda: torch_config().global_quant_config.weight, "dtype", "int9", "unknown Dtype 'int9'"),
    (JsonExporterConfig, "kv_cache_group", "*k_proj", "JsonExporterConfig.kv_cache_group: expected list"),
    (onnx_config, "exclude", 5, "QConfig.exclude: expected list"),
    (onnx_config, "extra_options", {"WeightOnly": True}, "unknown option 'WeightOnly'"),
    (QuantizationConfig, "activation_type", "int8", "expected QuantType or"),
]


@pytest.mark.parametrize(
    ("make", "name", "value", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_assignment_that_the_constructor_refuses_changes_nothing(
    make: Any, name: str, value: Any, message: str
) -> None:
    config = make()
    before = getattr(config, name, None)
    with pytest.raises(ConfigError, match=message):
        setattr(config, name, value)
    assert getattr(config, name, None) is before


def test_an_assignment_leaves_the_lists_of_the_other_fields_where_they_are() -> None:
    for config in (torch_config(), onnx_config()):
        exclude = config.exclude
        config.algo_config = []
        exclude.append("b")
        assert config.exclude == ["a", "b"]


def test_a_quantizer_obeys_what_was_changed_before_and_nothing_after() -> None:
    config, model = torch_config(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    config.exclude = ["2"]
    config.exclude.append("1")
    quantizer = ModelQuantizer(config)
    config.exclude.append("0")
    assert config.global_quant_config.weight is not None
    config.global_quant_config.weight = None
    quantized = quantizer.quantize_model(model)
    assert [type(layer) is nn.Linear for layer in quantized] == [False, True, True]
    quantizer.config.exclude.append("0")
    assert quantized.quant_config.exclude == ["2", "1"]  # type: ignore[union-attr]
    assert torch.isfinite(quantized(torch.ones(1, 8))).all()


def test_the_quantizer_of_onnx_models_too() -> None:
    config = onnx_config()
    config.exclude.append("b")
    config.extra_options["Percentile"] = 99.0
    quantizer = OnnxQuantizer(config)
    config.exclude.append("c")
    config.extra_options["Percentile"] = 50.0
    assert quantizer.config.exclude == ["a", "b"] and quantizer.config.extra_options["Percentile"] == 99.0


CHANGED: dict[str, tuple[Any, str]] = {
    "a pattern that is a number": (lambda: torch_config(), "QConfig.exclude: expected list"),
    "a node that is a number": (lambda: onnx_config(), "5"),
    "an unknown option": (lambda: Config(QuantizationConfig()), "unknown option 'Percentil'"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_is_put_into_a_list_is_checked_when_it_is_used(case: str) -> None:
    make, message = CHANGED[case]
    config = make()
    if isinstance(config, Config):
        config.global_quant_config.extra_options["Percentil"] = 99.0
    else:
        config.exclude.append(5)
    with pytest.raises(ConfigError, match=message):
        (ModelQuantizer if isinstance(config, QConfig) else OnnxQuantizer)(config)


def test_a_snapshot_holds_equal_values_and_shares_none() -> None:
    config = LLMTemplate.get("llama").get_config("int8", "awq", "fp8")
    copied = snapshot(config)
    assert copied == config and copied.exclude is not config.exclude
    assert copied.global_quant_config is not config.global_quant_config
    assert copied.algo_config is not None and config.algo_config is not None
    assert copied.algo_config[0] is not config.algo_config[0]


def test_what_a_config_of_a_template_is_changed_to_changes_no_other() -> None:
    LLMTemplate.register_scheme("mine", QLayerConfig(weight=Int8PerTensorSpec()))
    try:
        template = LLMTemplate.get("llama")
        config = template.get_config("mine", "awq")
        config.exclude.append("x")
        config.global_quant_config.weight = None
        assert config.algo_config is not None
        config.algo_config[0].scaling_layers.append({})  # type: ignore[attr-defined]
        other = template.get_config("mine", "awq")
        assert "x" not in other.exclude and other.global_quant_config.weight is not None
        assert other.algo_config is not None and {} not in other.algo_config[0].scaling_layers  # type: ignore[attr-defined]
    finally:
        LLMTemplate.unregister_scheme("mine")
