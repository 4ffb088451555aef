"""What documented pages, examples and public scripts import is there."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PATHS = {
    "quark.torch": (
        "LLMTemplate ModelQuantizer ModelExporter ModelImporter ModelPruner RuntimeOptions QuantFlow "
        "export_safetensors export_onnx export_gguf import_model_from_safetensors load_params save_params "
        "enable_native_inference disable_native_inference "
    ),
    "quark.torch.export": ("ExporterConfig JsonExporterConfig "),
    "quark.torch.export.config.config": ("ExporterConfig JsonExporterConfig "),
    "quark.torch.export.api": (
        "ModelExporter ModelImporter save_params export_safetensors export_onnx export_gguf "
        "import_model_from_safetensors _move_quantizer_to_dict "
    ),
    "quark.torch.export.main_export.quant_config_parser": ("QuantConfigParser "),
    "quark.torch.pruning.api": ("ModelPruner "),
    "quark.torch.quantization": ("OCP_MXFP4Spec "),
    "quark.torch.quantization.api": ("ModelQuantizer load_params "),
    "quark.torch.quantization.config.config": (
        "Config QConfig QuantizationConfig QLayerConfig QuantizationSpec QTensorConfig AWQConfig GPTQConfig "
        "SmoothQuantConfig RotationConfig AlgoConfig Int8PerTensorSpec Int4PerGroupSpec "
        "load_quant_algo_config_from_file "
    ),
    "quark.torch.quantization.config.type": ("Dtype QSchemeType ScaleType RoundType QuantizationMode ZeroPointType "),
    "quark.torch.quantization.config.template": ("LLMTemplate "),
    "quark.torch.quantization.observer.observer": (
        "ObserverBase PlaceholderObserver PerTensorMinMaxObserver PerTensorHistogramObserver "
        "PerTensorMSEObserver PerTensorPercentileObserver PerTensorHistogramObserverPro "
        "PerGroupMinMaxObserver PerChannelMinMaxObserver PerBlockMXObserver "
    ),
    "quark.torch.quantization.nn.modules": (
        "QuantLinear QuantConv2d QuantConvTranspose2d QuantEmbedding QuantEmbeddingBag "
    ),
    "quark.torch.quantization.nn.modules.quantize_linear": ("QuantLinear "),
    "quark.torch.quantization.observer.tqt_observer": ("TQTObserver "),
    "quark.torch.quantization.observer.lsq_observer": ("LSQObserver "),
    "quark.torch.quantization.utils": ("RuntimeOptions "),
    "quark.torch.utils": ("TPDeviceManager "),
    "quark.torch.utils.device": ("TPDeviceManager "),
    "quark.torch.utils.llm": (
        "LLMTemplate check_compatibility_before_quantization create_model_skeleton get_calib_dataloader "
        "get_loader get_model get_per_block_calib_batch_size get_tokenizer get_trainer_dataset get_wikitext2 "
        "maybe_save_preprocessors move_model_to_device_if_it_fits prepare_for_moe_quant "
        "preprocess_for_quantization revert_model_patching save_model set_seed "
    ),
    "quark.torch.utils.llm.model_preparation": ("get_model preprocess_for_quantization "),
    "quark.torch.utils.llm.data_preparation": ("get_calib_dataloader get_pile10k_dataloader "),
    "quark.contrib.llm_eval": (
        "eval_model ppl_eval task_eval lm_eval_entrypoint meteor_eval mlperf_rouge_eval ppl_eval_for_kv_cache "
        "ppl_eval_with_synthetic_dataset rouge_eval rouge_meteor_generations "
    ),
    "quark.contrib.llm_eval.evaluation": ("eval_model "),
    "quark.common.profiler": ("GlobalProfiler ProfileStep profile_scope "),
    "quark.common.utils.log": ("ScreenLogger log_errors "),
    "quark.common.utils.import_utils": (
        "export_for_training is_accelerate_available is_transformers_available "
        "is_transformers_version_higher_or_equal is_safetensors_available "
    ),
    "quark.shares.utils.log": ("ScreenLogger log_errors "),
    "quark.shares.utils.import_utils": (
        "is_transformers_available is_transformers_version_higher_or_equal is_accelerate_available "
    ),
    "quark.onnx": (
        "ModelQuantizer QConfig QLayerConfig Config QuantizationConfig XInt8Spec Int8Spec UInt8Spec Int16Spec "
        "UInt16Spec BFloat16Spec BFP16Spec CLEConfig AdaRoundConfig AdaQuantConfig AutoSearchPro "
        "AutoSearchConfig get_auto_search_config get_default_config get_library_path CalibrationMethod "
        "PowerOfTwoMethod LayerWiseMethod QuantType QuantFormat ExtendedQuantType ExtendedQuantFormat "
        "VitisQuantType VitisQuantFormat auto_search "
    ),
    "quark.onnx.auto_search": ("AutoSearch AutoSearchConfig "),
    "quark.onnx.calibration": ("CachedDataReader PathDataReader RandomDataReader PowerOfTwoMethod LayerWiseMethod "),
    "quark.onnx.operators.custom_ops": ("get_library_path "),
    "quark.onnx.quantization.api": ("ModelQuantizer "),
    "quark.onnx.quantization.auto_search": (
        "AutoSearch AutoSearchPro SearchSpace generate_all_configs get_auto_search_config "
    ),
    "quark.onnx.quantization.auto_search.auto_search_v1": ("AutoSearchConfig "),
    "quark.onnx.quantization.config": ("Config get_default_config "),
    "quark.onnx.quantization.config.config": ("Config QConfig QuantizationConfig "),
    "quark.onnx.quantization.config.spec": ("QLayerConfig BFloat16Spec CalibMethod Int8Spec XInt8Spec "),
    "quark.onnx.quantization.config.algorithm": (
        "AdaQuantConfig AdaRoundConfig CLEConfig SmoothQuantConfig GPTQConfig QuarotConfig "
        "BiasCorrectionConfig AutoMixprecisionConfig "
    ),
    "quark.onnx.quantization.config.custom_config": (
        "DEFAULT_ADAROUND_PARAMS DEFAULT_ADAQUANT_PARAMS U8S8_AAWS_CONFIG INT8_TRANSFORMER_DEFAULT_CONFIG "
        "INT8_TRANSFORMER_ACCURATE_CONFIG get_default_config "
    ),
    "quark.onnx.quantization.quant_utils": ("VitisQuantFormat VitisQuantType "),
    "quark.onnx.quant_utils": ("ExtendedQuantFormat ExtendedQuantType PowerOfTwoMethod "),
    "quark.onnx.tools": ("convert_shared_initializer_to_unique "),
}
"""Module -> names that are imported from it, some of which are modules themselves."""


@pytest.mark.parametrize("module", PATHS)
def test_every_name_can_be_imported(module: str) -> None:
    for name in PATHS[module].split():
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")


@pytest.mark.slow
def test_importing_the_helpers_loads_no_library_of_language_models() -> None:
    loaded = "import quark.torch.utils.llm, quark.contrib.llm_eval, sys; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "False\n"
