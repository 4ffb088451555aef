"""The names of the tensors of a model in GGUF files, and which of its weights lie otherwise there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from quark.base.libraries.transformers import is_conv1d
from quark.gguf import names
from quark.gguf.architectures.architecture import Architecture
from quark.gguf.architectures.table import architecture_of
from quark.torch.model.names import published_names


def check_config(config: Any) -> None:
    """Raise where no GGUF file can be written of a model: NotSupportedError, or MissingDependencyError."""
    names.import_gguf()
    architecture_of(config)


def tensor_names(model: Any, architecture: Architecture, more: int = 0) -> Callable[[str], str | None]:
    """Maps a name of the model to that of the file, `more` blocks after those of the model too; see there."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return names.tensor_names(model.config, architecture, published_names(model), prefix, more)


def tied_weights(model: Any) -> tuple[str, str] | None:
    """Names of the weights of head and embeddings where the model ties them."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return None
    names = {module: name for name, module in model.named_modules()}
    return f"{names[model.get_output_embeddings()]}.weight", f"{names[model.get_input_embeddings()]}.weight"


def is_conv1d_weight(model: nn.Module, name: str) -> bool:
    """Tell if a tensor is the weight of transformers' Conv1D, a linear layer whose weight is (I, O)."""
    parent, _, leaf = name.rpartition(".")
    try:
        return leaf == "weight" and is_conv1d(model.get_submodule(parent))
    except AttributeError:  # a layer that lies beside the model
        return False
