"""The questions of scripts about installed packages."""

from __future__ import annotations

from importlib import metadata

import pytest

from quark.base.libraries.installed_packages import (
    is_accelerate_available,
    is_package_lower_or_equal,
    is_safetensors_available,
    is_torch_available,
    is_transformers_available,
    is_transformers_version_higher_or_equal,
    is_transformers_version_lower,
)


def test_packages_of_the_tests_are_found() -> None:
    assert is_accelerate_available() and is_safetensors_available() and is_torch_available()
    assert is_transformers_available() and not is_package_lower_or_equal("no_such_package", "1")


@pytest.mark.parametrize(
    ("installed", "asked", "order"),
    [("4.9.0", "4.55", -1), ("5.0", "5.0.0", 0), ("5.0.0", "4.55.0", 1), ("2.13.0+cpu", "2.13", 0), ("5.1rc1", "5", 0)],
)
def test_versions_are_compared_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, installed: str, asked: str, order: int
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    assert is_transformers_version_higher_or_equal(asked) is (order >= 0)
    assert is_transformers_version_lower(asked) is (order < 0)
    assert is_package_lower_or_equal("transformers", asked) is (order <= 0)
