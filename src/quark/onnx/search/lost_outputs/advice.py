"""advice: what lost outputs come from and what brings them back, tried before it is given; the error that gives it.

Other scales and types are tried first (`trials.py`): that takes the least time, and helps most often. Then the nodes
that lose most are left in float with all that makes or reads the tensors that they lose it in: a tensor has codes as
long as one of these is quantized. What is lost then names the next ones, a few times over. All of it ends at a share
of the time that the quantization took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir

from quark.base.log import logger
from quark.errors import DamageError
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.own_time import own_time
from quark.onnx.evaluation.compare_models import ComparedLayer, damaged_layers
from quark.onnx.flow.body_model import bodies_of
from quark.onnx.graph.model_file import is_constant, to_proto
from quark.onnx.search.history import TimeBudget
from quark.onnx.search.lost_outputs.causes import tensor_causes, uneven_channels
from quark.onnx.search.lost_outputs.damage import Model
from quark.onnx.search.lost_outputs.trials import Trials, Tried
from quark.onnx.search.lost_outputs.verdict import Damage
from quark.onnx_ops.saving import PROTOBUF_LIMIT, weight_bytes

SHARE, LEAST_SECONDS = 0.5, 5.0
"""Share of the time of a quantization that the advice for it may take, and what it may take in any case."""
_LOOK = 0.25
"""Share of the time that is left then, which the look at what nodes lose may take: more samples say little new."""
_BLAMED = 3
"""Nodes that an error names for what they lose, and that are excluded at once."""
_TRIES = 4
"""Sets of nodes that are tried."""
_LOOKED = 8
"""Samples on which it is looked for what nodes lose."""
_NAMED = 8
"""Nodes that an error names of those that were tried in vain; the log names all."""

_LEARNED = 2.0
"""dB that AdaRound brings on new data where it helps: one of five refused files came above the bound, with 2.1."""
_LEARNING = 2.5
"""Times the quantization that 100 iterations take, at most: 2.0 where it took 11 s, 0.9 where it took 56."""


@dataclass(frozen=True)
class _Advice:
    """The advice for a model that has lost its outputs.

    Attributes:
        blamed: Names of the nodes that lose most, worst first.
        losses: What comes to each, and what it gives, in words.
        causes: What they come from, a sentence each.
        nodes: Nodes that were tried in float.
        tried: What is left with these in float; None where nothing was tried.
        others: What else was tried, and what it leaves, in words.
    """

    blamed: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    tried: Tried | None = None
    others: tuple[str, ...] = ()

    @property
    def blame(self) -> str:
        """Where most is lost, and why, in sentences with a space after; nothing where no node is blamed."""
        shown = "; ".join(f"{node} ({loss})" for node, loss in zip(self.blamed, self.losses, strict=True))
        found = [f"Most is lost at {shown}"] if shown else []
        found += self.causes
        if self.tried is not None and self.tried.left.lost:
            named = ", ".join(self.nodes[:_NAMED]) + (" ..." if len(self.nodes) > _NAMED else "")
            found.append(
                f"Excluding the {len(self.nodes)} nodes that lose most ({named}) was tried and does not help "
                f"({self.tried})"
            )
        return "".join(f"{sentence}. " for sentence in found)

    @property
    def cures(self) -> str:
        """The cures, with a comma after each; nothing where nothing that was tried does."""
        nodes = self.tried is not None and not self.tried.left.lost
        found = [f"exclude {', '.join(self.nodes)} (tried: {self.tried})"] if nodes else []
        return "".join(f"{cure}, " for cure in (*found, *self.others))


def _advice(
    model: ir.Model,
    quantized: onnx.ModelProto | Path,
    feeds: Sequence[Feed],
    trials: Trials | None,
    budget: TimeBudget,
) -> _Advice:
    """Find the nodes that lose most, why, and what brings the outputs back.

    Args:
        model: The float model, with the names that a user can exclude.
        quantized: What was made of it.
        feeds: Samples.
        trials: What quantizes in other ways; None to try nothing.
        budget: The time for all of it.
    """
    source, feeds = to_proto(model), feeds[:: -(-len(feeds) // _LOOKED)]
    uneven = uneven_channels(model, quantized, feeds) if budget.left() >= 0 else None
    if uneven:
        logger.info("%s.", uneven)
    others = () if trials is None else _other_types(trials, uneven is not None)
    makers = {value.name: node.name or "" for node in model.graph for value in node.outputs}
    layers = _damaged(source, quantized, feeds, budget)
    blamed = {makers[layer.tensor]: (layer, before) for layer, before in reversed(layers[:_BLAMED])}
    losses = [f"{before:.1f} dB -> {layer.sqnr:.1f}" for layer, before in reversed(blamed.values())]
    causes = tensor_causes(model, [layer.tensor for layer, _ in layers[:_BLAMED]], feeds, budget)
    for cause in causes:
        logger.info("%s.", cause)
    causes = [uneven, *causes] if uneven else causes
    advice = _Advice(tuple(reversed(blamed)), tuple(losses), tuple(causes), others=others)
    if trials is None or not layers:
        return advice
    chosen, tried = _nodes_that_help(model, source, layers, feeds, trials)
    return replace(advice, nodes=chosen, tried=tried)


def _nodes_that_help(
    model: ir.Model,
    source: onnx.ModelProto,
    layers: list[tuple[ComparedLayer, float]],
    feeds: Sequence[Feed],
    trials: Trials,
) -> tuple[tuple[str, ...], Tried | None]:
    """The nodes that lose most, as many as it takes; and what is left with them in float.

    The value is that of the quantization that was refused, with all that it does beside, where there is time.
    """
    chosen, tried = list[str](), None
    for _ in range(_TRIES):
        worst = [layer.tensor for layer, _ in layers if _around(model, [layer.tensor]) - set(chosen)][:_BLAMED]
        more = sorted(_around(model, worst) - set(chosen))
        found = trials.without(frozenset((*chosen, *more))) if worst else None
        if found is None:
            break
        chosen, tried = chosen + more, found
        logger.info("In float in this trial: %s.", ", ".join(chosen))
        if not tried.left.lost:
            break
        layers = _damaged(source, tried.model, feeds, trials.budget)
    whole = None if tried is None else trials.without(frozenset(chosen), whole=True)
    return tuple(chosen), whole or tried


def _other_types(trials: Trials, uneven: bool) -> tuple[str, ...]:
    """Return what other scales, and other types, leave, in the order of their price; where it is enough.

    The default, which is for another target, is tried where none of them is.

    Args:
        trials: What tries them.
        uneven: Whether channels of one scale differ: else scales of their own are not tried.
    """
    scales = trials.with_channel_scales() if uneven else None
    bfloat16 = trials.with_bfloat16()  # before A16W8, as without a calibration it takes a third of the time
    int16 = trials.with_int16()  # before A8W8, as it keeps more
    int8 = trials.with_float_scales()
    found = {
        "weights with a scale for each channel, where the target takes them": scales,
        "A8W8 with --config A8W8: scales are no powers of two, and the target has to take them": int8,
        "A16W8 with --config A16W8: activations take two bytes, and the target has to take them": int16,
        "BF16 with --config BF16: weights take two bytes, and the target has to take it": bfloat16,
    }
    kept = {what: tried for what, tried in found.items() if tried and tried.is_enough(trials.least)}
    if not kept:
        default = trials.with_default()
        if default and default.is_enough(trials.least):
            what = "the default without samples, for ONNX Runtime on a CPU"
            kept = {f"INT8_CPU_DYNAMIC with --config INT8_CPU_DYNAMIC: {what}": default}
    return tuple(f"{what} (tried: {tried})" for what, tried in kept.items())


def _adaround(seconds: float) -> str:
    """Name AdaRound, for which a refusal has no time.

    Args:
        seconds: That the quantization took.
    """
    return (
        "AdaRound with --algorithm adaround:num_iterations=100: the types stay (not tried: it takes up to "
        f"{_LEARNING * seconds:.0f} s more, and brings 0 to {_LEARNED:.0f} dB on new data)"
    )


def _damaged(
    source: onnx.ModelProto, quantized: onnx.ModelProto | Path, feeds: Sequence[Feed], budget: TimeBudget
) -> list[tuple[ComparedLayer, float]]:
    # It adds outputs to what it is given.
    copied = onnx.ModelProto()
    copied.CopyFrom(source)
    part = TimeBudget.of(_LOOK * max(0.0, budget.left()), budget.clock)
    return damaged_layers(copied, quantized, feeds, part.left)


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
    trials: Trials | None = None,
    budget: TimeBudget | None = None,
) -> None:
    """Log what was found; raise DamageError where it is too little, and say why, and what would help.

    Args:
        found: From `damage`.
        least: In dB; None: log only.
        model, quantized, feeds: As for `damage`.
        trials: What quantizes the model in other ways, and what is then left; None to try nothing.
        budget: The time that the advice may take; None for the least.
    """
    if found is None:
        return
    if not found.lost:
        logger.info(f"Quantized against float on calibration samples: {found}.{found.bound}")
        return
    if least is None:
        logger.warning(f"The quantized model has lost its outputs on calibration samples: {found}.")
        return
    named, budget = weight_bytes(model) < PROTOBUF_LIMIT, budget or TimeBudget.of(LEAST_SECONDS, own_time)
    if named and trials is not None:
        logger.info(
            "The quantized model has lost its outputs: %s. It is made, and --allow-damage writes it as it is. The "
            "search for the cause, and for what would help, takes at most %.0f s.",
            found,
            budget.shown or 0.0,
        )
    advice = _advice(model, quantized, feeds, trials, budget) if named else _Advice()
    if trials is not None and trials.may_learn and least - _LEARNED <= found.sqnr < least:
        advice = replace(advice, others=(*advice.others, _adaround(trials.seconds)))
    # Without an If, Loop or Scan there may be nothing left to quantize: nodes within it can be named as well.
    within = advice.blamed and set(advice.blamed) <= {body.node.name for body in bodies_of(model.graph)}
    cures = "exclude nodes within their bodies, " if within else advice.cures
    raise DamageError(
        f"The quantized model has lost its outputs on calibration samples: {found}; {least:g} dB are asked for. "
        f"{advice.blame}Possible: {cures}another configuration, "
        "more or better calibration data, or --allow-damage to write it as it is."
    )
