"""Damaged inputs, made from a seed: each must be refused in one line, or be read as its own runtime reads it.

`python -m tests.fuzz --cases 200 --seed 0` (or `make fuzz`) prints a table and every case that is neither.
"""
