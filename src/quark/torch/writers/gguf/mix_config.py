"""The config of a model under a mix of block types, embeddings and head included."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quark.base.log import logger
from quark.core.blocks.block_types import fitting_block_type
from quark.core.names.patterns import matches_any
from quark.core.spec import LayerSpec, TensorSpec, block_spec
from quark.errors import ConfigError, did_you_mean
from quark.gguf.architectures.table import architecture_of
from quark.gguf.mixes import MIXES, WeightRole, role_of
from quark.torch.config.algo_configs import ImatrixConfig
from quark.torch.config.config import QConfig
from quark.torch.config.llm_template import Algorithms, LLMTemplate
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers import layer_class
from quark.torch.model.passes import undo
from quark.torch.model.passes.unfuse_experts import unfuse_experts
from quark.torch.writers.gguf.of_model import is_conv1d_weight, tensor_names

WIDE = 256
"""Values in a block of the types that need most."""
KEPT = ("position_embd", "token_types", "ffn_gate_inp", "ffn_gate_inp_shexp")
"""Tensors that stay in float: small, and read by few values or by the choice of experts."""


def gguf_config(
    model: Any,
    mix: str | Mapping[str, str],
    algorithm: Algorithms | Sequence[Algorithms] | None = None,
    exclude_layers: Sequence[str] = (),
    layer_config: dict[str, str] | None = None,
    imatrix: str | os.PathLike[str] | None = None,
) -> QConfig:
    """The config that makes a GGUF file of a mix, such as "q4_k_m", from a model.

    Args:
        model: The float model of transformers, on any device, meta too.
        mix: A name in `MIXES`, as llama.cpp has it; or full name of a layer -> block type, as a budget chose them.
        algorithm: See `LLMTemplate.get_config`; "importance" weighs errors by what reaches a layer, "gptq" and
            "qronos" round so that errors of columns make up for each other.
        exclude_layers: Patterns of layers that stay in float.
        layer_config: Pattern -> scheme, in role of what the mix says.
        imatrix: Importance matrix of llama.cpp, by which errors are weighed; `algorithm` runs after it.

    Raises:
        ConfigError: No such mix, block type or layer.
        NotSupportedError: A model that GGUF files are not written of.
    """
    roles = dict(roles_of(model))
    chosen = dict(_specs(model, mix, roles))
    wanted = {name: spec for name, spec in chosen.items() if not matches_any(name, exclude_layers)}
    layers = {name: config_of_layer(LayerSpec(weight=spec)) for name, spec in wanted.items()}
    template = LLMTemplate.get(model.config.model_type)
    algorithms = template.get_config("int8_wo", algorithm).algo_config or []
    if imatrix is not None:
        tensors = {name: f"{role.name}.weight" for name, role in roles.items()}
        algorithms = [ImatrixConfig(file=str(imatrix), tensors=tensors), *algorithms]
    rules = {pattern: template.scheme(name) for pattern, name in (layer_config or {}).items()}
    return QConfig(
        global_quant_config=config_of_layer(LayerSpec()),
        layer_quant_config=rules | layers,
        exclude=list(exclude_layers),
        algo_config=algorithms or None,
    )


def _specs(
    model: Any, mix: str | Mapping[str, str], roles: Mapping[str, WeightRole]
) -> Iterator[tuple[str, TensorSpec]]:
    """Name of a layer -> the spec of its weight."""
    if not isinstance(mix, str):
        for name, kind in mix.items():
            if name not in roles:
                raise ConfigError(f"{name!r} has no block type in a GGUF file. {did_you_mean(name, roles)}")
            spec = fitting_spec(kind, roles[name])
            if spec is not None:
                yield name, spec
        return
    row = MIXES[mix]
    if not roles:
        raise ConfigError(f"{type(model).__name__} has no layer that the mix {mix!r} could quantize.")
    chosen = {name: found for name, role in roles.items() if (found := row.type_of(role)) is not None}
    _say_narrower(mix, [(row.type_of(replace(roles[name], columns=WIDE)), got) for name, got in chosen.items()])
    for name, got in chosen.items():
        yield name, block_spec(got)


def _say_narrower(mix: str, kinds: Sequence[tuple[str | None, str]]) -> None:
    """Log layers whose rows are no whole blocks of what the mix has for them: the file is larger than its name says.

    Args:
        mix: Its name.
        kinds: Of each layer what the mix has for it, and what it gets.
    """
    others = [got for wanted, got in kinds if got != wanted]
    if others:
        logger.warning(
            "%s: %s of %d layers have rows that are no multiple of %d values, and get %s.",
            mix, "all" if len(others) == len(kinds) else len(others), len(kinds), WIDE,
            ", ".join(sorted({kind.upper() for kind in others})),
        )  # fmt: skip


def fitting_spec(kind: str, role: WeightRole) -> TensorSpec | None:
    """The spec of a weight in a block type, or in the one that rows of this length get; None where none fits."""
    fits = fitting_block_type(kind, role.columns)
    return None if fits is None else block_spec(fits)


def roles_of(model: Any) -> list[tuple[str, WeightRole]]:
    """Name of each layer with a weight that a mix may quantize, each expert's too, and its role in the file."""
    originals = unfuse_experts(model, lambda name: True)
    try:
        return list(_roles(model))
    finally:
        undo(model, originals)


def _roles(model: Any) -> Iterator[tuple[str, WeightRole]]:
    file_name = tensor_names(model, architecture_of(model.config))
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if weight is None or weight.ndim != 2 or not (layer_class(layer) or is_conv1d_weight(model, f"{name}.weight")):
            continue
        if tied and layer is model.get_output_embeddings() and not layer_class(model.get_input_embeddings()):
            continue  # one tensor of the file, and the model computes with embeddings that stay in float
        # The head of a tied model has no tensor of its own in the file: it is computed with the embeddings.
        is_head = tied and layer is model.get_output_embeddings()
        stored = "token_embd.weight" if is_head else file_name(f"{name}.weight")
        if stored is None or stored.removesuffix(".weight").rpartition(".")[2] in KEPT:
            continue
        columns = weight.shape[0] if is_conv1d_weight(model, f"{name}.weight") else weight.shape[1]
        yield name, role_of(stored, int(columns), model.config)
