"""Algorithms that move scale from activations to weights, folded where that is exact."""
