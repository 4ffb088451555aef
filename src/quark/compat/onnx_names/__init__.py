"""Names of the ONNX flow that are documented, and that no job needs."""
