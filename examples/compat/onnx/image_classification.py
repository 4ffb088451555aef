"""Quantizes a classifier by the name of a configuration: XINT8, A8W8, A16W8, U8S8_AAWS, ...

python examples/compat/onnx/image_classification.py --config A8W8 --output_model_path digits_a8w8.onnx
python examples/compat/onnx/image_classification.py --calibration_dataset_path folder/with/a/folder/for/each/class
"""

from __future__ import annotations

from compat_data import image_reader, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.config import QConfig


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "image_classification.onnx")
    arguments.add_argument("--config", default="XINT8", help="the name of a configuration")
    args = arguments.parse_args(words)

    config = QConfig.get_default_config(args.config)
    print(f"The configuration for quantization is {config}")
    ModelQuantizer(config).quantize_model(args.input_model_path, args.output_model_path, image_reader(args))
    return report(args, args.input_model_path)


if __name__ == "__main__":
    main()
