"""Embeddings in the `compressed-tensors` format: a group of their own, whose target is their class.

vLLM 0.33.0 (compressed_tensors_embedding.py) looks rows up in words of codes, 32 / bits of them in each. Many of its
models do not say what their embedding is called (llama.py), so that names as targets are not found: its class,
VocabParallelEmbedding, is found by a part of its name. transformers 5.23.0 builds no embedding without a weight. It
loads such a folder with `dequantize=True` alone, and decodes all layers by the first group then.
"""

from __future__ import annotations

from torch import nn

from quark.core.granularity import PerChannel, PerGroup
from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.torch.formats.format import Folder, only_weight

ONLY_TARGET = "Embedding"
BITS = (2, 4, 8)
"""Widths of which a word of 32 bits holds a whole number, as vLLM takes it."""


def refuse_embedding(name: str, layer: nn.Embedding, spec: LayerSpec) -> None:
    """Raise NotSupportedError for an embedding that vLLM would refuse, or decode wrongly."""
    weight, columns = only_weight(spec), layer.embedding_dim
    readable = (
        weight is not None
        and not weight.dtype.is_float
        and (weight.dtype.bits in BITS and weight.dtype.signed and weight.symmetric)
        and isinstance(weight.granularity, (PerChannel, PerGroup))
        and columns % (32 // weight.dtype.bits) == 0
    )
    if not readable:
        raise NotSupportedError(
            f"{name}: the compressed-tensors format cannot hold this embedding of {columns} columns ({spec}): vLLM "
            f"reads embeddings in symmetric integers of {', '.join(map(str, BITS))} bits with a scale for each row or "
            "group, without inputs, in rows of whole words of 32 bits. Possible: int8_wo, or the quark format."
        )


def check_embeddings(folder: Folder) -> None:
    """Raise NotSupportedError for embeddings of several schemes: their class is the only target that is found."""
    kinds = {folder.specs[name]: name for name in folder.embeddings}
    if len(kinds) > 1:
        raise NotSupportedError(
            f"The compressed-tensors format has one scheme for all embeddings; {' and '.join(list(kinds.values())[:2])}"
            " differ. Possible: one scheme for them, or the quark format."
        )
