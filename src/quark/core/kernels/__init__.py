"""Computations of kernels of a GPU in one launch each, and of compiled code in one pass; when kernels are trusted."""
