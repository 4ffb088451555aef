"""Every pass of the PyTorch flow on every family: same outputs, twice = once, undone, and only what is wanted."""

from __future__ import annotations

import pytest
import torch

from quark.torch.model.passes import PASSES, prepare, undo
from tests.models.families import CONVERTED
from tests.models.torch_zoo import tiny_llama

PLAIN = {"llama": tiny_llama}
MODELS = {**CONVERTED, **PLAIN}
IDS = torch.arange(32).reshape(2, 16)


def everything(name: str) -> bool:
    return True


def layout(model: torch.nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", MODELS)
def test_passes_keep_outputs_and_twice_is_once_and_undo_restores(name: str) -> None:
    model = MODELS[name]().double()
    model.set_experts_implementation("eager")  # the default kernel has no float64
    before, modules, weights = model(IDS).logits, dict(model.named_modules()), dict(model.named_parameters())
    originals = prepare(model, everything)
    assert bool(originals) == (name not in PLAIN)
    changed = layout(model)
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-9, atol=1e-12)
    assert prepare(model, everything) == {} and layout(model) == changed
    undo(model, originals)
    assert dict(model.named_modules()) == modules and dict(model.named_parameters()).keys() == weights.keys()
    assert all(p is weights[key] for key, p in model.named_parameters())
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("run", PASSES)
def test_a_pass_leaves_alone_what_is_not_wanted(run: str, name: str) -> None:
    model = MODELS[name]()
    before = layout(model)
    assert PASSES[run](model, lambda layer: False) == {} and layout(model) == before


@pytest.mark.parametrize("name", CONVERTED)
def test_the_weights_are_views_of_the_old_ones(name: str) -> None:
    model = CONVERTED[name]()
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    prepare(model, everything)
    assert {p.untyped_storage().data_ptr() for p in model.parameters() if p.ndim > 1} <= storages
