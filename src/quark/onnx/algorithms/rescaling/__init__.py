"""Algorithms that move scale between layers or rotate what flows between them; the float model computes what it did."""
