"""Documented names that this version does not have. They can be imported; their use says what is possible instead."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

NAMED = "name it in QConfig(algo_config=[...]), and ModelQuantizer runs it"
PRUNING = "a model that another program has pruned, which is quantized as it is"
TUNING = "AutoRoundConfig and DistillationConfig train the blocks of a quantized model (algo_config), QAT all of it"
BUDGET = "`quark quantize MODEL --bits 4.5` and quark.torch.bit_budget choose a scheme for each layer"
GRAPHS = "the options of quark.onnx.QConfig change graphs, with ShapeShifterYaml as a YAML file names them"
FOLDERS = "export_safetensors writes codes and scales, import_model_from_safetensors reads them"
LAYERS = "torch.nn.Module has get_submodule, set_submodule and named_modules"
CODES = "quark.core.dtypes.DTYPES has the smallest and the largest value of each type"
SERVING = (
    "`quark quantize MODEL --for vllm` writes a folder that vLLM loads; QuantizeOnLoad quantizes in from_pretrained"
)
BRAVE = "ModelQuantizer on the float model, before Brevitas"
SESSIONS = "onnxruntime.InferenceSession runs every file that quark writes, without a library"
TESTS = "pytest has skipif and tmp_path"

ABSENT: dict[str, tuple[str, str]] = {
    "quark.torch.algorithm.api": (
        "apply_advanced_quant_algo apply_advanced_pruning_algo add_algorithm_config_by_model blockwise_tuning_algo",
        f"{NAMED}. {TUNING}",
    ),
    "quark.torch.algorithm.config": ("BlockwiseJointTuningConfig BlockwiseTuningConfig BaseAlgoConfig", TUNING),
    "quark.torch.algorithm.blockwise_joint_tuning": ("BlockwiseJointTuningProcessor", TUNING),
    "quark.torch.algorithm.blockwise_joint_tuning.processor": ("BlockwiseJointTuningProcessor", TUNING),
    "quark.torch.algorithm.blockwise_tuning.blockwise_tuning": ("BlockwiseTuningProcessor", TUNING),
    "quark.torch.algorithm.processor": ("BaseAlgoProcessor", "quark.torch.algorithms.base.Algorithm is the base class"),
    "quark.torch.algorithm.awq.awq": ("AwqProcessor", NAMED),
    "quark.torch.algorithm.awq.smooth": ("SmoothQuantProcessor", NAMED),
    "quark.torch.algorithm.awq.auto_smooth": ("AutoSmoothQuantProcessor", NAMED),
    "quark.torch.algorithm.gptq.gptq": ("GptqProcessor", NAMED),
    "quark.torch.algorithm.gptaq.gptaq": ("GptaqProcessor", NAMED),
    "quark.torch.algorithm.qronos.qronos": ("QronosProcessor", NAMED),
    "quark.torch.algorithm.rotation.rotation": ("RotationProcessor", NAMED),
    "quark.torch.algorithm.rotation.hadamard": (
        "get_hadamard_matrices random_hadamard_matrix matmul_hadU _get_hadamard_K",
        "RotationConfig in algo_config rotates by Hadamard matrices",
    ),
    "quark.torch.algorithm.rotation.rotation_utils": (
        "get_rotation_matrix rotate_in_channels_ rotate_out_channels_ transform_norm_and_linear HadamardTransform "
        "InputRotationWrapperHadamard",
        "RotationConfig in algo_config rotates a model",
    ),
    "quark.torch.algorithm.awq.scale": ("apply_scale scale_ln_fcs", f"{NAMED}: AWQConfig(scaling_layers=[...])"),
    "quark.torch.algorithm.utils.module": (
        "get_device get_named_linears get_nested_attr_from_module move_to_device",
        LAYERS,
    ),
    "quark.torch.algorithm.utils.prepare": (
        "cache_model_inps get_layers_for_scaling get_model_layers",
        f"{LAYERS}; quark.torch.record_steps records what a network is given",
    ),
    "quark.torch.algorithm.utils.utils": (
        "clear_memory get_device_map set_device_map",
        "gc.collect and torch.cuda.empty_cache; ModelQuantizer takes models with a device_map",
    ),
    "quark.torch.algorithm.svdquant": ("SVDQuantProcessor ErrorCorrectedModule LowRankCorrectionModule", NAMED),
    "quark.torch.algorithm.svdquant.svdquant": (
        "SVDQuantProcessor ErrorCorrectedModule LowRankCorrectionModule",
        NAMED,
    ),
    "quark.torch.algorithm.osscar.osscar": ("OsscarProcessor", PRUNING),
    "quark.torch.algorithm.depth_pruning.layer_importance": ("LayerImportancePrunerProcessor", PRUNING),
    "quark.torch.algorithm.qad_trainer": (
        "QADTrainer",
        "transformers.Trainer trains the model of quantize_model; DistillationConfig learns from the float model",
    ),
    "quark.torch.pruning.config": (
        "PConfig Config OSSCARConfig LayerImportancePruneConfig BlockwiseTuningConfig",
        PRUNING,
    ),
    "quark.torch.kernel": (
        "scaled_fake_quantize scaled_real_quantize non_scaled_fake_quantize non_scaled_real_quantize dequantize "
        "quant_fp8_e4m3 dequant_fp8_e4m3 quant_fp8_e5m2 dequant_fp8_e5m2",
        "quark.core.quantize has quantize, dequantize and fake_quantize",
    ),
    "quark.torch.kernel.hw_emulation.extensions": (
        "kernel_ext compile_kernel",
        "no compiled extension is needed; quark.torch.kernel.mx has dq_mxfp4 and qdq_mxfp4",
    ),
    "quark.torch.export.nn.modules.realquantizer": (
        "StaticScaledRealQuantizer DynamicScaledQuantizer SequentialRealQuantizer RealQuantizerBase get_real_quantizer",
        FOLDERS,
    ),
    "quark.torch.export.nn.modules.qparamslinear": ("QParamsLinearWithRotation", FOLDERS),
    "quark.torch.export.config.quant_config": ("QuantConfig", FOLDERS),
    "quark.torch.export.main_export.quant_config_parser": ("get_layer_quant_config", "QConfig.to_dict"),
    "quark.torch.export.main_import.pretrained_config": ("PretrainedConfig", FOLDERS),
    "quark.torch.quantization.tensor_quantize": (
        "FakeQuantizeBase ScaledFakeQuantize NonScaledFakeQuantize SequentialQuantize FrozenScaledFakeQuantize "
        "FakeQuantize FreezedScaledFakeQuantize BufferReusePool enable_or_disable_quantizer",
        "the quantizers of a layer are its input_quantizer, weight_quantizer and output_quantizer",
    ),
    "quark.torch.quantization.config.template": (
        "QuantizationSchemeCollection QuantizationScheme",
        "LLMTemplate.get_supported_schemes, LLMTemplate.register_scheme",
    ),
    "quark.torch.quantization.api": ("from_float_and_dict", FOLDERS),
    "quark.torch.quantization.config.config": (
        "MXSpec",
        "OCP_MXFP4Spec, OCP_MXFP6E3M2Spec, OCP_MXFP8E4M3Spec and others",
    ),
    "quark.torch.quantization.file2file_quantization": (
        "quantize_model_per_safetensor",
        "ModelQuantizer(config).direct_quantize_checkpoint",
    ),
    "quark.torch.quantization.utils": (
        "calculate_qmin_qmax get_dtype_params deep_compare count_calibration_tokens",
        f"{CODES}; == compares configs",
    ),
    "quark.torch.quantization.weight_convert": (
        "SplitFusedExperts WeightConverter",
        "direct_quantize_checkpoint, which finds fused experts itself, as every job does",
    ),
    "quark.torch.utils": ("getattr_recursive", LAYERS),
    "quark.torch.utils.torch_utils": ("getattr_recursive get_op_name get_op_by_name", LAYERS),
    "quark.torch.utils.llm.data_preparation": (
        "get_calib_dataloader_to_dict get_calib_dataloader_to_tensor get_dataset get_pileval",
        "get_calib_dataloader",
    ),
    "quark.torch.utils.per_block_runner": ("prepare finalize", "`quark quantize` reads a model block by block"),
    "quark.torch.utils.per_block_runner.lazy_loader": ("prepare finalize", "`quark quantize` reads it block by block"),
    "quark.torch.utils.accelerate_helper": (
        "untie_parameters clone_align_devices_hook OffloadParameter offload_to_weights_map update_offload_parameter",
        "ModelQuantizer takes models with a device_map, and ties stay ties",
    ),
    "quark.torch.utils.pack": (
        "PackMethod Pack_2_bits Pack_uint2 Pack_3_bits Pack_4_bits Pack_8_bits Pack_mxfp4 Pack_mxfp6 Pack_fp4 Pack_fp6",
        "create_pack_method, and export_safetensors, which packs",
    ),
    "quark.torch.quantization.model_transformation": (
        "process_model_transformation",
        "ModelQuantizer.quantize_model replaces the layers",
    ),
    "quark.torch.extensions.brevitas.algos": ("Preprocessing GPFQ GPTQ BiasCorrection", BRAVE),
    "quark.torch.extensions.brevitas.api": ("ModelQuantizer ModelExporter", BRAVE),
    "quark.torch.extensions.brevitas.config": ("Config QuantizationConfig QuantizationSpec Backend", BRAVE),
    "quark.torch.extensions.brevitas.mapping": ("get_brevitas_mapping", BRAVE),
    "quark.integrations.diffusers": (
        "QuarkDiffusersQuantizer QuarkQuantizationConfig DiffusersSafetensorsExporter",
        "quantize pipe.unet or pipe.transformer with ModelQuantizer; save_params and load_params keep it",
    ),
    "quark.experimental.torch.mixed_precision_planner": (
        "Candidates CandidateEvaluator DecisionSpace MixedPrecisionStrategy MixedPrecisionPlan MixedPrecisionPlanner "
        "SensitivityProfile TokenDataset evaluate_ppl",
        BUDGET,
    ),
    "quark.experimental.torch.llm.mix_precision": (
        "ConfigEvalResult ConfigSearcher HardwareTarget MixPrecisionConfig ModuleSearchConfig SearchGranularity "
        "SearchResult apply_quantization",
        BUDGET,
    ),
    "quark.experimental.torch.autoround.autoround": ("AutoRoundProcessor", f"{NAMED}: AutoRoundConfig"),
    "quark.experimental.torch.plugin.vllm_plugin": ("register", SERVING),
    "quark.experimental.torch.quant_perf.cli": ("main", "`quark evaluate` and `quark compare` measure folders"),
    "quark.experimental.speculative_decoding.eagle.config": (
        "Eagle3Config",
        "a draft model that another program trains",
    ),
    "quark.online_quantization.vllm": (
        "HF_QUANTIZATION_CONFIGS online_quant_config_to_quark online_quant_overrides register",
        SERVING,
    ),
    "quark.contrib.mince.config": ("BENCHMARKS BenchmarkConfig", "lm_eval with --limit, or with samples of yours"),
    "quark.contrib.mince.montecarlo": ("run_sizing", "lm_eval with --limit, or with samples of yours"),
    "quark.shapeshifter": (
        "shapeshifter Engine RunConfig ModelConfig ONNXModelConfig PytorchModelConfig ONNXPass PytorchPass "
        "LoadConfigFromFileOrDict",
        GRAPHS,
    ),
    "quark.shapeshifter.run_config": ("RunConfig", GRAPHS),
    "quark.shapeshifter.model_config": ("ModelConfig ONNXModelConfig PytorchModelConfig", GRAPHS),
    "quark.shapeshifter.pass_base": ("ONNXPass PytorchPass register_pass", GRAPHS),
    "quark.onnx.algorithm": (
        "apply_CLE apply_SmoothQuant apply_QuaRot apply_pre_quant_algorithms apply_BiasCorrection "
        "apply_AutoMixedPrecision apply_FastFinetune apply_GPTQ apply_post_quant_algorithms cle_transforms "
        "stem_equalize_transforms smooth_transforms rotation_transforms bias_correction auto_mixprecision "
        "fast_finetune GptqProcessor",
        f"{NAMED}: CLEConfig, SmoothQuantConfig, QuarotConfig, GPTQConfig, BiasCorrectionConfig, "
        "AutoMixprecisionConfig, AdaRoundConfig, AdaQuantConfig",
    ),
    "quark.onnx.algorithm.cle.equalization": ("cle_transforms stem_equalize_transforms", f"{NAMED}: CLEConfig"),
    "quark.onnx.algorithm.bc.bias_correction": ("bias_correction", f"{NAMED}: BiasCorrectionConfig"),
    "quark.onnx.algorithm.gptq.gptq": ("GptqProcessor GPTQ", f"{NAMED}: GPTQConfig"),
    "quark.onnx.algorithm.sq.smooth_quant": ("smooth_transforms", f"{NAMED}: SmoothQuantConfig"),
    "quark.onnx.algorithm.quarot.quarot": ("rotation_transforms", f"{NAMED}: QuarotConfig"),
    "quark.onnx.algorithm.finetuning.fast_finetune": ("fast_finetune", f"{NAMED}: AdaRoundConfig, AdaQuantConfig"),
    "quark.onnx.calibration.collectors": (
        "OverridedHistogramCollector",
        "calibrate_method, or calibration_method of a spec",
    ),
    "quark.onnx.finetuning.onnx_evaluate": ("inference_model", SESSIONS),
    "quark.onnx.optimizations": ("optimize_model", GRAPHS),
    "quark.onnx.quantizers": (
        "run_static_quantization run_dynamic_quantization run_matmul_nbits_quantization",
        "ModelQuantizer(config).quantize_model",
    ),
    "quark.onnx.quant_utils": (
        "check_and_create_path create_infer_session_for_onnx_model create_tmp_dir get_clip_min_max get_opset_version "
        "infer_custom_op_shape recursive_update register_custom_ops_library ONNXQuantizedModel",
        SESSIONS,
    ),
    "quark.onnx.quantization.quant_utils": ("compute_minmse compute_scale_zp", "calibration_method of a spec"),
    "quark.onnx.tools.rocm_memory_profiler": (
        "monitor_rocm_memory",
        "rocm-smi, or GlobalProfiler for memory of the host",
    ),
    "quark.onnx.utils.file_utils": ("save_quantized_info save_and_restore_func", "the extra option SaveAndRestore"),
    "quark.onnx.utils.model_utils": ("create_infer_session_for_onnx_model ONNXQuantizedModel", SESSIONS),
    "quark.onnx.utils.system_utils": ("create_tmp_dir check_and_create_path Profiler", "tempfile, and GlobalProfiler"),
    "quark.onnx.quantization.output_eval": (
        "calculate_cos calculate_l1_distance calculate_l2_distance calculate_psnr calculate_ssim",
        "quark.core.metrics has cosine, sqnr and more, and `quark evaluate FLOAT QUANTIZED` prints them",
    ),
    "quark.common.utils.testing_utils": (
        "TestCase skip_if_no_gpu slow_test slow_test_if use_temporary_directory torch_device require_accelerate "
        "PatchEverywhere retry_flaky_test",
        TESTS,
    ),
    "quark.shares.utils.testing_utils": (
        "torch_device use_temporary_directory retry_flaky_test require_accelerate require_torch_cuda",
        TESTS,
    ),
    "quark.testing": ("skip_if_no_gpu slow_test slow_test_if", TESTS),
    "quark.torch.utils.debug": ("collect_quantization_statistics", "`quark evaluate` lists the error of every layer"),
    "quark.onnx.algorithm.mprecision": ("auto_mixprecision", f"{NAMED}: AutoMixprecisionConfig"),
}
"""Documented path -> its names that this version does not have, and what is possible instead."""


class _Absent(type):
    """Class of the names that this version does not have: to call, derive from or ask anything of one raises."""

    instead: str

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Absent:
        for base in bases:
            if isinstance(base, _Absent):
                base.refuse()
        return super().__new__(mcls, name, bases, namespace)

    def refuse(cls) -> NoReturn:
        from quark.errors import NotSupportedError

        raise NotSupportedError(f"{cls.__name__} is not part of this version. Possible: {cls.instead}.")

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        cls.refuse()

    def __getitem__(cls, key: object) -> NoReturn:
        cls.refuse()

    def __iter__(cls) -> NoReturn:
        cls.refuse()

    def __contains__(cls, key: object) -> NoReturn:
        cls.refuse()

    def __instancecheck__(cls, instance: object) -> NoReturn:
        cls.refuse()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        cls.refuse()


@cache
def absent(path: str, name: str) -> type:
    """Return a class for a documented name that this version does not have, which says what is possible instead."""
    instead = ABSENT[path][1]
    doc = f"Not part of this version. Possible: {instead}."
    return _Absent(name, (), {"__module__": path, "__doc__": doc, "instead": instead})
