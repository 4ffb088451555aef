"""advice: which nodes in float bring a lost model back, tried before it is given; the error that gives it.

The nodes that lose most are left in float with all that makes or reads the tensors that they lose it in: a tensor has
codes as long as one of these is quantized. What is lost then names the next ones, a few times over.

It is tried by quantizing once more, without some nodes, on the samples that were kept (`Retrying`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from quark.base.log import logger, severity
from quark.errors import DamageError, QuarkError
from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings
from quark.onnx.evaluation.compare_models import damaged_layers
from quark.onnx.flow.body_model import bodies_of
from quark.onnx.flow.flow import finish
from quark.onnx.flow.image_layout import with_channels_last
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import checked_proto, is_constant, load, to_proto
from quark.onnx.search.lost_outputs.damage import Model, damage
from quark.onnx.search.lost_outputs.verdict import Damage
from quark.onnx.search.settle import convert
from quark.onnx_ops.saving import PROTOBUF_LIMIT, weight_bytes

_BLAMED = 3
"""Nodes that an error names for what they lose, and that are excluded at once."""
_TRIES = 4
"""Quantizations that are tried."""
_LOOKED = 8
"""Samples on which it is looked for what nodes lose."""

_Retry = Callable[[frozenset[str]], tuple[onnx.ModelProto, Damage | None]]
"""Quantizes without some nodes: the model, and what is left of its outputs."""


@dataclass(frozen=True)
class _Advice:
    """The advice for a model that has lost its outputs.

    Attributes:
        blamed: Names of the nodes that lose most, worst first.
        losses: What comes to each, and what it gives, in words.
        nodes: Nodes that bring the outputs back, if they stay in float; or that were tried in vain.
        tried: What is left with these in float; None where nothing was tried.
    """

    blamed: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    tried: Damage | None = None

    @property
    def blame(self) -> str:
        """Where most is lost, a sentence with a space after; nothing where no node is blamed."""
        shown = "; ".join(f"{node} ({loss})" for node, loss in zip(self.blamed, self.losses, strict=True))
        vain = "" if self.tried is None or not self.tried.lost else (
            f"Excluding {len(self.nodes)} nodes that lose most was tried and does not help ({self.tried}). "
        )  # fmt: skip
        return f"{f'Most is lost at {shown}. ' if shown else ''}{vain}"

    @property
    def exclusion(self) -> str:
        """The nodes to exclude, with a comma after; nothing where that was not tried, or does not help."""
        if self.tried is None or self.tried.lost:
            return ""
        return f"exclude {', '.join(self.nodes)} (tried: {self.tried}), "


def _exclusion_that_helps(
    model: ir.Model, quantized: onnx.ModelProto | Path, feeds: Sequence[Feed], retry: _Retry | None
) -> _Advice:
    """Find the nodes that lose most, and those without which the outputs are not lost.

    Args:
        model: The float model, with the names that a user can exclude.
        quantized: What was made of it.
        feeds: Samples.
        retry: What quantizes without some nodes; None to try nothing.
    """
    source, chosen, advice = to_proto(model), list[str](), _Advice()
    feeds = feeds[:: -(-len(feeds) // _LOOKED)]
    makers = {value.name: node.name or "" for node in model.graph for value in node.outputs}
    for _ in range(_TRIES):
        # It adds outputs to what it is given.
        copied = onnx.ModelProto()
        copied.CopyFrom(source)
        layers = damaged_layers(copied, quantized, feeds)
        if not advice.blamed:
            blamed = {makers[layer.tensor]: (layer, before) for layer, before in reversed(layers[:_BLAMED])}
            losses = [f"{before:.1f} dB -> {layer.sqnr:.1f}" for layer, before in reversed(blamed.values())]
            advice = _Advice(tuple(reversed(blamed)), tuple(losses))
        worst = [layer.tensor for layer, _ in layers if _around(model, [layer.tensor]) - set(chosen)][:_BLAMED]
        if retry is None or not worst:
            return advice
        chosen += sorted(_around(model, worst) - set(chosen))
        try:
            with severity(2):
                quantized, left = retry(frozenset(chosen))
        except QuarkError as error:
            logger.debug(f"Nothing is left to try: {error}")
            return advice
        if left is None:
            return advice
        advice = _Advice(advice.blamed, advice.losses, tuple(chosen), left)
        if not left.lost:
            return advice
    return advice


def _around(model: ir.Model, tensors: Sequence[str]) -> set[str]:
    """The nodes that make some tensors, and all that make or read these and what those nodes read."""
    made = [value for node in model.graph for value in node.outputs if value.name in tensors]
    read = [value for each in made for value in _inputs(each) if value is not None and not is_constant(value)]
    nodes = {use.node for value in (*made, *read) for use in value.uses()}
    nodes |= {producer for value in (*made, *read) if (producer := value.producer()) is not None}
    return {node.name or "" for node in nodes if node.graph is model.graph}


def _inputs(value: ir.Value) -> Sequence[ir.Value | None]:
    node = value.producer()
    return () if node is None else node.inputs


def refuse_damage(
    found: Damage | None,
    least: float | None,
    model: ir.Model,
    quantized: Model,
    feeds: Sequence[Feed],
    retry: _Retry | None = None,
) -> None:
    """Log what was found; raise DamageError where it is too little, and say which nodes in float would help.

    Args:
        found: From `damage`.
        least: In dB; None: log only.
        model, quantized, feeds: As for `damage`.
        retry: What quantizes the model without some nodes, and what is then left; None to try nothing.
    """
    if found is None:
        return
    if not found.lost:
        logger.info(f"Quantized against float on calibration samples: {found}.")
        return
    if least is None:
        logger.warning(f"The quantized model has lost its outputs on calibration samples: {found}.")
        return
    named = weight_bytes(model) < PROTOBUF_LIMIT
    advice = _exclusion_that_helps(model, quantized, feeds, retry) if named else _Advice()
    # Without an If, Loop or Scan there may be nothing left to quantize: nodes within it can be named as well.
    within = advice.blamed and set(advice.blamed) <= {body.node.name for body in bodies_of(model.graph)}
    exclusion = "exclude nodes within their bodies, " if within else advice.exclusion
    raise DamageError(
        f"The quantized model has lost its outputs on calibration samples: {found}; {least:g} dB are asked for. "
        f"{advice.blame}Possible: {exclusion}another configuration, "
        "more or better calibration data, or --allow-damage to write it as it is."
    )


# What an advice is tried by ------------------------------------------------------------------------------------------


CALIBRATED = 64
"""Samples that it calibrates on."""


class Retrying:
    """Quantizes a model without some nodes, as often as it is asked to; the model is calibrated once.

    Args:
        source: The float model, as `load` takes it.
        settings: Of the quantization that lost the outputs. Algorithms are left out: they would be run on each try.
        feeds: Samples.
    """

    def __init__(self, source: Any, settings: Settings, feeds: Sequence[Feed]) -> None:
        self._source, self._feeds = source, feeds
        calibration = replace(settings.calibration, statistics=None, range_file=None, figures=False)
        self._settings = replace(
            settings, calibration=calibration, algorithms=(), equalization=None, equalize_if_better=False,
            correct_biases=False, measurement=replace(settings.measurement, enabled=False), prepared_file=None,
        )  # fmt: skip
        self._statistics: dict[str, Statistics] = {}

    @cached_property
    def _prepared(self) -> tuple[ir.Model, Settings]:
        model, settings = self._loaded()
        return model, prepare(model, settings)

    def _loaded(self) -> tuple[ir.Model, Settings]:
        """The float model as the feeds fit it, and what is then left to do."""
        model = load(self._source)
        return model, with_channels_last(model, self._settings, None)[0]

    def __call__(self, names: frozenset[str]) -> tuple[onnx.ModelProto, Damage | None]:
        """The model with these nodes in float, and what is left of its outputs."""
        model, settings = self._prepared
        specs = replace(settings.specs, exclude=(*settings.specs.exclude, names))
        data = Samples(self._feeds[:CALIBRATED], model_inputs(model))
        quantized = convert(Prepared(model, data, statistics=self._statistics).copy(), replace(settings, specs=specs))
        finish(quantized, settings)
        proto = checked_proto(quantized)
        return proto, damage(self._loaded()[0], proto, self._feeds, settings)
