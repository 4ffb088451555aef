"""Every algorithm of the ONNX flow, with few iterations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.fingerprint.onnx_models import NETWORKS, quantize
from benchmarks.fingerprint.outputs import OUT, add
from quark.onnx import (
    AdaQuantConfig,
    AdaRoundConfig,
    AutoMixprecisionConfig,
    BFloat16Spec,
    BiasCorrectionConfig,
    CalibMethod,
    CLEConfig,
    Config,
    GPTQConfig,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    MX9Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    QuantizationConfig,
    QuarotConfig,
    SmoothQuantConfig,
    UInt8Spec,
)

CHANNEL = Int8Spec(quant_granularity=QuantGranularity.Channel)
A8 = UInt8Spec(calibration_method=CalibMethod.MinMax)
U8S8, U8S8_CHANNEL = QLayerConfig(input_tensors=A8, weight=Int8Spec()), QLayerConfig(input_tensors=A8, weight=CHANNEL)
U8S4 = QLayerConfig(input_tensors=A8, weight=Int4Spec(quant_granularity=QuantGranularity.Channel))
GROUPS = QLayerConfig(input_tensors=A8, weight=Int4Spec(quant_granularity=QuantGranularity.Group))
BF16 = QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec())
S8S8 = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
WIDE = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())
BLOCKS = QLayerConfig(input_tensors=MX9Spec(), weight=MX9Spec())
CLE = CLEConfig(cle_scale_use_threshold=False)

ROUND: dict[str, Any] = {"num_iterations": 5, "data_size": 16}
TRAIN: dict[str, Any] = {**ROUND, "learning_rate": 0.01}
SETTINGS: dict[str, tuple[str, QLayerConfig, list[Any], dict[str, Any]]] = {
    "cle": ("digits", U8S8, [CLE], {}),
    "cle_threshold": ("digits", U8S8, [CLEConfig()], {"AllowNoop": True}),
    "cle_steps": ("cnn", U8S8, [CLEConfig(cle_steps=3, cle_scale_use_threshold=False)], {}),
    "cle_without_bias": ("digits", U8S8, [CLEConfig(cle_scale_append_bias=False, cle_scale_use_threshold=False)], {}),
    "bias_correction": ("digits", U8S8, [BiasCorrectionConfig()], {}),
    "bias_correction_mlp": ("mlp", U8S4, [BiasCorrectionConfig()], {}),
    "cle_bias_correction": ("digits", U8S8, [CLE, BiasCorrectionConfig()], {}),
    "smooth_quant": ("llama", U8S8_CHANNEL, [SmoothQuantConfig()], {"Target": "ort_x64"}),
    "smooth_quant_alpha": ("llama", S8S8, [SmoothQuantConfig(alpha=0.8)], {}),
    "smooth_quant_blocks": ("llama", BLOCKS, [SmoothQuantConfig()], {}),
    "quarot": ("llama", U8S8_CHANNEL, [QuarotConfig()], {"Target": "ort_x64"}),
    "quarot_random": ("llama", S8S8, [QuarotConfig(r_matrix_dim=64, use_random_had=True)], {}),
    "quarot_smooth_quant": ("llama", U8S8_CHANNEL, [QuarotConfig(), SmoothQuantConfig()], {}),
    "gptq": ("llama", GROUPS, [GPTQConfig(bits=4, group_size=32)], {}),
    "gptq_channels": ("mlp", U8S8, [GPTQConfig(per_channel=True)], {}),
    "gptq_tensor": ("mlp", U8S8, [GPTQConfig()], {}),
    "gptq_3_bits": ("mlp", GROUPS, [GPTQConfig(bits=3, group_size=16, weight_symmetric=False, mse=True)], {}),
    "gptq_order": ("mlp", GROUPS, [GPTQConfig(bits=4, group_size=16, act_order=True, perc_damp=0.1)], {}),
    "gptq_activations": ("mlp", U8S8, [GPTQConfig(per_channel=True)], {"WeightsOnly": False}),
    "adaround": ("digits", U8S4, [AdaRoundConfig(**ROUND)], {}),
    "adaround_options": (
        "digits",
        U8S4,
        [AdaRoundConfig(**ROUND, batch_size=2, num_batches=2, warm_start=0.0, drop_ratio=0.5, output_qdq=True)],
        {},
    ),
    "adaround_selective": ("cnn", U8S4, [AdaRoundConfig(**ROUND, selective_update=True)], {}),
    "adaround_parallel": ("digits", U8S4, [AdaRoundConfig(**ROUND, parallel=True, dynamic_batch=True)], {}),
    "adaround_some": ("digits", U8S4, [AdaRoundConfig(**ROUND, target_op_type=["Gemm"], mem_opt_level=2)], {}),
    "adaround_largest": ("digits", U8S4, [AdaRoundConfig(**ROUND, select_max_mem_layer=True, mem_opt_level=0)], {}),
    "adaquant": ("digits", U8S8, [AdaQuantConfig(**TRAIN)], {}),
    "adaquant_bias": ("digits", U8S4, [AdaQuantConfig(**TRAIN, update_bias=True, lr_adjust=(1e-3, 0.005))], {}),
    "adaquant_bfloat16": ("digits", BF16, [AdaQuantConfig(**TRAIN)], {"BF16QDQToCast": True}),
    "adaquant_blocks": ("digits", BLOCKS, [AdaQuantConfig(**TRAIN, early_stop=True)], {}),
    "adaround_adaquant": ("digits", U8S4, [AdaRoundConfig(**ROUND), AdaQuantConfig(**TRAIN)], {}),
    "mixed_speed": ("digits", WIDE, [AutoMixprecisionConfig(S8S8, metric_default="sqnr", metric_threshold=-40)], {}),
    "mixed_quality": (
        "digits",
        S8S8,
        [
            AutoMixprecisionConfig(
                WIDE, metric_threshold=0.05, metric_optimize_object="quality", sensitivity_cache_file="out/cache.json"
            )
        ],
        {},
    ),
    "mixed_size": ("digits", U8S8_CHANNEL, [AutoMixprecisionConfig(U8S4, size_budget=0.2)], {}),
    "mixed_weights": (
        "digits",
        U8S8_CHANNEL,
        [AutoMixprecisionConfig(U8S4, size_budget=0.2, data_size=4)],
        {"WeightsOnly": True},
    ),
    "mixed_blocks": ("cnn", BF16, [AutoMixprecisionConfig(BLOCKS, metric_default="kl", dual_quant_nodes=True)], {}),
    "mixed_unshared": (
        "cnn",
        WIDE,
        [AutoMixprecisionConfig([S8S8, U8S8], shared_param_mode="unshare", no_input_qdq_shared=True, worker_num=2)],
        {},
    ),
}


def solved(network: str, layer: QLayerConfig, algorithms: list[Any], options: dict[str, Any]) -> None:
    quantize(QConfig(layer, algo_config=algorithms, **options), network)


def older(flag: str, options: dict[str, Any]) -> None:
    """An algorithm in the words of QuantizationConfig."""
    fields: dict[str, Any] = {flag: True}
    model, feeds = NETWORKS["llama" if flag in ("include_sq", "include_rotation") else "digits"]()
    config = QuantizationConfig(extra_options=options, **fields)
    ModelQuantizer(Config(global_quant_config=config)).quantize_model(model, str(OUT / "model.onnx"), feeds)


def rotated_by_file() -> None:
    """QuaRot told what to rotate: the embedding, and in each of the five blocks seven linear layers and two norms."""
    pairs = []
    writers = ["node_embedding"]
    for block in range(5):
        q, k, v, o, gate, up, down = (f"node_linear{f'_{i}' if i else ''}" for i in range(7 * block, 7 * block + 7))
        for readers, norm, writer in (([q, k, v], 4 + 9 * block, o), ([gate, up], 10 + 9 * block, down)):
            pairs.append({"prev_nodes": writers, "next_nodes": readers, "norm_node": f"node_mul_{norm}"})
            writers = [writer]
    pairs.append({"prev_nodes": writers, "next_nodes": ["node_linear_35"], "norm_node": "node_mul_49"})
    Path("pairs.json").write_text(json.dumps({"R1_pairs": pairs}), encoding="utf-8")
    solved("llama", S8S8, [QuarotConfig(r_config_path="pairs.json")], {})


def recovered(network: str, layer: QLayerConfig, target: float, metric: str) -> str:
    """What brings accuracy back: the steps that were tried, and the model. No step is left out for lack of time."""
    model, feeds = NETWORKS[network]()
    quantizer = ModelQuantizer(QConfig(layer))
    found = quantizer.recover(model, str(OUT / "model.onnx"), feeds, metric=metric, target=target, budget=None)
    return "\n".join(f"{trial.step} {trial.before} {trial.after} {trial.result}" for trial in found.trials)


for _name, _setting in SETTINGS.items():
    add(f"onnx/algorithms/{_name}", solved, *_setting)
for _flag, _options in {
    "include_sq": {"SmoothAlpha": 0.6},
    "include_rotation": {"RMatrixDim": 64},
    "include_cle": {"CLESteps": 2, "CLEScaleUseThreshold": False},
    "include_fast_ft": {"FastFinetune": {"OptimAlgorithm": "adaround", "NumIterations": 5, "DataSize": 16}},
    "include_auto_mp": {"AutoMixprecision": {"TargetLayerConfig": WIDE, "MetricThreshold": 0.5}},
}.items():
    add(f"onnx/algorithms/older/{_flag}", older, _flag, _options)
add("onnx/algorithms/quarot_file", rotated_by_file)
add("onnx/recovery/to_a_target", recovered, "digits", U8S8, 36.5, "sqnr")
add("onnx/recovery/all_steps", recovered, "mlp", U8S4, 90.0, "psnr")
