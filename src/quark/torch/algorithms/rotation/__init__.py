"""Rotations of the residual stream and of what layers read."""
