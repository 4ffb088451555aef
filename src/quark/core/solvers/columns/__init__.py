"""Solving a matrix column by column: grids, compiled code, kernels, and steps of numpy and torch."""
