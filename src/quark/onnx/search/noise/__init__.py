"""Noise: what each quantized tensor adds to the outputs of a model, and which nodes are best left in float."""
