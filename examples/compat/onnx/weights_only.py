"""Quantizes only weights: MatMulNBits nodes of 4 bits, by rounding or HQQ, or int8 behind a DequantizeLinear.

python examples/compat/onnx/weights_only.py --hqq
python examples/compat/onnx/weights_only.py --config INT8_TRANSFORMER_DEFAULT
"""

from __future__ import annotations

import copy

from compat_data import float_language_model, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "weights_only.onnx", language_model=True)
    arguments.add_argument("--config", default="MATMUL_NBITS", choices=["MATMUL_NBITS", "INT8_TRANSFORMER_DEFAULT"])
    arguments.add_argument("--hqq", action="store_true", help="search zero points that lose less")
    args = arguments.parse_args(words)

    quant_config = copy.deepcopy(get_default_config(args.config))
    quant_config.include_cle = False
    if args.config == "MATMUL_NBITS":
        quant_config.extra_options["MatMulNBitsParams"]["AccuracyLevel"] = 0
        if args.hqq:
            quant_config.extra_options["MatMulNBitsParams"]["Algorithm"] = "HQQ"
    else:
        quant_config.op_types_to_quantize = ["MatMul"]
        quant_config.extra_options["WeightsOnly"] = True
    config = Config(global_quant_config=quant_config)
    print(f"The configuration for quantization is {config}")

    source = float_language_model(args)
    ModelQuantizer(config).quantize_model(source, args.output_model_path)
    return report(args, source)


if __name__ == "__main__":
    main()
