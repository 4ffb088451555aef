"""Which tensor of a GGUF file holds which tensor of a model, by the gguf package's own tables.

The experts of a block are one tensor there, (experts, rows, columns), and layers of their own in a quantized model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from quark.errors import require_packages
from quark.torch.model.published_names import published_names

EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
IN_BLOCK = re.compile(r"(?<=\d\.)\w+(?=\.experts\.)")
"""The part of a block that holds experts: mlp.experts.0, block_sparse_moe.experts.0."""
LEAF_BIAS = re.compile(r"_bias$")


def import_gguf() -> Any:
    """The gguf package. Raises MissingDependencyError."""
    require_packages("A GGUF file", "gguf", "gguf")
    import gguf  # of an extra: only where such files are read and written

    return gguf


def arch_key(arch: str) -> Any:
    """The member of gguf.MODEL_ARCH that is called so in files."""
    return next(key for key, value in import_gguf().MODEL_ARCH_NAMES.items() if value == arch)


def tensor_names(model: Any, arch: str) -> Callable[[str], str | None]:
    """Maps a name of the model to that of the file; to None if it has none. All experts of a block have one name."""
    table = import_gguf().get_tensor_name_map(arch_key(arch), model.config.num_hidden_layers)
    publish, prefix = published_names(model), f"{getattr(model, 'base_model_prefix', '')}."

    def name_in_file(name: str) -> str | None:
        # The tables know some models by the names of their published checkpoints alone, or by those of the model
        # inside, and experts in fewer places than there are.
        for known in (name, publish(name)):
            for form in (known, known.removeprefix(prefix), IN_BLOCK.sub("mlp", known)):
                found: str | None = table.get_name(_as_in_tables(form), try_suffixes=(".weight", ".bias"))
                if found is not None:
                    return found
        return None

    return name_in_file


def _as_in_tables(name: str) -> str:
    """Without the number of an expert, and with the suffix that all names have there."""
    name = LEAF_BIAS.sub(".bias", EXPERT.sub("", name))
    return name if name.endswith((".weight", ".bias")) else f"{name}.weight"


def expert_of(name: str) -> int | None:
    """Number of the expert that a layer or tensor of a model belongs to; None for one of no expert."""
    found = EXPERT.search(name)
    return int(found[1]) if found else None
