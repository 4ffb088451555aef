"""Runs the calibration: scales of the weights from the weights, ranges of the activations from data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from quark.base.progress import progress
from quark.base.steps import step
from quark.core.array import dtype_name
from quark.core.blocks.block_types import BlockType
from quark.core.checks import all_finite, check, gathered, naming, read
from quark.core.kernels.runs import run_ranges
from quark.core.observers import OBSERVERS
from quark.core.observers.base import bring_to_host
from quark.core.quantize import compute_qparams, fake_quantize, quantize_scales, range_of, second_level
from quark.core.scales import EPS, TINY, QParams, qparams_from_range
from quark.core.spec import TensorSpec, by_row
from quark.errors import CalibrationError, NonFiniteError
from quark.torch.calibration.distributed import merge_observers, part_of
from quark.torch.calibration.expert_tokens import ExpertCalibration, all_tokens_to_all_experts
from quark.torch.calibration.experts import finish_expert_ranges
from quark.torch.calibration.timesteps import noting_ranges
from quark.torch.config.config import QConfig
from quark.torch.layers import QuantLayer
from quark.torch.layers.attention.cache_rules import floor_cache_scales, share_cache_ranges
from quark.torch.layers.attention.probabilities import attention_quantizers
from quark.torch.layers.embedding import QuantEmbedding
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.modes import layer_quantizers, observing
from quark.torch.model.batches import run_batches

FROM_OWN_RANGE = frozenset({"min_max", "block"})
"""Observers whose range of one whole tensor is its minimum and maximum: a weight needs no statistic object."""


@step("Calibration (Weights)")
def calibrate_weights(layers: Mapping[str, QuantLayer]) -> None:
    """Find the scales of all weights and biases.

    Raises:
        NonFiniteError: A weight or bias holds NaN or Inf; names it.
    """
    with gathered():
        for name, layer in progress(layers.items(), "weights", total=len(layers)):
            for role in ("weight", "bias"):
                quantizer = layer.quantizer(role)
                if isinstance(quantizer, FakeQuantize):
                    calibrate_tensor(f"{name}.{role}", getattr(layer, role).detach(), quantizer)


def calibrate_tensor(name: str, x: torch.Tensor, quantizer: FakeQuantize) -> None:
    """Find the scale of one known tensor, unless it has one. Raises NonFiniteError, which names it."""
    if quantizer.spec.dynamic or quantizer.params is not None:
        return
    if x.is_meta:
        raise CalibrationError(f"{name} is on the meta device (offloaded or not loaded): load it first.")
    if not quantizer.spec.is_cast:
        with naming(name):
            quantizer.store(tensor_qparams(x, quantizer.spec))


def tensor_qparams(x: torch.Tensor, spec: TensorSpec) -> QParams:
    """Scale and zero point of one known tensor, by the observer of its spec.

    Raises:
        NonFiniteError: x holds NaN or Inf.
        CalibrationError: All of it would become zero.
    """
    params = _tensor_qparams(x, spec)
    # Scales of integers are not below the epsilon of float32, and others have lost their digits at its smallest normal.
    scale = params.scale if not isinstance(spec.dtype, BlockType) else (params.second or params).scale.abs()
    check(~(scale <= EPS).all(), lambda: _all_zero(x, params, spec))
    return params


def _all_zero(x: torch.Tensor, params: QParams, spec: TensorSpec) -> CalibrationError | None:
    """Return an error for a tensor whose scales are next to nothing; None where it is all 0, or keeps some values."""
    largest = float(x.abs().amax()) if x.numel() else 0.0
    if largest == 0 or (largest >= TINY and bool(fake_quantize(x, params, spec).any())):
        return None
    return CalibrationError(
        f"the largest value is {largest:.3g}, which no scale of this type holds: all would become zero. "
        "Possible: exclude the layer, or scale the model."
    )


def not_finite_error(x: torch.Tensor) -> NonFiniteError:
    """Says how many values of a tensor are not finite."""
    return NonFiniteError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} values are NaN or Inf.")


def _tensor_qparams(x: torch.Tensor, spec: TensorSpec) -> QParams:
    not_finite = partial(not_finite_error, x)
    if isinstance(spec.dtype, BlockType):
        check(all_finite(x), not_finite)
        return compute_qparams(x, spec)
    if spec.observer not in FROM_OWN_RANGE:
        observer = OBSERVERS[spec.observer](spec)
        observer.update(x)
        return observer.qparams()
    low, high = run_ranges(x, spec) or range_of(x, spec)
    check(all_finite(low, high), not_finite)
    params = qparams_from_range(low, high, spec, dtype_name(x))
    return second_level(params, x, spec)


def of_own_values(spec: TensorSpec) -> bool:
    """Return True where each scale of a known tensor follows from the values under it alone."""
    levels = spec.scale_spec is not None or spec.code_spec is not None
    return not spec.is_cast and not levels and spec.observer in FROM_OWN_RANGE


def has_rows_alone(layer: QuantLayer) -> bool:
    """Return True where the scales of some rows of a layer's weight follow from these rows."""
    spec = layer.spec.weight
    return spec is not None and of_own_values(spec) and by_row(spec)


@contextmanager
def scales_of_embeddings(embeddings: Mapping[str, QuantLayer], in_file: bool) -> Iterator[None]:
    """Within: embeddings are quantized.

    Args:
        embeddings: Full name -> quantized layer, whose scales are found, but for those that are found later.
        in_file: Whether tables stay in their file: scales are those of the rows that are looked up, where these follow
            from the rows, and those of the table are found when all of it is written.
    """
    later = {name: layer for name, layer in embeddings.items() if in_file and has_rows_alone(layer)}
    calibrate_weights({name: layer for name, layer in embeddings.items() if name not in later})
    tables = [cast(QuantEmbedding, layer) for layer in later.values()]
    for layer in tables:
        quantizer = cast(FakeQuantize, layer.quantizer("weight"))
        layer.scales_of, quantizer.mode = partial(compute_qparams, spec=quantizer.spec), Mode.quantize
    try:
        yield
    finally:
        for layer in tables:
            layer.scales_of = None


def share_scales(layers: Mapping[str, QuantLayer], groups: Sequence[Sequence[str]]) -> None:
    """Give siblings whose leaf names are in one group the largest second-level weight scale among them.

    A runtime that fuses q, k and v (or gate and up) into one matrix has one such scale for it (NVFP4).
    """
    quantizers = {}
    for name, layer in layers.items():
        quantizer = layer.quantizer("weight")
        # Solved weights lie on scales that were shared before.
        if isinstance(quantizer, FakeQuantize) and quantizer.mode is not Mode.frozen:
            quantizers[name] = quantizer
    specs = {name: quantizer.spec for name, quantizer in quantizers.items()}
    families = sharing_scales(specs, groups)
    seconds = [torch.stack([cast(torch.Tensor, quantizers[name].scale_2) for name in members]) for members in families]
    largests = [scales.amax(0) for scales in seconds]
    same = [(scales == largest).all() for scales, largest in zip(seconds, largests, strict=True)]
    is_shared = read(torch.stack([one.to(same[0].device) for one in same])) if same else []
    for members, largest, shared in zip(families, largests, is_shared, strict=True):
        if shared:
            continue  # perhaps by an algorithm that chose the first level for it
        for name in members:
            weight: torch.Tensor = layers[name].weight.detach()  # type: ignore[operator]
            quantizers[name].store(qparams_under(largest.clone(), weight, specs[name]))


def sharing_scales(specs: Mapping[str, TensorSpec], groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Names of layers that share a second-level weight scale: siblings, at least two, with leaf names in one group."""
    families: dict[tuple[str, int], list[str]] = {}
    for name, spec in specs.items():
        parent, _, leaf = name.rpartition(".")
        for index, group in enumerate(groups):
            if leaf in group and spec.scale_spec is not None:
                families.setdefault((parent, index), []).append(name)
    return [members for members in families.values() if len(members) > 1]


def qparams_under(largest: torch.Tensor, weight: torch.Tensor, spec: TensorSpec) -> QParams:
    """Scales of a weight whose second-level scale is given."""
    return quantize_scales(compute_qparams(weight, replace(spec, scale_spec=None)), QParams(largest), spec)


@step("Calibration (Forward)")
def calibrate_activations(
    model: nn.Module, layers: Mapping[str, QuantLayer], data: Iterable[Any] | None, config: QConfig
) -> None:
    """Run the data through the float model and fix the static scales of inputs and outputs.

    Args:
        model, layers: The model and its quantized layers.
        data: The batches.
        config: Of the model: it says which of them share a range.

    Raises:
        CalibrationError: No data, a batch of a wrong type, or a layer that no batch reached; names it.
        NonFiniteError: An activation has NaN or Inf; names the layer.
    """
    calibrate_tensors(model, waiting_ranges(model, layers), layer_quantizers(layers.values()), data, config)


def calibrate_tensors(
    model: nn.Module,
    quantizers: Mapping[str, FakeQuantize],
    everything: Sequence[FakeQuantize],
    data: Iterable[Any] | None,
    config: QConfig,
) -> None:
    """Fix the static scales of live tensors.

    Args:
        model: Holds the quantizers; runs in float.
        quantizers: Those of live tensors, by the names that messages have.
        everything: These and those of the weights.
        data: Batches.
        config: Which quantizers share a range or have a least scale.
    """
    quantizers = {name: quantizer for name, quantizer in quantizers.items() if quantizer.needs_range}
    if not quantizers:
        return
    if data is None:
        raise CalibrationError(
            f"{len(quantizers)} activations ({next(iter(quantizers))}, ...) have static scales, which need "
            "calibration data: pass a dataloader to quantize_model, or choose a dynamic or weight-only scheme."
        )
    with (
        observing(everything, quantizers),
        expert_tokens(model, config),
        noting_ranges(model, quantizers) as by_timestep,
    ):
        if run_batches(model, part_of(data)) == 0:
            raise CalibrationError("The calibration dataloader is empty: static scales need at least one batch.")
    finish_ranges(quantizers, config)
    by_timestep.say()


def expert_tokens(model: nn.Module, config: QConfig) -> AbstractContextManager[None]:
    """Within: each expert reads all tokens, if the config says so."""
    return all_tokens_to_all_experts(model) if config.calibrate_all_experts else nullcontext()


def finish_ranges(quantizers: Mapping[str, FakeQuantize], config: QConfig) -> None:
    """Fix the scales of quantizers that have observed, on all ranks."""
    merge_observers(quantizers)
    of_others = finish_expert_ranges(quantizers, config.sync_moe_expert_input_amax)
    ExpertCalibration(all_experts=config.calibrate_all_experts, ranges=of_others).say()
    share_cache_ranges(config, quantizers)
    bring_to_host([quantizer.observer for quantizer in quantizers.values() if quantizer.observer is not None])
    with gathered():
        for name, quantizer in quantizers.items():
            with naming(name):
                quantizer.finish_observing()
    floor_cache_scales(config, quantizers)


def waiting_activations(
    layers: Mapping[str, QuantLayer], roles: Sequence[str] = ("input", "output")
) -> dict[str, FakeQuantize]:
    """The static activation quantizers that have no scale yet, by the names of their tensors."""
    waiting = {}
    for name, layer in layers.items():
        for role in roles:
            quantizer = layer.quantizer(role)
            if isinstance(quantizer, FakeQuantize) and quantizer.needs_range:
                waiting[f"{name}.{role}"] = quantizer
    return waiting


def waiting_ranges(model: nn.Module, layers: Mapping[str, QuantLayer], name: str = "") -> dict[str, FakeQuantize]:
    """All static quantizers of live tensors that have no scale yet: of the layers' tensors, and inside attention.

    Args:
        model: A model, or a block of it.
        layers: Its quantized layers, by their full names.
        name: The full name of the block.
    """
    inside = {tensor: q for tensor, q in attention_quantizers(model, name).items() if q.needs_range}
    return waiting_activations(layers) | inside
