"""Algorithms that choose the codes of a weight."""
