"""The names of huggingface_hub that quark takes: documented ones alone, of which none is young."""

from __future__ import annotations

from quark.base.libraries.names import Name

NAMES: tuple[Name, ...] = (
    Name("serialization", "split_torch_state_dict_into_shards", "which tensors lie in which file"),
    Name("repocard_data", "ModelCardData", "the head of a model card"),
    Name("repocard", "metadata_load", "the head of a card that is there"),
)
