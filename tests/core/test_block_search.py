"""The search of block scales: against llama.cpp's quantizer, and on numpy as on torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.core.blocks.block_types import BLOCK_TYPES, NL_VALUES, block_codes
from quark.core.granularity import PerGroup
from quark.core.quantize import block_qparams, compute_qparams, dequantize, fake_quantize, quantize
from quark.core.spec import TensorSpec, block_spec
from quark.errors import ConfigError, ShapeError

EVERY_TYPE = pytest.mark.parametrize("name", BLOCK_TYPES)
LLAMA = {
    "q4_0": (0.058523, 0.025942), "q4_1": (0.053754, 0.021568), "q5_0": (0.028926, 0.012742),
    "q5_1": (0.025921, 0.010398), "q8_0": (0.003651, 0.001823), "iq4_nl": (0.052353, 0.023990),
    "q2_k": (0.203645, 0.078865), "q3_k": (0.103408, 0.045094), "q4_k": (0.048744, 0.021951),
    "q5_k": (0.024764, 0.011101), "q6_k": (0.012154, 0.005465), "iq4_xs": (0.052731, 0.024260),
}  # fmt: skip
"""Block type -> root of the (weighted) mean square error of ggml_quantize_chunk on `bell()` (ggml as of llama.cpp
b6173), without importance and with `importance()`; gguf's own decoder decoded it."""


def bell(rows: int = 64, columns: int = 512) -> np.ndarray:
    """Weights as trained ones are spread, from exact arithmetic alone."""
    uniform = np.random.default_rng(0).random((6, rows, columns))
    return (uniform.sum(0) - 3).astype(np.float32)


def importance(columns: int = 512) -> np.ndarray:
    return (np.random.default_rng(1).random(columns) ** 3 + 0.01).astype(np.float32)


def loss(x: np.ndarray, y: np.ndarray, h: np.ndarray | float = 1.0) -> float:
    return float(np.sqrt((((x - y).astype(np.float64) ** 2) * h).mean()))


@EVERY_TYPE
def test_the_error_is_below_that_of_llama_cpp(name: str) -> None:
    x, h, spec = bell(), importance(), block_spec(name)
    plain = loss(x, fake_quantize(x, compute_qparams(x, spec), spec))
    weighted = loss(x, fake_quantize(x, block_qparams(x, h, spec), spec), h)
    assert plain < LLAMA[name][0]
    assert weighted < LLAMA[name][1]
    # Who is told what matters loses less there than who is not.
    assert weighted < loss(x, fake_quantize(x, compute_qparams(x, spec), spec), h)


@EVERY_TYPE
def test_numpy_and_torch_find_scales_of_one_error(name: str) -> None:
    """Sums in another order may choose another of two trials that are as good."""
    x, spec = bell(8), block_spec(name)
    ours = fake_quantize(x, compute_qparams(x, spec), spec)
    theirs = fake_quantize(torch.from_numpy(x), compute_qparams(torch.from_numpy(x), spec), spec).numpy()
    assert loss(x, theirs) == pytest.approx(loss(x, ours), rel=1e-4)


@EVERY_TYPE
def test_every_code_is_the_nearest(name: str) -> None:
    x, spec = bell(4), block_spec(name)
    dtype, params = BLOCK_TYPES[name], compute_qparams(x, spec)
    near = np.abs(dequantize(quantize(x, params, spec), params, spec) - x)
    codes = dtype.values or range(int(dtype.min), int(dtype.max) + 1)
    for code in codes:
        other = np.abs(dequantize(np.full_like(x, code), params, spec) - x)
        # A product with the reciprocal decides; two codes as near as float32 can tell may change places.
        assert (near <= other + 1e-6).all()


@EVERY_TYPE
def test_zeros_stay_zeros_and_outliers_are_kept(name: str) -> None:
    spec = block_spec(name)
    x = np.zeros((3, 512), np.float32)
    x[1, 3], x[2, 300] = 1e3, -1e3
    y = fake_quantize(x, compute_qparams(x, spec), spec)
    assert not y[0].any() and np.isfinite(y).all()
    # A value alone costs as much as its scale is rounded to, 11 bits of float16. IQ4 has no code for 0: the 31
    # others of its group are 1, and pull the scale down by 31 / 113^2.
    bound = 2**-10 + (31 / 113**2 if BLOCK_TYPES[name].values else 0)
    assert y[1, 3] == pytest.approx(1e3, rel=bound) and y[2, 300] == pytest.approx(-1e3, rel=bound)


def test_the_table_is_rounded_to_the_nearest() -> None:
    x = np.linspace(-140, 120, 2601, dtype=np.float32)
    found = block_codes(x, np.ones_like(x), None, BLOCK_TYPES["iq4_nl"])
    table = np.array(NL_VALUES, np.float32)
    assert np.array_equal(np.abs(found - x), np.abs(x[:, None] - table).min(1))


def test_block_types_are_for_the_rows_of_static_weights() -> None:
    q4_k = BLOCK_TYPES["q4_k"]
    for options in ({"granularity": PerGroup(-1, 128)}, {"granularity": PerGroup(-1, 256), "dynamic": True}):
        with pytest.raises(ConfigError, match="for static weights, in groups of 256"):
            TensorSpec(q4_k, **options)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="rows of a matrix"):
        compute_qparams(np.zeros(256, np.float32), block_spec("q4_k"))
    with pytest.raises(ShapeError, match="256"):
        compute_qparams(np.zeros((2, 128), np.float32), block_spec("q4_k"))
