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
PUBLIC = {
    "quark.common.utils.testing_utils": (
        "PatchEverywhere require_accelerate skip_if_no_gpu torch_device use_temporary_directory"
    ),
    "quark.contrib.mince.config": "BENCHMARKS BenchmarkConfig",
    "quark.contrib.mince.montecarlo": "run_sizing",
    "quark.experimental.cli.main": "main",
    "quark.experimental.speculative_decoding.eagle.config": "Eagle3Config",
    "quark.experimental.torch.llm.mix_precision": (
        "ConfigEvalResult ConfigSearcher HardwareTarget MixPrecisionConfig ModuleSearchConfig"
    ),
    "quark.experimental.torch.mixed_precision_planner": "Candidates DecisionSpace MixedPrecisionStrategy",
    "quark.experimental.torch.plugin.vllm_plugin": "register",
    "quark.integrations": "diffusers",
    "quark.integrations.diffusers": "QuarkDiffusersQuantizer QuarkQuantizationConfig",
    "quark.online_quantization.vllm": "HF_QUANTIZATION_CONFIGS online_quant_overrides",
    "quark.onnx": (
        "CalibMethod CalibrationDataReader ExtendedCalibrationMethod GPTQConfig QTensorConfig "
        "SmoothQuantConfig XINT8_QCONFIG __version__ dump_model quantize_dynamic quantize_static"
    ),
    "quark.onnx.algorithm": "apply_pre_quant_algorithms",
    "quark.onnx.auto_search": "SearchSpace",
    "quark.onnx.calibrate": "CalibrationDataReader PowerOfTwoMethod create_calibrator_float_scale",
    "quark.onnx.calibration": "get_data_reader load_tensors_range run_calibration save_tensors_range",
    "quark.onnx.calibration.collectors": "OverridedHistogramCollector",
    "quark.onnx.calibration.methods": "ExtendedCalibrationMethod Int16Method LayerWiseMethod PowerOfTwoMethod",
    "quark.onnx.operators.custom_ops": "_COP_BFP_OP_NAME _COP_DOMAIN _COP_IN_OP_NAME _COP_MX_OP_NAME _COP_VERSION",
    "quark.onnx.optimizations": "optimize_model",
    "quark.onnx.quant_utils": (
        "CachedDataReader COP_DOMAIN RandomDataReader VitisQuantFormat create_infer_session_for_onnx_model"
    ),
    "quark.onnx.quantization.config": "QConfig custom_config spec",
    "quark.onnx.quantization.config.custom_config": "A8W8_CONFIG S16S16_MIXED_S8S8_CONFIG XINT8_CONFIG XINT8_QCONFIG",
    "quark.onnx.quantization.config.data_type": "BFP16 DataType Int8 MX9 UInt8",
    "quark.onnx.quantization.config.legacy": "QuantizationConfig",
    "quark.onnx.quantization.config.spec": (
        "BFP16Spec MXFP8E4M3Spec MXInt8Spec QTensorConfig QuantGranularity ScaleType"
    ),
    "quark.onnx.quantization.quant_utils": (
        "COP_DOMAIN COP_MX_OP_NAME ExtendedQuantFormat ExtendedQuantType compute_minmse"
    ),
    "quark.onnx.quantize": "quantize_static",
    "quark.onnx.quantizers": "run_static_quantization",
    "quark.onnx.tools": "remove_qdq",
    "quark.onnx.tools.convert_bias_int32_to_int16": "convert_bias_int32_to_int16",
    "quark.onnx.tools.convert_opset_version": "convert_opset_version",
    "quark.onnx.tools.convert_quant_to_float": "convert_quant_to_float",
    "quark.onnx.tools.insert_clip_bfloat16_qdq": "insert_clip_bfloat16_qdq",
    "quark.onnx.tools.rocm_memory_profiler": "monitor_rocm_memory",
    "quark.onnx.utils.deploy_utils": "dump_model",
    "quark.onnx.utils.file_utils": "save_quantized_info",
    "quark.onnx.utils.model_utils": "create_infer_session_for_onnx_model",
    "quark.onnx.utils.system_utils": "check_and_create_path create_tmp_dir",
    "quark.shapeshifter": "Engine RunConfig shapeshifter",
    "quark.shares.utils.testing_utils": "require_torch_cuda retry_flaky_test torch_device use_temporary_directory",
    "quark.testing": "skip_if_no_gpu slow_test",
    "quark.torch": "export_llama_cpp_gguf list_llama_cpp_export_formats",
    "quark.torch.algorithm.api": "add_algorithm_config_by_model blockwise_tuning_algo",
    "quark.torch.algorithm.awq.auto_smooth": "AutoSmoothQuantProcessor",
    "quark.torch.algorithm.awq.awq": "AwqProcessor",
    "quark.torch.algorithm.awq.scale": "scale_ln_fcs",
    "quark.torch.algorithm.config": "BlockwiseJointTuningConfig",
    "quark.torch.algorithm.processor": "BaseAlgoProcessor",
    "quark.torch.algorithm.qad_trainer": "QADTrainer",
    "quark.torch.algorithm.rotation.hadamard": "get_hadamard_matrices random_hadamard_matrix",
    "quark.torch.algorithm.rotation.rotation": "RotationProcessor",
    "quark.torch.algorithm.rotation.rotation_utils": "get_rotation_matrix HadamardTransform",
    "quark.torch.algorithm.svdquant": "build_quant_layer_config QUANT_MODE_TO_SCHEME",
    "quark.torch.algorithm.svdquant.svdquant": "ErrorCorrectedModule SVDQuantProcessor build_quant_layer_config",
    "quark.torch.algorithm.utils.module": "get_device get_named_linears",
    "quark.torch.algorithm.utils.prepare": "get_layers_for_scaling get_model_layers",
    "quark.torch.algorithm.utils.utils": "clear_memory",
    "quark.torch.export": "OnnxExporterConfig",
    "quark.torch.export.api": "_map_to_quark",
    "quark.torch.export.config.config": "OnnxExporterConfig",
    "quark.torch.export.config.quant_config": "QuantConfig",
    "quark.torch.export.main_export.quant_config_parser": "get_layer_quant_config",
    "quark.torch.export.main_import.pretrained_config": "PretrainedConfig",
    "quark.torch.export.nn.modules": "realquantizer",
    "quark.torch.export.nn.modules.qparamslinear": "QParamsLinear QParamsLinearWithRotation",
    "quark.torch.export.nn.modules.realquantizer": "StaticScaledRealQuantizer get_real_quantizer",
    "quark.torch.export.safetensors": "_load_weights_from_safetensors export_hf_model",
    "quark.torch.extensions.brevitas": "algos api config mapping",
    "quark.torch.kernel": "mx dequant_fp8_e4m3 quant_fp8_e4m3 scaled_fake_quantize",
    "quark.torch.kernel.hw_emulation.extensions": "kernel_ext",
    "quark.torch.kernel.hw_emulation.hw_emulation_interface": "fake_quantize_fp4_fp6_per_group_with_scale",
    "quark.torch.kernel.mx": "dq_mxfp4 qdq_mxfp4",
    "quark.torch.pruning.config": "BlockwiseTuningConfig Config LayerImportancePruneConfig OSSCARConfig PConfig",
    "quark.torch.quantization": (
        "AutoSmoothQuantConfig Bfloat16Spec Config FP4PerGroupSpec FP8E4M3PerChannelSpec FP8E4M3PerTensorSpec "
        "Int4PerTensorSpec QuantizationConfig ScaleQuantSpec load_quant_algo_config_from_file"
    ),
    "quark.torch.quantization.api": "RuntimeOptions from_float_and_dict",
    "quark.torch.quantization.config.algo_configs": "AWQ_MAP get_algo_config",
    "quark.torch.quantization.config.config": (
        "AmdFP4Spec AutoSmoothQuantConfig MXSpec SVDQuantConfig load_pre_optimization_config_from_file"
    ),
    "quark.torch.quantization.config.template": "QuantizationScheme QuantizationSchemeCollection",
    "quark.torch.quantization.model_transformation": "process_model_transformation",
    "quark.torch.quantization.nn.modules.mixin": "QuantMixin",
    "quark.torch.quantization.nn.modules.quantize_conv": "QuantConv2d QuantConvTranspose2d",
    "quark.torch.quantization.nn.modules.quantize_embed": "QuantEmbedding QuantEmbeddingBag",
    "quark.torch.quantization.nn.modules.quantize_linear": "QuantMixin",
    "quark.torch.quantization.tensor_quantize": (
        "FakeQuantizeBase FreezedScaledFakeQuantize ScaledFakeQuantize SequentialQuantize"
    ),
    "quark.torch.quantization.utils": (
        "calculate_qmin_qmax deep_compare even_round get_dtype_params reshape_to_blocks set_op_by_name "
        "enable_native_inference"
    ),
    "quark.torch.quantization.weight_convert": "SplitFusedExperts WeightConverter",
    "quark.torch.utils": "create_pack_method setattr_recursive",
    "quark.torch.utils.accelerate_helper": "clone_align_devices_hook untie_parameters",
    "quark.torch.utils.diffusers": "get_calib_dataloader",
    "quark.torch.utils.diffusers.integration": "quantize_diffusion_model_in_place",
    "quark.torch.utils.llm.data_preparation": "get_pileval get_wikitext2",
    "quark.torch.utils.llm.model_preparation": "get_tokenizer",
    "quark.torch.utils.log": "ScreenLogger",
    "quark.torch.utils.pack": "create_pack_method",
    "quark.torch.utils.per_block_runner": "finalize prepare",
    "quark.torch.utils.torch_utils": "get_op_name setattr_recursive",
}
"""What scripts, notebooks and programs that are public import besides."""


@pytest.mark.parametrize("module", sorted({*PATHS, *PUBLIC}))
def test_every_name_can_be_imported(module: str) -> None:
    """What of them is absent refuses its use, which tests/compat/test_documented_paths.py shows of each."""
    for name in f"{PATHS.get(module, '')} {PUBLIC.get(module, '')}".split():
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")


@pytest.mark.slow
def test_importing_the_helpers_loads_no_library_of_language_models() -> None:
    loaded = "import quark.torch.utils.llm, quark.contrib.llm_eval, sys; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "False\n"
