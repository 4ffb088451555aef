"""The documented import paths of all generations hold what they promise."""

from __future__ import annotations

import importlib

import pytest

from quark.errors import NotSupportedError

PATHS = {
    "quark.torch": """ModelQuantizer load_params save_params export_safetensors export_onnx export_gguf ModelPruner
        import_model_from_safetensors LLMTemplate QuantFlow RuntimeOptions enable_native_inference
        disable_native_inference ModelExporter ModelImporter processes accelerate""",
    "quark.torch.quantization": """QConfig QLayerConfig QTensorConfig ProgressiveSpec ScaleQuantSpec AWQConfig
        GPTQConfig
        RotationConfig OnlineRotationConfig SmoothQuantConfig AutoSmoothQuantConfig load_quant_algo_config_from_file
        load_pre_optimization_config_from_file""",
    "quark.torch.quantization.config.config": """Config QConfig QuantizationConfig QLayerConfig QuantizationSpec
        QTensorConfig AmdFP4Spec FP8E5M3PerTensorSpec GPTAQConfig QronosConfig AutoRoundConfig SVDQuantConfig TQTSpec
        QATSpec AlgoConfig PreQuantOptConfig TwoStageSpec DataTypeSpec QuaRotConfig Int8PerTensorSpec OCP_MXFP4Spec
        Dtype ScaleType RoundType QSchemeType ZeroPointType DeviceType QuantizationMode QuantFlow
        TQTThresholdInitMeth""",
    "quark.torch.quantization.api": "ModelQuantizer load_params",
    "quark.torch.quantization.config.type": """Dtype ScaleType RoundType QSchemeType ZeroPointType DeviceType
        QuantizationMode QuantFlow TQTThresholdInitMeth""",
    "quark.torch.quantization.observer.observer": """PlaceholderObserver PerTensorMinMaxObserver ObserverBase
        PerTensorPercentileObserver PerTensorMSEObserver PerTensorHistogramObserver PerTensorHistogramObserverPro
        PerTensorPowOf2MinMaxObserver PerTensorPowOf2MinMSEObserver PerChannelMinMaxObserver PerGroupMinMaxObserver
        PerChannelPowOf2MinMaxObserver PerChannelPowOf2MinMSEObserver PerBlockMXObserver PerBlockMXDiffsObserver
        PerBlockBFPObserver PerBlock2DMinMaxObserver UniformScalingObserver LSQObserver TQTObserver""",
    "quark.torch.quantization.observer.tqt_observer": "TQTObserver",
    "quark.torch.quantization.observer.lsq_observer": "LSQObserver",
    "quark.torch.quantization.config.template": "LLMTemplate",
    "quark.torch.quantization.graph.ops.quant_stubs": "QuantStub DeQuantStub",
    "quark.torch.quantization.utils": """RuntimeOptions enable_native_inference disable_native_inference set_op_by_name
        even_round reshape_to_blocks""",
    "quark.torch.utils": "TPDeviceManager setattr_recursive",
    "quark.torch.pruning.api": "ModelPruner",
    "quark.torch.export": "ExporterConfig JsonExporterConfig OnnxExporterConfig",
    "quark.torch.export.config.config": "ExporterConfig JsonExporterConfig OnnxExporterConfig",
    "quark.torch.export.api": """ModelExporter ModelImporter _map_to_quark _move_quantizer_to_dict export_safetensors
        export_onnx export_gguf import_model_from_safetensors save_params""",
    "quark.torch.export.main_export.quant_config_parser": "QuantConfigParser",
}


@pytest.mark.parametrize("module", PATHS)
def test_documented_names_are_where_they_are_printed(module: str) -> None:
    loaded = importlib.import_module(module)
    missing = [name for name in PATHS[module].split() if not hasattr(loaded, name)]
    assert not missing


def test_older_names_are_the_same_classes() -> None:
    from quark.torch.quantization.config import config

    assert config.Config is config.QConfig
    assert config.QuantizationConfig is config.QLayerConfig
    assert config.QuantizationSpec is config.QTensorConfig


def test_names_of_later_features_say_so() -> None:
    import quark.torch as q

    with pytest.raises(NotSupportedError, match="not part of this version"):
        q.ModelPruner()


def test_tensor_parallelism_says_that_it_is_not_there() -> None:
    from quark.compat.torch_names.not_supported import TPDeviceManager
    from quark.torch.export.api import _move_quantizer_to_dict

    for use in (TPDeviceManager.tp_mesh_init, lambda: _move_quantizer_to_dict(object())):
        with pytest.raises(NotSupportedError, match="--use_tp"):
            use()
