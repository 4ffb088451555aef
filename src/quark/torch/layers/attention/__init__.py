"""Quantization inside attention: the cache of keys and values, and the probabilities."""
