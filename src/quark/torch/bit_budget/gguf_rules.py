"""What GGUF files say of a budget: each tensor has a block type of its own, embeddings and head too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from quark.core.names.patterns import matches_any
from quark.core.spec import LayerSpec, block_spec
from quark.gguf import CHOSEN_TYPES, WeightRole
from quark.torch.bit_budget.rules import BudgetLayers, BudgetRules
from quark.torch.config.config import QConfig
from quark.torch.plan import Plan
from quark.torch.writers.gguf.format import GgufFormat
from quark.torch.writers.gguf.mix_config import fitting_spec, roles_of
from quark.torch.writers.gguf.of_model import tied_weights
from quark.torch.writers.gguf.tensors import bytes_around


class GgufRules(BudgetRules):
    """GGUF files: block types, embeddings and head too. Each tensor has its own, so a mixture's experts are alike."""

    candidates = CHOSEN_TYPES

    def __init__(self) -> None:
        self.form = GgufFormat()
        self._roles: dict[str, WeightRole] = {}
        self._copy: str | None = None

    def spec(self, candidate: str) -> LayerSpec:
        return LayerSpec(weight=block_spec(candidate))

    def layers(self, model: Any, plan: Plan, config: QConfig) -> BudgetLayers:
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

    def rest(self, model: nn.Module, plan: Plan, layers: BudgetLayers, folder: Path | None) -> int:
        return bytes_around(model, layers, folder)
