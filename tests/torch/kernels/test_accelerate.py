"""Packed layers compute what the formula says, on what the layer's quantizers give; kernels are chosen by a clock."""

from __future__ import annotations

import copy
import io
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quark.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, ScaleType, TensorSpec, spec
from quark.errors import ConfigError, NotSupportedError
from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    RuntimeOptions,
    accelerate,
    disable_native_inference,
    enable_native_inference,
    export_onnx,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.kernels import KERNELS
from quark.torch.kernels.accelerate import coded_weight
from quark.torch.kernels.fp8 import ScaledMm
from quark.torch.kernels.int4 import _order
from quark.torch.kernels.int8_int8 import IntMm, OneDnnInt8, int8_codes, onednn_sums_are_exact
from quark.torch.kernels.kernel import CodedWeight, Kernel, input_codes
from quark.torch.kernels.packed_linear import PackedLinear
from quark.torch.layers.fake_quant import FakeQuantize
from quark.torch.layers.linear import QuantLinear
from tests.models.torch_zoo import tiny_llama, token_batches

BY_NAME = {kernel.name: kernel for kernel in KERNELS}


INTEGERS = ["onednn_int8", "int_mm"]


def kernel_named(name: str) -> Kernel:
    """The kernel; a test of oneDNN's ends here on a processor without VNNI, where that kernel takes no layer."""
    if name == "onednn_int8" and not onednn_sums_are_exact():
        pytest.skip("This processor has no VNNI: oneDNN's sums of 8-bit codes saturate.")
    return BY_NAME[name]


def integer(dtype: str, group: int | None = None, **options: Any) -> TensorSpec:
    split = PerChannel(0) if group is None else PerGroup(-1, group)
    return spec(dtype, split, scale_type=ScaleType.float, **options)


def live(dtype: str, split: Any, **options: Any) -> TensorSpec:
    return spec(dtype, split, dynamic=True, **options)


INT8 = integer("int8")
LAYERS = {
    "int4 32": ("int4_groups", LayerSpec(weight=integer("int4", 32))),
    "uint4 64": ("int4_groups", LayerSpec(weight=integer("uint4", 64, symmetric=False))),
    "uint4 128": ("int4_groups", LayerSpec(weight=integer("uint4", 128, symmetric=False))),
    "uint4 channel": ("int4_groups", LayerSpec(weight=integer("uint4", symmetric=False))),
    "int4 channel": ("int4_groups", LayerSpec(weight=integer("int4"))),
    "int4 and int8": ("int4_groups", LayerSpec(weight=integer("int4", 64), input=live("int8", PerToken()))),
    "int8": ("int8_weights", LayerSpec(weight=INT8)),
    "int8 tensor": ("int8_weights", LayerSpec(weight=spec("int8", scale_type=ScaleType.bfloat16))),
    "token": ("onednn_int8", LayerSpec(weight=INT8, input=live("int8", PerToken()))),
    "token, _int_mm": ("int_mm", LayerSpec(weight=INT8, input=live("int8", PerToken()))),
    "tensor": ("onednn_int8", LayerSpec(weight=INT8, input=live("int8", PerTensor()))),
    "tensor, _int_mm": ("int_mm", LayerSpec(weight=INT8, input=live("int8", PerTensor()))),
    "static": ("onednn_int8", LayerSpec(weight=INT8, input=spec("int8"))),
    "static, _int_mm": ("int_mm", LayerSpec(weight=INT8, input=spec("int8"))),
    "static uint8": ("onednn_int8", LayerSpec(weight=INT8, input=spec("uint8", symmetric=False))),
    "static uint8, _int_mm": ("int_mm", LayerSpec(weight=INT8, input=spec("uint8", symmetric=False))),
    "uint8 token": ("int_mm", LayerSpec(weight=INT8, input=live("uint8", PerToken(), symmetric=False))),
    "int8 shifted": ("int_mm", LayerSpec(weight=INT8, input=live("int8", PerTensor(), symmetric=False))),
}


def frozen(layer: LayerSpec, n: int, k: int, dtype: torch.dtype, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(n + k)
    model = nn.Sequential(nn.Linear(k, n, bias=bias)).to(dtype)
    config = QConfig(global_quant_config=config_of_layer(layer))
    quantizer = ModelQuantizer(config)
    # scales of their own for inputs that are not centred
    result = quantizer.freeze(quantizer.quantize_model(model, [torch.randn(16, k).to(dtype) + 0.5]))
    assert isinstance(result, nn.Sequential)
    return result.requires_grad_(False)


def packed(model: nn.Module, kernel: Kernel, way: str) -> nn.Module:
    """The model's one layer in a kernel, computing in one way whatever the number of rows."""
    layer = model[0]  # type: ignore[index]
    assert isinstance(layer, QuantLinear)
    weight = coded_weight(layer, any_rounding=True)
    assert weight is not None and kernel.fits(weight)
    with torch.no_grad():
        return nn.Sequential(PackedLinear(layer, kernel, (way,) * 3, weight))


def formula(model: nn.Module, x: torch.Tensor, inputs_in: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes and scales stand for, in float64, with the input rounded to what the kernel reads; and sum |x| |w|."""
    layer = model[0]  # type: ignore[index]
    weight = coded_weight(layer, any_rounding=True)
    assert weight is not None
    read = x if layer.input_quantizer is None else layer.input_quantizer(x.float())
    read = read.to(inputs_in or read.dtype).double()
    scale = weight.scale if inputs_in is None else weight.scale.to(inputs_in).float()
    decoded = CodedWeight(weight.codes, scale, weight.zero, weight.spec, None, weight.dtype).decoded().double()
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(read, decoded, bias), F.linear(read.abs(), decoded.abs()) + (0 if bias is None else bias.abs())


def ways() -> Iterator[tuple[str, str]]:
    for name, (kernel, layer) in LAYERS.items():
        model = frozen(layer, 8, 128, torch.float32)
        for way in BY_NAME[kernel].ways(model[0].input_quantizer):  # type: ignore[arg-type]
            yield name, way


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("name", "way"), list(ways()))
def test_every_way_computes_the_formula(name: str, way: str, dtype: torch.dtype) -> None:
    kernel, layer = LAYERS[name]
    # 100 rows are no multiple of what kernels take; three blocks of 64 are not of two.
    for n, k, shape, bias in ((8, 256, (1,), False), (100, 256, (2, 3), True), (192, 128, (3, 1, 5), True)):
        model = frozen(layer, n, k, dtype, bias)
        x = (torch.randn(*shape, k, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)
        with torch.no_grad():
            found = packed(model, kernel_named(kernel), way)(x)
        takes_codes = BY_NAME[kernel].takes_codes
        if takes_codes:
            # The scale of a live input is of the input's dtype: taken from the same tensor.
            expected, most = _integer_formula(model, x)
        else:
            expected, most = formula(model, x, torch.bfloat16)
        assert found.dtype == dtype and found.shape == (*shape, n)
        # Roundings to the output's dtype: of the product and of the sum with the bias; and where weights are decoded
        # or the kernel writes bfloat16, to that. Sums are of float32: 1e-5 of sum |x| |w| for 256 terms.
        unit = max(torch.finfo(dtype).eps, 0.0 if takes_codes else torch.finfo(torch.bfloat16).eps)
        assert float(((found.double() - expected).abs() / most).max()) <= 2 * unit + 1e-5


def _integer_formula(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    layer = model[0]  # type: ignore[index]
    weight = coded_weight(layer)
    assert weight is not None
    rows = x.reshape(-1, x.shape[-1])
    codes, params = input_codes(rows, layer.input_quantizer)
    zero = 0.0 if params.zero_point is None else params.zero_point.double().reshape(-1, 1)
    read = (codes.double() - zero) * params.scale.double().reshape(-1, 1)
    decoded = weight.decoded().double()
    bias = torch.zeros(len(decoded)) if layer.bias is None else layer.bias
    y, most = F.linear(read, decoded, bias.double()), F.linear(read.abs(), decoded.abs()) + bias.double().abs()
    return y.reshape(*x.shape[:-1], -1), most.reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["token", "tensor", "static", "static uint8", "uint8 token", "int8 shifted"])
def test_compiled_codes_are_those_of_the_formulas(name: str, dtype: torch.dtype) -> None:
    quantizer = frozen(LAYERS[name][1], 8, 128, torch.float32)[0].input_quantizer
    assert isinstance(quantizer, FakeQuantize)
    shift = 0 if quantizer.spec.dtype.signed else 128
    for columns in (1, 7, 515):
        x = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns)) + 0.3
        x[0], x[1], x[2] = 0.0, x[1].abs(), -x[2].abs()
        for factor in (1e-30, 1e-3, 1.0, 300.0):
            rows = (x * factor).to(dtype)
            codes, params = int8_codes(quantizer)(rows)
            expected, of_core = input_codes(rows, quantizer)
            assert codes.dtype == torch.int8 and torch.equal(codes, (expected - shift).to(torch.int8))
            assert torch.equal(params.scale, of_core.scale)
            assert params.zero_point is None or torch.equal(params.zero_point, of_core.zero_point)
    rows[4, 0] = float("nan")
    scales = int8_codes(quantizer)(rows)[1].scale, input_codes(rows, quantizer)[1].scale
    assert torch.equal(scales[0].isnan(), scales[1].isnan())


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_products_are_those_of_the_fake_quantized_float32_layer(name: str) -> None:
    model = frozen(LAYERS["token"][1], 96, 256, torch.float32)
    x = torch.randn(4, 256)
    with torch.no_grad():
        reference = model(x)
        # float32 sums of 256 terms in another order
        found = packed(model, kernel_named(name), "integers")(x)
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-5)


def saturated(kernel: OneDnnInt8, a: torch.Tensor, packed: Any) -> torch.Tensor:
    """The product of a processor without VNNI: each sum of two products in 16 bits."""
    unsigned, weight = (a.int() + 128).view(len(a), 1, -1, 2), packed["weight"].codes().int()
    pairs = (unsigned * weight.view(1, len(weight), -1, 2)).sum(-1).clamp(-(1 << 15), (1 << 15) - 1)
    return pairs.sum(-1) * packed["scale"] + packed["offset"]


def exact(kernel: OneDnnInt8, a: torch.Tensor, packed: Any) -> torch.Tensor:
    return a.float() @ packed["weight"].codes().float().T * packed["scale"]


def test_a_processor_whose_sums_saturate_does_not_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen(LAYERS["token"][1], 64, 64, torch.float32)
    weight = coded_weight(model[0])  # type: ignore[arg-type]
    assert weight is not None
    for product, fits in ((exact, True), (saturated, False)):
        monkeypatch.setattr(OneDnnInt8, "product", product)
        onednn_sums_are_exact.cache_clear()
        try:
            assert OneDnnInt8().fits(weight) is fits
        finally:
            onednn_sums_are_exact.cache_clear()
    assert IntMm().fits(weight)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN is told an instruction set of x86.")
def test_sums_without_vnni_saturate() -> None:
    program = "from quark.torch.kernels.int8_int8 import onednn_sums_are_exact; print(onednn_sums_are_exact())"
    settings = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize("name", LAYERS)
def test_unpacking_gives_the_frozen_layer_bit_for_bit(name: str) -> None:
    kernel, layer = LAYERS[name]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = frozen(layer, 72, 256, dtype)
        weight = model[0].weight.detach().clone()
        again = copy.deepcopy(
            packed(model, kernel_named(kernel), next(iter(BY_NAME[kernel].ways(model[0].input_quantizer))))
        )  # type: ignore[arg-type]
        assert torch.equal(again[0].weight, weight)
        assert disable_native_inference(again) == 1
        assert torch.equal(again[0].weight, weight) and type(again[0]) is QuantLinear
        x = torch.randn(3, 256).to(dtype)
        assert torch.equal(again(x), model(x))


def test_the_order_of_packed_codes_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (128, 96), dtype=torch.int32)
    stored = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    # torch's own kernel tells the codes: one input of 1, all others 0, scale 1.
    one = torch.ones(3, 128, 2, dtype=torch.bfloat16) * torch.tensor([1.0, 0.0], dtype=torch.bfloat16)
    told = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(96).bfloat16(), stored, 32, one)
    found = BY_NAME["int4_groups"].codes({"weight": stored, "signed": 8}, (128, 96))
    assert torch.equal(found, told.t().float()) and torch.equal(found + 8, codes.float())
    assert sorted(_order().rows.tolist()) == list(range(_order().length))


class Slow:
    """A clock on which the n-th timed function of each round takes `seconds[n]`."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.calls, self.now = seconds, count(), 0.0

    def __call__(self) -> float:
        call = next(self.calls)
        if call % 2:
            self.now += self.seconds[call // 2 % len(self.seconds)]
        return self.now


def test_the_fastest_way_for_one_row_decides() -> None:
    layer = LAYERS["int4 32"][1]
    # packed, decoded, float
    assert isinstance(accelerate(frozen(layer, 64, 64, torch.bfloat16), clock=Slow(1, 3, 2))[0], PackedLinear)  # type: ignore[index]
    stays = accelerate(frozen(layer, 64, 64, torch.bfloat16), clock=Slow(3, 3, 2))
    assert type(stays[0]) is QuantLinear  # type: ignore[index]
    chosen = accelerate(frozen(layer, 64, 64, torch.bfloat16), clock=Slow(3, 1, 2))[0]  # type: ignore[index]
    assert chosen.ways == ("decoded",) * 3


def test_a_kernel_that_computes_something_else_is_not_taken() -> None:
    class Wrong(type(BY_NAME["int8_weights"])):  # type: ignore[misc]
        def pack(self, weight: CodedWeight) -> dict[str, Any]:
            result: dict[str, Any] = super().pack(weight)
            return {**result, "scale": result["scale"] * 1.1}

    model = frozen(LAYERS["int8"][1], 64, 64, torch.bfloat16)
    assert type(accelerate(model, kernels=(Wrong(),), clock=Slow(1))[0]) is QuantLinear  # type: ignore[index]


@pytest.mark.parametrize(("group", "columns", "fits"), [(16, 256, False), (48, 192, False), (160, 320, True)])
def test_groups_that_a_kernel_does_not_take_stay_as_they_are(group: int, columns: int, fits: bool) -> None:
    model = frozen(LayerSpec(weight=integer("uint4", group, symmetric=False)), 64, columns, torch.bfloat16)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        reference = model(x)
        fast = accelerate(model, clock=Slow(1, 1, 2))
        assert isinstance(fast[0], PackedLinear) == fits  # type: ignore[index]
        if not fits:
            assert torch.equal(fast(x), reference)


def test_what_would_lose_bits_stays_float_unless_it_is_allowed() -> None:
    layer = LAYERS["int8"][1]
    fast = Slow(1, 1, 2)
    assert type(accelerate(frozen(layer, 64, 64, torch.float32), clock=fast)[0]) is QuantLinear  # type: ignore[index]
    allowed = accelerate(frozen(layer, 64, 64, torch.float32), torch.bfloat16, clock=Slow(1, 1, 2))
    assert isinstance(allowed[0], PackedLinear)  # type: ignore[index]
    fine = LayerSpec(weight=spec("int8", PerChannel(0), scale_type=ScaleType.float32))
    assert type(accelerate(frozen(fine, 64, 64, torch.bfloat16), clock=fast)[0]) is QuantLinear  # type: ignore[index]


def test_fp8_computes_the_formula() -> None:
    # On the CPU too, where it is no kernel because it is slow; a GPU runs the same lines.
    model = frozen(SCHEMES["ptpc_fp8"], 32, 64, torch.bfloat16)
    weight = coded_weight(model[0])  # type: ignore[arg-type]
    assert weight is not None and ScaledMm().computes(weight) and not ScaledMm().fits(weight)
    x = torch.randn(3, 64).bfloat16()
    y = ScaledMm().ways(model[0].input_quantizer)["fp8"](x, ScaledMm().pack(weight))  # type: ignore[arg-type]
    expected, most = _integer_formula(model, x)
    bias = model[0].bias.double()
    assert float(((y.double() - (expected - bias)).abs() / most).max()) <= 2.0**-8


def test_memory_falls_to_the_codes() -> None:
    model = accelerate(frozen(LAYERS["uint4 128"][1], 1024, 1024, torch.bfloat16), clock=Slow(1, 1, 2))
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    # 4 bits a weight; scale and zero point of 128 weights: 2 x 16 bits packed, 3 x 32 bits to unpack and correct
    assert size <= 1024 * 1024 / 2 * 1.3


def test_a_gradient_is_refused_and_so_are_moves_and_export(tmp_path: Path) -> None:
    model = accelerate(frozen(LAYERS["token"][1], 64, 64, torch.float32), kernels=(IntMm(),), clock=Slow(1, 2))
    x = torch.randn(2, 64, requires_grad=True)
    with pytest.raises(NotSupportedError, match="disable_native_inference"):
        model(x).sum().backward()
    with pytest.raises(NotSupportedError, match="stays"):
        model.to(torch.bfloat16)
    assert model.to("cpu") is model
    with pytest.raises(ConfigError, match="disable_native_inference"):
        ModelQuantizer.freeze(model)
    with pytest.raises(ConfigError, match="disable_native_inference"):
        export_onnx(model, tmp_path, torch.zeros(2, 64))
    with pytest.raises(ConfigError, match="disable_native_inference"):
        export_safetensors(model, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", INTEGERS)
def test_packed_layers_pickle(name: str) -> None:
    kernels = (kernel_named(name),)
    model = accelerate(frozen(LAYERS["token"][1], 64, 64, torch.float32), kernels=kernels, clock=Slow(1, 2))
    assert isinstance(model[0], PackedLinear)  # type: ignore[index]
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


def test_options_that_cannot_be_obeyed_are_refused() -> None:
    model = frozen(LAYERS["int8"][1], 64, 64, torch.bfloat16)
    for options in (RuntimeOptions("mxfp4"), RuntimeOptions(use_preshuffle=True), RuntimeOptions("flydsl_svdquant")):
        with pytest.raises(NotSupportedError, match="mxfp4|use_preshuffle|flydsl"):
            ModelQuantizer.freeze(model, runtime_options=options)
    with pytest.raises(ConfigError, match="native_linear_mode='fast'"):
        enable_native_inference(model, runtime_options=RuntimeOptions("fast"))
    with pytest.raises(ConfigError, match="compute_dtype"):
        accelerate(model, torch.float64)
    with pytest.raises(ConfigError, match="no quantized"):
        accelerate(nn.Sequential(nn.Linear(4, 4)))
    assert enable_native_inference(model, runtime_options=RuntimeOptions("fp8_per_tensor")) == 0
    assert type(ModelQuantizer.freeze(model, runtime_options=RuntimeOptions())[0]) in (QuantLinear, PackedLinear)  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "form", "kernel", "seconds"),
    [
        ("uint4_wo_32", "awq", "int4_groups", (1, 1, 2)),
        ("int4_wo_32", "awq", "int4_groups", (1, 1, 2)),
        ("uint4_wo_32", "compressed-tensors", "int4_groups", (1, 1, 2)),
        ("int8_wo", "compressed-tensors", "int8_weights", (1, 1, 2)),
        ("int8_dynamic", "compressed-tensors", "int_mm", (1, 2)),
    ],
)
def test_folders_of_other_programs_are_packed_and_written_as_onnx(
    tmp_path: Path, scheme: str, form: str, kernel: str, seconds: tuple[float, ...]
) -> None:
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
    model = quantizer.freeze(quantizer.quantize_model(tiny_llama().to(torch.bfloat16)))
    export_safetensors(model, tmp_path / "folder", custom_mode=form)
    loaded = import_model_from_safetensors(tiny_llama().to(torch.bfloat16), tmp_path / "folder")
    (ids,) = token_batches(1)
    with torch.no_grad():
        reference = loaded(ids).logits
        in_float32 = import_model_from_safetensors(tiny_llama(), tmp_path / "folder")
        session = onnxruntime.InferenceSession(export_onnx(in_float32, tmp_path / "onnx", ids))
        accelerate(loaded, kernels=(BY_NAME[kernel],), clock=Slow(*seconds))
        assert sum(isinstance(m, PackedLinear) for m in loaded.modules()) == 14
        packed_logits = loaded(ids).logits
        disable_native_inference(loaded)
        assert torch.equal(loaded(ids).logits, reference)
    (from_onnx,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
    for logits in (packed_logits, torch.from_numpy(from_onnx)):
        # bfloat16 layers round every product and weight: 2^-8 each, a few layers deep
        assert float((logits - reference).norm() / reference.norm()) < 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler, when it is imported
@pytest.mark.parametrize(
    # The ways of the kernel, then the float product.
    ("scheme", "kernel", "seconds"),
    [
        ("uint4_wo_32", "int4_groups", (1, 1, 2)),
        ("int8_dynamic", "onednn_int8", (1, 2)),
        ("int8_dynamic", "int_mm", (1, 2)),
    ],
)
def test_generate_compile_and_reloaded_folders(
    tmp_path: Path, scheme: str, kernel: str, seconds: tuple[float, ...]
) -> None:
    kernels = (kernel_named(kernel),)
    model = tiny_llama().to(torch.bfloat16)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
    model = quantizer.freeze(quantizer.quantize_model(model))
    export_safetensors(model, tmp_path / "folder")
    (ids,) = token_batches(1)
    with torch.no_grad():
        reference = model(ids).logits
    reloaded = import_model_from_safetensors(tiny_llama().to(torch.bfloat16), tmp_path / "folder")
    for each in (model, reloaded):
        accelerate(each, kernels=kernels, clock=Slow(*seconds))
        assert sum(isinstance(m, PackedLinear) for m in each.modules()) > 0
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, reloaded(ids).logits)
        # bfloat16 layers round every product and weight: 2^-8 each, a few layers deep
        assert float((logits - reference).norm() / reference.norm()) < 0.05
        compiled = torch.compile(model)(ids).logits
        assert float((compiled - logits).norm() / logits.norm()) < 0.05
        tokens = model.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape[1] == ids.shape[1] + 4


@pytest.mark.parametrize("split", [PerTensor(), PerChannel(0), PerGroup(-1, 64)], ids=str)
def test_codes_are_the_same_in_pieces(split: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerSpec(weight=spec("uint4", split, symmetric=False, scale_type=ScaleType.float))
    model = frozen(layer, 100, 256, torch.bfloat16)
    whole = coded_weight(model[0])  # type: ignore[arg-type]
    monkeypatch.setitem(coded_weight.__globals__, "CODE_BYTES", 7 * 4 * 256)
    monkeypatch.setitem(coded_weight.__globals__, "chunk_bytes_for", lambda x: 0)
    pieces = coded_weight(model[0])  # type: ignore[arg-type]
    assert whole is not None and pieces is not None
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(pieces.decoded().bfloat16(), model[0].weight)  # type: ignore[arg-type]
    model[0].weight[99, 255] *= 1.5  # type: ignore[index, operator]
    assert coded_weight(model[0]) is None  # type: ignore[arg-type]
