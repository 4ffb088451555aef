"""Adapters of PEFT in a model that is written: a folder holds the base model, under the names of its own layers.

to_q                     lora.Linear
to_q.base_layer          the layer      ->   to_q
to_q.lora_A.default      the adapter
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from quark.base.libraries.peft import base_layer
from quark.base.log import logger
from quark.errors import NotSupportedError
from quark.torch.layers.replace import set_submodule


def adapted_layers(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Full name -> what an adapter put in the place of a layer, and the layer; the outermost where they are nested."""
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, module in model.named_modules():
        inside = base_layer(module)
        if inside is not None and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module, inside
    return found


def refuse_adapted(model: nn.Module, why: str) -> None:
    """Raise NotSupportedError for a model that has an adapter in it; `why` begins the sentence."""
    if found := adapted_layers(model):
        raise NotSupportedError(
            f"{why} (around {len(found)} layers, for one {next(iter(found))}), whose folder no program would load. "
            "Possible: merge it first (pipeline.fuse_lora and unload_lora_weights, or merge_and_unload of PEFT), then "
            "quantize; or quantize without it, and load it into the quantized model."
        )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within: each layer is in its own place, and adapters are out of the model.

    Raises:
        NotSupportedError: The model was quantized with an adapter in it.
    """
    found = adapted_layers(model)
    prefixes = tuple(f"{name}." for name in found)
    if any(name.startswith(prefixes) for name in model.quant_plan.layers):  # type: ignore[union-attr]
        refuse_adapted(model, "The model was quantized with an adapter in it")
    if found:
        logger.warning(
            "The folder holds the base model alone: the adapter around %d layers is not in it. Possible: to save it "
            "beside (save_lora_adapter of diffusers, save_pretrained of PEFT), or to merge it before quantizing.",
            len(found),
        )
    try:
        for name, (_, inside) in found.items():
            set_submodule(model, name, inside)
        yield
    finally:
        for name, (outside, _) in found.items():
            set_submodule(model, name, outside)
