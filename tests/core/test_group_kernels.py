"""Fake quantization in one launch, against the plain steps: bit for bit, under every scheme."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quark.core import quantize
from quark.core.array import dtype_name
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.kernels import groups, trust
from quark.core.kernels.element_rule import ElementRule
from quark.core.kernels.group_rules import Runs, live_scale
from quark.core.kernels.groups import same_bits
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.scales import QParams
from quark.core.schemes import SCHEMES
from quark.core.spec import ScaleRule, ScaleType, TensorSpec, spec
from tests.models import gpu_kernels
from tests.models.operations import Operations

DTYPES_OF_TENSORS = [torch.float32, torch.bfloat16, torch.float16]
OFTEN = ("uint4_wo_32", "int8_dynamic", "mxfp4", "mx6", "nvfp4", "amdfp4")
E8M0 = ScaleType.float8_e8m0fnu


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> trust.Trust:
    """What is known of the kernels: nothing yet."""
    made = trust.Trust("fake-quantize groups", "In steps.")
    monkeypatch.setattr(groups, "TRUST", made)
    return made


@pytest.fixture
def on_a_device(trusted: trust.Trust, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Within: tensors count as those of a GPU, whose kernels are interpreted."""
    pytest.importorskip("triton", reason="there are wheels for Linux alone")
    with gpu_kernels.interpreted(gpu_kernels.GROUPS) as module:
        monkeypatch.setattr(groups, "device_of", lambda x: "interpreter")
        monkeypatch.setattr(groups, "kernel_module", lambda name: module)
        monkeypatch.setattr(quantize, "on_cpu", lambda x: False)
        yield module


def values(dtype: torch.dtype, shape: tuple[int, ...] = (7, 128)) -> torch.Tensor:
    """Rows of very different sizes; ties, zeros, subnormals, NaN and Inf among them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw) * 10.0 ** torch.randint(
        -3, 3, (shape[0], *[1] * (len(shape) - 1)), generator=draw
    )
    flat = x.reshape(shape[0], -1)
    flat[0, :5] = torch.tensor([0.0, -0.0, 1e-42, -1e-42, 0.3])
    flat[1] = 0.0
    flat[2] = torch.round(flat[2] * 4) / 4
    flat[3, :3] = torch.tensor([1e-30, 3e38, -3e38])
    flat[4, 1], flat[5, 2] = torch.nan, torch.inf
    return x.to(dtype)


def plain(x: torch.Tensor, params: QParams | None, tensor: TensorSpec) -> torch.Tensor:
    out = torch.empty_like(x)
    quantize._fake_quantize_in_steps(x, params, tensor, out)
    return out


def compare(x: torch.Tensor, tensor: TensorSpec, known: trust.Trust) -> set[str]:
    """Which kernels were taken: under scales that are given, and without."""
    clean = x.nan_to_num(0.0, 0.0, 0.0)
    for params in (compute_qparams(clean, tensor), None):
        expected = plain(x, params, tensor)
        for again in range(2):  # checked, and then trusted
            assert bool(same_bits(fake_quantize(x, params, tensor), expected)), (params is None, again)
        assert not known.refused, (params is None, "refused")
    inside = x.clone()
    assert fake_quantize(inside, None, tensor, out=inside) is inside and bool(same_bits(inside, expected))
    taken = {str(key[0]) for _, key in known.passed}
    known.passed.clear()
    return taken


NO_KERNEL = ("int4_fp8", "float16", "bfloat16")


@pytest.mark.parametrize(
    "scheme", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
)
def test_every_scheme(scheme: str, trusted: trust.Trust, on_a_device: ModuleType) -> None:
    for tensor in filter(None, (SCHEMES[scheme].weight, SCHEMES[scheme].input)):
        if scheme in NO_KERNEL and tensor is SCHEMES[scheme].weight:
            assert ElementRule.of(tensor) is None
            continue
        for dtype in DTYPES_OF_TENSORS:
            taken = compare(values(dtype), tensor, trusted)
            live = live_scale(tensor, dtype_name(values(dtype))) and tensor.granularity != PerTensor()
            if isinstance(tensor.granularity, PerBlock):  # the last tiles of this tensor are cut
                assert taken == set()
                continue
            assert taken == ({"stored", "live"} if live else {"stored"})


SPLITS = {
    "tensor": spec("int8"),
    "channel of images": spec("uint8", PerChannel(1), symmetric=False),
    "last axis": spec("int8", PerChannel(-1)),
    "tokens longer than a tile": spec("fp8_e4m3", PerToken(), dynamic=True),
    "groups that are padded": spec("fp4_e2m1", PerGroup(-1, 32, pad=True), scale_type=E8M0),
    "pairs that are padded": spec("mx6", PerGroup(-1, 16, pad=True)),
    "tiles": spec("fp8_e4m3", PerBlock((2, 5))),
    "float zero points": spec("uint4", PerGroup(-1, 15), symmetric=False, float_zero_point=True),
    "floor": spec("fp4_e2m1", PerGroup(-1, 15), scale_type=E8M0, scale_rule=ScaleRule.floor),
    "ceil": spec("fp8_e5m2", PerGroup(-1, 15), scale_type=E8M0, scale_rule=ScaleRule.ceil),
    "16 bits": spec("uint16", PerGroup(-1, 15), symmetric=False),
    "scales in bfloat16": spec("int4", PerGroup(-1, 15), scale_type=ScaleType.bfloat16),
    "scales in float16": spec("fp6_e2m3", PerGroup(-1, 15), scale_type=ScaleType.float16),
    "powers of two": spec("int8", PerGroup(-1, 15), scale_type=ScaleType.pof2),
    "one group": spec("int8", PerGroup(-1, -1), scale_type=ScaleType.float),
}


@pytest.mark.parametrize("case", SPLITS)
def test_splits_shapes_and_rules(case: str, trusted: trust.Trust, on_a_device: ModuleType) -> None:
    shape = (6, 2, 1, 2075) if "tile" in case and "longer" in case else (6, 3, 2, 45)
    for dtype in DTYPES_OF_TENSORS if case == "tensor" else [torch.bfloat16]:
        assert "stored" in compare(values(dtype, shape), SPLITS[case], trusted)


def test_what_no_kernel_takes_goes_in_steps(trusted: trust.Trust, on_a_device: ModuleType) -> None:
    x = values(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    for tensor in (spec("int8", PerGroup(0, 7)), spec("int32"), spec("float16")):
        assert torch.equal(fake_quantize(x, None, tensor), plain(x, None, tensor))
    learned = x.clone().requires_grad_()
    fake_quantize(learned, compute_qparams(x, spec("fp8_e4m3")), spec("fp8_e4m3")).sum().backward()
    assert learned.grad is not None
    assert torch.equal(fake_quantize(x.T, None, spec("int8")), plain(x.T, None, spec("int8")))
    fake_quantize(x.double(), None, spec("int8"))
    assert not trusted.passed and not trusted.refused
    assert Runs.of(PerTensor(), (0, 3)) is None and Runs.of(PerTensor(), ()) is None


def off_by_a_bit(out: torch.Tensor) -> None:
    out.view(torch.int32).reshape(-1)[-1] += 1


def loses_a_sign(out: torch.Tensor) -> None:
    """-0 for 0: not in the first row, whose zeros have both signs."""
    out[1, 1] = -0.0


def fails(out: torch.Tensor) -> None:
    out.zero_()
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize("harm", [off_by_a_bit, loses_a_sign, fails])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_kernel_that_is_broken_is_not_used(
    harm: Any, in_place: bool, trusted: trust.Trust, on_a_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it wrote; one warning says so, and what comes after is in steps."""

    class Broken:
        @staticmethod
        def live(x: torch.Tensor, out: torch.Tensor, rule: Any) -> None:
            on_a_device.live(x, out, rule)
            harm(out)

    said: list[str] = []
    monkeypatch.setattr(groups, "kernel_module", lambda name: Broken)
    monkeypatch.setattr(trust.logger, "warning", lambda text, *parts: said.append(text % parts))
    tensor = spec("fp4_e2m1", PerGroup(-1, 32), scale_type=E8M0)
    expected = plain(values(torch.float32), None, tensor)
    for _ in range(2):
        x = values(torch.float32)
        assert bool(same_bits(fake_quantize(x, None, tensor, out=x if in_place else None), expected))
    assert len(said) == 1 and "The kernel to fake-quantize groups is not used on interpreter" in said[0]
    assert not trusted.passed and trusted.refused == {"interpreter"}


# What it costs a device. ---------------------------------------------------------------------------------------------


LAUNCHES = {
    "int4_wo_128": 7, "uint4_wo_128": 9, "mxfp4": 13, "nvfp4": 14, "int8_dynamic": 7, "fp8": 13,
}  # fmt: skip
"""Scheme -> what rounding its weight under stored scales launches in plain steps."""


@pytest.mark.parametrize("scheme", LAUNCHES)
def test_one_launch_in_place_of_many(scheme: str, trusted: trust.Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted:
        @staticmethod
        def stored(x: torch.Tensor, out: torch.Tensor, *others: Any) -> None:
            out.fill_(0.0)

        @staticmethod
        def live(x: torch.Tensor, out: torch.Tensor, rule: Any) -> None:
            out.fill_(0.0)

    tensor = SCHEMES[scheme].weight
    assert tensor is not None
    x = values(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    params = compute_qparams(x, tensor)
    with Operations() as in_steps:
        fake_quantize(x, params, tensor)
    monkeypatch.setattr(groups, "device_of", lambda x: "counted")
    monkeypatch.setattr(groups, "kernel_module", lambda name: Counted)
    monkeypatch.setattr(quantize, "on_cpu", lambda x: False)
    monkeypatch.setattr(trusted, "passed", Everything())
    with Operations() as at_once:
        fake_quantize(x, params, tensor)
    assert in_steps.launches == LAUNCHES[scheme] and at_once.launches == 1 and not at_once.waits


class Everything(set[Any]):
    def __contains__(self, item: object) -> bool:
        return True


# On a GPU that is not here. ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", gpu_kernels.TARGETS, ids=str)
def test_kernels_compile_for_gpus(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="there are wheels for Linux alone")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gpu_kernels.check_compiles(compiled_for, target)


def compiled_for(target: Any) -> list[tuple[bytes, str]]:
    """Machine code and assembly of the kernels under rules of each kind."""
    from quark.core.kernels import groups_triton
    from quark.core.kernels.elements_triton import EXACT, constants_of

    made = []
    for scheme, pointer in (
        ("uint4_wo_128", "*bf16"), ("int8_dynamic", "*fp16"), ("mxfp4", "*bf16"), ("mx6", "*fp32"), ("bfp16", "*bf16"),
        ("amdfp4", "*fp32"), ("nvfp4", "*bf16"),
    ):  # fmt: skip
        layer = SCHEMES[scheme]
        tensor = layer.input or layer.weight
        assert tensor is not None
        element = ElementRule.of(tensor)
        assert element is not None
        bits = groups_triton.MANTISSA[{"*bf16": "bfloat16", "*fp16": "float16", "*fp32": "float32"}[pointer]]
        sizes = {"bits": bits, "tall": 8, "wide": 128, "size": 128} | constants_of(element)
        types = {"x": pointer, "out": pointer}
        stored = sizes | {"one_group": False, "two_levels": tensor.scale_spec is not None}
        scales = types | dict.fromkeys(("scale", "zero", "second"), "*fp32")
        made.append(gpu_kernels.compiled(groups_triton.stored_kernel, scales, stored, EXACT, target))
        if (scale := live_scale(tensor, "bfloat16")) is not None:
            made.append(gpu_kernels.compiled(groups_triton.live_kernel, types, sizes | scale, EXACT, target))
    return made


def test_every_element_type_has_a_rule_or_a_reason() -> None:
    """What stays in steps: types of 32 bits, casts, and bfloat16's exponents."""
    without = {name for name in DTYPES if ElementRule.of(TensorSpec(DTYPES[name], PerGroup(-1, 16))) is None}
    assert without == {"int32", "uint32", "float16", "bfloat16"}
