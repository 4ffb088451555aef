"""Modes of the quantizers of a model for a while: off, so that the float model runs, or observing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode


@contextmanager
def quantizers_off(layers: Iterable[QuantLayer]) -> Iterator[None]:
    """Within: quantizers let the float tensor pass, but for those that are told otherwise there."""
    with _off(layer_quantizers(layers)):
        yield


@contextmanager
def observing(everything: Iterable[FakeQuantize], quantizers: Mapping[str, FakeQuantize]) -> Iterator[None]:
    """Within: the quantizers given observe, all others are off, so that the float model runs."""
    with _off(everything):
        for quantizer in quantizers.values():
            quantizer.start_observing()
        yield


def layer_quantizers(layers: Iterable[QuantLayer]) -> list[FakeQuantize]:
    """The quantizers of all tensors of the layers."""
    return [module for layer in layers for module in layer.children() if isinstance(module, FakeQuantize)]


@contextmanager
def _off(quantizers: Iterable[FakeQuantize]) -> Iterator[None]:
    modes = [(quantizer, quantizer.mode) for quantizer in quantizers]
    for quantizer, mode in modes:
        if mode is not Mode.frozen:
            quantizer.mode = Mode.off
    try:
        yield
    finally:
        for quantizer, mode in modes:
            if quantizer.mode in (Mode.off, Mode.observe):
                quantizer.mode = mode
