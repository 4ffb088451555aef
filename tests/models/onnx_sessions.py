"""Sessions of stock ONNX Runtime for exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from quark.onnx.graph.sessions import integer_kernels_are_exact


def exact_options() -> onnxruntime.SessionOptions:
    """The defaults where integer kernels are exact; else decoded values, so that what the file says is measured.

    Integer operators that a file has by name (MatMulInteger, DynamicQuantizeLSTM) get uint8 weights there.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not integer_kernels_are_exact():
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def session(file: Path) -> Any:
    """With the defaults."""
    options = exact_options()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def exact_session(file: Path) -> Any:
    """Computing what the file says: floats stay float32, float weights and biases of a Conv are not rounded."""
    options = exact_options()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    kept = ["WeightBiasQuantization"]
    return onnxruntime.InferenceSession(
        str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=kept
    )


def in_exact_kernels(made: onnx.ModelProto) -> onnx.ModelProto:
    """The model with int8 weights of DynamicQuantizeLSTM as uint8 ones of equal values: sums with int8 need VNNI."""
    changed, names = onnx.ModelProto(), set[str]()
    changed.CopyFrom(made)
    bodies = [attribute.g for node in changed.graph.node for attribute in node.attribute if attribute.HasField("g")]
    for node in (node for graph in (changed.graph, *bodies) for node in graph.node):
        names |= {node.input[i] for i in (1, 2, 9, 11)} if node.op_type == "DynamicQuantizeLSTM" else set()
    for tensor in (tensor for graph in (changed.graph, *bodies) for tensor in graph.initializer):
        if tensor.name in names and tensor.data_type == onnx.TensorProto.INT8:
            codes = numpy_helper.to_array(tensor).astype(np.int16) + 128
            tensor.CopyFrom(numpy_helper.from_array(codes.astype(np.uint8), tensor.name))
    return changed
