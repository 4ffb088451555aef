"""Puts quantizers into a graph: those of its operators, and those of keys and values."""
