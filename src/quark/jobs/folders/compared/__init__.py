"""Comparison of model folders: a float and a quantized model, their outputs and their layers."""
