"""A check that the granularities of a spec fit the weight and the input of a layer."""

from __future__ import annotations

from quark.core.blocks.block_types import BLOCK_TYPES, BlockType
from quark.core.dtypes import Dtype
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ShapeError


def check_shapes(name: str, kind: str, weight: tuple[int, ...] | None, features: int | None, spec: LayerSpec) -> None:
    """Raise ShapeError, naming the layer, where a granularity does not fit its weight or its input features."""
    try:
        if spec.weight is not None and weight is not None:
            _fit(spec.weight, weight, "weight")
        if spec.input is not None and features is not None and spec.input.dynamic:
            _fit(spec.input, (1, features), "input")
    except ShapeError as error:
        raise ShapeError(f"Layer {name!r} ({kind}, weight {weight}): {error}") from None


def _fit(spec: TensorSpec, shape: tuple[int, ...], role: str) -> None:
    """Raise ShapeError, naming the tensor, when the granularity does not fit the shape."""
    try:
        _fit_blocks(spec.dtype, shape)
        spec.split.scale_shape(shape)
        if spec.code_spec is not None:
            spec.code_spec.split.scale_shape(shape)
    except ShapeError as error:
        raise ShapeError(f"{role}: {error}") from None


def _fit_blocks(dtype: Dtype, shape: tuple[int, ...]) -> None:
    """Raise ShapeError where rows are no whole number of the blocks of a block type."""
    if not isinstance(dtype, BlockType) or (len(shape) == 2 and shape[1] % dtype.block == 0):
        return
    smaller = [row.name for row in BLOCK_TYPES.values() if len(shape) == 2 and shape[1] % row.block == 0]
    raise ShapeError(
        f"{dtype} cuts the rows of a matrix into blocks of {dtype.block}. Possible here: "
        f"{', '.join(smaller) or 'no block type'}, or a mix, which chooses by itself."
    )
