"""The cost of a quantized model: scores, comparisons, what ONNX Runtime fuses, recovery."""
