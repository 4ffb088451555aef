"""Quantizes a classifier to int8 with one scale for each weight, its channels equalized across layers first.

python examples/compat/onnx/cle.py --include_cle
"""

from __future__ import annotations

from compat_data import image_reader, parser, report

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.algorithm import CLEConfig
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, QLayerConfig


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "cle.onnx")
    arguments.add_argument("--include_cle", action="store_true", help="without it, the layers are only quantized")
    arguments.add_argument("--cle_steps", type=int, default=1)
    args = arguments.parse_args(words)

    # Channels whose ranges sum to less than 0.5 would keep their scale; those of a small model all do.
    equalize = CLEConfig(cle_steps=args.cle_steps, cle_scale_use_threshold=False)
    activation, weight = Int8Spec(), Int8Spec()
    activation.set_symmetric(False)
    activation.set_calibration_method(CalibMethod.MinMax)
    weight.set_calibration_method(CalibMethod.MinMax)
    config = QConfig(
        global_config=QLayerConfig(activation=activation, weight=weight),
        algo_config=[equalize] if args.include_cle else [],
        AlignSlice=False,
        FoldRelu=True,
        AlignConcat=True,
    )
    print(f"The configuration for quantization is {config}")
    ModelQuantizer(config).quantize_model(args.input_model_path, args.output_model_path, image_reader(args))
    return report(args, args.input_model_path)


if __name__ == "__main__":
    main()
