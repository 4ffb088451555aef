"""Scales of output channels for weights that one scale serves badly, where nothing else would show it.

    n = mean over the output channels c of sum((w_c - q_c)^2) / sum(w_c^2)

with w a weight and q the same under the one scale that is asked for. Where the inputs of a layer are uncorrelated and
of one size, n is the noise of its outputs, each as a share of itself: the next layer may magnify a small one. Noises of
layers in a row add. Weight-only and dynamic quantization see no samples on which outputs could be measured, so weights
keep one scale only while their noises are at most `_MOST_NOISE` together; the noisiest get scales of channels first.
Values of a normal distribution have n = 1e-4 at 8 bits. Channels of different size, as depthwise convolutions have
them and a batch normalization leaves them when it is folded, have up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.base.log import logger
from quark.core.granularity import Granularity, PerChannel, PerTensor
from quark.core.quantize import fake_quantize
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant
from quark.onnx.operators import RECURRENT, rule_of
from quark.onnx.placement.placement import Operand, Placement
from quark.onnx.placement.stored_weights import stored_spec
from quark.onnx.placement.weight_spec import weight_spec

_MOST_NOISE = 1e-4
"""40 dB, what one weight of normally distributed values loses at 8 bits: 30 more than `lost_outputs/verdict.py` asks of
outputs, for what later layers amplify and activations lose. PP-OCR's text recognition needs 28 of them."""


def refine_scales(
    placement: Placement, settings: Settings, params: Mapping[Operand, QParams]
) -> dict[Operand, TensorSpec]:
    """The specs of the weights that get scales of channels in the place of one.

    Args:
        placement: Of a model without Q/DQ around activations; not changed.
        settings: With overrides: a weight that one names keeps what it says.
        params: Scale and zero point of every weight as it is placed.
    """
    finer = _finer_specs(placement, settings)
    noise = {
        operand: _noise(operand, placement.weights[operand], params[operand], spec.granularity)
        for operand, spec in finer.items()
    }
    # All readers of a constant follow the noisiest of them, so that its codes are stored once.
    readers: dict[ir.Value | None, list[Operand]] = {}
    for operand in sorted(noise, key=noise.__getitem__, reverse=True):
        readers.setdefault(operand[0].inputs[operand[1]], []).append(operand)
    left, chosen = sum(noise.values()), dict[Operand, TensorSpec]()
    for operands in readers.values():
        if left <= _MOST_NOISE:
            break
        left -= sum(noise[operand] for operand in operands)
        chosen |= {operand: finer[operand] for operand in operands}
    if chosen:
        logger.info(
            "%d of %d weights have scales for each output channel: under one scale they would lose too much.",
            len(chosen),
            len(placement.weights),
        )
    return chosen


def _finer_specs(placement: Placement, settings: Settings) -> dict[Operand, TensorSpec]:
    """Return the spec that each weight under one scale could have instead, where the runtime has a form for it."""
    named, finer = dict(settings.specs.overrides), {}
    for operand, spec in placement.weights.items():
        value = operand[0].inputs[operand[1]]
        assert value is not None
        if spec.has_zero_point and not spec.is_block and value.name not in named and _is_coarse(operand, spec):
            channels = _by_channels(operand, spec, settings, placement)
            if channels is not None and channels.granularity != spec.granularity:
                finer[operand] = channels
    return finer


def _is_coarse(operand: Operand, spec: TensorSpec) -> bool:
    """Return True for a weight under one scale, and a recurrent one under one scale for each direction."""
    node, index = operand
    if is_op(node, *RECURRENT):
        return isinstance(spec.granularity, PerTensor) or spec.granularity == PerChannel(0)
    return isinstance(spec.granularity, PerTensor) and index in (rule_of(node.op_type).weight, *_stored(node))


def _stored(node: ir.Node) -> tuple[int, ...]:
    """Indices of the constants that are kept as codes, of a Gather as of layers with matrices and tables."""
    return rule_of(node.op_type).stored


def _by_channels(operand: Operand, spec: TensorSpec, settings: Settings, placement: Placement) -> TensorSpec | None:
    """The spec with scales of channels, in a form that the runtime has; None where there is none."""
    node, index = operand
    in_kernel = node in placement.dynamic
    # ConvInteger has one zero point for all channels of a weight, DynamicQuantizeLSTM for all outputs of a direction.
    symmetric = spec.symmetric or (in_kernel and is_op(node, "Conv", "LSTM"))
    channels = replace(spec, granularity=PerChannel(0), symmetric=symmetric)
    if index in _stored(node):
        return stored_spec(node, index, channels, in_kernel)
    return weight_spec(node, channels, settings)


def _noise(operand: Operand, spec: TensorSpec, params: QParams, channels: Granularity) -> float:
    """The mean noise of the channels of a weight under its spec, each as a share of itself; 0 for one of zeros."""
    weight = np.asarray(constant(operand[0].inputs[operand[1]]), np.float32)
    error = np.asarray(fake_quantize(weight, params, spec))
    error -= weight
    with np.errstate(over="ignore", invalid="ignore"):
        signal, noise = (np.asarray(channels.sums(np.square(part))) for part in (weight, error))
        shares = np.divide(noise, signal, out=np.zeros_like(signal), where=signal > 0)
    return float(np.nan_to_num(shares, nan=1.0).mean())
