"""Every algorithm of the PyTorch flow under weights of several kinds, and families of models with other structures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.fingerprint.outputs import OUT, add
from benchmarks.fingerprint.torch_models import (
    FAMILIES,
    FOLDER,
    LLAMA,
    computed,
    family,
    language_model,
    logits,
    quantized,
    tokens,
)
from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    QuantFlow,
    export_gguf,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.quantization import (
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    DistillationConfig,
    GPTAQConfig,
    GPTQConfig,
    OnlineRotationConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)

SCHEMES = ("int3_wo_128", "int8", "nvfp4")
NAMES = ("smooth", "awq", "gptq", "gptaq", "qronos", "importance", "rotation", "quarot")
FOLDS = [{"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"}]
LAYER = "model.layers.layer_id"
ATTENTION = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"]
MLP = [f"{LAYER}.mlp.{part}_proj" for part in ("gate", "up")]
INNER = {
    "prev_modules": [f"{LAYER}.self_attn.o_proj"],
    "norm_module": f"{LAYER}.post_attention_layernorm",
    "next_modules": MLP,
}
OUTER = {"norm_module": f"{LAYER}.input_layernorm", "next_modules": ATTENTION}
LAST = {"prev_modules": [f"{LAYER}.mlp.down_proj"], "norm_module": "model.norm", "next_modules": ["lm_head"]}
STREAM: dict[str, list[dict[str, Any]]] = {
    "first_layer": [{**OUTER, "prev_modules": ["model.embed_tokens"]}, INNER],
    "middle_layers": [{**OUTER, "prev_modules": ["model.layers.pre_layer_id.mlp.down_proj"]}, INNER],
    "last_layer": [LAST],
}
"""The residual stream by hand."""
TARGETS: dict[str, list[dict[str, Any]]] = {"middle_layers": [{"target_modules": MLP}]}
AUTOROUND = AutoRoundConfig(iters=3, batch_size=1)
SETTINGS: dict[str, tuple[str, list[AlgoConfig]]] = {
    "gptq_in_order": ("int3_wo_128", [GPTQConfig(desc_act=False, refine_passes=0)]),
    "gptq_on_the_way": ("uint4_wo_64", [GPTQConfig(desc_act=False, static_groups=False, group_aware_order=True)]),
    "gptq_some_layers": ("uint4_wo_64", [GPTQConfig(inside_layer_modules=["mlp.down_proj"], damp_percent=0.1)]),
    "gptaq_alpha": ("int3_wo_128", [GPTAQConfig(alpha=0.5, refine_passes=2)]),
    "qronos_on_the_way": (
        "int3_wo_128",
        [
            QronosConfig(
                inside_layer_modules=[], model_decoder_layers="model.layers", desc_act=False, static_groups=False
            )
        ],
    ),
    "awq_gptq": ("int3_wo_128", [AWQConfig(), GPTQConfig()]),
    "awq_named": ("uint4_wo_64", [AWQConfig(scaling_layers=FOLDS)]),
    "smooth_alpha": ("int8", [SmoothQuantConfig(alpha=0.5, scale_clamp_min=1e-2)]),
    "smooth_named": ("int8", [SmoothQuantConfig(scaling_layers=FOLDS)]),
    "autosmooth": ("int8", [AutoSmoothQuantConfig()]),
    "autosmooth_mae": ("int8", [AutoSmoothQuantConfig(compute_scale_loss="MAE")]),
    "autoround": ("int3_wo_128", [AUTOROUND]),
    "autoround_asymmetric": ("uint4_wo_64", [AUTOROUND]),
    "autoround_mxfp4": ("mxfp4", [replace(AUTOROUND, enable_minmax_tuning=False)]),
    "rotation_blocks": ("mxfp4", [RotationConfig(rotation_size=32)]),
    "rotation_r2_r4": ("int8", [RotationConfig(r2=True, r4=True)]),
    "rotation_random": ("int8", [RotationConfig(random_r1=True, random_r2=True, r2=True)]),
    "rotation_online": ("int8", [RotationConfig(online_r1_rotation=True)]),
    "rotation_stream": ("int8", [RotationConfig(scaling_layers=STREAM)]),
    "rotation_targets": ("int8", [RotationConfig(scaling_layers=TARGETS, online_r1_rotation=True)]),
    "rotation_online_layers": (
        "int8",
        [
            RotationConfig(
                online_r1_rotation=True,
                online_config=OnlineRotationConfig(
                    shared_parallel=False, online_rotation_layers=["model.layers.1.mlp.down_proj"]
                ),
            )
        ],
    ),
    "rotation_smooth_gptq": ("int8", [RotationConfig(r4=True), SmoothQuantConfig(alpha=0.5), GPTQConfig()]),
    "svdquant": ("int8", [SVDQuantConfig()]),
    "distillation": ("int4_wo_64", [DistillationConfig()]),
    "trained_rotation": ("int8", [RotationConfig(trainable=True)]),
}


def solved(config: Any, model: Any = None, data: Any = None) -> str:
    """A checkpoint after an algorithm, and what the model computes."""
    model = language_model(torch.float32) if model is None else model
    model = quantized(config, model, tokens() if data is None else data)
    export_safetensors(model, OUT / "model")
    return logits(model)


def by_name(name: str, scheme: str) -> str:
    return solved(LLAMA.get_config(scheme, name))


def by_config(scheme: str, algorithms: list[AlgoConfig]) -> str:
    """As configured, and as read back: online rotations are part of a checkpoint."""
    found = solved(replace(LLAMA.get_config(scheme), algo_config=algorithms))
    return found + logits(import_model_from_safetensors(language_model(torch.float32), OUT / "model"))


def per_block(scheme: str, algorithm: str) -> str:
    config = LLAMA.get_config(scheme, algorithm)
    return solved(replace(config, quant_flow=QuantFlow.per_block, gpu_resident_blocks=1))


def of_family(name: str, scheme: str, algorithm: str | None = None) -> str:
    config = LLMTemplate.get(name).get_config(scheme, algorithm)
    return solved(config, family(name))


def file_of_family(name: str, scheme: str) -> None:
    family(name).save_pretrained("float")
    ModelQuantizer(LLMTemplate.get(name).get_config(scheme)).direct_quantize_checkpoint("float", OUT / "model")


def gguf_of_family(name: str, scheme: str) -> str:
    model = quantized(LLMTemplate.get(name).get_config(scheme), family(name), None)
    export_gguf(model, OUT, "model", tokenizer_path=FOLDER)
    return computed(model, tokens()[0])


for _scheme in SCHEMES:
    for _name in NAMES:
        add(f"torch/algorithms/{_name}/{_scheme}", by_name, _name, _scheme)
for _name, _setting in SETTINGS.items():
    add(f"torch/algorithms/settings/{_name}", by_config, *_setting)
for _scheme, _name in (("int8", "smooth"), ("int3_wo_128", "gptq")):
    add(f"torch/algorithms/per_block/{_name}", per_block, _scheme, _name)
for _family in FAMILIES:
    for _scheme in ("int4_wo_32", "int8", "nvfp4"):
        add(f"torch/families/{_family}/{_scheme}", of_family, _family, _scheme)
    # How values flow in attention of this kind is not followed yet: what asks for it breaks.
    for _name in ("gptq",) if _family == "deepseek_v3" else ("smooth", "awq", "gptq", "rotation", "quarot"):
        add(f"torch/families/{_family}/{_name}", of_family, _family, "int8_dynamic", _name)
    add(f"torch/families/{_family}/file2file", file_of_family, _family, "mxfp4")
    add(f"torch/families/{_family}/gguf", gguf_of_family, _family, "int4_wo_32")
