"""Every element type has an ONNX type that holds its codes, and ONNX's own schema agrees since when it has it."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import onnx
import pytest
from onnx import TensorProto, helper

from quark.core.dtypes import DTYPES, Dtype
from quark.errors import NotSupportedError
from quark.onnx_ops.element_types import FIRST_OPSET, PER_CHANNEL_OPSET, code_type

NARROWER = {"8": "4", "16": "8", "32": "16"}


def limits(kind: str) -> tuple[int, int]:
    """Smallest and largest value of an ONNX integer type."""
    info = ml_dtypes.iinfo(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(kind)))
    return int(info.min), int(info.max)


@pytest.mark.parametrize("name", DTYPES)
def test_codes_fit_their_type_and_no_narrower_one(name: str) -> None:
    dtype, kind = DTYPES[name], code_type(DTYPES[name])
    if "FLOAT" in kind:
        assert kind == dtype.onnx
        return
    steps = 2 if name in ("mx4", "mx6", "mx9") else 1
    codes = (0, 2**dtype.bits - 1) if dtype.is_float else (steps * dtype.min, steps * dtype.max)
    low, high = limits(kind)
    assert low <= codes[0] and codes[1] <= high
    digits = kind.lstrip("UINT")
    if digits in NARROWER:
        low, high = limits(kind.replace(digits, NARROWER[digits]))
        assert not (low <= codes[0] and codes[1] <= high)


def test_a_new_element_type_needs_its_row_only() -> None:
    int5 = Dtype("int5", "int", 5, -16, 15, torch="uint8")
    assert code_type(int5) == "INT8"
    assert code_type(replace(int5, name="uint3", bits=3, min=0, max=7)) == "UINT4"
    assert code_type(replace(int5, kind="float", ebits=2, mbits=2, bias=1)) == "UINT8"


def test_eight_bits_are_the_least_where_a_runtime_has_no_four() -> None:
    assert [code_type(DTYPES[name], 8) for name in ("int4", "uint4", "int2", "mx4")] == [
        "INT8",
        "UINT8",
        "INT8",
        "INT8",
    ]


def test_more_than_32_bits_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="int40: .* up to 32 bits"):
        code_type(Dtype("int40", "int", 40, -(2.0**39), 2.0**39 - 1))


@pytest.mark.parametrize("kind", FIRST_OPSET)
def test_the_first_opset_is_that_of_onnx(kind: str) -> None:
    written = helper.tensor_dtype_to_string(TensorProto.DataType.Value(kind)).removeprefix("TensorProto.").lower()

    def has(op_type: str, opset: int) -> bool:
        schema = onnx.defs.get_schema(op_type, opset)
        types = {text for constraint in schema.type_constraints for text in constraint.allowed_type_strs}
        return f"tensor({written})" in types

    assert has("DequantizeLinear", FIRST_OPSET[kind])
    assert has("QuantizeLinear", FIRST_OPSET[kind]) or kind == "INT32"
    assert FIRST_OPSET[kind] == PER_CHANNEL_OPSET or not has("DequantizeLinear", FIRST_OPSET[kind] - 1)
