"""Since which release compressed-tensors, by which transformers loads folders of that format, decodes what."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version

from quark.base.libraries.installed_packages import is_package_lower

PACKAGE = "compressed_tensors"
THREE_BITS, TILES, MXFP6 = "3-bit integers", "weights with scales of tiles", "MXFP6"
SINCE = {THREE_BITS: "0.18", TILES: "0.19", MXFP6: "0.20"}
"""What newer releases decode -> the first one, in their order. Before, 3-bit codes lay in other
words, and scales of tiles were not spread over their values."""


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
