"""Numerics and meaning, shared by the PyTorch and the ONNX flow. Needs numpy only; computes on torch tensors too."""
