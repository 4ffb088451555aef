"""Quantizes to block formats, BFP16 or one of MX, with or without AdaQuant.

python examples/compat/onnx/block_formats.py --config BFP16 --use_adaquant
python examples/compat/onnx/block_formats.py --config MXFP8E4M3
"""

from __future__ import annotations

from compat_data import image_reader, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import spec
from quark.onnx.quantization.config.algorithm import AdaQuantConfig
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.spec import QLayerConfig

FORMATS = ("BFP16", "MX4", "MX6", "MX9", "MXFP4E2M1", "MXFP6E2M3", "MXFP6E3M2", "MXFP8E4M3", "MXFP8E5M2", "MXInt8")


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "block_formats.onnx")
    arguments.add_argument("--config", default="BFP16", choices=FORMATS)
    arguments.add_argument("--use_adaquant", action="store_true", help="train the weights")
    arguments.add_argument("--num_iterations", type=int, default=200)
    args = arguments.parse_args(words)

    tuning = AdaQuantConfig(data_size=100, learning_rate=1e-6, num_iterations=args.num_iterations)
    made = getattr(spec, f"{args.config}Spec")
    config = QConfig(
        QLayerConfig(activation=made(), weight=made()),
        algo_config=[tuning] if args.use_adaquant else [],
    )
    print(f"The configuration for quantization is {config}")
    ModelQuantizer(config).quantize_model(args.input_model_path, args.output_model_path, image_reader(args))
    return report(args, args.input_model_path)


if __name__ == "__main__":
    main()
