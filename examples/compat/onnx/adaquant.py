"""Quantizes a classifier to int8, and trains weights and biases with the rounding in the loop.

python examples/compat/onnx/adaquant.py --use_adaquant --num_iterations 500
"""

from __future__ import annotations

from compat_data import image_reader, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.algorithm import AdaQuantConfig
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, QLayerConfig


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "adaquant.onnx")
    arguments.add_argument("--use_adaquant", action="store_true", help="without it, the layers are only quantized")
    arguments.add_argument("--num_iterations", type=int, default=1000)
    arguments.add_argument("--learning_rate", type=float, default=1e-5)
    args = arguments.parse_args(words)

    tuning = AdaQuantConfig(num_iterations=args.num_iterations, learning_rate=args.learning_rate)
    activation, weight = Int8Spec(), Int8Spec()
    activation.set_symmetric(False)
    activation.set_calibration_method(CalibMethod.MinMax)
    weight.set_calibration_method(CalibMethod.MinMax)
    config = QConfig(
        global_config=QLayerConfig(activation=activation, weight=weight),
        algo_config=[tuning] if args.use_adaquant else [],
        AlignSlice=False,
        FoldRelu=True,
        AlignConcat=True,
    )
    print(f"The configuration for quantization is {config}")
    ModelQuantizer(config).quantize_model(args.input_model_path, args.output_model_path, image_reader(args))
    return report(args, args.input_model_path)


if __name__ == "__main__":
    main()
