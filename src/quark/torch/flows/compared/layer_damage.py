"""The loss of each layer of a quantized model, seen while its weights are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.core.granularity import PerTensor
from quark.core.metrics import sqnr
from quark.core.quantize import fake_quantize
from quark.report.figures import ClippedHistogram
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize
from quark.torch.layers.replace import quantized_layers

MOST_HISTOGRAMS = 6
HUGE = 1e30
"""A value beyond each range: what it is quantized to is an end of the range."""


class LayerDamage:
    """Weight SQNR and output SQNR in dB of the layers whose weights come from codes, on one batch.

    The output SQNR compares what the layer gives inside the quantized model with what it gives inside the float
    model: errors of the layers before are part of it. It is NaN for an expert that did not get the same number of
    tokens in both, or none.

    Args:
        before, after: The float and the quantized model, with or without weights; parts of them run with weights.
        draws: Whether histograms of the worst layers are kept.

    Attributes:
        damage: Layer -> both SQNR, of those that were seen.
    """

    def __init__(self, before: nn.Module, after: nn.Module, draws: bool = False) -> None:
        self.before, self.draws, self._coded = before, draws, coded_layers(after)
        self._found: dict[str, tuple[float, float]] = {}
        self._drawn: dict[str, list[ClippedHistogram]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return list(self._coded)

    @property
    def damage(self) -> dict[str, tuple[float, float]]:
        """Layer -> both SQNR, in the order of the model."""
        return {name: self._found[name] for name in self._coded if name in self._found}

    @property
    def histograms(self) -> list[ClippedHistogram]:
        """Float inputs and weights of the layers whose outputs lost most, the worst first, with the ends of codes."""
        return [each for name in self._worst() if name in self._drawn for each in self._drawn[name]]

    @contextmanager
    def watching(self, holds: Callable[[str], bool]) -> Iterator[None]:
        """Within: a part of both models runs on one batch, and its weights are there until the end.

        Args:
            holds: Whether a layer belongs to the part.
        """
        names = [name for name in self._coded if holds(name)]
        inputs, expected, given = (dict[str, Any]() for _ in range(3))
        with ExitStack() as hooks:
            for name in names:
                float_layer, layer = self.before.get_submodule(name), self._coded[name]
                hooks.enter_context(float_layer.register_forward_hook(partial(_note_output, expected, name)))
                hooks.enter_context(layer.register_forward_hook(partial(_note_output, given, name)))
                if self.draws:
                    hooks.enter_context(float_layer.register_forward_pre_hook(partial(_note_input, inputs, name)))
            yield
        with torch.no_grad():
            for name in names:
                self._look_at(name, inputs.pop(name, None), expected.pop(name, None), given.pop(name, None))

    def _look_at(self, name: str, x: Any, expected: Any, given: Any) -> None:
        """Measure a layer whose weights are there.

        Args:
            name: Of the layer.
            x: What it read in the float model; None: not noted.
            expected, given: What it gave in each model; None where it did not run.
        """
        float_layer: Any = self.before.get_submodule(name)
        layer, weight = self._coded[name], float_layer.weight
        decoded = decoded_weight(layer)
        same = expected is not None and given is not None and expected.shape == given.shape and given.numel() > 0
        self._found[name] = sqnr(weight, decoded), sqnr(expected, given) if same else math.nan
        if not self.draws or name not in self._worst():
            return
        drawn = []
        if x is not None and isinstance(layer, QuantLayer) and layer.quantizer("input") is not None:
            drawn.append(ClippedHistogram.of(f"{name} (input)", _array(x), input_range(layer)))
        ends = (float(decoded.min()), float(decoded.max()))
        self._drawn[name] = [*drawn, ClippedHistogram.of(f"{name} (weight)", _array(weight), ends)]

    def _worst(self) -> list[str]:
        """The layers of those seen whose outputs lost most."""
        return sorted(self.damage, key=lambda name: worst_first(self._found[name][1]))[:MOST_HISTOGRAMS]


def worst_first(value: float) -> float:
    """An SQNR to sort by: what is not known comes last."""
    return math.inf if math.isnan(value) else value


def coded_layers(model: Any) -> dict[str, Any]:
    """Layers whose weights come from codes, by name: quantized ones, or float ones that were decoded when loaded."""
    return quantized_layers(model) or {name: model.get_submodule(name) for name in getattr(model, "decoded_layers", ())}


def decoded_weight(layer: Any) -> Any:
    """The values that a layer of `coded_layers` computes with."""
    return layer.quantized_weight() if isinstance(layer, QuantLayer) else layer.weight


def input_range(layer: QuantLayer) -> tuple[float, float] | None:
    """Return the range of the codes of a layer's input; None where each input has a range of its own."""
    quantizer = layer.quantizer("input")
    if not isinstance(quantizer, FakeQuantize) or quantizer.spec.dynamic or quantizer.scale is None:
        return None
    if not isinstance(quantizer.spec.granularity, PerTensor):
        return None
    ends = torch.tensor([-HUGE, HUGE], device=quantizer.scale.device)
    low, high = fake_quantize(ends, quantizer.params, quantizer.spec).tolist()
    return low, high


def _note_output(found: dict[str, Any], name: str, module: Any, args: Any, output: Any) -> None:
    found[name] = output.detach()


def _note_input(found: dict[str, Any], name: str, module: Any, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        found[name] = args[0].detach()


def _array(x: torch.Tensor) -> Any:
    return x.detach().float().cpu().numpy()
