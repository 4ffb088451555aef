"""The commands over ONNX files."""
