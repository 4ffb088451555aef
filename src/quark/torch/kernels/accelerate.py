"""accelerate: quantized linear layers multiply with their codes, where that is measured to be faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from quark.base.log import logger
from quark.core.array import chunk_bytes_for, row_chunks
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.quantize import dequantize, quantize, recover_codes
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import LONGEST, ConfigError, NotSupportedError, one_line
from quark.torch.checkpoint.loading import StoredTensor
from quark.torch.kernels.fp8 import ScaledMm
from quark.torch.kernels.int4 import Int4Groups
from quark.torch.kernels.int8 import Int8Weights
from quark.torch.kernels.int8_int8 import IntMm, OneDnnInt8
from quark.torch.kernels.kernel import AGREEMENT, CodedWeight, Kernel, Multiply, Packed, attempted
from quark.torch.kernels.packed_linear import ROWS, PackedLinear
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.linear import QuantLinear
from quark.torch.layers.low_rank import branch_of
from quark.torch.layers.replace import set_submodule
from quark.torch.layers.stored_codes.layer import codes_of

KERNELS: tuple[Kernel, ...] = (Int4Groups(), Int8Weights(), OneDnnInt8(), IntMm(), ScaledMm())
"""All kernels. A new one is a file and an entry here."""

Layer = TypeVar("Layer", bound=nn.Module)

Choice = tuple[Kernel, tuple[str, ...]]
"""A kernel and its way for each of ROWS."""

Clock = Callable[[], float]
"""Seconds; `time.perf_counter`, or what a test injects."""

RUNS = 5
"""Of each function at least."""

ENOUGH = 0.02
"""Seconds that short functions are run again for: the shortest of five runs of some microseconds is chance."""

_CHOICES: dict[Hashable, Choice | None] = {}
"""The choices that were measured in this process; None where the float layer is fastest."""

_FAILED: set[tuple[str, torch.device]] = set()
"""Kernels that raised an error, and the devices on which they did, of which a line was said."""

CODE_BYTES = 1 << 20
"""Of a weight in float32, whose codes are made at once."""


def accelerate(
    model: nn.Module,
    compute_dtype: torch.dtype | None = None,
    *,
    kernels: tuple[Kernel, ...] = KERNELS,
    clock: Clock = time.perf_counter,
) -> nn.Module:
    """Let quantized linear layers multiply with their codes by the kernels that torch brings.

    Each shape of layer is measured once in a process, at 1, 8 and 64 rows. A layer whose float product is as fast for a
    single row stays a frozen layer. The results are those of the frozen model but for the order of summation and for
    roundings to the dtype of the model: a kernel does not round the decoded weight to it.

    Args:
        model: A model from `quantize_model`, frozen or not, or one loaded from a quantized folder; changed in place.
        compute_dtype: None: kernels that round inputs and scales to bfloat16 (4-bit groups, int8 weights) run only in
            bfloat16 models with such scales. torch.bfloat16: they run in float32 and float16 models too.
        kernels: Kernels to choose from.
        clock: What tells the time, in seconds.

    Returns:
        The same model.

    Raises:
        ConfigError: The model has no quantized layer, or compute_dtype is neither None nor torch.bfloat16.
    """
    if compute_dtype not in (None, torch.bfloat16):
        raise ConfigError(f"compute_dtype={compute_dtype}; possible: None or torch.bfloat16.")
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    layers = {name: module for name, module in modules.items() if isinstance(module, QuantLinear)}
    if not layers and count_packed(model) == 0:
        raise ConfigError("accelerate needs a model from quantize_model or a loaded one; this has no quantized linear.")
    changed = 0
    with torch.no_grad():
        for name, layer in layers.items():
            faster = _faster(layer, compute_dtype is not None, kernels, clock)
            if faster is not None and name:
                set_submodule(model, name, faster)
                changed += isinstance(faster, PackedLinear)
    logger.info("%d of %d quantized linear layers multiply with their codes.", changed, len(layers))
    return model


def count_packed(model: nn.Module) -> int:
    """How many layers multiply with their codes."""
    return sum(isinstance(module, PackedLinear) for module in model.modules()) if isinstance(model, nn.Module) else 0


def undo_acceleration(model: nn.Module) -> int:
    """Put frozen layers back in the place of packed ones; how many there were."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    for name, module in packed.items():
        set_submodule(model, name, module.unpacked())
    return len(packed)


def _has_scales_in_rows(spec: TensorSpec) -> bool:
    """Return True where stored float scales are of a matrix, of its rows, or of groups in them."""
    if spec.scale_spec is not None or spec.code_spec is not None or spec.dynamic or spec.dtype.is_block:
        return False
    if isinstance(spec.granularity, PerGroup):
        return spec.granularity.axis % 2 == 1
    return spec.granularity in (PerTensor(), PerChannel(0), PerChannel(-2))


def coded_weight(layer: QuantLinear, any_rounding: bool = False) -> CodedWeight | None:
    """The codes of a layer's weight; None where one scale is not of a tensor, a row or a group of a row's inputs."""
    quantizer = layer.weight_quantizer
    if not isinstance(quantizer, (FakeQuantize, StoredTensor)) or quantizer.spec.is_cast:
        return None
    spec = quantizer.spec
    if not _has_scales_in_rows(spec):
        return None
    if isinstance(quantizer, StoredTensor):
        try:
            params, codes = (
                quantizer.params(layer.extras("weight")),
                quantizer.codes(codes_of(layer, "weight").detach()),
            )
        except NotSupportedError:
            return None  # float values
        dtype = quantizer.layout.model_dtype
    else:
        params, dtype = quantizer.params, layer.weight.dtype
        if params is None or quantizer.mode not in (Mode.quantize, Mode.frozen) or quantizer.trained is not None:
            return None
        found = _codes_of(layer.weight.detach(), params, spec, quantizer.mode is Mode.frozen)
        if found is None:
            return None  # the weight was changed after it was frozen
        codes = found
    assert params is not None
    return _by_rows(codes, params, layer, dtype, any_rounding, quantizer)


def _codes_of(weight: torch.Tensor, params: QParams, spec: TensorSpec, frozen: bool) -> torch.Tensor | None:
    """Codes of a weight, some rows at a time, so that steps in between stay in the cache.

    Of a frozen weight those that stand for it; None where no codes do.
    """
    codes, chunk_bytes = torch.empty(weight.shape, device=weight.device), max(CODE_BYTES, chunk_bytes_for(weight))
    for rows in row_chunks(weight.shape[0], 4 * weight.shape[1], chunk_bytes):
        each = (params.scale, params.zero_point)
        scale, zero = (p if p is None or p.ndim == 0 or p.shape[0] == 1 else p[rows] for p in each)
        x, own = weight[rows], QParams(scale, zero)
        part = quantize(x, own, spec)
        if frozen and not _stands_for(part, x, own, spec):
            part = recover_codes(x, part, own, spec)
            if not _stands_for(part, x, own, spec):
                return None
        codes[rows] = part
    return codes


def _stands_for(codes: torch.Tensor, x: torch.Tensor, params: QParams, spec: TensorSpec) -> bool:
    return torch.equal(dequantize(codes, params, spec).to(x.dtype), x)


def _by_rows(
    codes: torch.Tensor,
    params: QParams,
    layer: QuantLinear,
    dtype: torch.dtype,
    any_rounding: bool,
    quantizer: FakeQuantize | StoredTensor,
) -> CodedWeight | None:
    spec = quantizer.spec
    n, k = codes.shape
    if isinstance(spec.granularity, PerGroup) and k % spec.granularity.size:
        return None

    def each_row(parameter: torch.Tensor) -> torch.Tensor:
        rows = parameter.float().reshape(-1, 1) if parameter.ndim < 2 else parameter.float()
        return rows.expand(n, -1).contiguous()

    zero = None if params.zero_point is None else each_row(params.zero_point)
    if zero is not None and ((spec.symmetric and spec.dtype.signed) or not bool(zero.any())):
        zero = None
    return CodedWeight(codes.float(), each_row(params.scale), zero, spec, layer.quantizer("input"), dtype, any_rounding)


def _faster(
    layer: QuantLinear, any_rounding: bool, kernels: tuple[Kernel, ...], clock: Clock
) -> PackedLinear | QuantLinear | None:
    """Return the layer that takes the layer's place; None if it stays."""
    # Other packages wrap the forward of a module; their wrapper would go on calling the old one.
    if "forward" in layer.__dict__ or layer.weight.is_meta:
        return None
    weight = coded_weight(layer, any_rounding)
    if weight is None:
        return None
    fitting = [kernel for kernel in kernels if kernel.fits(weight)]
    choice = None
    if fitting:
        key = _key(layer, weight, fitting)
        if key not in _CHOICES or clock is not time.perf_counter:
            _CHOICES[key] = _measured(layer, weight, fitting, clock)
        choice = _CHOICES[key]
    if choice is not None:
        return PackedLinear(layer, *choice, weight)
    if not isinstance(layer.weight_quantizer, StoredTensor):
        return None
    # A loaded layer decodes its weight once, and not in each forward.
    layer._parameters["weight"] = nn.Parameter(layer.quantized_weight().detach(), requires_grad=False)
    layer.add_module("weight_quantizer", None)
    return layer


def _key(layer: QuantLinear, weight: CodedWeight, fitting: list[Kernel]) -> Hashable:
    names = tuple(kernel.name for kernel in fitting)
    activation = weight.input_quantizer.spec if isinstance(weight.input_quantizer, FakeQuantize) else None
    asymmetric = weight.zero is not None
    place = (weight.codes.device, torch.get_num_threads())
    beside = (layer.bias is None, layer.spec.bias, layer.spec.output, branch_of(layer) is None)
    return names, weight.shape, weight.group, asymmetric, weight.dtype, activation, beside, place


def _measured(layer: QuantLinear, weight: CodedWeight, fitting: list[Kernel], clock: Clock) -> Choice | None:
    """The kernel whose times have the smallest product over ROWS, of those that beat the frozen layer for one row,
    with its fastest way for each of ROWS; None if no kernel does.

    What is timed are the layers that will run, as a whole: in a small one the call costs as much as the product.
    """
    frozen: QuantLinear = QuantLinear.from_float(layer, layer.spec)  # type: ignore[assignment]
    frozen._modules |= {name: module for name, module in layer._modules.items() if name != "weight_quantizer"}
    frozen._modules["weight_quantizer"] = None
    frozen._parameters["weight"] = nn.Parameter(weight.decoded().to(weight.dtype), requires_grad=False)
    float_layer, by_name = _without_hooks(frozen), {kernel.name: kernel for kernel in fitting}
    batches = [_rows(weight, count) for count in ROWS]
    right = _right(layer, weight, fitting, batches)
    seconds: list[dict[Hashable, float]] = []
    for x in batches:
        timed: dict[Hashable, Callable[[], object]] = {key: partial(made, x) for key, made in right.items()}
        timed["float"] = partial(float_layer, x)
        seconds.append(_seconds_of(timed, x.device, clock))
    best = [_fastest_ways(each) for each in seconds]
    faster = [name for name, (_, shortest) in best[0].items() if shortest < seconds[0]["float"]]
    if not faster:
        return None
    name = min(faster, key=lambda name: math.prod(each[name][1] for each in best))
    return by_name[name], tuple(each[name][0] for each in best)


def _right(
    layer: QuantLinear, weight: CodedWeight, kernels: list[Kernel], batches: list[torch.Tensor]
) -> dict[Hashable, PackedLinear]:
    """(kernel, way) -> the packed layer, of those that run on this device and compute the formula.

    Args:
        layer: That they may replace.
        weight: Of it.
        kernels: That fit.
        batches: Inputs of all sizes that are measured; a way that fails for one of them is not taken.
    """
    (x, expected, most), right = _probe(weight), dict[Hashable, PackedLinear]()

    def run(kernel: Kernel, way: str, multiply: Multiply, packed: Packed) -> PackedLinear | None:
        quantizer = None if kernel.takes_codes else weight.input_quantizer
        y = multiply(x if quantizer is None else quantizer(x), packed)
        if not ((y.float() - expected).abs() <= AGREEMENT * most).all():
            return None
        made = _without_hooks(PackedLinear(layer, kernel, (way,) * len(ROWS), weight, packed))
        for each in batches:
            made(each)
        _wait(x.device)  # a device tells of an error later
        return made

    for kernel in kernels:
        packed = attempted(partial(kernel.pack, weight))
        if isinstance(packed, Exception):
            _note_failure(kernel, x.device, packed)
            continue
        for way, multiply in kernel.ways(weight.input_quantizer).items():
            made = attempted(partial(run, kernel, way, multiply, packed))
            if isinstance(made, Exception):
                _note_failure(kernel, x.device, made)
            elif made is not None:
                right[kernel.name, way] = made
    return right


def _note_failure(kernel: Kernel, device: torch.device, error: Exception) -> None:
    """Say, once for each kernel and device, that it does not run."""
    if (kernel.name, device) not in _FAILED:
        _FAILED.add((kernel.name, device))
        said = one_line(error)[:LONGEST]
        logger.warning("%s does not run on %s and is not used: %s: %s", kernel.name, device, type(error).__name__, said)


def _rows(weight: CodedWeight, count: int) -> torch.Tensor:
    """Inputs of a layer, of the dtype and on the device of its weight."""
    x = torch.randn(count, weight.shape[1], generator=torch.Generator().manual_seed(count))
    return x.to(weight.codes.device, weight.dtype)


def _without_hooks(layer: Layer) -> Layer:
    """The layer, whose hooks are those of a model that does not run."""
    for hooks in (layer._forward_hooks, layer._forward_pre_hooks):
        hooks.clear()
    return layer


def _fastest_ways(seconds: dict[Hashable, float]) -> dict[str, tuple[str, float]]:
    """Kernel -> its fastest way, and the seconds of that."""
    best: dict[str, tuple[str, float]] = {}
    for key, time_of_way in seconds.items():
        if isinstance(key, tuple) and time_of_way < best.get(key[0], ("", math.inf))[1]:
            best[key[0]] = key[1], time_of_way
    return best


def _probe(weight: CodedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, extreme ones included, on which integer sums saturate; what the formula gives, and sum |x| |w|."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(2, weight.shape[1], generator=generator).sign()
    x = torch.cat([torch.randn(3, weight.shape[1], generator=generator), 4 * signs, torch.full_like(signs[:1], 4.0)])
    x = x.to(weight.codes.device, weight.dtype)
    read = x if weight.input_quantizer is None else weight.input_quantizer(x)
    decoded = weight.decoded()
    return x, F.linear(read.float(), decoded), F.linear(read.float().abs(), decoded.abs_())


def _seconds_of(
    functions: Mapping[Hashable, Callable[[], object]], device: torch.device, clock: Clock = time.perf_counter
) -> dict[Hashable, float]:
    """The shortest of some runs of each function, which take turns, so that a busy moment hits all of them."""
    times: dict[Hashable, float] = {}
    for function in functions.values():
        function()  # the first call of a kernel compiles or allocates
    runs, begin = 0, time.perf_counter()
    while runs < RUNS or time.perf_counter() - begin < ENOUGH:
        runs += 1
        for name, function in functions.items():
            _wait(device)
            start = clock()
            function()
            _wait(device)
            times[name] = min(clock() - start, times.get(name, float("inf")))
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
