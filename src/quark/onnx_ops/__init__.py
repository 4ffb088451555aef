"""Operators beyond ONNX, domain com.amd.quark, as ONNX functions in the file: what both flows write.

A package of its own between the flows and `core`: `core` knows no file format, and the flows do not import each other.
"""
