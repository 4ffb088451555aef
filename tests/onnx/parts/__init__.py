"""Tests of the parts that a Concat joins."""
