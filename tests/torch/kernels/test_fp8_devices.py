"""A device is asked what FP8 products it computes. AMD's cards are simulated here: nothing has run on one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from quark.core.schemes import SCHEMES
from quark.torch import accelerate, disable_native_inference
from quark.torch.kernels import fp8_devices
from quark.torch.kernels.accelerate import _FAILED, coded_weight
from quark.torch.kernels.fp8 import ScaledMm
from quark.torch.kernels.fp8_devices import codes_of, stored
from quark.torch.kernels.int8_int8 import IntMm
from quark.torch.kernels.packed_linear import PackedLinear
from quark.torch.layers.linear import QuantLinear
from tests.pretended_gpu import PretendedGpu, on_host
from tests.torch.kernels.test_accelerate import LAYERS, Slow, _integer_formula, frozen

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

# Card -> its architecture, what its `_scaled_mm` takes, and whether with scales of rows.
CARDS = {
    "MI300": ("gfx942:sramecc+:xnack-", FNUZ, True),
    "MI300, no scales of rows": ("gfx942:sramecc+:xnack-", FNUZ, False),
    "MI350": ("gfx950:sramecc+:xnack-", FN, True),
    "MI250": ("gfx90a:sramecc+:xnack-", None, False),
}


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch, name: str, arch: str, taken: Any, by_rows: bool) -> Iterator[list[Any]]:
    """Within: cuda:0 is a card of AMD's, of which both the capability and the CPU's own product say too much."""
    asked = []

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> torch.Tensor:
        asked.append((a.dtype, scale_a.numel() > 1))
        if not a.dtype == b.dtype == taken or (scale_a.numel() > 1 and not by_rows):
            raise RuntimeError("torch._scaled_mm: hipblasLt has no such product")
        assert scale_a.dtype == scale_b.dtype == torch.float32 and b.stride(0) == 1
        # Not by the product of this processor: of some it is not exact in float32.
        return ((a.double() * scale_a) @ (b.double() * scale_b)).to(out_dtype)

    with PretendedGpu(where=False), monkeypatch.context() as patch:
        properties = torch.cuda.get_device_properties(0)
        patch.setattr(properties, "name", name)
        patch.setattr(properties, "gcnArchName", arch)
        patch.setattr(properties, "minor", 4)
        patch.setattr(torch.version, "hip", "7.0")
        patch.setattr(torch, "_scaled_mm", product)
        fp8_devices._asked.cache_clear()
        try:
            yield asked
        finally:
            fp8_devices._asked.cache_clear()


def fp8_layer() -> nn.Sequential:
    """A layer whose codes hold zeros of both signs, and the largest of both signs."""
    model = frozen(SCHEMES["ptpc_fp8"], 32, 64, torch.bfloat16)
    with torch.no_grad():
        weight = model[0].weight
        weight[:, ::7] *= 0  # type: ignore[index, operator]
    codes = coded_weight(model[0]).codes  # type: ignore[arg-type, union-attr]
    assert codes.abs().max() == 448 and (codes.signbit() & (codes == 0)).any()
    return model


@pytest.mark.parametrize("card", CARDS)
def test_a_card_multiplies_what_it_takes(
    card: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arch, taken, by_rows = CARDS[card]
    model, x = fp8_layer(), torch.randn(3, 64).bfloat16()
    x[0, 0], x[1] = float("nan"), 0.0
    expected, most = _integer_formula(model, x)
    with (
        simulated(monkeypatch, card, arch, taken, by_rows) as asked,
        caplog.at_level(logging.INFO, "quark"),
        torch.no_grad(),
    ):
        model.to("cuda")
        reference = on_host(model(x.to("cuda")))
        accelerate(model, kernels=(ScaledMm(),), clock=Slow(1, 2))
        found = on_host(model(x.to("cuda")))
        if taken is None:
            assert type(model[0]) is QuantLinear and len(asked) == 4
            assert torch.equal(found[1:], reference[1:])
            assert "MI250, gfx90a) multiplies no FP8 codes" in caplog.text and "though" not in caplog.text
            return
        assert isinstance(model[0], PackedLinear) and model[0].packed["weight"].dtype == taken
        assert set(asked[-3:]) == {(taken, by_rows)}
        number = len(asked)
        assert fp8_devices.fp8_product(torch.device("cuda", 0)) is not None and len(asked) == number  # not asked again
        disable_native_inference(model)
        assert torch.equal(on_host(model(x.to("cuda")))[1:], reference[1:])
    assert found[0].isnan().all()
    # roundings of the product and of the sum with the bias to bfloat16
    assert float(((found.double() - expected).abs() / most)[1:].max()) <= 2.0**-8


def test_a_card_that_does_less_than_it_should_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with simulated(monkeypatch, "MI300", "gfx942", None, False), caplog.at_level(logging.WARNING, "quark"):
        assert fp8_devices.fp8_product(torch.device("cuda", 0)) is None
    assert "though it should (float8_e4m3fnuz)" in caplog.text and "hipblasLt has no such product" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("HIP"), RuntimeError("HIPBLAS_STATUS_ALLOC_FAILED")])
def test_full_memory_is_no_answer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    device = torch.device("cuda", 0)
    with simulated(monkeypatch, "MI300", "gfx942", FNUZ, True):
        usual = torch._scaled_mm

        def full(*args: Any, **kwargs: Any) -> Any:
            raise error

        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(torch, "_scaled_mm", full)
            fp8_devices.fp8_product(device)
        assert torch._scaled_mm is usual
        assert fp8_devices.fp8_product(device) == fp8_devices.Fp8Product(FNUZ, by_rows=True)


@pytest.mark.parametrize("broken", ["negative zero", "the value of e4m3fn"])
def test_a_card_that_reads_codes_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Codes that reach the device as bits of e4m3fn, once all of them, once without a negative zero."""

    def as_bits(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        bits = codes.to(FN).view(torch.uint8)
        return bits.view(FNUZ) if broken == "negative zero" else torch.where(bits == 0x80, 0, bits).view(FNUZ)

    with simulated(monkeypatch, "MI300", "gfx942", FNUZ, True):
        monkeypatch.setattr(fp8_devices, "stored", as_bits)
        if broken == "the value of e4m3fn":
            monkeypatch.setitem(fp8_devices.FACTORS, FNUZ, 1.0)
        assert fp8_devices.fp8_product(torch.device("cuda", 0)) is None


def test_each_code_is_the_bits_of_e4m3fn_or_the_one_nan() -> None:
    bits = np.arange(256, dtype=np.uint8)
    codes = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = stored(torch.from_numpy(codes), FNUZ)
    # The same bits are half the value; a negative zero has none there, and NaN are those of 0x80.
    wanted = np.where(bits == 0x80, 0, np.where(np.isnan(codes), 0x80, bits)).astype(np.uint8)
    assert np.array_equal(found.view(torch.uint8).numpy(), wanted)
    assert np.array_equal(wanted.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32) * 2, codes, equal_nan=True)
    assert np.array_equal(codes_of(found).numpy(), codes, equal_nan=True)
    assert np.array_equal(stored(torch.from_numpy(codes), FN).view(torch.uint8).numpy() & 127, bits & 127)


@pytest.mark.parametrize("rows", [6, 8])
def test_a_kernel_that_does_not_run_is_not_used_and_said_once(
    rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails for the inputs that are compared, or for those of one size that is measured."""

    class Failing(IntMm):
        error: Exception = RuntimeError("hipblasLt:\nno such product")

        def product(self, a: torch.Tensor, packed: Any) -> torch.Tensor:
            if a.shape[0] == rows:
                raise self.error
            return super().product(a, packed)

    _FAILED.clear()
    for _ in range(2):
        model = frozen(LAYERS["token"][1], 64, 64, torch.float32)
        assert type(accelerate(model, kernels=(Failing(),), clock=Slow(1))[0]) is QuantLinear  # type: ignore[index]
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["int_mm does not run on cpu and is not used: RuntimeError: hipblasLt: no such product"]
    _FAILED.clear()
    monkeypatch.setattr(Failing, "error", torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        accelerate(model, kernels=(Failing(),), clock=Slow(1))


def test_codes_of_another_kind_of_device_are_refused() -> None:
    model = frozen(SCHEMES["ptpc_fp8"], 32, 64, torch.bfloat16)
    weight = coded_weight(model[0])  # type: ignore[arg-type]
    assert weight is not None
    packed = PackedLinear(model[0], ScaledMm(), ("fp8",) * 3, weight)  # type: ignore[arg-type]
    tensors = packed.state_dict()
    packed.load_state_dict(tensors)
    with pytest.raises(RuntimeError, match="packed_weight is torch.float8_e4m3fnuz; this device packs .*e4m3fn"):
        packed.load_state_dict(tensors | {"packed_weight": stored(weight.codes, FNUZ)})
