"""Quantizes, exports and evaluates a language model, with the arguments of the documented script of this name.

python examples/compat/quantize_quark.py --model_dir examples/models/language_model --device cpu \
        --dataset examples/models/text/calibration.txt --evaluation_dataset examples/models/text/heldout.txt \
        --quant_scheme fp8 --kv_cache_dtype fp8 --num_calib_data 32 --model_export hf_format --output_dir out
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from quark.common.profiler import GlobalProfiler, ProfileStep
from quark.contrib.llm_eval import eval_model
from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    export_gguf,
    export_onnx,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.quantization.config.config import QConfig, load_quant_algo_config_from_file
from quark.torch.utils.llm import (
    check_compatibility_before_quantization,
    get_calib_dataloader,
    get_model,
    get_tokenizer,
)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_dir", required=True, help="a folder, or a name on the hub")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--multi_gpu", nargs="?", const="auto", default=None, choices=["auto", "balanced"])
    add("--multi_device", action="store_true")
    add("--model_attn_implementation", default="eager", choices=["eager", "sdpa"])
    add("--data_type", default="auto", choices=["auto", "float16", "bfloat16", "float32"])
    add("--trust_remote_code", action=argparse.BooleanOptionalAction, default=True)
    add("--no_trust_remote_code", dest="trust_remote_code", action="store_false")
    add("--dataset", default="pileval", help="a text file, or the name of a dataset")
    add("--seq_len", type=int, default=512)
    add("--batch_size", type=int, default=1)
    add("--num_calib_data", type=int, default=512)
    add("--skip_quantization", action="store_true")
    add("--file2file_quantization", action="store_true")
    add("--quant_scheme", choices=LLMTemplate.get_supported_schemes())
    add("--layer_quant_scheme", action="append", nargs=2, metavar=("PATTERN", "SCHEME"))
    add("--kv_cache_dtype", "--kv_cache_quant_scheme", choices=["fp8"])
    add("--min_kv_scale", type=float, default=0.0)
    add("--kv_cache_post_rope", action="store_true")
    add("--attention_dtype", choices=["fp8"])
    add("--quant_algo", type=lambda names: names.split(","), metavar="alg1,alg2")
    add("--quant_algo_config_file", action="append", nargs=2, metavar=("ALGORITHM", "FILE"))
    add("--exclude_layers", nargs="*", default=None, help="patterns; without any, nothing is excluded")
    add("--model_reload", action="store_true", help="evaluate a quantized folder")
    add("--import_model_dir", help="the quantized folder, where it is not --model_dir")
    add("--model_export", action="append", choices=["hf_format", "onnx", "gguf"])
    add("--custom_mode", default="quark", choices=["quark", "awq", "fp8"])
    add("--pack_method", default="reorder", choices=["order", "reorder"])
    add("--export_weight_format", default="real_quantized", choices=["fake_quantized", "real_quantized"])
    add("--output_dir", default="exported_model")
    add("--skip_evaluation", action="store_true")
    add("--evaluation_dataset", default="wikitext", help="a text file, or wikitext")
    add("--num_eval_data", type=int, default=-1)
    add("--save_metrics_to_csv", action="store_true")
    add("--metrics_output_dir", default="metrics_output_dir")
    add("--tasks", metavar="task1,task2", help="of the package lm_eval")
    add("--eval_batch_size", default=1)
    add("--max_eval_batch_size", type=int, default=64)
    add("--num_fewshot", type=int)
    add("--apply_chat_template", action="store_true")
    add("--use_ppl_eval_for_kv_cache", action="store_true")
    for name, size in (("context", 1024), ("sample", 512), ("patch", None)):
        add(f"--ppl_eval_for_kv_cache_{name}_size", type=int, default=size)
    return parser.parse_args(words)


def quant_config(args: argparse.Namespace, model_type: str) -> QConfig:
    files = args.quant_algo_config_file or []
    config = LLMTemplate.get(model_type).get_config(
        scheme=args.quant_scheme,
        algorithm=args.quant_algo,
        kv_cache_scheme=args.kv_cache_dtype,
        min_kv_scale=args.min_kv_scale,
        attention_scheme=args.attention_dtype,
        layer_config=dict(args.layer_quant_scheme or []),
        exclude_layers=args.exclude_layers,
        algo_configs={name: load_quant_algo_config_from_file(file) for name, file in files},
    )
    return replace(config, kv_cache_post_rope=args.kv_cache_post_rope)


def quantized_model(args: argparse.Namespace, profiler: GlobalProfiler) -> torch.nn.Module:
    if args.model_reload:
        return import_model_from_safetensors(None, args.import_model_dir or args.model_dir, device=args.device)
    with profiler.scope(ProfileStep.MODEL_LOADING):
        model, _ = get_model(
            args.model_dir,
            args.data_type,
            args.device,
            args.multi_gpu,
            args.multi_device,
            args.model_attn_implementation,
            args.trust_remote_code,
        )
    if args.skip_quantization:
        return model
    check_compatibility_before_quantization(model, raise_on_error=True)
    quantizer = ModelQuantizer(quant_config(args, model.config.model_type), args.multi_device)
    return quantizer.freeze(quantizer.quantize_model(model, calibration_data(args)))


def calibration_data(args: argparse.Namespace):
    tokenizer = get_tokenizer(args.model_dir, args.seq_len, trust_remote_code=args.trust_remote_code)
    return get_calib_dataloader(
        args.dataset,
        tokenizer=tokenizer,
        batch_size=args.batch_size,
        num_calib_data=args.num_calib_data,
        seqlen=args.seq_len,
    )


def export(args: argparse.Namespace, model: torch.nn.Module, profiler: GlobalProfiler) -> None:
    formats = args.model_export or []
    if "hf_format" in formats:
        with profiler.scope(ProfileStep.EXPORT_HF_SAFETENSORS):
            export_safetensors(model, args.output_dir, args.custom_mode, args.export_weight_format, args.pack_method)
    if "onnx" in formats:
        with profiler.scope(ProfileStep.EXPORT_ONNX):
            batch = next(iter(calibration_data(args)))
            export_onnx(model, args.output_dir, batch, uint4_int4_flag="int4" in args.quant_scheme)
    if "gguf" in formats:
        with profiler.scope(ProfileStep.EXPORT_GGUF):
            export_gguf(model, args.output_dir, model.config.model_type, args.model_dir)


def main(words: list[str] | None = None) -> dict[str, float]:
    args = arguments(words)
    profiler = GlobalProfiler(Path(args.output_dir).with_name("quark_profile.yaml"))
    if args.file2file_quantization:
        stored = json.loads((Path(args.model_dir) / "config.json").read_text(encoding="utf-8"))
        quantizer = ModelQuantizer(quant_config(args, stored["model_type"]))
        quantizer.direct_quantize_checkpoint(args.model_dir, args.output_dir)
        return {}
    model = quantized_model(args, profiler)
    export(args, model, profiler)
    if args.skip_evaluation:
        return {}
    args.use_ppl_eval_model = True
    with profiler.scope(ProfileStep.MODEL_EVALUATION):
        return eval_model(args, model, args.device, args.save_metrics_to_csv, args.metrics_output_dir)


if __name__ == "__main__":
    main()
