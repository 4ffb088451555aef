"""Quantizes, exports and evaluates a language model, with the arguments of the documented script of this name.

python examples/compat/quantize_quark.py --model_dir examples/models/language_model --device cpu \
        --dataset examples/models/text/calibration.txt --evaluation_dataset examples/models/text/heldout.txt \
        --quant_scheme fp8 --kv_cache_dtype fp8 --num_calib_data 32 --model_export hf_format --output_dir out
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch

from quark.common.profiler import GlobalProfiler, ProfileStep
from quark.contrib.llm_eval import eval_model, mlperf_rouge_eval
from quark.core.schemes import OLD_SCHEMES
from quark.errors import QuarkError, did_you_mean
from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    RuntimeOptions,
    disable_native_inference,
    enable_native_inference,
    export_gguf,
    export_onnx,
    export_safetensors,
    import_model_from_safetensors,
    load_params,
    save_params,
)
from quark.torch.quantization.config.config import QConfig, load_quant_algo_config_from_file
from quark.torch.utils import TPDeviceManager
from quark.torch.utils.llm import (
    check_compatibility_before_quantization,
    get_calib_dataloader,
    get_model,
    get_tokenizer,
    preprocess_for_quantization,
)

OLDER = {
    "--pre_quantization_optimization": "--quant_algo rotation, or smoothquant",
    "--pre_optimization_config_file_path": "--quant_algo_config_file ALGORITHM FILE",
    "--no_weight_matrix_merge": "nothing: matrices are never merged",
    "--weight_matrix_merge": "nothing: serving programs merge matrices themselves",
}
"""Arguments of earlier versions -> what says it today."""
NEEDS = {
    "import_model_dir": "model_reload",
    "json_path": "params_load",
    "safetensors_path": "params_load",
    "save_dir": "params_save",
    "min_kv_scale": "kv_cache_dtype",
    "kv_cache_post_rope": "kv_cache_dtype",
    "native_linear_mode": "enable_native_inference",
    "quant_algo_config_file": "quant_algo",
    "pack_method": "model_export",
    "export_weight_format": "model_export",
    "custom_mode": "model_export",
    "eval_data_dir": "use_mlperf_rouge",
    "metrics_output_dir": "save_metrics_to_csv",
    "num_fewshot": "tasks",
    "apply_chat_template": "tasks",
    "eval_batch_size": "tasks",
    "max_eval_batch_size": "tasks",
    "ppl_eval_for_kv_cache_context_size": "use_ppl_eval_for_kv_cache",
    "ppl_eval_for_kv_cache_sample_size": "use_ppl_eval_for_kv_cache",
    "ppl_eval_for_kv_cache_patch_size": "use_ppl_eval_for_kv_cache",
}
"""Arguments that say something only beside another one."""
NOT_FROM_FILES = (
    "multi_gpu multi_device model_attn_implementation data_type dataset seq_len batch_size num_calib_data params_save "
    "enable_native_inference torch_compile tasks save_metrics_to_csv use_ppl_eval_for_kv_cache"
)
"""Arguments about a model in memory, which is never there from file to file."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_dir", required=True, help="a folder, or a name on the hub")
    add("--revision", help="branch, tag or commit of a model on the hub")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--multi_gpu", nargs="?", const="auto", default=None, choices=["auto", "balanced"])
    add("--multi_device", action="store_true")
    add("--model_attn_implementation", default="eager", choices=["eager", "sdpa", "flash_attention_2"])
    add("--data_type", default="auto", choices=["auto", "float16", "bfloat16", "float32"])
    add("--trust_remote_code", action=argparse.BooleanOptionalAction, default=False)
    add("--no_trust_remote_code", dest="trust_remote_code", action="store_false")
    add("--dataset", default="pileval", help="a text file, or the name of a dataset")
    add("--seq_len", type=int, default=512)
    add("--batch_size", type=int, default=1)
    add("--num_calib_data", type=int, default=512)
    add("--skip_quantization", action="store_true")
    add("--quant_flow", default="standard", choices=["standard", "file2file", "per_block"])
    add("--file2file_quantization", action="store_true", help="of older scripts: --quant_flow file2file")
    add("--gpu_resident_blocks", type=int, default=0, help="of --quant_flow per_block")
    add("--group_size", type=int, help="of older scripts: part of a scheme's name now, as in uint4_wo_128")
    add("--quant_scheme", help="a scheme, or its name in older versions (w_uint4_per_group_asym)")
    add("--layer_quant_scheme", action="append", nargs=2, metavar=("PATTERN", "SCHEME"))
    add("--kv_cache_dtype", "--kv_cache_quant_scheme", choices=["fp8"])
    add("--min_kv_scale", type=float, default=0.0)
    add("--kv_cache_post_rope", action="store_true")
    add("--attention_dtype", choices=["fp8"])
    add("--quant_algo", type=lambda names: names.split(","), metavar="alg1,alg2")
    add("--quant_algo_config_file", action="append", nargs=2, metavar=("ALGORITHM", "FILE"))
    add("--exclude_layers", nargs="*", default=None, help="patterns; without any, nothing is excluded")
    add("--no_keep_prequantized_layers", action="store_true")
    add("--enable_native_inference", action="store_true")
    add("--native_linear_mode", default="auto", choices=["auto", "fp8_per_tensor"])
    add("--params_load", action="store_true", help="load what --params_save wrote: --json_path, --safetensors_path")
    add("--json_path")
    add("--safetensors_path")
    add("--model_reload", action="store_true", help="evaluate a quantized folder")
    add("--import_model_dir", help="the quantized folder, where it is not --model_dir")
    add("--model_export", action="append", choices=["hf_format", "onnx", "gguf"])
    add("--custom_mode", default="quark", choices=["quark", "awq", "fp8"])
    add("--pack_method", default="reorder", choices=["order", "reorder"])
    add("--export_weight_format", default="real_quantized", choices=["fake_quantized", "real_quantized"])
    add("--output_dir", default="exported_model")
    add("--torch_compile", action="store_true", help="compile the model before it is evaluated")
    add("--params_save", action="store_true", help="write config and tensors of any module into --save_dir")
    add("--save_dir", default="model_params")
    add("--skip_evaluation", action="store_true")
    add("--evaluation_dataset", default="wikitext", help="a text file, or wikitext")
    add("--num_eval_data", type=int, default=-1)
    add("--use_ppl_eval_model", action="store_true", help="always on, unless --skip_evaluation")
    add("--use_mlperf_rouge", action="store_true")
    add("--eval_data_dir")
    add("--use_tp", action="store_true")
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
    args, unknown = parser.parse_known_args(words)
    if unknown:
        today = OLDER.get(unknown[0].partition("=")[0])
        known = [name for action in parser._actions for name in action.option_strings]
        possible = f"Possible: {today}." if today else did_you_mean(unknown[0], known)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. {possible}")
    if args.quant_scheme in OLD_SCHEMES:
        args.quant_scheme = OLD_SCHEMES[args.quant_scheme]
    if args.group_size is not None:  # of older scripts; the group size is part of the name of a scheme now
        size = "per_channel" if args.group_size == -1 else args.group_size
        args.quant_scheme = re.sub(r"_\d+$", f"_{size}", args.quant_scheme or "")
        mx = args.group_size == 32 and args.quant_scheme.startswith("mx")  # which has no other groups
        if not mx and not args.quant_scheme.endswith(f"_{size}"):
            parser.error(f"--group_size {args.group_size} goes with a scheme whose name has one, as uint4_wo_128")
    schemes = LLMTemplate.get_supported_schemes()
    if args.quant_scheme is not None and args.quant_scheme not in schemes:
        parser.error(f"--quant_scheme: no scheme {args.quant_scheme!r}. {did_you_mean(args.quant_scheme, schemes)}")
    if args.params_load and not (args.json_path and args.safetensors_path):
        parser.error("--params_load needs --json_path and --safetensors_path")
    if args.revision is not None and Path(args.model_dir).is_dir():
        parser.error(f"--revision {args.revision} is of a model on the hub; {args.model_dir} is a folder")
    if args.custom_mode != "quark" and args.export_weight_format == "fake_quantized":
        parser.error("--export_weight_format fake_quantized goes with --custom_mode quark only")
    if args.quant_scheme is None and not (args.skip_quantization or args.params_load or args.model_reload):
        parser.error(f"--quant_scheme is needed, or --skip_quantization. Possible: {', '.join(schemes)}")
    if args.quant_flow == "per_block":
        parser.error(
            "--quant_flow per_block: possible: `quark quantize MODEL --scheme SCHEME --calib FILE --stream`, which "
            "holds one block of the model at a time, with a GPU or without"
        )
    args.file2file_quantization |= args.quant_flow == "file2file"
    if args.file2file_quantization and {*(args.model_export or [])} - {"hf_format"}:
        parser.error(f"--quant_flow file2file writes hf_format only, not {', '.join(args.model_export)}")
    for name, other in NEEDS.items():
        if getattr(args, name) != parser.get_default(name) and not getattr(args, other):
            print(f"[INFO] --{name} has no effect without --{other}.")
    idle = [f"--{name}" for name in NOT_FROM_FILES.split() if getattr(args, name) != parser.get_default(name)]
    if args.file2file_quantization and idle:
        print(f"[INFO] From file to file no model is in memory. Without effect: {', '.join(idle)}.")
    return args


def quant_config(args: argparse.Namespace, model_type: str) -> QConfig:
    files = args.quant_algo_config_file or []
    config = LLMTemplate.get(model_type).get_config(
        scheme=args.quant_scheme,
        algorithm=args.quant_algo,
        kv_cache_scheme=args.kv_cache_dtype,
        min_kv_scale=args.min_kv_scale if args.kv_cache_dtype else 0.0,
        attention_scheme=args.attention_dtype,
        layer_config=dict(args.layer_quant_scheme or []),
        exclude_layers=args.exclude_layers,
        algo_configs={name: load_quant_algo_config_from_file(file) for name, file in files},
    )
    config.keep_prequantized_layers = not args.no_keep_prequantized_layers
    config.kv_cache_post_rope = args.kv_cache_post_rope and args.kv_cache_dtype is not None
    return config


def quantized_model(args: argparse.Namespace, profiler: GlobalProfiler) -> torch.nn.Module:
    if args.model_reload:
        return import_model_from_safetensors(
            None,
            args.import_model_dir or args.model_dir,
            args.multi_device,
            args.trust_remote_code,
            args.model_attn_implementation,
            args.device,
            args.multi_gpu,
        )
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
    check_compatibility_before_quantization(model)
    if args.params_load:
        return load_params(model, json_path=args.json_path, safetensors_path=args.safetensors_path)
    if args.skip_quantization:
        return model
    preprocess_for_quantization(model)
    quantizer = ModelQuantizer(quant_config(args, model.config.model_type), args.multi_device)
    model = quantizer.quantize_model(model, calibration_data(args))
    options = RuntimeOptions(native_linear_mode=args.native_linear_mode) if args.enable_native_inference else None
    return quantizer.freeze(model, runtime_options=options)


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
    native = disable_native_inference(model) if formats else 0  # a file holds codes, not the layout of a kernel
    if "hf_format" in formats:
        with profiler.scope(ProfileStep.EXPORT_HF_SAFETENSORS):
            export_safetensors(model, args.output_dir, args.custom_mode, args.export_weight_format, args.pack_method)
            get_tokenizer(args.model_dir, args.seq_len).save_pretrained(args.output_dir)
    if "onnx" in formats:
        with profiler.scope(ProfileStep.EXPORT_ONNX):
            batch = next(iter(calibration_data(args)))
            export_onnx(model, args.output_dir, batch, uint4_int4_flag="int4" in (args.quant_scheme or ""))
    if "gguf" in formats:
        with profiler.scope(ProfileStep.EXPORT_GGUF):
            export_gguf(model, args.output_dir, model.config.model_type, args.model_dir)
    if native:
        enable_native_inference(model, runtime_options=RuntimeOptions(native_linear_mode=args.native_linear_mode))


def main(words: list[str] | None = None) -> dict[str, float]:
    args = arguments(words)
    if args.use_tp:
        TPDeviceManager.tp_mesh_init()
    if args.use_mlperf_rouge and not args.skip_evaluation:
        mlperf_rouge_eval()  # which says before the work that there is none
    if args.revision is not None:
        import huggingface_hub

        args.model_dir = huggingface_hub.snapshot_download(args.model_dir, revision=args.revision)
    profiler = GlobalProfiler(Path(args.output_dir).with_name("quark_profile.yaml"))
    if args.file2file_quantization:
        stored = json.loads((Path(args.model_dir) / "config.json").read_text(encoding="utf-8"))
        quantizer = ModelQuantizer(quant_config(args, stored["model_type"]))
        converters = LLMTemplate.get(stored["model_type"]).f2f_weight_converters
        quantizer.direct_quantize_checkpoint(args.model_dir, args.output_dir, weight_converters=converters)
        return {}
    model = quantized_model(args, profiler)
    export(args, model, profiler)
    if args.params_save:
        save_params(model, model_type=model.config.model_type, export_dir=args.save_dir)
    if args.torch_compile:
        model = torch.compile(model)
    if args.skip_evaluation:
        return {}
    args.use_ppl_eval_model = True
    with profiler.scope(ProfileStep.MODEL_EVALUATION):
        return eval_model(args, model, args.device, args.save_metrics_to_csv, args.metrics_output_dir)


if __name__ == "__main__":
    try:
        main()
    except QuarkError as error:
        sys.exit(f"quantize_quark.py: {error}")
