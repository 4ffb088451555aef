"""The version under the address that transformers' quark integration imports."""

from quark import __version__

__all__ = ["__version__"]
