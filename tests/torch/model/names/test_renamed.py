"""Names that a renaming of transformers is not about: its loader keeps them, and so do we."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from quark.torch.model.names import found_by, in_model, source_names


class Normed(nn.Module):
    """A norm behind the layers, and one in a layer that has another name in files: `layer.norm`."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict({"kv_norm": nn.LayerNorm(2, bias=False)})
        self.model = nn.ModuleDict({"norm": nn.LayerNorm(2, bias=False), "layer": layer})
        self.config = SimpleNamespace(model_type="normed")


def test_a_name_that_the_model_has_stays_where_its_renaming_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import WeightRenaming

    rule = WeightRenaming(source_patterns=r"\.norm\.", target_patterns=r".kv_norm.")
    monkeypatch.setattr(in_model, "conversions", lambda model, legacy=False: [rule])
    model, stored = Normed(), ["model.norm.weight", "model.layer.norm.weight", "model.other.norm.weight"]
    found = found_by(model, stored)
    assert not found.missing
    assert found.lost == ["model.other.norm.weight"]
    assert source_names(model, stored[:2]) == {
        "model.norm.weight": "model.norm.weight",
        "model.layer.kv_norm.weight": "model.layer.norm.weight",
    }
