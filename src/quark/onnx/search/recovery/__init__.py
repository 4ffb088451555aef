"""Recovery: what brings an ONNX model's accuracy back, tried step after step."""
