"""Fake quantization of groups in one launch, where a tensor is on a GPU and its kernel has passed.

A result is right if each value has the bits of the plain steps, or both are NaN: nothing is summed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quark.core.array import Array, astype, dtype_name, is_torch, namespace, view
from quark.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from quark.core.kernels.element_rule import ElementRule
from quark.core.kernels.group_rules import WIDEST, LiveRule, Runs, StoredRule, live_scale
from quark.core.kernels.trust import Trust, device_of, kernel_module
from quark.core.scales import QParams
from quark.core.spec import TensorSpec

MODULE = "quark.core.kernels.groups_triton"
TRUST = Trust("fake-quantize groups", "Values are computed in more launches there, by the same formulas.")
PATTERNS = {"float32": "int32", "float16": "int16", "bfloat16": "int16"}
"""Element type of a tensor that kernels take -> the integers that its patterns are compared as."""

Plain = Callable[[Array, Array], None]
"""(x, out) -> None: the plain steps."""


def takes(x: Array, spec: TensorSpec) -> bool:
    """Return True where a kernel may take x, if its scales lie as one reads them."""
    device = device_of(x)
    if device is None or device in TRUST.refused or not _is_taken(x) or _needs_grad(x):
        return False
    if namespace(x).compiler.is_compiling():
        return False  # the compiler fuses the plain steps
    return ElementRule.of(spec) is not None and kernel_module(MODULE) is not None


def fake_quantize_at_once(x: Array, params: QParams | None, spec: TensorSpec, out: Array, plain: Plain) -> bool:
    """Write what x becomes to `out` with a kernel, and say so; False where no kernel takes it.

    Args:
        x, out: As `fake_quantize` takes them.
        params: Scale and zero point; with `second` those of the scales; None for scales of x itself.
        spec: The element type and the rules.
        plain: Computes the same.
    """
    if not takes(x, spec) or not _is_taken(out) or any(_needs_grad(part) for part in _arrays_of(params)):
        return False
    device, element = device_of(x), ElementRule.of(spec)
    assert device is not None and element is not None
    run = _live(x, spec, out, element) if params is None else _stored(x, params, spec, out, element)
    if run is None:
        return False
    kernel, key = run

    def prepare() -> tuple[Callable[[], Array], Callable[[], None]]:
        expected = namespace(x).empty_like(x)
        plain(x, expected)
        kept = x * 1 if out.data_ptr() == x.data_ptr() else None
        return (lambda: same_bits(out, expected)), (lambda: None if kept is None else x.copy_(kept))

    TRUST.run(device, key, kernel, lambda: plain(x, out), prepare)
    return True


def same_bits(found: Array, expected: Array) -> Array:
    """Return True where all values have the same bits, or are both NaN; an array of one bool."""
    pattern = PATTERNS[dtype_name(found)]
    nan = (found != found) & (expected != expected)
    return ((view(found, pattern) == view(expected, pattern)) | nan).all()


def _stored(
    x: Array, params: QParams, spec: TensorSpec, out: Array, element: ElementRule
) -> tuple[Callable[[], None], tuple[object, ...]] | None:
    """The launch under given scales, and what it is compiled for."""
    shape = tuple(x.shape)
    runs = Runs.of(spec.split, shape)
    if runs is None or math.prod(spec.split.scale_shape(shape)) != math.prod(params.scale.shape):
        return None
    given = {"scale": params.scale}
    if spec.scale_spec is not None and params.second is not None:
        given["second"] = params.second.scale
        scales = spec.scale_spec
        one = isinstance(scales.split, PerTensor) and params.second.scale.numel() == 1
        if not (one and scales.dtype.is_float) or scales.is_cast:
            return None
    if element.zero_decoded:
        given["zero"] = params.zero_point
    if any(part is None or part.device != x.device for part in given.values()):
        return None
    given = {name: astype(part, "float32").contiguous() for name, part in given.items()}
    scale, zero, second = map(given.get, ("scale", "zero", "second"))
    rule = StoredRule(runs, element)
    key = (
        "stored", dtype_name(x), bytes(element), second is not None, min(runs.groups, 2), runs.groups > 1 and runs.size,
        min(runs.length, 1024).bit_length(),
    )  # fmt: skip
    return (lambda: kernel_module(MODULE).stored(x, out, scale, zero, second, rule)), key


def _live(
    x: Array, spec: TensorSpec, out: Array, element: ElementRule
) -> tuple[Callable[[], None], tuple[object, ...]] | None:
    """The launch that finds the scales, and what it is compiled for."""
    scale, granularity = live_scale(spec, dtype_name(x)), spec.granularity
    runs = None if scale is None else Runs.of(granularity, tuple(x.shape))
    if scale is None or runs is None or runs.size > WIDEST:
        return None
    rows = isinstance(granularity, PerChannel) and granularity.axis % x.ndim == 0
    if not (rows or isinstance(granularity, (PerGroup, PerToken))):
        return None
    rule = LiveRule(runs, element, scale)
    key = ("live", dtype_name(x), bytes(element), runs.size, *scale.values())
    return (lambda: kernel_module(MODULE).live(x, out, rule)), key


def _arrays_of(params: QParams | None) -> list[Any]:
    return [] if params is None else [params.scale, params.zero_point, *_arrays_of(params.second)]


def _needs_grad(x: Any) -> bool:
    """Return True where a gradient is asked for, which goes through the plain steps alone."""
    return bool(is_torch(x) and x.requires_grad and namespace(x).is_grad_enabled())


def _is_taken(x: Array) -> bool:
    return dtype_name(x) in PATTERNS and bool(x.is_contiguous())
