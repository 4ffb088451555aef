"""Sessions of stock ONNX Runtime for exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime


def session(file: Path) -> Any:
    """With the defaults."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def exact_session(file: Path) -> Any:
    """Computing what the file says: floats stay float32, float weights and biases of a Conv are not rounded."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    kept = ["WeightBiasQuantization"]
    return onnxruntime.InferenceSession(
        str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=kept
    )
