"""int8 weights and inputs: integer products, by oneDNN or by torch's `_int_mm`.

    y[m, n] = scale_x[m] * scale_w[n] * (sum over k of a[m, k] * q[n, k]  -  zero_x[m] * (sum over k of q[n, k]))

a are the codes that the layer's input quantizer makes, moved by -128 where they are unsigned, and zero_x with them.
They are made in one compiled pass or two instead of nine of torch:

    code = clamp(round(x * (1 / scale)) + zero_point, qmin, qmax) - shift,    shift = 128 for unsigned codes, else 0

The scale is what `quark.core` makes of the range, and the codes are those of `quark.core.quantize`. Where this machine
has no compiler, and for roundings and dtypes that are rare, `quark.core` makes them. What the quantizer of a layer asks
for is looked at once, when its coder is made: a product of one token takes less time than that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from quark.core.granularity import PerTensor, PerToken
from quark.core.kernels.runs import CodeRule, has_live_codes, is_compiled, live_codes, ranges, rule_of
from quark.core.kernels.runs import codes as run_codes
from quark.core.rounding import RoundType
from quark.core.scales import QParams, qparams_from_range
from quark.torch.kernels.kernel import CodedWeight, Kernel, Multiply, Packed, input_codes
from quark.torch.layers.fake_quant import FakeQuantize


class _Int8Int8(Kernel):
    """Symmetric int8 weights per channel or tensor; inputs int8 or uint8 per tensor or token, static or dynamic."""

    takes_codes = True

    def fits(self, weight: CodedWeight) -> bool:
        quantizer = weight.input_quantizer
        if not isinstance(quantizer, FakeQuantize) or weight.codes.dtype.is_complex:
            return False
        spec = quantizer.spec
        plain = spec.scale_spec is None and spec.code_spec is None and quantizer.trained is None
        return (
            weight.spec.dtype.name == "int8"
            and weight.scale.shape[1] == 1
            and weight.zero is None
            and spec.dtype.name in ("int8", "uint8")
            and plain
            and not spec.float_zero_point
            and isinstance(spec.granularity, (PerTensor, PerToken))
            and (spec.dynamic or isinstance(spec.granularity, PerTensor))
            # Sums stay within int32, of codes without a sign too.
            and weight.shape[1] < (1 << 31) // (255 * 128)
        )

    def pack(self, weight: CodedWeight) -> dict[str, Any]:
        codes, scale = weight.codes.to(torch.int8), weight.scale[:, 0].contiguous()
        return {
            "weight": self.pack_codes(codes),
            "scale": scale,
            "sums": weight.codes.sum(1),  # exact: below 2^24
        }

    def pack_codes(self, codes: torch.Tensor) -> Any:
        """The weight as the product takes it."""
        return codes

    def product(self, a: torch.Tensor, packed: Packed) -> torch.Tensor:
        """The exact integer sums times scale_w, float32."""
        raise NotImplementedError

    def ways(self, input_quantizer: nn.Module | None) -> dict[str, Multiply]:
        assert isinstance(input_quantizer, FakeQuantize)
        return {"integers": _integers(input_quantizer, self.product)}


Product = Callable[[torch.Tensor, Packed], torch.Tensor]


def _integers(quantizer: FakeQuantize, product: Product) -> Multiply:
    spec, coder = quantizer.spec, int8_codes(quantizer)
    centred, shift = spec.dtype.signed and spec.symmetric, 0.0 if spec.dtype.signed else 128.0

    def multiply(x: torch.Tensor, packed: Packed) -> torch.Tensor:
        codes, params = coder(x)
        y = product(codes, packed)
        if not centred:
            zero = torch.zeros_like(params.scale) if params.zero_point is None else params.zero_point
            y = y - (zero.float() - shift).reshape(-1, 1) * (packed["sums"] * packed["scale"])
        return y.mul_(params.scale.float().reshape(-1, 1)).to(x.dtype)

    def traced(x: torch.Tensor, packed: Packed) -> torch.Tensor:
        # torch.compile breaks its graph here: its own lowering of oneDNN's product takes weights that are constants of
        # the graph only, and the compiled passes are no operators of torch.
        if torch.compiler.is_compiling():
            run: Callable[..., torch.Tensor] = torch.compiler.disable(multiply)  # type: ignore[no-untyped-call]
            return run(x, packed)
        return multiply(x, packed)

    return traced


class OneDnnInt8(_Int8Int8):
    """oneDNN's int8 matrix product, on CPUs.

    It takes codes without a sign, u = a + 128: without AMX there is no instruction for signed codes, which oneDNN
    multiplies a hundred times slower. Their part, 128 times the sum of a row of q, is taken away as a bias, in float32:
    told of a zero point, oneDNN reads the weight once more in each call to find these sums.

    A processor without VNNI (AVX2, the first with AVX-512) adds two products of codes in 16 bits, where they saturate:
    2 * 255 * 127 becomes 32767. No layer fits there, whatever its codes, for inputs are not known when it is packed.
    """

    name = "onednn_int8"

    def fits(self, weight: CodedWeight) -> bool:
        on_cpu = weight.codes.device.type == "cpu" and torch._C._has_mkldnn
        return on_cpu and super().fits(weight) and onednn_sums_are_exact()

    def pack(self, weight: CodedWeight) -> dict[str, Any]:
        packed = super().pack(weight)
        scale, sums = packed["scale"], packed["sums"]
        zero = torch.zeros(len(scale), dtype=torch.int32)
        return {**packed, "zero": zero, "offset": (sums.double() * scale.double() * -128).float()}

    def pack_codes(self, codes: torch.Tensor) -> Prepacked:
        return Prepacked(codes)

    def codes(self, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        codes: torch.Tensor = packed["weight"].codes().float()
        return codes

    def product(self, a: torch.Tensor, packed: Packed) -> torch.Tensor:
        weight, scale, offset = packed["weight"].tensor, packed["scale"], packed["offset"]
        unsigned = a.view(torch.uint8) ^ 128
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            unsigned, 1.0, 0, weight, scale, packed["zero"], offset, 1.0, 0, torch.float32, "none", [], ""
        )
        return y


@cache
def onednn_sums_are_exact() -> bool:
    """Return True where the sums of `OneDnnInt8` are exact here, for one row and for many; found once in a process.

    The largest codes and the smallest ones show it: no others saturate where these do not.
    """
    codes, kernel = torch.tensor([[127], [-128]], dtype=torch.int8).repeat(16, 64), OneDnnInt8()
    ones, sums = torch.ones(len(codes)), codes.sum(1)
    packed = {"weight": Prepacked(codes), "scale": ones, "zero": torch.zeros_like(sums, dtype=torch.int32)}
    packed["offset"] = sums * -128.0
    return all(
        torch.equal(kernel.product(a, packed), a.float() @ codes.float().T) for a in (codes[:1], codes[1:2], codes)
    )


class IntMm(_Int8Int8):
    """torch's `_int_mm`, on CPUs and CUDA; CUDA takes 17 rows or more, and multiples of 8."""

    name = "int_mm"

    def fits(self, weight: CodedWeight) -> bool:
        n, k = weight.shape
        return (weight.codes.device.type == "cpu" or (n % 8 == 0 and k % 8 == 0)) and super().fits(weight)

    def codes(self, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        codes: torch.Tensor = packed["weight"].float()
        return codes

    def product(self, a: torch.Tensor, packed: Packed) -> torch.Tensor:
        rows = a.shape[0]
        if a.is_cuda and rows < 17:
            a = torch.nn.functional.pad(a, (0, 0, 0, 17 - rows))
            return torch._int_mm(a, packed["weight"].t())[:rows] * packed["scale"]
        return torch._int_mm(a, packed["weight"].t()) * packed["scale"]


class Prepacked:
    """An int8 weight in oneDNN's own layout. Copies and pickles through the plain codes: torch's cannot.

    Args:
        codes: int8 (out_features, in_features).
    """

    def __init__(self, codes: torch.Tensor) -> None:
        self.tensor = torch.ops.onednn.qlinear_prepack(codes.contiguous(), None)

    def codes(self) -> torch.Tensor:
        """The plain codes."""
        dense: torch.Tensor = self.tensor.to_dense()
        return dense.t().contiguous()

    def __reduce__(self) -> tuple[type[Prepacked], tuple[torch.Tensor]]:
        return Prepacked, (self.codes(),)


# Codes ----------------------------------------------------------------------------------------------------------------


_Coder = Callable[[torch.Tensor], tuple[torch.Tensor, QParams]]
"""x (rows, in_features) -> int8 codes of the shape of x, unsigned ones moved by -128; scale and zero point, not moved.

A range that was NaN gives codes that mean nothing, and a scale that is NaN."""


def int8_codes(quantizer: FakeQuantize) -> _Coder:
    """Return the function that makes the codes of the rows of x under a scale per row or tensor.

    Args:
        quantizer: Of int8 or uint8, one level of scales.
    """
    shift = 0.0 if quantizer.spec.dtype.signed else 128.0
    by_torch = partial(_codes_by_torch, quantizer, shift)
    if quantizer.spec.rounding is not RoundType.half_even or not is_compiled():
        return by_torch
    rule, live = rule_of(quantizer.spec, shift=shift), has_live_codes(quantizer.spec)
    compiled = partial(_compiled_codes, quantizer, rule, live)
    return lambda x: compiled(x) if x.is_cpu else by_torch(x)


def _codes_by_torch(quantizer: FakeQuantize, shift: float, x: torch.Tensor) -> tuple[torch.Tensor, QParams]:
    codes, params = input_codes(x, quantizer)
    return (codes - shift if shift else codes).to(torch.int8), params


def _compiled_codes(
    quantizer: FakeQuantize, rule: CodeRule, live: bool, x: torch.Tensor
) -> tuple[torch.Tensor, QParams]:
    """Codes, scale and zero point of x on the CPU, by compiled passes; `live`: by one that finds the scales, too."""
    spec, dtype = quantizer.spec, x.dtype
    per_tensor = isinstance(spec.granularity, PerTensor)
    if dtype is not torch.bfloat16 and dtype is not torch.float32:
        x = x.float()
    x = x.contiguous()
    if live and (not per_tensor or x.shape[0] == 1):
        codes, scale, zero = live_codes(x, spec, rule)
        if per_tensor:
            shape = spec.split.scale_shape(tuple(x.shape))
            scale, zero = scale.reshape(shape), zero.reshape(shape)
        return codes.view(torch.int8), QParams(scale, zero)
    params = quantizer.params_for(x)
    if params is None:
        low, high = ranges(x, x.shape[1])
        if per_tensor:
            low, high = low.amin(), high.amax()
        shape = spec.split.scale_shape(tuple(x.shape))
        low, high = low.reshape(shape), high.reshape(shape)
        params = qparams_from_range(low, high, spec, str(dtype).removeprefix("torch."))
    inverse = (1.0 / params.scale.float()).reshape(-1)
    zero = params.zero_point
    zero = None if zero is None or (spec.symmetric and spec.dtype.signed) else zero.float().contiguous()
    codes = run_codes(x, x.shape[1], inverse, zero, rule)
    return codes.view(torch.int8).reshape(x.shape), params
