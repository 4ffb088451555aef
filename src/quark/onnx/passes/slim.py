"""SimplifyModelOptions: onnxslim simplifies the model first, with these options; the result must compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from quark.errors import ConfigError, FormatError, NotSupportedError, did_you_mean, require_packages
from quark.onnx.graph.model_file import name_nodes, to_proto
from quark.onnx.graph.proto_file import reason
from quark.onnx.passes.same_outputs import require_same
from quark.onnx_ops.saving import PROTOBUF_LIMIT, weight_bytes

OPTIONS = (
    "input_shapes",
    "model_check",
    "model_check_inputs",
    "no_shape_infer",
    "save_as_external_data",
    "size_threshold",
    "skip_fusion_patterns",
    "skip_optimizations",
    "verbose",
)
"""Parameters of `onnxslim.slim` that leave inputs, outputs and element types as they are, and write no file."""


def check_slim_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a parameter that `onnxslim.slim` does not have, or that makes another model."""
    for key in options:
        if key not in OPTIONS:
            raise ConfigError(f"SimplifyModelOptions: {key!r}. {did_you_mean(str(key), OPTIONS)}")


def slim(model: ir.Model, options: Mapping[str, Any]) -> int:
    """Simplify a model by onnxslim; return how many nodes are gone.

    Args:
        model: The model, changed in place.
        options: Keywords of `onnxslim.slim`.

    Raises:
        MissingDependencyError: onnxslim is absent.
        NotSupportedError: The model is over 2 GB, in which onnxslim writes files.
        FormatError: onnxslim fails on the model.
        StructureError: The simplified model computes something else.
    """
    require_packages("SimplifyModelOptions", "slim", "onnxslim")
    import onnxslim  # of an extra of its own, and slow

    if weight_bytes(model) > PROTOBUF_LIMIT:
        raise NotSupportedError("SimplifyModelOptions is for models up to 2 GB. Possible: leave it out.")
    before = len(model.graph)
    try:
        # A copy of the weights: onnxslim changes what it is given.
        fresh = ir.from_proto(onnxslim.slim(to_proto(model), **options))
    except Exception as error:  # of any kind: it has no errors of its own
        raise FormatError(f"onnxslim does not simplify the model: {reason(error)}") from error
    name_nodes(fresh)
    require_same(model, fresh, "onnxslim does not keep what the model computes")
    model.graph, model.ir_version = fresh.graph, fresh.ir_version
    model.opset_imports.update(fresh.opset_imports)
    return before - len(model.graph)
