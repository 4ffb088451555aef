"""Names that public code takes from documented paths: they work, or their use says what to take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quark.errors import NotSupportedError
from quark.torch import ModelQuantizer, export_safetensors
from tests.models.torch_zoo import tiny_llama


def test_all_presets_come_with_a_star() -> None:
    names: dict[str, object] = {}
    exec("from quark.onnx.quantization.config.custom_config import *", names)
    presets = {name for name in names if name.endswith(("_CONFIG", "_QCONFIG"))}
    assert len(presets) > 80 and {"XINT8_CONFIG", "DEFAULT_ADAROUND_PARAMS", "get_default_config"} <= {*names}
    assert type(names["XINT8_CONFIG"]).__name__ == "QuantizationConfig"


def test_data_types_say_their_bits_and_their_type_in_the_flat_configuration() -> None:
    from onnxruntime.quantization import QuantType

    from quark.onnx import BFP16, MX6, ExtendedQuantType, Int8, Int16
    from quark.onnx.quantization.config.data_type import MXFP6E2M3, UInt4

    found = [(kind.bitwidth, kind.map_onnx_format) for kind in (Int8, Int16, BFP16, MX6, MXFP6E2M3, UInt4)]
    assert found == [
        (8, QuantType.QInt8), (16, ExtendedQuantType.QInt16), (16, ExtendedQuantType.QBFP),
        (13, ExtendedQuantType.QBFP), (6, ExtendedQuantType.QMX), (4, QuantType.QUInt4),
    ]  # fmt: skip


def test_stored_tensors_are_read_as_they_are(tmp_path: Path) -> None:
    from quark.torch.export.safetensors import _load_weights_from_safetensors

    export_safetensors(ModelQuantizer.freeze(ModelQuantizer("int8_wo").quantize_model(tiny_llama())), tmp_path / "out")
    found, stored = _load_weights_from_safetensors(str(tmp_path / "out")), load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)


def test_quantized_layers_are_told_by_their_base_class() -> None:
    from quark.torch.quantization.nn.modules.mixin import QuantMixin

    model = ModelQuantizer("int8_wo").quantize_model(nn.Sequential(nn.Linear(64, 8), nn.ReLU()))
    assert [isinstance(layer, QuantMixin) for layer in model] == [True, False]


def test_configs_of_algorithms_are_read_from_dicts() -> None:
    from quark.torch.quantization.config.config import AWQConfig, Int8PerTensorSpec, RotationConfig, ScaleType

    assert AWQConfig.from_dict({"name": "awq", "model_decoder_layers": "model.layers"}).scaling_layers == []
    assert RotationConfig(scaling_layers=None).scaling_layers is None
    as_in_the_guide = Int8PerTensorSpec(observer_method="min_max", scale_type=ScaleType.float)  # type: ignore[arg-type]
    assert as_in_the_guide.to_quantization_spec() == Int8PerTensorSpec(observer_method="min_max").to_quantization_spec()


def test_internal_classes_say_what_to_take() -> None:
    from quark.torch.quantization.config.template import QuantizationSchemeCollection
    from quark.torch.quantization.tensor_quantize import FrozenScaledFakeQuantize
    from quark.torch.utils.accelerate_helper import update_offload_parameter
    from quark.torch.utils.pack import Pack_uint2

    for absent, words in (
        (QuantizationSchemeCollection, "get_supported_schemes"), (FrozenScaledFakeQuantize, "weight_quantizer"),
        (update_offload_parameter, "device_map"), (Pack_uint2, "create_pack_method"),
    ):  # fmt: skip
        with pytest.raises(NotSupportedError, match=words):
            absent()
