"""The names of huggingface_hub that quark takes: documented ones alone, of which none is young."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from quark.base.libraries.names import Name

NAMES: tuple[Name, ...] = (
    Name("serialization", "split_torch_state_dict_into_shards", "which tensors lie in which file"),
    Name("repocard_data", "ModelCardData", "the head of a model card"),
    Name("repocard", "metadata_load", "the head of a card that is there"),
    Name("constants", "HF_HUB_OFFLINE", "says, once it is loaded, whether servers are asked"),
)
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables by which the libraries of Hugging Face ask no server."""


@contextmanager
def offline() -> Iterator[None]:
    """Within: the libraries of Hugging Face ask no server, those that are loaded too."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    kept = []
    for module in ("huggingface_hub.constants", "datasets.config"):
        for name in OFFLINE:
            if (loaded := sys.modules.get(module)) is not None and hasattr(loaded, name):
                kept.append((loaded, name, getattr(loaded, name)))
                setattr(loaded, name, True)
    try:
        yield
    finally:
        for loaded, name, value in kept:
            setattr(loaded, name, value)
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
