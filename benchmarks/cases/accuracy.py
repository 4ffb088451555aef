"""What accuracy algorithms give back, on the example language model: perplexity on held-out text.

Schemes: weights of 4, 3 and 2 bits, MXFP4 and NVFP4, static w8a8 and W4A4; plain, and with function-preserving outliers
(eight channels of every norm's gain times 30, the weights that read them divided by 30). Calibration: 64 windows of
256 tokens, with three refinements after GPTQ and its kin; perplexity and `kl`, the mean divergence of the next token
from the float model: 60 held-out windows of 256. `left` is the share of the divergence of rounding to nearest that an
algorithm leaves.
Names of schemes may be given as arguments (`int3_g128`, ...), of algorithms with `+` (`+gptq`). Distillation, and what
stands before it, has 512 texts that the model writes beside the windows.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from algorithms import INSIDE, SCALING  # the case beside this one: scripts of one folder

ROOT = Path(__file__).parent.parent.parent / "examples" / "models"
WINDOW, CALIBRATION, HELD_OUT, SYNTHETIC = 256, 64, 60, 512
WEIGHT_ONLY = ("gptq", "gptaq", "qronos", "awq", "importance", "qronos_groups", "fisher_groups", "awq+gptq")
LIVE = ("gptq", "qronos", "fisher", "rotation", "rotation+gptq", "rotation+qronos")
CASES: dict[str, tuple[str, ...]] = {
    "int4_g128": WEIGHT_ONLY,
    "int4_channel": WEIGHT_ONLY,
    "int3_g128": WEIGHT_ONLY,
    "int2_g64": WEIGHT_ONLY,
    "mxfp4": LIVE,
    "nvfp4": LIVE,
    "w8a8": ("smooth", "rotation"),
    "w4a4": LIVE,
}
OUTLIERS = ("w8a8", "mxfp4", "w4a4", "int3_g128")


def scheme(name: str) -> Any:
    """The layer config of a scheme, in documented names."""
    from quark.torch.quantization import (
        Int3PerGroupSpec,
        Int4PerChannelSpec,
        Int8PerTensorSpec,
        QLayerConfig,
        Uint4PerGroupSpec,
    )

    if name == "w8a8":
        tensor = Int8PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
        return QLayerConfig(weight=tensor, input_tensors=tensor)
    if name == "w4a4":
        weight = Int4PerChannelSpec(ch_axis=0, is_dynamic=False, symmetric=True).to_quantization_spec()
        live = Int4PerChannelSpec(ch_axis=1, is_dynamic=True, symmetric=True).to_quantization_spec()
        return QLayerConfig(weight=weight, input_tensors=live)
    if name == "int4_channel":
        spec: Any = Int4PerChannelSpec(ch_axis=0, is_dynamic=False, symmetric=True)
    elif name == "int4_g128":
        spec = Uint4PerGroupSpec(ch_axis=-1, group_size=128)
    elif name == "int3_g128":
        spec = Int3PerGroupSpec(ch_axis=-1, group_size=128, is_dynamic=False, symmetric=False)
    else:
        from quark.torch.quantization import Int2PerGroupSpec

        spec = Int2PerGroupSpec(ch_axis=-1, group_size=64, is_dynamic=False, symmetric=False)
    return QLayerConfig(weight=spec.to_quantization_spec())


def algorithms(name: str) -> list[Any]:
    """The algorithm configs of a name like "awq+gptq"."""
    from quark.torch.quantization.config import config as configs

    layers: dict[str, Any] = {"model_decoder_layers": "model.layers"}
    # quark's own field; the peer has none.
    more = {"refine_passes": 3} if hasattr(configs.GPTQConfig, "refine_passes") else {}
    makers: dict[str, Callable[[], Any]] = {
        "gptq": lambda: configs.GPTQConfig(inside_layer_modules=INSIDE, **layers, **more),
        "gptaq": lambda: configs.GPTAQConfig(inside_layer_modules=INSIDE, **layers, **more),
        "qronos": lambda: configs.QronosConfig(inside_layer_modules=INSIDE, **layers, **more),
        "qronos_groups": lambda: configs.QronosConfig(
            inside_layer_modules=INSIDE, desc_act=False, static_groups=False, **layers, **more
        ),
        "fisher": lambda: configs.QronosConfig(inside_layer_modules=INSIDE, fisher=True, **layers, **more),
        "fisher_groups": lambda: configs.QronosConfig(
            inside_layer_modules=INSIDE, fisher=True, desc_act=False, static_groups=False, **layers, **more
        ),
        "gptq_groups": lambda: configs.GPTQConfig(
            inside_layer_modules=INSIDE, desc_act=False, static_groups=False, **layers, **more
        ),
        "awq": lambda: configs.AWQConfig(scaling_layers=SCALING, **layers),
        "smooth": lambda: configs.SmoothQuantConfig(alpha=0.8, scaling_layers=SCALING[:2], **layers),
        "rotation": lambda: configs.RotationConfig(r1=True, r2=True, r4=True),
        "importance": _importance,
        "autoround": lambda: configs.AutoRoundConfig(batch_size=8),
        "distillation": _distillation,
    }
    return [makers[part]() for part in name.split("+")]


def _importance() -> Any:
    from quark.torch.config.algo_configs import ImportanceScaleConfig

    return ImportanceScaleConfig()


def _distillation() -> Any:
    from quark.torch.config.algo_configs import DistillationConfig

    return DistillationConfig()


def main() -> None:
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.quantization import QConfig

    chosen = [a for a in sys.argv[1:] if not a.startswith("+")] or list(CASES)
    only = [a[1:] for a in sys.argv[1:] if a.startswith("+")]
    calibration, held_out = windows("calibration", CALIBRATION), windows("heldout", HELD_OUT)
    scores = [log_probabilities(load(False), window) for window in held_out]
    reference, _ = measure(load(False), held_out, scores)
    result: dict[str, Any] = {"float": round(reference, 3)}
    for name in chosen:
        plain = name.removesuffix("_outliers")
        for outliers in (False, True):
            if outliers and plain not in OUTLIERS:
                continue
            rows: dict[str, Any] = {}
            for algorithm in ("none", *(only or CASES[plain])):
                template = LLMTemplate.get("llama")
                config = (
                    template.get_config(plain)
                    if plain in ("mxfp4", "nvfp4")
                    else QConfig(global_quant_config=scheme(plain), exclude=["lm_head"])
                )
                settings = {f: getattr(config, f) for f in ("global_quant_config", "exclude", "shared_scale_groups")}
                try:
                    found = None if algorithm == "none" else algorithms(algorithm)
                except (ImportError, AttributeError, TypeError):  # the peer has no such algorithm
                    continue
                model = load(outliers)
                start = time.perf_counter()
                quantizer = ModelQuantizer(QConfig(**settings, algo_config=found))
                data = with_synthetic(calibration) if "distillation" in algorithm else calibration
                model = quantizer.quantize_model(model, data)
                seconds = time.perf_counter() - start
                value, divergence = measure(model, held_out, scores)
                nearest = rows.get("none", {"kl": divergence})
                rows[algorithm] = {
                    "perplexity": round(value, 3),
                    "kl": divergence,
                    "left": divergence / nearest["kl"],
                    "seconds": round(seconds, 1),
                }
                print(name + (" outliers" if outliers else ""), algorithm, rows[algorithm], file=sys.stderr, flush=True)
            result[plain + ("_outliers" if outliers else "")] = rows
    print(json.dumps(result))


def load(outliers: bool) -> Any:
    """The example model in float32, with outliers or not."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / "language_model", dtype=torch.float32).eval()
    if outliers:
        with torch.no_grad():
            for layer in model.model.layers:
                attention, mlp = layer.self_attn, layer.mlp
                for norm, readers in (
                    (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                    (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
                ):
                    channels = torch.arange(3, len(norm.weight), len(norm.weight) // 8)
                    norm.weight[channels] *= 30
                    for reader in readers:
                        reader.weight[:, channels] /= 30
    return model


def windows(name: str, count: int) -> list[Any]:
    """Windows of token ids, (1, WINDOW) each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "language_model")
    ids = tokenizer((ROOT / "text" / f"{name}.txt").read_text(), return_tensors="pt", verbose=False).input_ids[0]
    return list(ids[: count * WINDOW].reshape(count, 1, WINDOW))


def with_synthetic(data: list[Any]) -> list[Any]:
    """The windows, and those that the model writes."""
    from quark.torch import synthetic_batches

    return [*data, *synthetic_batches(load(False), data, SYNTHETIC)]


def log_probabilities(model: Any, window: Any) -> Any:
    """Of every next token, shape (WINDOW, vocabulary)."""
    import torch

    with torch.no_grad():
        return torch.log_softmax(model(window).logits[0].float(), -1)


def measure(model: Any, data: list[Any], scores: list[Any]) -> tuple[float, float]:
    """Perplexity, and the mean Kullback-Leibler divergence from the float model's `scores`."""
    loss = divergence = 0.0
    for window, expected in zip(data, scores, strict=True):
        found = log_probabilities(model, window)
        loss -= float(found[:-1].gather(-1, window[0, 1:, None]).mean())
        divergence += float((expected.exp() * (expected - found)).sum(-1).mean())
    return math.exp(loss / len(data)), divergence / len(data)


if __name__ == "__main__":
    main()
