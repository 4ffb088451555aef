"""The documented command lines: `python -m quark.onnx.tools.<name>`."""
