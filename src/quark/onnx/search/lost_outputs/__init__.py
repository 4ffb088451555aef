"""Finds out whether a quantized model has lost its outputs, and what brings them back."""
