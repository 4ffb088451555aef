"""Scales of block floats against every neighbour, in the arithmetic of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from quark.core.quantize import compute_qparams, effective
from quark.core.schemes import SCHEMES
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import TensorSpec

ROWS, COLUMNS = 8, 256
LOWEST, HIGHEST = 0.54, 1.5
"""Of the rule's scale, which is a sixteenth at most from the one before rounding: the search starts from that."""


def scheme(name: str) -> TensorSpec:
    """How the scheme quantizes weights."""
    tensor = SCHEMES[name].weight
    assert tensor is not None
    return tensor


def values(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight with heavy tails, and the importance of its columns."""
    random = np.random.default_rng(seed)
    weight = random.standard_t(4, (ROWS, COLUMNS)) * 0.05
    return np.float32(weight), np.float32(random.random(COLUMNS) ** 4)


def errors(weight: np.ndarray, importance: np.ndarray, scale: np.ndarray, size: int) -> np.ndarray:
    """The weighted square error of each block of `size` FP4 values under its scale, (rows, blocks); float64."""
    blocks = weight.reshape(ROWS, -1, size)
    divided = np.clip(blocks / scale[..., None], -6, 6)
    lost = np.float64(divided.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale[..., None]) - blocks
    found: np.ndarray = (lost**2 * importance.reshape(-1, size)).sum(-1)
    return found


@pytest.mark.parametrize(("name", "size"), [("nvfp4", 16), ("mxfp4_weight_only", 32)])
def test_no_scale_between_half_and_the_top_at_four_loses_less(name: str, size: int) -> None:
    rule, (weight, importance) = scheme(name), values(7)
    params, plain = weighted_qparams(weight, importance, rule), compute_qparams(weight, rule)
    found, nearest = (errors(weight, importance, effective(p, rule).scale, size) for p in (params, plain))
    of_all = 1.0 if params.second is None else float(params.second.scale)
    representable = ml_dtypes.float8_e8m0fnu if params.second is None else ml_dtypes.float8_e4m3fn
    codes = np.arange(256, dtype=np.uint8).view(representable).astype(np.float32)
    codes = codes[np.isfinite(codes) & (codes > 0)]
    rule_codes = plain.scale
    best = np.full_like(found, np.inf)
    for code in codes:
        inside = (code >= rule_codes * LOWEST) & (code <= rule_codes * HIGHEST)
        lost = errors(weight, importance, np.full(found.shape, code * of_all, np.float32), size)
        best = np.where(inside, np.minimum(best, lost), best)
    assert (found <= best * (1 + 1e-4)).all()
    assert found.sum() < nearest.sum()


def test_a_block_may_end_at_four_where_nothing_lies_between_four_and_six() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :16], weight[0, 16:] = 4.5, 5.0
    weight[0, 0], weight[0, 16] = 6.0, 448 * 6.0  # the second block sets the scale of scales, 1
    rule = scheme("nvfp4")
    assert compute_qparams(weight, rule).scale[0, 0] == 1  # 6 stays 6, and 4.5 becomes 4
    assert weighted_qparams(weight, np.ones(32, np.float32), rule).scale[0, 0] == 1.5  # both are exact: 4 and 3
