"""Which packages are installed, and of which version: the questions that scripts ask before they import one."""

from __future__ import annotations

import importlib.util
from importlib import metadata

__all__ = [
    "is_accelerate_available", "is_datasets_available", "is_package_lower", "is_package_lower_or_equal",
    "is_safetensors_available", "is_torch_available", "is_transformers_available",
    "is_transformers_version_higher_or_equal", "is_transformers_version_lower",
]  # fmt: skip


def is_accelerate_available() -> bool:
    """Return True where accelerate can be imported; it is not."""
    return _is_found("accelerate")


def is_datasets_available() -> bool:
    """Return True where datasets can be imported; it is not."""
    return _is_found("datasets")


def is_safetensors_available() -> bool:
    """Return True where safetensors can be imported; it is not."""
    return _is_found("safetensors")


def is_torch_available() -> bool:
    """Return True where torch can be imported; it is not."""
    return _is_found("torch")


def is_transformers_available() -> bool:
    """Return True where transformers can be imported; it is not."""
    return _is_found("transformers")


def is_transformers_version_higher_or_equal(target_version: str) -> bool:
    """Return True where transformers is installed, of this version ("4.55.0") or a later one."""
    return _is_found("transformers") and _version("transformers") >= _numbers(target_version)


def is_transformers_version_lower(target_version: str) -> bool:
    """Return True where transformers is installed, of a version before this one."""
    return is_package_lower("transformers", target_version)


def is_package_lower(package_name: str, target_version: str) -> bool:
    """Return True where a package, by the name that is imported, is installed of a version before this one."""
    return _is_found(package_name) and _version(package_name) < _numbers(target_version)


def is_package_lower_or_equal(package_name: str, target_version: str) -> bool:
    """Return True where a package is installed, of this version or an earlier one."""
    return _is_found(package_name) and _version(package_name) <= _numbers(target_version)


def _is_found(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _version(name: str) -> list[int]:
    return _numbers(metadata.version(name))


def _numbers(version: str) -> list[int]:
    """2.13.0+cpu is [2, 13]: releases only, and zeros at the end say nothing."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers
