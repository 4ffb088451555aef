"""The error of each layer of a quantized model, as a table: of any module, beside its float model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark.base.progress import progress
from quark.core.metrics import Comparison, kl_by_row
from quark.errors import CalibrationError, ConfigError
from quark.report.page import PageTable
from quark.report.shown import Shown
from quark.torch.flows.compared.coded_layers import coded_layers
from quark.torch.flows.compared.layer_damage import LayerDamage, worst_first
from quark.torch.flows.compared.moved_layers import LayerMove
from quark.torch.layers.base import input_of
from quark.torch.model.batches import calibration_step, evaluating, input_device, named_outputs
from quark.torch.model.passes import while_prepared


@dataclass(frozen=True)
class ErrorOfLayer:
    """The error of one layer.

    Attributes:
        weight: SQNR of its weight in dB; 6 dB more is half the error.
        output: SQNR of what it gives inside the quantized model in dB, so with the errors of the layers before; NaN
            where it did not run, or on other tokens than in the float model.
        alone: Error of the model's output if this layer alone is quantized: the mean KL divergence in nats of a model
            with logits, else noise over signal; None where that was not measured.
    """

    weight: float
    output: float
    alone: float | None = None


@dataclass(frozen=True, repr=False)
class LayerErrors(Shown):
    """The errors of the layers of a model; it prints as a table, in a notebook too.

    Attributes:
        layers: Name -> its error, in the order of the model.
        divergence: Whether `alone` is a KL divergence.
        shown: How many layers the table has.
    """

    layers: Mapping[str, ErrorOfLayer]
    divergence: bool = False
    shown: int = 20

    @property
    def worst(self) -> list[str]:
        """Names of the layers, first the one that costs the output most: by `alone`, else by its own output."""

        def cost(name: str) -> float:
            found = self.layers[name]
            return worst_first(found.output) if found.alone is None else -found.alone

        return sorted(self.layers, key=cost)

    def heat_map(self) -> str:
        """Return all layers at once as an SVG picture, blocks by kinds of layer: what each costs the model's output, if
        that was measured, else the SQNR of its own output.

        It is "" where the layers are of fewer than two blocks. Raises MissingDependencyError without matplotlib.
        """
        from quark.report.figures import heat_map  # of an extra of its own

        alone = {name: each.alone for name, each in self.layers.items() if each.alone is not None}
        if alone:
            return heat_map(alone, "KL nats" if self.divergence else "error", low_is_worst=False)
        return heat_map({name: each.output for name, each in self.layers.items()}, "SQNR dB", low_is_worst=True)

    def drawn(self) -> Sequence[str]:
        """The heat map."""
        return [self.heat_map()]

    def tables(self) -> Sequence[PageTable]:
        """The layers that cost most."""
        measured = any(each.alone is not None for each in self.layers.values())
        column = [alone_words(self.divergence)] if measured else []
        rows = [
            (name, *([] if found.alone is None else [f"{found.alone:.3g}"]), f"{found.weight:.1f}",
             "" if math.isnan(found.output) else f"{found.output:.1f}")
            for name, found in ((name, self.layers[name]) for name in self.worst[: self.shown])
        ]  # fmt: skip
        some = "" if len(rows) == len(self.layers) else f", {len(rows)} of {len(self.layers)}"
        headers = ("layer", *column, "weight SQNR dB", "output SQNR dB")
        return [PageTable(headers, rows, f"Layers, worst first{some}")]


def alone_words(divergence: bool) -> str:
    """The head of a column of costs, which are KL divergences or not."""
    return "KL nats of it alone" if divergence else "error of it alone"


def layer_errors(
    float_model: nn.Module, quantized_model: nn.Module, batches: Iterable[Any], *, alone: bool = False
) -> LayerErrors:
    """Measure the error of each quantized layer of a model.

    Layers that a rotation or a scaling moved (AWQ, SmoothQuant, QuaRot) are compared with the float layer moved in the
    same way.

    Args:
        float_model: The model before it was quantized. It stays as it is.
        quantized_model: The same after `quantize_model`, frozen or not, or as it was loaded.
        batches: As `quantize_model` takes them, best of data that nothing was calibrated on.
        alone: Whether to measure what each layer costs the model's output by itself, which takes a forward for each
            layer and batch. The worst layer is then the one that costs most.

    Raises:
        ConfigError: The quantized model has no quantized layers, or other layers than the float one.
        CalibrationError: No batch, or one that a model does not take.
    """
    data, coded = list(batches), coded_layers(quantized_model)
    if not coded:
        raise ConfigError("layer_errors: the quantized model has no quantized layer. Possible: quantize_model first.")
    if not data:
        raise CalibrationError("layer_errors: there is no batch; at least one is needed.")
    with while_prepared(float_model, coded.__contains__):  # the same layers, where the model has them in another form
        return _errors(float_model, quantized_model, coded, data, alone)


def _errors(
    before: nn.Module, after: nn.Module, coded: Mapping[str, Any], data: Sequence[Any], alone: bool
) -> LayerErrors:
    """The errors of layers that have the same names in both models; ConfigError where one has not."""
    there = dict(before.named_modules())
    missing = next((name for name in coded if name not in there), None)
    if missing is not None:
        raise ConfigError(f"layer_errors: the float model has no layer {missing!r}. Possible: the one it was made of.")
    damage = LayerDamage(before, after)
    with evaluating(before), evaluating(after), torch.no_grad():
        for index, batch in enumerate(progress(data, "batches", len(data))):
            with damage.watching(lambda name: True):
                for model in (before, after):
                    calibration_step(model, batch, input_device(model), index, "batch")
        costs, divergence = costs_alone(before, coded, damage.moves, data) if alone else ({}, False)
    found = {name: ErrorOfLayer(*pair, costs.get(name)) for name, pair in damage.damage.items()}
    return LayerErrors(found, divergence)


def costs_alone(
    before: nn.Module, coded: Mapping[str, Any], moves: Mapping[str, LayerMove], data: Sequence[Any]
) -> tuple[dict[str, float], bool]:
    """The cost to the output of each layer by itself; True where that is a KL divergence in nats.

    Args:
        before: The float model, in evaluation mode.
        coded: Name -> layer of the quantized model.
        moves: Name -> how it was moved; those that did not run have none, and no cost.
        data: Batches.
    """
    coded = {name: layer for name, layer in coded.items() if name in moves}
    device, costs, divergence = input_device(before), dict.fromkeys(coded, 0.0), False
    for index, batch in enumerate(data):
        name, expected = _output(before, batch, device, index)
        divergence = "logits" in name
        for layer in progress(list(coded), "layers", len(coded)):
            with _quantized_alone(before.get_submodule(layer), coded[layer], moves[layer]):
                given = _output(before, batch, device, index)[1]
            if divergence:
                cost = float(kl_by_row(*(x.reshape(-1, x.shape[-1]) for x in (expected, given))).mean())
            else:
                found = Comparison().update(expected, given)
                cost = found.noise / found.signal if found.signal else math.inf
            costs[layer] += cost / len(data)
    return costs, divergence


def _output(model: nn.Module, batch: Any, device: torch.device, index: int) -> tuple[str, torch.Tensor]:
    return next(iter(named_outputs(calibration_step(model, batch, device, index, "batch"))))


@contextmanager
def _quantized_alone(layer: nn.Module, quantized: nn.Module, move: LayerMove) -> Iterator[None]:
    """Within: a float layer gives what the quantized one would, of an input moved to it, moved back."""

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        x = input_of(args, kwargs)
        given: torch.Tensor = quantized(x if isinstance(layer, nn.Embedding) else move.input(x))
        return move.output_back(given).to(output.dtype)

    hook = layer.register_forward_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
