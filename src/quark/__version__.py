"""The version, at the address that transformers' quark integration imports."""

__version__ = "1.1.0"
