"""torch-llm-ptq: a language model is quantized, written and evaluated."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quark.base.json_objects import plain_json
from quark.errors import ConfigError

KV_CACHE = (
    "fp8", "fp8_dynamic", "int8_per_tensor_static", "int8_per_tensor_dynamic", "int8_per_token", "mxfp8",
    "fp6e2m3_per_group", "mxfp6_e2m3", "fp6e3m2_per_group", "mxfp6_e3m2", "fp4_per_group", "mxfp4",
)  # fmt: skip


def declare_llm(add: Callable[..., Any]) -> None:
    """Declare the arguments of torch-llm-ptq."""
    add("--model_dir", required=True, help="a folder, or a name on the hub")
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    add("--multi_device", action="store_true")
    add("--dataset", default="pileval", help="a text file, or the name of a dataset")
    add("--seq_len", type=int, default=512)
    add("--batch_size", type=int, default=1)
    add("--num_calib_data", type=int, default=512)
    add("--template_file", help="a JSON file with the arguments of LLMTemplate")
    add("--quant_scheme")
    add("--layer_quant_scheme", action="append", nargs=2, metavar=("PATTERN", "QUANT_SCHEME"))
    add("--kv_cache_dtype", "--kv_cache_quant_scheme", choices=KV_CACHE)
    add("--quant_algo", type=lambda names: names.split(","), metavar="alg1,alg2")
    add("--exclude_layers", nargs="*", help="patterns; without any, nothing is excluded")
    add("--output_dir", default="exported_model")
    add("--skip_evaluation", action="store_true")
    add("--evaluation_dataset", default="wikitext", help="a text file, or wikitext")
    add("--trust_remote_code", action="store_true", help="run code of the model's folder; there it is the default")
    add("--no_trust_remote_code", dest="trust_remote_code", action="store_false")


def torch_llm_ptq(args: argparse.Namespace) -> None:
    """Quantize a language model, write its folder, and evaluate it."""
    import torch

    from quark.compat.llm_scripts.calibration_text import get_calib_dataloader
    from quark.compat.llm_scripts.evaluation import eval_model
    from quark.compat.llm_scripts.model_loading import get_model, get_tokenizer
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.template_file is not None:
        LLMTemplate.register_template(_template(args.template_file))
    code = args.trust_remote_code
    model: Any
    model, _ = get_model(args.model_dir, "auto", device, False, args.multi_device, trust_remote_code=code)
    tokenizer = get_tokenizer(args.model_dir, args.seq_len, trust_remote_code=code)
    config = LLMTemplate.get(model.config.model_type).get_config(
        scheme=args.quant_scheme, algorithm=args.quant_algo, kv_cache_scheme=args.kv_cache_dtype,
        layer_config=dict(args.layer_quant_scheme or []), exclude_layers=args.exclude_layers,
    )  # fmt: skip
    data = get_calib_dataloader(args.dataset, tokenizer, args.batch_size, args.num_calib_data, args.seq_len)
    quantizer = ModelQuantizer(config, args.multi_device)
    model = quantizer.freeze(quantizer.quantize_model(model, data))
    export_safetensors(model, args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    if not args.skip_evaluation:
        eval_model(argparse.Namespace(**vars(args), use_ppl_eval_model=True), model, device)


def _template(file: str) -> Any:
    """The template of a JSON file."""
    from quark.torch import LLMTemplate
    from quark.torch.config.named_algorithms import algo_config_from_dict

    try:
        fields = plain_json(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--template_file {file} cannot be read as JSON: {error}.") from None
    algorithms = fields.pop("algorithm_configs", {}) if isinstance(fields, dict) else None
    if not isinstance(algorithms, dict) or "model_type" not in fields:
        raise ConfigError(f"--template_file {file} has no object with model_type and other arguments of LLMTemplate.")
    made = {name: algo_config_from_dict(entry) for name, entry in algorithms.items()}
    return LLMTemplate(**fields, algorithm_configs=made)
