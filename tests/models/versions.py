"""Tests of what only newer versions of transformers can do, and of what needs a package that quark does not."""

from __future__ import annotations

import pytest
from transformers import AutoImageProcessor

from quark.base.libraries.compressed_tensors import undecoded_before
from quark.base.libraries.installed_packages import (
    is_transformers_version_higher_or_equal,
    is_transformers_version_lower,
)
from quark.base.libraries.transformers import LATENT, transformers_version
from quark.core.schemes import SCHEMES
from quark.torch.formats.compressed_tensors.format import young_kind


def needs_transformers(version: str, ability: str) -> pytest.MarkDecorator:
    """A mark that skips a test where transformers is older than the first version with an ability.

    Args:
        version: "5.14".
        ability: What it has from there on, as in "decodes experts of compressed-tensors folders".
    """
    reason = f"transformers {transformers_version()}: from {version} on it {ability}"
    return pytest.mark.skipif(is_transformers_version_lower(version), reason=reason)


def _loads_images() -> bool:
    """Whether the installed transformers has image processors: before 5.7, and in 5.17, they ask for torchvision."""
    try:
        return callable(AutoImageProcessor.from_pretrained)
    except ImportError:
        return False


IMAGES = pytest.mark.skipif(
    not _loads_images(), reason=f"transformers {transformers_version()}: its image processors need torchvision"
)
"""Tests in which images go through the processor of a folder."""


def skip_where_undecoded(scheme: str) -> None:
    """Skip a test of a compressed-tensors folder that transformers cannot load beside the installed release."""
    if (why := undecoded_before({young_kind(SCHEMES[scheme])})) is not None:
        pytest.skip(why)


FP8_WITHOUT_A_GPU = pytest.mark.skipif(
    is_transformers_version_higher_or_equal("5.16") and is_transformers_version_lower("5.17"),
    reason=f"transformers {transformers_version()}: 5.16 loads no FP8 folder without a GPU (AttributeError)",
)
"""Tests in which transformers loads such a folder on a CPU."""

LATENT_CACHES = needs_transformers(LATENT, "has caches of what latent attention compresses")
"""Tests of scales of such caches, which quark refuses before."""
