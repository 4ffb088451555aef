"""Quantizes to types that need custom operators, and runs the model in both ways: with a library, and without.

python examples/compat/onnx/custom_ops.py --activation BFloat16 --weight BFP16

Each custom operator is also a function in the file, so the library is only faster, not needed.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from compat_data import digits, image_reader, outputs, parser, report

from quark.onnx import ModelQuantizer, get_library_path
from quark.onnx.operators.custom_ops import _COP_DOMAIN
from quark.onnx.quantization.config import spec
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.spec import QLayerConfig


def main(words: list[str] | None = None) -> dict[str, float]:
    arguments = parser(__doc__, "custom_ops.onnx")
    arguments.add_argument("--activation", default="BFP16", help="BFP16, MX9, BFloat16, ...")
    arguments.add_argument("--weight", default="BFP16")
    arguments.add_argument("--device", default="CPU", help="whose library: CPU, ROCM or CUDA")
    args = arguments.parse_args(words)

    layer = QLayerConfig(
        activation=getattr(spec, f"{args.activation}Spec")(), weight=getattr(spec, f"{args.weight}Spec")()
    )
    config = QConfig(global_config=layer)
    print(f"The configuration for quantization is {config}")
    ModelQuantizer(config).quantize_model(args.input_model_path, args.output_model_path, image_reader(args))

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path(args.device))
    feed = {"image": digits("heldout")[0]}
    by_function, by_library = outputs(args.output_model_path, feed), outputs(args.output_model_path, feed, options)
    nodes = onnx.load(args.output_model_path).graph.node
    custom = sum(node.domain == _COP_DOMAIN for node in nodes)
    return report(args, args.input_model_path, custom=custom, differ=int(np.sum(by_function != by_library)))


if __name__ == "__main__":
    main()
