"""Overrides: another type, symmetry, range or scale for single tensors and whatever shares their scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.errors import ConfigError, did_you_mean
from quark.onnx.calibration.qparams import ModelQParams, onnx_range
from quark.onnx.config.settings import Override, Settings
from quark.onnx.placement.placement import Operand, Placement
from quark.onnx.placement.weight_spec import weight_spec


def override_specs(placement: Placement, settings: Settings) -> None:
    """Change the specs of the tensors that the overrides name.

    Raises:
        ConfigError: No quantized tensor has the name, or two tensors with one scale are told different things.
    """
    told: dict[ir.Value, Override] = {}
    for name, override in settings.specs.overrides:
        roots, constants = _classes_named(placement, name, settings.specs.bodies)
        for root in roots:
            if override.axis is not None:
                raise ConfigError(f"TensorQuantOverrides[{name!r}]: only a weight has one scale for each channel.")
            if told.setdefault(root, override) != override:
                raise ConfigError(f"TensorQuantOverrides[{name!r}]: tensors that share its scale have other overrides.")
            for value, spec in placement.activations.items():
                if placement.root(value) is root:
                    placement.activations[value] = _changed(spec, override)
        for node, index in constants:
            spec = _changed(placement.weights[node, index], override)
            if override.axis is not None:
                spec = weight_spec(node, replace(spec, granularity=PerChannel(override.axis)), settings)
                if spec.granularity != PerChannel(override.axis):
                    raise ConfigError(
                        f"TensorQuantOverrides[{name!r}]: the channels of this weight: {spec.granularity}."
                    )
            placement.weights[node, index] = spec


def override_params(placement: Placement, qparams: ModelQParams, settings: Settings) -> None:
    """Put the given scales and ranges in the place of those found."""
    for name, override in settings.specs.overrides:
        if override.scale is None and override.low is None:
            continue
        roots, constants = _classes_named(placement, name, settings.specs.bodies)
        for root in roots:
            found = qparams.activations[root]
            qparams.activations[root] = _given_qparams(override, found, placement.activations[root])
        for key in constants:
            qparams.weights[key] = _given_qparams(override, qparams.weights[key], placement.weights[key])


def _classes_named(placement: Placement, name: str, elsewhere: bool) -> tuple[set[ir.Value], list[Operand]]:
    """The classes and constants of this name; there may be none where tensors are quantized `elsewhere` too."""
    roots = {placement.root(value) for value in placement.activations if value.name == name}
    constants = [(node, i) for node, i in placement.weights if getattr(node.inputs[i], "name", None) == name]
    if not roots and not constants and not elsewhere:
        known = [value.name or "" for value in placement.activations]
        known += [getattr(node.inputs[i], "name", "") for node, i in placement.weights]
        raise ConfigError(f"TensorQuantOverrides: no quantized tensor is named {name!r}. {did_you_mean(name, known)}")
    return roots, constants


def _changed(spec: TensorSpec, override: Override) -> TensorSpec:
    if not spec.has_zero_point and override.dtype is None:
        raise ConfigError(f"TensorQuantOverrides: a tensor of {spec.dtype} has no scale; give a quant_type.")
    dtype = DTYPES[override.dtype or spec.dtype.name]
    symmetric = spec.symmetric if override.symmetric is None else override.symmetric
    observer = spec.observer if spec.has_zero_point else "min_max"
    changed = onnx_range(replace(spec, dtype=dtype, symmetric=symmetric, observer=observer))
    assert changed is not None
    return changed


def _given_qparams(override: Override, found: QParams, spec: TensorSpec) -> QParams:
    """The scale or range of an override, one for each channel that has a scale."""

    def full(value: float | None) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.full(np.shape(found.scale), value, np.float32)

    if override.scale is not None:
        return QParams(full(override.scale), full(override.zero_point))
    return qparams_from_range(full(override.low), full(override.high), spec)
