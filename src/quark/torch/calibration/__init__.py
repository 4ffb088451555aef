"""Calibration of a model: ranges of activations, experts, several processes."""
