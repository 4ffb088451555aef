"""What a quantized model costs: scores, comparisons, what ONNX Runtime fuses, recovery."""
