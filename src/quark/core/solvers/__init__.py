"""Algebra that both flows use: matrices in, matrices out; one file each."""
