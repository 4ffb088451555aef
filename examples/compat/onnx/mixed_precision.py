"""Quantizes to 16 bits, and to 8 bits the layers that can bear it: as many as the accuracy on the data allows.

python examples/compat/onnx/mixed_precision.py --top1_acc_target 0.02
python examples/compat/onnx/mixed_precision.py --l2_target 0.05
"""

from __future__ import annotations

import numpy as np
from compat_data import digits, image_reader, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.algorithm import AutoMixprecisionConfig
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, Int16Spec, QLayerConfig, QTensorConfig


def top1_accuracy(results: list[list[np.ndarray]]) -> float:
    """Share of the calibration images that are classified rightly."""
    labels = digits("calibration")[1]
    found = np.concatenate([result[0].reshape(-1, 10) for result in results]).argmax(1)
    return float((found == labels[: len(found)]).mean())


def minmax(made: type[QTensorConfig]) -> QTensorConfig:
    return made(calibration_method=CalibMethod.MinMax)


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "mixed_precision.onnx")
    arguments.add_argument("--config", default="S16S16_MIXED_S8S8", choices=["S16S16_MIXED_S8S8", "S8S8"])
    arguments.add_argument("--top1_acc_target", type=float, default=0.02, help="how much accuracy may be lost")
    arguments.add_argument("--l2_target", type=float, help="how far the outputs may move, instead")
    args = arguments.parse_args(words)

    search = AutoMixprecisionConfig(
        QLayerConfig(activation=minmax(Int8Spec), weight=minmax(Int8Spec)),
        metric_evaluate_fn=None if args.l2_target else top1_accuracy,
        metric_threshold=args.l2_target or args.top1_acc_target,
        metric_optimize_object="speed",
    )
    mixed = args.config == "S16S16_MIXED_S8S8"
    made = Int16Spec if mixed else Int8Spec
    layer = QLayerConfig(activation=minmax(made), weight=minmax(made))
    config = QConfig(layer, algo_config=[search] if mixed else [], Int32Bias=False, Int16Bias=False)
    print(f"The configuration for quantization is {config}")
    ModelQuantizer(config).quantize_model(args.input_model_path, args.output_model_path, image_reader(args))
    return report(args, args.input_model_path)


if __name__ == "__main__":
    main()
