"""Bits for a budget: which layer gets which scheme, so that a model of a given size loses least."""
