"""A float model beside a quantized one: layer by layer, and step by step of a denoiser."""
