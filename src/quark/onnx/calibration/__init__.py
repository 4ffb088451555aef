"""Ranges of activations: data in, statistics, qparams out."""
