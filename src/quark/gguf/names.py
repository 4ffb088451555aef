"""Which tensor of a GGUF file holds which tensor of a model, by the gguf package's own tables.

The experts of a block are one tensor there, (experts, rows, columns), and layers of their own in a quantized model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from quark.errors import require_packages

EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
_IN_BLOCK = re.compile(r"(?<=\d\.)\w+(?=\.experts\.)")
"""The part of a block that holds experts: mlp.experts.0, block_sparse_moe.experts.0."""
IN_LAYERS = re.compile(r"\.(\d+)\.")
"""The number of a block."""
_IN_FILE = re.compile(r"blk\.([0-9]{1,9})\.")
"""The number of a block at the front of a name in a file."""
_BARE = (".A_log", ".D")
"""Ends of the names of tensors that have no suffix in files."""
_LEAF_BIAS = re.compile(r"_bias$")


def import_gguf() -> Any:
    """The gguf package. Raises MissingDependencyError."""
    require_packages("A GGUF file", "gguf", "gguf")
    import gguf  # of an extra: only where such files are read and written

    return gguf


def arch_key(arch: str) -> Any:
    """The member of gguf.MODEL_ARCH that is called so in files."""
    return next(key for key, value in import_gguf().MODEL_ARCH_NAMES.items() if value == arch)


def tensor_names(
    config: Any, architecture: Any, publish: Callable[[str], str], prefix: str, more: int = 0
) -> Callable[[str], str | None]:
    """Maps a name of the model to that of the file; to None if it has none. All experts of a block have one name.

    What is several tensors in the file has the name of the first one.

    Args:
        config: Of the transformers model.
        architecture: Its Architecture.
        publish: Name in the model -> name in its published checkpoints.
        prefix: What the names of the model inside begin with, a dot at the end.
        more: How many blocks there are after those of the model.
    """
    table = import_gguf().get_tensor_name_map(arch_key(architecture.arch), config.num_hidden_layers + more)

    def name_in_file(name: str) -> str | None:
        if parts := architecture.parts(name, config):
            return part_name(name, parts[0])
        # The tables know some models by the names of their published checkpoints alone, or by those of the model
        # inside, and experts in fewer places than there are.
        for known in (name, publish(name)):
            for place in (known, known.removeprefix(prefix), _IN_BLOCK.sub("mlp", known)):
                for form in _as_in_tables(place):
                    found: str | None = table.get_name(form, try_suffixes=(".weight", ".bias"))
                    if found is not None:
                        return found
        return None

    return name_in_file


def block_of(stored: str) -> int | None:
    """Number of the block that a tensor of a file belongs to."""
    found = _IN_FILE.match(stored)
    return int(found[1]) if found else None


def part_name(name: str, part: str) -> str:
    """The name in the file of a part of a matrix, which is in the same block."""
    found = IN_LAYERS.search(name)
    assert found is not None
    return f"blk.{found[1]}.{part}"


def _as_in_tables(name: str) -> Iterator[str]:
    """Without the number of an expert, and with the suffixes that names have there."""
    name = EXPERT.sub("", name)
    if name.endswith((".weight", ".bias")):
        yield name
    elif _LEAF_BIAS.search(name):
        # A bias that is no layer's: expert_bias, sinks_bias, or dt_bias of a projection that is part of another one.
        yield from (_LEAF_BIAS.sub(".bias", name), f"{name}.bias", _LEAF_BIAS.sub("_proj.bias", name))
    else:
        yield name if name.endswith(_BARE) else f"{name}.weight"


def expert_of(name: str) -> int | None:
    """Number of the expert that a layer or tensor of a model belongs to; None for one of no expert."""
    found = EXPERT.search(name)
    return int(found[1]) if found else None
