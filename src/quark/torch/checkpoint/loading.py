"""Turns a float model into the modules that hold a quantized checkpoint, before its tensors are loaded.

After loading, a layer computes with `weight_quantizer(weight)`, which decodes the stored tensors in each forward: the
model needs the memory of the checkpoint, not of the float model.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from quark.core.blocks.block_types import BlockType
from quark.core.granularity import PerTensor
from quark.core.scales import QParams
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import NonFiniteError, NotSupportedError
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.checkpoint.finite import is_finite
from quark.torch.config.algo_configs import SVDQuantConfig
from quark.torch.config.config import QConfig
from quark.torch.config.selectors import resolved_names
from quark.torch.formats import FORMATS, Format
from quark.torch.formats.layout import CodedLayout, Layout, Tensors
from quark.torch.layers import QuantLayer
from quark.torch.layers.attention.cache_rules import cached_layers
from quark.torch.layers.attention.cache_view import CacheQuantize
from quark.torch.layers.attention.probabilities import attention_quantizers, quantize_attention
from quark.torch.layers.base import EXTRA_SUFFIXES
from quark.torch.layers.fake_quant import Extras, FakeQuantize, Mode
from quark.torch.layers.low_rank import hold_branches
from quark.torch.layers.online_rotation import hold_rotations
from quark.torch.layers.replace import quantized_layers, replace_layer
from quark.torch.layers.stored_codes.layer import become_stored
from quark.torch.layers.stored_codes.model import answer_as_float
from quark.torch.layers.stored_codes.weight import StoredWeight
from quark.torch.model.passes import prepare, undo
from quark.torch.plan import Plan, chooser, make_plan

REAL_QUANTIZED, FAKE_QUANTIZED = WEIGHT_FORMATS = ("real_quantized", "fake_quantized")


SAVER = ("quark.torch.writers.safetensors", "save_quantized")
"""The function that writes a loaded model: found by name, since the writers import this module."""

DEQUANTIZER = ("quark.torch.checkpoint.dequantize", "dequantize")
"""Module and name of the function that makes a loaded model float, which imports this module."""


def save_pretrained(model: Any, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """The `save_pretrained` of a loaded model; `save_quantized` says what it takes and raises."""
    home, name = SAVER
    getattr(import_module(home), name)(model, save_directory, **options)


def dequantize(model: Any, dtype: torch.dtype | None = None) -> Any:
    """The `dequantize` of a loaded model, as that of transformers: `quark.torch.dequantize`, then a dtype if asked."""
    home, name = DEQUANTIZER
    made = getattr(import_module(home), name)(model)
    return made if dtype is None else made.to(dtype)


def mark_loaded(model: Any, config: QConfig, form: str) -> None:
    """Note on a model what it was loaded as, and let its `save_pretrained` write quantized layers.

    Args:
        model: Any module; only those of transformers have a `save_pretrained`.
        config: Under which it got its layers.
        form: Name of the format that it came in, in which it is saved.
    """
    model.quant_config, model.quark_quantized, model.quant_format = config, True, form
    if hasattr(model, "save_pretrained"):
        # That of transformers would save codes without a config that says so. A partial: a copy, pickled or not, saves
        # itself.
        model.save_pretrained = partial(save_pretrained, model)
    if hasattr(model, "dequantize"):  # by which transformers and diffusers would ask their own quantizer
        model.dequantize = partial(dequantize, model)
    answer_as_float(model)


class StoredTensor(nn.Module):
    """Decodes a stored weight or bias.

    Args:
        layout: Reads the stored tensors.
        shape: Shape of the float tensor.
        tensors: What the file will hold, for the shapes and dtypes of the buffers.

    Attributes:
        code_dtype: Of what is stored.
        name: Of the tensor in its model, for messages; empty where it is not known.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    def __init__(self, layout: Layout, shape: tuple[int, ...], tensors: Tensors) -> None:
        super().__init__()
        self.layout = layout
        self.shape = shape
        self.code_dtype = tensors[""].dtype
        self._kept: dict[int, torch.Tensor] | None = None
        self._is_checked, self.name = False, ""
        for name in ("scale", "zero_point"):
            self.register_buffer(name, tensors.get(name))

    def forward(self, stored: torch.Tensor, extras: Extras | None = None) -> torch.Tensor:
        """The float tensor; `extras` are the stored tensors that live on the layer."""
        if isinstance(stored, StoredWeight):  # `weight` of the layer, as others see it
            stored = stored.coded
        if self._kept is not None and id(stored) in self._kept:
            return self._kept[id(stored)]
        decoded = self.layout.load({"": stored, **self._params(extras)}, self.shape)
        self._require_finite(decoded)
        if self._kept is not None:
            self._kept[id(stored)] = decoded
        return decoded

    def _require_finite(self, decoded: torch.Tensor) -> None:
        """Look at what is decoded for the first time: a code of NaN, or a scale whose products are beyond their type.

        Raises NonFiniteError. A graph that is traced has no values to look at.
        """
        if self._is_checked or torch.compiler.is_compiling() or isinstance(decoded, FakeTensor) or decoded.is_meta:
            return
        if not is_finite(decoded):
            raise NonFiniteError(
                f"{self.name or 'A tensor'} decodes to NaN or infinity: its codes or scales are damaged."
            )
        self._is_checked = True

    @contextmanager
    def decoding_once(self) -> Iterator[None]:
        """Within: what is decoded is kept, and not decoded again; the stored tensors stay as they are."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def _params(self, extras: Extras | None) -> Tensors:
        own = {"scale": self.scale, "zero_point": self.zero_point}
        return {**{k: v for k, v in own.items() if v is not None}, **(extras or {})}

    def params(self, extras: Extras | None = None, stored: torch.Tensor | None = None) -> QParams | None:
        """Scale and zero point; None for a plain cast. Blocks of GGUF hold them in the `stored` tensor itself.

        Raises:
            NotSupportedError: The checkpoint holds float values in place of codes.
        """
        own = {} if stored is None else {"": stored}
        return None if self.spec.is_cast else self._coded().load_params({**own, **self._params(extras)}, self.shape)

    def codes(self, stored: torch.Tensor) -> torch.Tensor:
        """The codes, as floats that hold their values."""
        return stored.float() if self.spec.is_cast else self._coded().load_codes(stored, self.shape)

    def _coded(self) -> CodedLayout:
        if not self.layout.real:
            raise NotSupportedError("A fake_quantized checkpoint holds no codes: export from a real_quantized one.")
        assert isinstance(self.layout, CodedLayout)  # as all layouts of files are
        return self.layout

    def encode(self, values: torch.Tensor) -> Tensors:
        """The tensors that are stored of new values, by suffix, under scales that their observer finds.

        Raises CalibrationError or NonFiniteError where they have none.
        """
        x = values.to(self.layout.model_dtype)
        params = None if self.spec.is_cast else tensor_qparams(x, self.spec)
        return self.layout.store(x, params)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Decode to another dtype from now on; what is stored stays."""
        self.layout = copy.copy(self.layout)
        self.layout.model_dtype = dtype

    @property
    def spec(self) -> TensorSpec:
        """The spec of the decoded tensor."""
        return self.layout.spec

    @property
    def float_like(self) -> torch.Tensor:
        """A tensor on the meta device, of the shape and dtype that is decoded."""
        return torch.empty(self.shape, dtype=self.layout.model_dtype, device="meta")

    def extra_repr(self) -> str:
        return f"{self.spec}, stored"


def map_to_stored(
    model: nn.Module,
    config: QConfig,
    pack_method: str = "reorder",
    weight_format: str = REAL_QUANTIZED,
    form: Format = FORMATS["quark"],
) -> dict[str, nn.Module]:
    """Replace the layers that a checkpoint quantizes by modules with its tensors' shapes, on the device of the model.

    Args:
        model: Float model, on the meta device where memory matters; its values are not used.
        config: The config stored in the checkpoint; its excludes are resolved names.
        pack_method: Nibble order of the checkpoint.
        weight_format: "real_quantized" (codes) or "fake_quantized" (float values).
        form: Format of the checkpoint.

    Returns:
        The float layers that were replaced, by name.
    """
    config = replace(config, exclude=resolved_names(config.exclude, model))
    originals = prepare(model, chooser(config, model).wanted)
    try:
        real = weight_format == REAL_QUANTIZED
        plan = make_plan(config, model, strict=False)
        model.quant_plan = plan  # type: ignore[assignment]
        _hold_layers(model, plan, form, pack_method, real, originals)
        cached = cached_layers(config, quantized_layers(model))
        quantize_attention(model, cached, plan.probabilities)
        for name in cached:  # a scale for each head: how many there are is known now
            _hold_activation(quantized_layers(model)[name], "output", form)
        _hold_attention(model, form)
        rotation = config.get_rotation_config()
        if rotation is not None:
            hold_rotations(model, rotation)
        for algorithm in config.algo_config or []:
            if isinstance(algorithm, SVDQuantConfig):
                hold_branches(model, algorithm)
    except BaseException:
        undo(model, originals)
        raise
    return originals


def _hold_layers(
    model: nn.Module, plan: Plan, form: Format, pack_method: str, real: bool, originals: dict[str, nn.Module]
) -> None:
    for name, spec in plan.layers.items():
        module = model.get_submodule(name)
        layer = replace_layer(model, name, spec)
        for role in ("weight", "bias"):
            _hold_stored(layer, role, form, pack_method, real)
            if isinstance(quantizer := layer.quantizer(role), StoredTensor):
                quantizer.name = f"{name}.{role}"
        for role in ("input", "output"):
            _hold_activation(layer, role, form)
        if not any(name == done or name.startswith(f"{done}.") for done in originals):
            originals[name] = module


def _hold_attention(model: nn.Module, form: Format) -> None:
    """Make buffers for the scales of what acts inside attention."""
    for name, quantizer in attention_quantizers(model).items():
        device = next(model.get_submodule(name.rpartition(".")[0]).parameters()).device
        layout = form.make_layout(quantizer.spec, LayerSpec(), torch.float32, "reorder", True)
        tensors = _on_device(empty_scale(layout), device)
        quantizer.scale, quantizer.zero_point = tensors["scale"], tensors.get("zero_point")
        quantizer.mode = Mode.quantize


def _hold_stored(layer: QuantLayer, role: str, form: Format, pack_method: str, real: bool) -> None:
    quantizer = layer.quantizer(role)
    if isinstance(quantizer, FakeQuantize):
        x: torch.Tensor = getattr(layer, role)
        layout = form.make_layout(quantizer.spec, layer.spec, x.dtype, pack_method, real)
        _hold_tensors(layer, role, layout, stored_like(layout, layout.spec, x, x.device))


def hold_codes(layer: QuantLayer) -> None:
    """Let a layer whose weight and bias have scales hold what a quark folder stores of them, in the place of floats.

    A layer on the meta device gets what it would hold, without values.
    """
    form = FORMATS["quark"]
    for role in ("weight", "bias"):
        quantizer = layer.quantizer(role)
        if not isinstance(quantizer, FakeQuantize):
            continue
        x: torch.Tensor = getattr(layer, role).detach()
        if x.is_meta:
            _hold_stored(layer, role, form, "reorder", real=True)
        else:
            layout = form.make_layout(quantizer.spec, layer.spec, x.dtype, "reorder", True)
            stored = layout.store(x, quantizer.params)
            # Of a view across another tensor as a file would give it back: products sum in the order of memory.
            _hold_tensors(layer, role, layout, {suffix: tensor.contiguous() for suffix, tensor in stored.items()})


def _hold_tensors(layer: QuantLayer, role: str, layout: Layout, tensors: Tensors) -> None:
    """Put the stored tensors of a weight or bias, and what decodes them, in the place of the float tensor."""
    shape = tuple(getattr(layer, role).shape)
    setattr(layer, role, nn.Parameter(tensors[""], requires_grad=False))
    layer.add_module(f"{role}_quantizer", StoredTensor(layout, shape, tensors))
    _register_extras(layer, role, tensors)
    become_stored(layer)


def _hold_activation(layer: QuantLayer, role: str, form: Format) -> None:
    quantizer = layer.quantizer(role)
    if not isinstance(quantizer, FakeQuantize) or not quantizer.spec.needs_calibration:
        return
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    layout = form.make_layout(quantizer.spec, layer.spec, float_dtype(layer, weight), "reorder", True)
    tensors = _on_device(empty_activation(layer, role, layout), weight.device)
    if not quantizer.spec.dynamic:
        quantizer.scale, quantizer.zero_point = tensors["scale"], tensors.get("zero_point")
    _register_extras(layer, role, tensors)


def _register_extras(layer: QuantLayer, role: str, tensors: Tensors) -> None:
    for suffix in EXTRA_SUFFIXES:
        if suffix in tensors:
            layer.register_buffer(f"{role}_{suffix}", tensors[suffix])


def stored_like(layout: Layout, spec: TensorSpec, x: torch.Tensor, device: torch.device | str = "meta") -> Tensors:
    """Tensors of the shapes and dtypes that `layout` stores for `x` under parameters of `spec`."""
    return _on_device(stored_on_meta(layout, spec, tuple(x.shape), x.dtype), torch.device(device))


@lru_cache(maxsize=1024)
def stored_on_meta(layout: Layout, spec: TensorSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    """Return the tensors that `stored_like` gives, to be looked at alone: layers of one shape share them.

    The store itself runs on the meta device: ten milliseconds.
    """
    return layout.store(torch.empty(shape, dtype=dtype, device="meta"), empty_params(spec, shape))


def empty_params(spec: TensorSpec, shape: tuple[int, ...]) -> QParams | None:
    """Parameters of the right shapes for a tensor of `shape`, on the meta device."""
    if spec.is_cast:
        return None
    # float32 whatever the default dtype is: transformers sets that to the dtype of the model while it loads.
    scale = torch.empty(spec.split.scale_shape(shape), dtype=torch.float32, device="meta")
    zero = torch.empty_like(scale) if spec.has_zero_point else None
    second = None
    if isinstance(spec.dtype, BlockType):
        levels = torch.empty(spec.granularity.scale_shape(shape), device="meta")
        empty = [x if spec.dtype.has_minimum else None for x in (scale, levels)]
        return QParams(scale, empty[0], QParams(levels, empty[1]) if spec.dtype.scales is not None else None)
    if spec.scale_spec is not None:
        second = empty_params(spec.scale_spec, tuple(scale.shape))
    elif spec.code_spec is not None:
        second = empty_params(spec.code_spec, shape)
    return QParams(scale, zero, second)


def empty_activation(layer: QuantLayer, role: str, layout: Layout) -> Tensors:
    """Return the tensors that `layout` stores for a static activation, on the meta device."""
    spec = layout.spec
    if spec.dynamic:
        # Only the scale of the scales is static.
        assert spec.scale_spec is not None
        return {"scale_2": torch.empty((), dtype=torch.float32, device="meta")}
    quantizer = layer.quantizer(role)
    heads = quantizer.heads if isinstance(quantizer, CacheQuantize) else None
    features = activation_features(layer, role) if heads is None else (1, heads, 1, 1)
    params = empty_params(replace(spec, granularity=PerTensor()) if features is None else spec, features or ())
    assert params is not None
    return layout.store_params(params)


def empty_scale(layout: Layout) -> Tensors:
    """Return the tensors that `layout` stores for a tensor with one scale, on the meta device."""
    params = empty_params(layout.spec, ())
    assert params is not None
    return layout.store_params(params)


def activation_features(layer: QuantLayer, role: str) -> tuple[int, ...] | None:
    """A shape that stands for the activations of a layer: channels where the layer has them, other axes 1."""
    names = ("in_features", "in_channels") if role == "input" else ("out_features", "out_channels", "embedding_dim")
    count = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
    if count is None:
        return None
    return (1, count, 1, 1) if hasattr(layer, "in_channels") else (1, 1, count)


def float_dtype(layer: QuantLayer, weight: torch.Tensor) -> torch.dtype:
    """The dtype that a layer computes in, whatever its weight is stored as."""
    quantizer = layer.quantizer("weight")
    return quantizer.layout.model_dtype if isinstance(quantizer, StoredTensor) else weight.dtype


def _on_device(tensors: Tensors, device: torch.device) -> Tensors:
    return {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
