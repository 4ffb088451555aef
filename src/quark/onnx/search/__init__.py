"""Searches: settings are changed, the model is quantized by them, and what its outputs and its time say decides."""
