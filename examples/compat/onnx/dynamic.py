"""Quantizes weights now, and activations by the range that each input has at run time: no calibration data.

python examples/compat/onnx/dynamic.py --output_model_path dynamic.onnx
"""

from __future__ import annotations

from compat_data import float_language_model, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "dynamic.onnx", language_model=True)
    arguments.add_argument("--config", default="UINT8_DYNAMIC_QUANT", help="the name of a configuration")
    args = arguments.parse_args(words)

    config = Config(global_quant_config=get_default_config(args.config))
    print(f"The configuration for quantization is {config}")
    source = float_language_model(args)
    ModelQuantizer(config).quantize_model(source, args.output_model_path)
    return report(args, source)


if __name__ == "__main__":
    main()
