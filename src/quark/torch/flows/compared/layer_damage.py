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
from quark.core.metrics import Comparison, sqnr
from quark.core.quantize import fake_quantize
from quark.report.figures import ClippedHistogram
from quark.torch.flows.compared.channel_outliers import ChannelOutliers, noting_channels, of_noted
from quark.torch.flows.compared.coded_layers import coded_layers, rotated_input, unrotated_weight
from quark.torch.flows.compared.moved_layers import LayerMove, Moves
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize

MOST_HISTOGRAMS = 6
HUGE = 1e30
"""A value beyond each range: what it is quantized to is an end of the range."""


class LayerDamage:
    """Weight SQNR and output SQNR in dB of the layers whose weights come from codes, on one batch or several.

    The output SQNR compares what the layer gives inside the quantized model with what it gives inside the float
    model: errors of the layers before are part of it. It is NaN for an expert that did not get the same number of
    tokens in both, or none. Where the quantized model was rotated or scaled, both are of the float layer moved
    in the same way, see `Moves`.

    Args:
        before, after: The float and the quantized model, with or without weights; parts of them run with weights.
        draws: Whether what is drawn is kept: histograms of the worst layers, and what all read by channel.

    Attributes:
        damage: Layer -> both SQNR, of those that were seen.
        moves: Layer -> how it was moved, of those that were seen.
        coded: Name -> layer of the quantized model.
    """

    def __init__(self, before: nn.Module, after: nn.Module, draws: bool = False) -> None:
        self.before, self.after, self.draws, self.coded = before, after, draws, coded_layers(after)
        self._weights: dict[str, float] = {}
        self._outputs: dict[str, Comparison] = {}
        self.moves: dict[str, LayerMove] = {}
        self._moves: Moves | None = None
        self._drawn: dict[str, list[ClippedHistogram]] = {}
        self._channels: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return list(self.coded)

    @property
    def damage(self) -> dict[str, tuple[float, float]]:
        """Layer -> both SQNR, in the order of the model."""
        return {name: (self._weights[name], self._output(name)) for name in self.coded if name in self._weights}

    @property
    def histograms(self) -> list[ClippedHistogram]:
        """Float inputs and weights of the layers whose outputs lost most, the worst first, with the ends of codes."""
        return [each for name in self._worst() if name in self._drawn for each in self._drawn[name]]

    @property
    def channels(self) -> ChannelOutliers:
        """The channels that layers of the quantized model read, first the layers whose outputs lost most."""
        return of_noted(self._channels, self._worst(len(self._weights)))

    @contextmanager
    def reading(self, holds: Callable[[str], bool]) -> Iterator[None]:
        """Within: a part of the quantized model runs on any batch; where it draws, channels are noted.

        Args:
            holds: Whether a layer belongs to the part.
        """
        layers = {name: layer for name, layer in self.coded.items() if self.draws and holds(name)}
        with noting_channels(layers, self._channels):
            yield

    @contextmanager
    def watching(self, holds: Callable[[str], bool]) -> Iterator[None]:
        """Within: a part of both models runs on one batch, and its weights are there until the end.

        Args:
            holds: Whether a layer belongs to the part.
        """
        if self._moves is None:
            self._moves = Moves(self.before, self.after)
        names = [name for name in self.coded if holds(name)]
        inputs, expected, given = (dict[str, Any]() for _ in range(3))
        with ExitStack() as hooks:
            for name in names:
                float_layer, layer = self.before.get_submodule(name), self.coded[name]
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
        layer, float_layer = self.coded[name], self.before.get_submodule(name)
        weight: Any = float_layer.weight
        decoded = unrotated_weight(layer)
        same = expected is not None and given is not None and expected.shape == given.shape and given.numel() > 0
        if name not in self._weights:
            assert self._moves is not None
            move = self._moves.find(float_layer, weight, decoded)
            self.moves[name] = move.scaled_to(move.output(expected), given) if same else move
            self._weights[name] = sqnr(self.moves[name].weight(weight.float()), decoded)
        if same:
            self._outputs.setdefault(name, Comparison()).update(self.moves[name].output(expected), given)
        if not self.draws or name not in self._worst():
            return
        drawn = []
        if x is not None and isinstance(layer, QuantLayer) and layer.quantizer("input") is not None:
            read = rotated_input(layer, self.moves[name].input(x))
            drawn.append(ClippedHistogram.of(f"{name} (input)", _array(read), input_range(layer)))
        ends = (float(decoded.min()), float(decoded.max()))
        moved = self.moves[name].weight(weight.float())
        self._drawn[name] = [*drawn, ClippedHistogram.of(f"{name} (weight)", _array(moved), ends)]

    def _output(self, name: str) -> float:
        """The SQNR of the outputs of a layer in dB."""
        found = self._outputs.get(name)
        return math.nan if found is None else found.sqnr

    def _worst(self, most: int = MOST_HISTOGRAMS) -> list[str]:
        """The layers of those seen whose outputs lost most."""
        return sorted(self._weights, key=lambda name: worst_first(self._output(name)))[:most]


def worst_first(value: float) -> float:
    """An SQNR to sort by: what is not known comes last."""
    return math.inf if math.isnan(value) else value


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
