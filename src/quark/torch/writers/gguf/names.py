"""Which tensor of a GGUF file holds which tensor of a model, by the gguf package's own tables.

The experts of a block are one tensor there, (experts, rows, columns), and layers of their own in a quantized model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from quark.errors import require_packages
from quark.torch.model.published_names import published_names
from quark.torch.writers.gguf.architectures import Architecture

EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")


def import_gguf() -> Any:
    """The gguf package. Raises MissingDependencyError."""
    require_packages("A GGUF file", "gguf", "gguf")
    import gguf  # of an extra: only where such files are read and written

    return gguf


def tensor_names(model: Any, architecture: Architecture) -> Callable[[str], str | None]:
    """Maps a name of the model to that of the file; to None if it has none. All experts of a block have one name."""
    gguf = import_gguf()
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture.arch)
    table = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    publish = published_names(model)

    def name_in_file(name: str) -> str | None:
        # The tables know some models by the names of their published checkpoints alone.
        for form in (name, publish(name)):
            found: str | None = table.get_name(EXPERT.sub("", form), try_suffixes=(".weight", ".bias"))
            if found is not None:
                return found
        return None

    return name_in_file


def expert_of(name: str) -> int | None:
    """Number of the expert that a layer or tensor of a model belongs to; None for one of no expert."""
    found = EXPERT.search(name)
    return int(found[1]) if found else None
