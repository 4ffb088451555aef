"""Other packages that scripts bring with them: no extra of this one installs them, and its own work needs none."""

from __future__ import annotations

import importlib
from typing import Any

from quark.errors import MissingDependencyError


def other_package(name: str, purpose: str, instead: str = "") -> Any:
    """The module of a package.

    Args:
        name: As it is imported and installed: "datasets".
        purpose: What needs it, the beginning of a sentence.
        instead: What can be done without it, a sentence.

    Raises:
        MissingDependencyError: It is not installed, or lacks a package of its own.
    """
    try:
        # Not an import statement: those name what the extras of this package bring.
        return importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).split(".")[0]
        raise MissingDependencyError(
            f"{purpose} needs the package {missing}, which is not installed: pip install {missing}. {instead}".rstrip()
        ) from None
