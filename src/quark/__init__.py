"""quark: quantization of PyTorch and ONNX models. Import `quark.torch` or `quark.onnx`."""

__version__ = "1.0.0.dev0"
