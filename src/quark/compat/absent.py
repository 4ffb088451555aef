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
        "get_hadamard_matrices random_hadamard_matrix matmul_hadU",
        "RotationConfig in algo_config rotates by Hadamard matrices",
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
    "quark.torch.quantization.tensor_quantize": (
        "FakeQuantizeBase ScaledFakeQuantize NonScaledFakeQuantize SequentialQuantize FrozenScaledFakeQuantize",
        "the quantizers of a layer are its input_quantizer, weight_quantizer and output_quantizer",
    ),
    "quark.torch.quantization.config.template": (
        "QuantizationSchemeCollection QuantizationScheme",
        "LLMTemplate.get_supported_schemes, LLMTemplate.register_scheme",
    ),
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
    "quark.torch.extensions.brevitas": ("config mapping algos", "ModelQuantizer on the float model, before Brevitas"),
    "quark.integrations.diffusers": (
        "QuarkDiffusersQuantizer QuarkQuantizationConfig",
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
    "quark.onnx.quantization.output_eval": (
        "calculate_cos calculate_l1_distance calculate_l2_distance calculate_psnr calculate_ssim",
        "quark.core.metrics has cosine, sqnr and more, and `quark evaluate FLOAT QUANTIZED` prints them",
    ),
    "quark.common.utils.testing_utils": (
        "TestCase skip_if_no_gpu slow_test slow_test_if use_temporary_directory torch_device",
        "pytest has skipif and tmp_path",
    ),
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
