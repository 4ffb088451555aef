"""The rules of a format for a budget: layers that there are to choose for, which share a choice, and their bytes.

In GGUF files each tensor has a block type of its own, embeddings and head too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quark.core.names.patterns import first_match, matches_any
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, block_spec
from quark.errors import ConfigError, NotSupportedError, ShapeError
from quark.gguf import CHOSEN_TYPES, WeightRole
from quark.goals.fused_layers import PROGRAMS
from quark.torch.checkpoint.shards import predicted_bytes, stored_bytes
from quark.torch.config.config import QConfig
from quark.torch.config.llm_template import LLMTemplate
from quark.torch.config.lowering import lower_layer
from quark.torch.formats import FORMATS, Format
from quark.torch.layers import layer_class
from quark.torch.layers.shapes import check_shapes
from quark.torch.plan import Plan, chooser
from quark.torch.writers.gguf.format import GgufFormat
from quark.torch.writers.gguf.mix_config import fitting_spec, roles_of
from quark.torch.writers.gguf.of_model import tied_weights
from quark.torch.writers.gguf.tensors import bytes_around

_BudgetLayers = Mapping[str, nn.Linear | nn.Embedding]


def convolutions(model: nn.Module, config: QConfig) -> list[str]:
    """The convolutions to which a config gives what it gives all layers, and for which no scheme is chosen."""
    choice, named = chooser(config, model), config.layer_quant_config
    return [
        name
        for name, module in model.named_modules()
        if layer_class(module)
        and cast(torch.Tensor, module.weight).ndim > 2
        and first_match(name, named) is None
        and choice.spec(name, type(module)) != LayerSpec()
    ]


class BudgetRules(ABC):
    """The rules of one format.

    Attributes:
        form: Whose bytes are counted.
        candidates: Names that are chosen from where none are given.
        programs: Servers that read the files; what one of them makes one layer of has one scheme.
    """

    form: Format
    candidates: tuple[str, ...]
    programs: tuple[str, ...] = PROGRAMS

    @abstractmethod
    def spec(self, candidate: str) -> LayerSpec:
        """The spec of a candidate. Raises ConfigError, NotSupportedError."""

    @abstractmethod
    def layers(self, model: nn.Module, plan: Plan, config: QConfig) -> _BudgetLayers:
        """Full name of each layer that is chosen for."""

    @abstractmethod
    def fitting(self, name: str, layer: nn.Linear | nn.Embedding, spec: LayerSpec) -> LayerSpec | None:
        """Return the scheme of the layer under a candidate; None where it does not fit."""

    @abstractmethod
    def rest(self, model: nn.Module, plan: Plan, layers: _BudgetLayers, folder: Path | None) -> int:
        """Bytes of all that is not chosen for; `folder` holds the tokenizer."""

    def groups(self, found: list[list[str]]) -> list[list[str]]:
        """The layers that need one scheme, of those that servers make one of, and of mixtures."""
        return found

    def is_counted(self, name: str) -> bool:
        """Return True where the bytes of a layer are its own, and not those of another one that is the same tensor."""
        return True

    def bytes(self, weight: torch.Tensor, spec: LayerSpec) -> int:
        """Return the bytes of a weight."""
        assert spec.weight is not None
        return stored_bytes(weight, spec.weight, spec, self.form)


class FolderRules(BudgetRules):
    """Model folders whose config.json says what each layer has. Embeddings and head stay in float."""

    def __init__(self, name: str, candidates: tuple[str, ...]) -> None:
        self.form, self.candidates = FORMATS[name], candidates

    def spec(self, candidate: str) -> LayerSpec:
        spec = SCHEMES[candidate] if candidate in SCHEMES else lower_layer(LLMTemplate.scheme(candidate))
        if spec.needs_data or spec.output is not None or spec.bias is not None:
            raise ConfigError(
                f"The candidate {candidate!r} has static activation scales, whose error is not measured. Possible: "
                f"schemes of weights, or with dynamic inputs: {', '.join(self.candidates)} ..."
            )
        reason = self.form.refusal(spec)
        if reason:
            raise NotSupportedError(
                f"The {self.form.name} format cannot hold {reason} ({candidate}). {self.form.possible()}"
            )
        return spec

    def layers(self, model: nn.Module, plan: Plan, config: QConfig) -> _BudgetLayers:
        names = [name for name in plan.layers if first_match(name, config.layer_quant_config) is None]
        found = {name: model.get_submodule(name) for name in names}
        for name, layer in found.items():
            if not isinstance(layer, nn.Linear):
                kind = type(layer).__name__
                raise NotSupportedError(
                    f"{name} is a {kind}; schemes are chosen for linear layers. Possible: exclude it, or name a scheme "
                    "for it."
                )
        return found  # type: ignore[return-value]

    def fitting(self, name: str, layer: nn.Linear | nn.Embedding, spec: LayerSpec) -> LayerSpec | None:
        columns = layer.in_features if isinstance(layer, nn.Linear) else layer.embedding_dim
        try:
            check_shapes(name, type(layer).__name__, tuple(layer.weight.shape), columns, spec)
        except ShapeError:
            return None
        return spec

    def rest(self, model: nn.Module, plan: Plan, layers: _BudgetLayers, folder: Path | None) -> int:
        chosen = sum(self.bytes(layer.weight, plan.layers[name]) for name, layer in layers.items())
        return predicted_bytes(model, plan, self.form) - chosen


# GGUF -----------------------------------------------------------------------------------------------------------------


class GgufRules(BudgetRules):
    """GGUF files: block types, embeddings and head too. Each tensor has its own; experts of a mixture share a type."""

    candidates = CHOSEN_TYPES

    def __init__(self) -> None:
        self.form = GgufFormat()
        self._roles: dict[str, WeightRole] = {}
        self._copy: str | None = None

    def spec(self, candidate: str) -> LayerSpec:
        return LayerSpec(weight=block_spec(candidate))

    def layers(self, model: Any, plan: Plan, config: QConfig) -> _BudgetLayers:
        self._roles = dict(roles_of(model))
        given = [*config.exclude, *config.layer_quant_config]
        tied = tied_weights(model)
        self._copy = None if tied is None else tied[0].removesuffix(".weight")
        # The plan leaves embeddings out that nothing names; what else it leaves out stays in float.
        embeddings = model.get_input_embeddings()
        return {
            name: layer
            for name, layer in model.named_modules()
            if name in self._roles
            and (name in plan.layers or layer is embeddings)
            and not matches_any(name, given)
            and fitting_spec(self.candidates[0], self._roles[name]) is not None
        }

    def fitting(self, name: str, layer: nn.Linear | nn.Embedding, spec: LayerSpec) -> LayerSpec | None:
        assert spec.weight is not None
        fits = fitting_spec(spec.weight.dtype.name, self._roles[name])
        return None if fits is None else LayerSpec(weight=fits)

    def groups(self, found: list[list[str]]) -> list[list[str]]:
        tensors: dict[str, list[str]] = {}
        for name in (name for group in found for name in group):
            tensors.setdefault(self._roles[name].name, []).append(name)
        return list(tensors.values())

    def is_counted(self, name: str) -> bool:
        """Not of a tied head, which is computed with the embeddings."""
        return name != self._copy

    def rest(self, model: nn.Module, plan: Plan, layers: _BudgetLayers, folder: Path | None) -> int:
        return bytes_around(model, layers, folder)
