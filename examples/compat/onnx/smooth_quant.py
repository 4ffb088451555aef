"""Quantizes a language model to int8, the outliers of its activations moved into the weights first.

python examples/compat/onnx/smooth_quant.py --include_sq --sq_alpha 0.5
"""

from __future__ import annotations

import copy

from compat_data import float_language_model, parser, report, text_reader

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "smooth_quant.onnx", language_model=True)
    arguments.add_argument("--config", default="INT8_TRANSFORMER_DEFAULT", help="the name of a configuration")
    arguments.add_argument("--include_sq", action="store_true", help="without it, the model is only quantized")
    arguments.add_argument("--sq_alpha", type=float, default=0.5)
    args = arguments.parse_args(words)

    quant_config = copy.deepcopy(get_default_config(args.config))
    quant_config.extra_options["OpTypesToExcludeOutputQuantization"] = ["MatMul", "Gemm"]
    quant_config.include_cle = False
    quant_config.include_sq = args.include_sq
    if args.include_sq:
        quant_config.extra_options["SmoothAlpha"] = args.sq_alpha
    config = Config(global_quant_config=quant_config)
    print(f"The configuration for quantization is {config}")

    source = float_language_model(args, outliers=True)
    ModelQuantizer(config).quantize_model(source, args.output_model_path, text_reader(args))
    return report(args, source)


if __name__ == "__main__":
    main()
