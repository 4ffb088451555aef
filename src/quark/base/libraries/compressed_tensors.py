"""Since which release compressed-tensors, by which transformers loads folders of that format, decodes what."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version

from quark.base.libraries.installed_packages import is_package_lower, is_transformers_version_lower

PACKAGE = "compressed_tensors"
THREE_BITS, TILES, MXFP6 = "3-bit integers", "weights with scales of tiles", "MXFP6"
SINCE = {THREE_BITS: "0.18", TILES: "0.19", MXFP6: "0.20"}
"""Encodings that newer releases decode -> the first release that does, in their order. Before, 3-bit codes lay in
other words, and scales of tiles were not spread over their values."""
RENAMED, UNTRIED = "5.24", "0.21"
"""The first transformers that gives attention its cache by another name, and the first release not tried with it."""


def unread_caches() -> str | None:
    """Why transformers leaves keys and values of a folder in float, a sentence; None where it rounds them.

    compressed-tensors takes a module for attention that caches by the name of the argument.
    """
    if is_transformers_version_lower(RENAMED) or not is_package_lower(PACKAGE, UNTRIED):
        return None
    return (
        f"transformers {version('transformers')} beside compressed-tensors {version('compressed-tensors')} leaves keys "
        f"and values in float: before {RENAMED} it rounds them, as servers do by code of their own."
    )


def undecoded_before(kinds: Collection[str | None]) -> str | None:
    """Why transformers cannot load a folder beside the installed release, a sentence; None where it can.

    Args:
        kinds: What the folder holds, of SINCE.
    """
    lacking = [kind for kind, first in SINCE.items() if kind in kinds and is_package_lower(PACKAGE, first)]
    if not lacking:
        return None
    first = SINCE[lacking[-1]]
    return (
        f"compressed-tensors {version('compressed-tensors')} is installed, beside which transformers does not load "
        f"{' and '.join(lacking)}: from {first} on it does. Servers decode them by code of their own, where they do."
    )
