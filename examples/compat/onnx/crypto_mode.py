"""Quantizes a model that never lies on the disk in clear: a ModelProto in, a ModelProto out.

python examples/compat/onnx/crypto_mode.py --output_model_path digits.onnx
"""

from __future__ import annotations

import onnx
from compat_data import image_reader, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.spec import QLayerConfig, XInt8Spec


def main(words: list[str] | None = None) -> dict[str, float]:
    args = parser(__doc__, "crypto_mode.onnx").parse_args(words)

    layer = QLayerConfig(activation=XInt8Spec(), weight=XInt8Spec())
    config = QConfig(global_config=layer, CryptoMode=True, EnableNPUCnn=True)
    print(f"The configuration for quantization is {config}")
    model = onnx.load(args.input_model_path)  # a script with secrets would decrypt it here
    quantized = ModelQuantizer(config).quantize_model(model, calibration_data_reader=image_reader(args))
    onnx.save(quantized, args.output_model_path)  # and encrypt it here
    return report(args, args.input_model_path)


if __name__ == "__main__":
    main()
