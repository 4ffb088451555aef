"""The ONNX export of a quantized module."""
