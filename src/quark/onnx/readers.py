"""Calibration data readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quark.errors import ConfigError

if TYPE_CHECKING:
    import onnx_ir as ir

SEED = 42


class RandomDataReader:
    """One sample of seeded normal noise for each input; unknown dimensions count as 1.

    Args:
        model: The model whose inputs are filled.
        input_shape: Input name -> shape, for inputs with unknown dimensions.
    """

    def __init__(self, model: ir.Model, input_shape: dict[str, list[int]] | None = None) -> None:
        generator = np.random.default_rng(SEED)
        self._feed: dict[str, Any] | None = {}
        for value in model.graph.inputs:
            if value.dtype is None or value.shape is None:
                raise ConfigError(f"Input {value.name} has no type or shape: random data cannot be made for it.")
            shape = (input_shape or {}).get(value.name or "") or [d if isinstance(d, int) else 1 for d in value.shape]
            kind = value.dtype.numpy()
            if value.dtype.is_floating_point():
                self._feed[value.name or ""] = generator.standard_normal(shape).astype(kind)
            else:
                self._feed[value.name or ""] = generator.integers(0, 2, shape).astype(kind)

    def get_next(self) -> dict[str, Any] | None:
        """The sample, once."""
        feed, self._feed = self._feed, None
        return feed
