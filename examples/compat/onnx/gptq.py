"""Quantizes the weights of a language model column by column, each making up for the errors of those before.

python examples/compat/onnx/gptq.py --use_gptq
python examples/compat/onnx/gptq.py --config MATMUL_NBITS --use_gptq
"""

from __future__ import annotations

import copy

from compat_data import float_language_model, parser, report, text_reader

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "gptq.onnx", language_model=True)
    arguments.add_argument("--config", default="MATMUL_NBITS", choices=["MATMUL_NBITS", "INT8_TRANSFORMER_DEFAULT"])
    arguments.add_argument("--use_gptq", action="store_true", help="without it, weights are rounded to the nearest")
    args = arguments.parse_args(words)

    quant_config = copy.deepcopy(get_default_config(args.config))
    quant_config.extra_options["OpTypesToExcludeOutputQuantization"] = ["MatMul", "Gemm"]
    quant_config.include_cle = False
    if args.config == "MATMUL_NBITS":
        quant_config.extra_options["MatMulNBitsParams"]["AccuracyLevel"] = 0
        quant_config.extra_options["MatMulNBitsParams"]["Algorithm"] = "GPTQ" if args.use_gptq else "DEFAULT"
    else:
        quant_config.extra_options["UseGPTQ"] = args.use_gptq
        quant_config.extra_options["GPTQParams"] = {
            "MSE": False, "GroupSize": 128, "ActOrder": False, "PerChannel": True,
        }  # fmt: skip
    config = Config(global_quant_config=quant_config)
    print(f"The configuration for quantization is {config}")

    source = float_language_model(args)
    ModelQuantizer(config).quantize_model(source, args.output_model_path, text_reader(args))
    return report(args, source)


if __name__ == "__main__":
    main()
