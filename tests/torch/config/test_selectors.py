"""What the selectors of an exclude list stand for, and the names of a checkpoint, which are none."""

from __future__ import annotations

from torch import nn

from quark.torch.config.selectors import resolved_names, selected_names


class Body(nn.Module):
    """A model without a head, with a layer of as many rows as its embedding has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.projection = nn.Linear(8, 32)
        self.layer = nn.Linear(8, 8)


def test_a_head_that_a_checkpoint_names_is_no_other_layer_of_a_model_without_it() -> None:
    excluded = ["lm_head", "*.layers.1.*", "layer"]
    assert selected_names(excluded, Body()) == {"projection"}
    assert resolved_names(excluded, Body()) == ["*.layers.1.*", "layer"]
    assert selected_names(resolved_names(excluded, Body()), Body()) == set()
    headed = nn.ModuleDict({"lm_head": nn.Linear(8, 8)})
    assert resolved_names(excluded, headed) == excluded
