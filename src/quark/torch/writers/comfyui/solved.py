"""A denoiser in memory that is calibrated and solved as ComfyUI computes it: layers that are one there are one here.

    diffusers   to_q (O, I)   to_k (O, I)   to_v (O, I)     three scales, were they quantized apart
    ComfyUI     qkv (3 O, I)                                one scale of the weight, one of the input

So the layers of each such tensor are made one linear layer before anything is measured, and in their places stand
modules that give each its rows of what that one makes. What is calibrated and solved then is the layer of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark.core.scales import QParams
from quark.core.spec import LayerSpec, block_spec
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.replace import quantized_layers, set_submodule
from quark.torch.writers.comfyui.names import OriginalTensor
from quark.torch.writers.comfyui.plan import PlannedLayer
from quark.torch.writers.comfyui.source import DenoiserSource

JOINED = "joined"
"""The name of the layer that stands for several, in the place of the first of them."""


class RowsOfJoined(nn.Module):
    """Stands for a linear layer of which a file has the rows in another: gives its part of what that one makes.

    The other is computed once for all parts that read the same values; a part that comes again computes it again.

    Args:
        rows: Of the layer, as slices that follow one another.
        first: The part that holds the layer; None: this one does.
    """

    def __init__(self, rows: tuple[slice, ...], first: RowsOfJoined | None = None) -> None:
        super().__init__()
        self.rows = rows
        # In a tuple, so that it is no submodule, and the layer has one name.
        self._first = () if first is None else (first,)
        self._parts: list[RowsOfJoined] = [] if first is None else first._parts
        self._parts.append(self)
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None
        self._left: list[RowsOfJoined] = []

    @property
    def first(self) -> RowsOfJoined:
        """The part that holds the layer."""
        return self._first[0] if self._first else self

    @property
    def layer(self) -> Any:
        """The linear layer of all parts."""
        return getattr(self.first, JOINED)

    @property
    def weight(self) -> torch.Tensor:
        """The rows of the weight, without a gradient."""
        return self._rows_of(self.layer.weight.detach(), 0)

    @property
    def bias(self) -> torch.Tensor | None:
        """The rows of the bias."""
        return None if self.layer.bias is None else self._rows_of(self.layer.bias.detach(), 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of the output: (..., I) to (..., O)."""
        return self._rows_of(self.first._product(x, self), -1)

    def _product(self, x: torch.Tensor, part: RowsOfJoined) -> torch.Tensor:
        """Return the output of the layer for x, which is kept until each part has had it."""
        known = self._made[0] if self._made and any(part is other for other in self._left) else None
        equal = known is x
        if known is not None and (known.shape, known.dtype, known.device) == (x.shape, x.dtype, x.device):
            # Without values, what ComfyUI reads once is taken to be equal.
            equal = equal or x.is_meta or torch.equal(known, x)
        if self._made is None or not equal:
            self._made, self._left = (x, self.layer(x)), list(self._parts)
        made = self._made[1]
        self._left = [other for other in self._left if other is not part]
        if not self._left:
            self._made = None
        return made

    def _rows_of(self, whole: torch.Tensor, axis: int) -> torch.Tensor:
        parts = [whole.narrow(axis, rows.start, rows.stop - rows.start) for rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def join_layers(model: nn.Module, plan: Mapping[str, PlannedLayer]) -> dict[str, str]:
    """Make one linear layer of those that are one in the file, in place.

    Args:
        model: A network of diffusers, on any device.
        plan: What is quantized, by the names in the file.

    Returns:
        Name in the file -> name of the linear layer in the model, of all that are linear layers there.
    """
    found = {}
    for name, layer in plan.items():
        parts = [part.removesuffix(".weight") for part in layer.tensor.parts]
        modules = [_module(model, part) for part in parts]
        if not all(isinstance(module, nn.Linear) for module in modules):
            continue
        alone = len(parts) == 1 and not layer.tensor.swapped
        found[name] = parts[0] if alone else _join(model, parts, modules, layer.tensor)
    return found


def _module(model: nn.Module, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a parameter of a module that is no layer
        return None


def _join(model: nn.Module, names: list[str], modules: list[Any], tensor: OriginalTensor) -> str:
    first = modules[0]
    weight = tensor.of([module.weight.detach() for module in modules])
    biases = [module.bias for module in modules]
    joined = nn.Linear(1, 1, bias=biases[0] is not None, device="meta")
    joined.in_features, joined.out_features = weight.shape[1], weight.shape[0]
    joined.weight = nn.Parameter(weight, first.weight.requires_grad)
    if biases[0] is not None:
        joined.bias = nn.Parameter(tensor.of([bias.detach() for bias in biases]), first.bias.requires_grad)
    places = _places([module.weight.shape[0] for module in modules], tensor.swapped)
    holder = RowsOfJoined(places[0])
    holder.add_module(JOINED, joined.train(first.training))
    for name, module, rows in zip(names, modules, places, strict=True):
        part = holder if module is first else RowsOfJoined(rows, holder)
        set_submodule(model, name, part.train(module.training))
    return f"{names[0]}.{JOINED}"


def _places(sizes: list[int], swapped: bool) -> list[tuple[slice, ...]]:
    """The rows that each of several has in the tensor that is made of them; see `OriginalTensor.of`."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    if not swapped:
        return [(slice(start, start + size),) for start, size in zip(starts, sizes, strict=True)]
    whole, half = sum(sizes), -(-sum(sizes) // 2)
    found = []
    for start, size in zip(starts, sizes, strict=True):
        upper = slice(start + whole - half, min(start + size, half) + whole - half)
        lower = slice(max(start, half) - half, start + size - half)
        found.append(tuple(rows for rows in (upper, lower) if rows.stop > rows.start))
    return found


def config_for(names: Mapping[str, str], plan: Mapping[str, PlannedLayer], algorithms: Any) -> QConfig:
    """The config under which a model with joined layers is quantized as a file is planned.

    Args:
        names: See `join_layers`.
        plan: What is quantized, by the names in the file.
        algorithms: Configs of algorithms; None: none.
    """
    specs = {names[name]: layer.what for name, layer in plan.items() if name in names}
    layers = {
        name: config_of_layer(LayerSpec(weight=block_spec(what)) if isinstance(what, str) else what)
        for name, what in specs.items()
    }
    return QConfig(global_quant_config=config_of_layer(LayerSpec()), layer_quant_config=layers, algo_config=algorithms)


@dataclass(frozen=True)
class SolvedDenoiser:
    """A denoiser after calibration and algorithms.

    Attributes:
        model: With joined layers.
        layers: Name in the file -> quantized layer.
    """

    model: Any
    layers: Mapping[str, QuantLayer]

    @classmethod
    def of(cls, model: Any, names: Mapping[str, str]) -> SolvedDenoiser:
        """Of a quantized model; `names` as `join_layers` gives them."""
        quantized = quantized_layers(model)
        return cls(model, {name: quantized[own] for name, own in names.items() if own in quantized})

    def value(self, source: DenoiserSource, tensor: OriginalTensor) -> torch.Tensor:
        """The values of a tensor that stays in float: those of the source, unless an algorithm changed them."""
        x = source.read(tensor)
        parts = [_tensor(self.model, part) for part in tensor.parts]
        own = [part.detach().cpu() for part in parts if part is not None]
        if len(own) < len(parts):
            return x
        now = tensor.of(own)
        return x if torch.equal(now, x.to(now.dtype)) else now.to(x.dtype)


def _tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    parent, _, leaf = name.rpartition(".")
    value = getattr(_module(model, parent), leaf, None)
    return value if isinstance(value, torch.Tensor) else None


def weight_of(layer: QuantLayer) -> tuple[torch.Tensor, QParams, bool]:
    """The weight of a layer, its scales, and whether it holds quantized values already; on the CPU."""
    quantizer = layer.quantizer("weight")
    assert isinstance(quantizer, FakeQuantize) and quantizer.params is not None
    weight: Any = layer.weight
    return weight.detach().cpu(), _on_cpu(quantizer.params), quantizer.mode is Mode.frozen


def _on_cpu(params: QParams) -> QParams:
    second = None if params.second is None else _on_cpu(params.second)
    zero = None if params.zero_point is None else params.zero_point.cpu()
    return QParams(params.scale.cpu(), zero, second)


def input_scale(layer: QuantLayer) -> torch.Tensor | None:
    """Return the scale of the input of a layer that calibration found, or of live scales theirs; None: none."""
    quantizer = layer.quantizer("input")
    if not isinstance(quantizer, FakeQuantize):
        return None
    found = quantizer.scale_2 if quantizer.spec.dynamic else quantizer.scale
    return None if found is None else found.detach().cpu()
