"""MX in a float type, as serving engines call it: against ml_dtypes, and against the layout of checkpoints."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from quark.compat.torch_names.mx_emulation import (
    create_pack_method,
    dequantize_fp4_fp6_per_group,
    dq_mxfp4,
    even_round,
    fake_quantize_fp4_fp6_per_group_with_scale,
    qdq_mxfp4,
    reshape_to_blocks,
)
from quark.core.scales import QParams
from quark.core.schemes import SCHEMES
from quark.errors import ConfigError, NotSupportedError, ShapeError
from quark.torch.formats.quark.layout import QuarkLayout
from tests.pretended_gpu import PretendedGpu, on_host

TYPES = {"fp4": "float4_e2m1fn", "fp6_e2m3": "float6_e2m3fn", "fp6_e3m2": "float6_e3m2fn"}
LARGEST = {"fp4": 6.0, "fp6_e2m3": 7.5, "fp6_e3m2": 28.0}
X = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[[1.0]], [[30.0]], [[1e-3]]])


def scales(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """As the engines find them: (rows, groups)."""
    return even_round(reshape_to_blocks(x, 32, -1).abs().amax(-1), dtype)


def codes(x: torch.Tensor, scale: torch.Tensor, dtype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Codes by ml_dtypes, (rows, groups, 32)."""
    parts = reshape_to_blocks(x.float(), 32, -1).numpy() / scale.numpy()[..., None]
    return parts.clip(-LARGEST[dtype], LARGEST[dtype]).astype(getattr(ml_dtypes, TYPES[dtype])).view(np.uint8)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_ml_dtypes(dtype: str, kind: torch.dtype) -> None:
    x = X.to(kind)
    scale = scales(x, dtype)
    y = fake_quantize_fp4_fp6_per_group_with_scale(x, scale, axis=-1, group_size=32, quant_dtype=dtype)
    values = codes(x, scale, dtype).view(getattr(ml_dtypes, TYPES[dtype])).astype(np.float32)
    assert (y.dtype, y.shape) == (kind, x.shape)
    np.testing.assert_array_equal(y.float().numpy(), (values * scale.numpy()[..., None]).reshape(x.shape))
    if dtype == "fp4":
        assert torch.equal(qdq_mxfp4(x), y)


def test_packed_fp4_is_what_a_checkpoint_stores() -> None:
    scale = scales(X, "fp4")
    found = torch.from_numpy(codes(X, scale, "fp4").reshape(X.shape))
    exponents = (torch.log2(scale) + 127).to(torch.uint8).reshape(3, 5, 2)
    packed = found[..., ::2] | (found[..., 1::2] << 4)
    for kind in (torch.float32, torch.bfloat16):
        assert torch.equal(dq_mxfp4(packed, exponents, kind), qdq_mxfp4(X).to(kind))
    weight = SCHEMES["mxfp4"].weight
    assert weight is not None
    stored = QuarkLayout(weight, torch.float32).store(X[0], QParams(scale[:5]))
    assert torch.equal(next(iter(stored.values())), packed[0])
    exponents[0, 0, 0] = 255
    assert dq_mxfp4(packed, exponents, torch.float32)[0, 0].isnan().tolist() == [True] * 32 + [False] * 32


@pytest.mark.parametrize("dtype", TYPES)
def test_packing_and_back(dtype: str) -> None:
    scale = scales(X, dtype)
    y = fake_quantize_fp4_fp6_per_group_with_scale(X, scale, -1, 32, dtype)
    values = y / scale.reshape(3, 5, 2).repeat_interleave(32, -1)
    method = create_pack_method(None, dtype=dtype)
    packed = method.pack(values)
    assert (packed.dtype, packed.shape[-1]) == (torch.uint8, 32 if dtype == "fp4" else 48)
    assert torch.equal(method.unpack(packed, reorder=False), values)
    for given in (scale, scale.reshape(3, 5, 2)):
        assert torch.equal(dequantize_fp4_fp6_per_group(values, given, axis=-1, group_size=32, quant_dtype=dtype), y)


def test_another_axis_and_a_last_group_that_is_cut() -> None:
    x = X[..., :40]
    scale = scales(x, "fp4").reshape(3, 5, 2)
    along = fake_quantize_fp4_fp6_per_group_with_scale(x, scale, -1, 32, "fp4")
    across = fake_quantize_fp4_fp6_per_group_with_scale(x.transpose(1, 2), scale.transpose(1, 2), 1, 32, "fp4")
    assert torch.equal(across, along.transpose(1, 2)) and torch.equal(along, qdq_mxfp4(x))


def test_tensors_are_made_on_the_device_and_nothing_waits_for_it() -> None:
    scale = scales(X, "fp6_e2m3")
    values = fake_quantize_fp4_fp6_per_group_with_scale(X, scale, -1, 32, "fp6_e2m3")
    exponents = (torch.log2(scale) + 127).to(torch.uint8).reshape(3, 5, 2)
    packed = torch.arange(3 * 5 * 32, dtype=torch.uint8).reshape(3, 5, 32)
    wanted = (values, qdq_mxfp4(X), dq_mxfp4(packed, exponents, torch.bfloat16))
    with PretendedGpu() as gpu:
        x = X.to("cuda")
        scale = even_round(reshape_to_blocks(x, 32, -1).abs().amax(-1), "fp6_e2m3")
        found = (
            fake_quantize_fp4_fp6_per_group_with_scale(x, scale, -1, 32, "fp6_e2m3"),
            qdq_mxfp4(x),
            dq_mxfp4(packed.to("cuda"), exponents.to("cuda"), torch.bfloat16),
        )
        waited = dict(gpu.meter.waited_at)
        on_cpu = [on_host(tensor) for tensor in found]
    assert not [line for line in waited if not line.startswith("tests")], waited
    assert all(torch.equal(one, other) for one, other in zip(on_cpu, wanted, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"need \(3, 5, 2\)"):
        dq_mxfp4(torch.zeros(3, 5, 32, dtype=torch.uint8), torch.zeros(3, 5, 1, dtype=torch.uint8), torch.float32)
    with pytest.raises(ConfigError, match="possible|Possible"):
        qdq_mxfp4(X, "nearest")
    with pytest.raises(ConfigError, match="fp6_e2m3"):
        even_round(X, "fp6_e2m2")
    with pytest.raises(NotSupportedError, match="export_safetensors"):
        create_pack_method("per_group", "int4")
