"""Quantizes a language model to int8, its residual stream rotated first so that no channel is an outlier.

python examples/compat/onnx/quarot.py --include_rotation --include_sq
"""

from __future__ import annotations

import copy
import json

from compat_data import LANGUAGE_MODEL, float_language_model, parser, report, text_reader
from onnxruntime.quantization.calibrate import CalibrationMethod

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "quarot.onnx", language_model=True)
    width = json.loads((LANGUAGE_MODEL / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    arguments.add_argument("--config", default="INT8_TRANSFORMER_DEFAULT", help="the name of a configuration")
    arguments.add_argument("--include_rotation", action="store_true")
    arguments.add_argument("--hidden_size", type=int, default=width, help="size of the rotation")
    arguments.add_argument("--use_random_had", action="store_true", help="random signs in the Hadamard matrix")
    arguments.add_argument("--r_config_path", default="", help="JSON: what is rotated; without it, it is found")
    arguments.add_argument("--include_sq", action="store_true", help="SmoothQuant, too")
    arguments.add_argument("--sq_alpha", type=float, default=0.5)
    arguments.add_argument("--use_moving_average", action="store_true")
    arguments.add_argument("--calib_method", default="", help="percentile+99.99, or nothing: the whole range")
    args = arguments.parse_args(words)

    quant_config = copy.deepcopy(get_default_config(args.config))
    options = quant_config.extra_options
    quant_config.optimize_model = False
    quant_config.include_cle = False
    quant_config.include_sq = args.include_sq
    quant_config.include_rotation = args.include_rotation
    options |= {"RemoveInputInit": False, "SimplifyModel": False, "CopySharedInit": None}
    options |= {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"], "CalibMovingAverage": args.use_moving_average}
    options |= {"ActivationSymmetric": True, "MatMulConstBOnly": True, "TmpDir": "."}
    if args.include_sq:
        options["SmoothAlpha"] = args.sq_alpha
    if args.include_rotation:
        options |= {"RMatrixDim": args.hidden_size, "UseRandomHad": args.use_random_had}
        options["RConfigPath"] = args.r_config_path
    if args.calib_method.startswith("percentile"):
        quant_config.calibrate_method = CalibrationMethod.Percentile
        options["Percentile"] = float(args.calib_method.split("+")[-1])
    config = Config(global_quant_config=quant_config)
    print(f"The configuration for quantization is {config}")

    source = float_language_model(args, outliers=True)
    ModelQuantizer(config).quantize_model(source, args.output_model_path, text_reader(args))
    return report(args, source)


if __name__ == "__main__":
    main()
