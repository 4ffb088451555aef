"""Quantizes to 16-bit floats: bfloat16 with casts or with Q/DQ pairs, or float16, or converts a whole model.

python examples/compat/onnx/float16_bf16.py --config BF16 --with_cast
python examples/compat/onnx/float16_bf16.py --config convert_fp32_to_fp16
"""

from __future__ import annotations

import argparse

from compat_data import image_reader, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.algorithm import AdaQuantConfig
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.spec import BFloat16Spec, CalibMethod, Float16Spec, QLayerConfig
from quark.onnx.tools import convert_fp32_to_fp16


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "float16_bf16.onnx")
    arguments.add_argument("--config", default="BF16", choices=["BF16", "FP16", "convert_fp32_to_fp16"])
    arguments.add_argument("--with_cast", action="store_true", help="Cast nodes in the place of pairs")
    arguments.add_argument("--use_adaquant", action="store_true", help="train the weights")
    args = arguments.parse_args(words)

    if args.config == "convert_fp32_to_fp16":
        convert_fp32_to_fp16.convert(
            argparse.Namespace(input=args.input_model_path, output=args.output_model_path, keep_io_types=True)
        )
        return report(args, args.input_model_path)
    made = BFloat16Spec() if args.config == "BF16" else Float16Spec()
    made.set_calibration_method(CalibMethod.MinMax)
    config = QConfig(
        global_config=QLayerConfig(activation=made, weight=made),
        algo_config=[AdaQuantConfig(num_iterations=200, learning_rate=1e-6)] if args.use_adaquant else [],
        BF16QDQToCast=args.with_cast,
    )
    print(f"The configuration for quantization is {config}")
    ModelQuantizer(config).quantize_model(args.input_model_path, args.output_model_path, image_reader(args))
    return report(args, args.input_model_path)


if __name__ == "__main__":
    main()
