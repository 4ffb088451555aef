"""The places of a model where a tensor is quantized, as an exported graph shows them: one marker node each.

`torch.export` would trace the arithmetic of a FakeQuantize operation by operation. Within `marked`, it is one node of a
domain of ours that names it, so that the graph says where the quantized tensors are, whatever layer they belong to, and
the writers decide how each becomes ONNX. A frozen weight has its marker too: frozen or not, the graph is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import nn

from quark.core.quantize import compute_qparams, quantize, recover_codes
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError
from quark.torch.checkpoint.loading import StoredTensor
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import Extras, FakeQuantize, Mode, second_level_of

MARKER_DOMAIN, MARKER = "quark.export", "FakeQuantize"


@dataclass(frozen=True)
class MarkedTensor:
    """One quantized tensor of a model.

    Attributes:
        name: Of the tensor: "model.layers.0.mlp.up_proj.weight".
        module: What quantizes it, or decodes it.
        extras: Tensors of a loaded checkpoint that belong to it and live on its layer.
    """

    name: str
    module: FakeQuantize | StoredTensor
    extras: Extras = field(default_factory=dict)

    @property
    def spec(self) -> TensorSpec:
        """The spec of the tensor."""
        return self.module.spec

    @property
    def second(self) -> QParams | None:
        """The second level of a live tensor's scales, or None."""
        scale = getattr(self.module, "scale_2", None)
        return second_level_of(self.extras) if scale is None else QParams(scale, self.module.zero_point_2)

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        """X on the device of what quantizes it: torch.onnx gives some weights back on the host, wherever they were."""
        own = next(chain(self.module.buffers(), self.extras.values()), None)
        return x if own is None else x.to(own.device)

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Shape of the tensor, given what holds it."""
        return self.module.shape if isinstance(self.module, StoredTensor) else tuple(x.shape)

    def params(self, x: torch.Tensor) -> QParams | None:
        """Scale and zero point of a weight; None for a plain cast."""
        if self.spec.is_cast:
            return None
        if isinstance(self.module, StoredTensor):
            return self.module.params(self.extras)
        return self.module.params or compute_qparams(x, self.spec)

    def codes(self, x: torch.Tensor, params: QParams | None) -> torch.Tensor:
        """The codes of a weight, as floats that hold their values."""
        if isinstance(self.module, StoredTensor):
            return self.module.codes(x)
        codes: torch.Tensor = quantize(x, params, self.spec)  # type: ignore[arg-type]
        if params is not None and self.module.mode is Mode.frozen:
            codes = recover_codes(x, codes, params, self.spec)
        return codes


@contextmanager
def marked(model: nn.Module) -> Iterator[dict[str, MarkedTensor]]:
    """Within: every quantizer of the model traces as one marker node.

    Yields:
        The tensors by the name of their module.

    Raises:
        CalibrationError: A quantizer is still collecting its statistics; names it.
    """
    tensors = {name: _marked_tensor(model, name, m) for name, m in model.named_modules() if isinstance(m, _DECODERS)}
    for name, tensor in tensors.items():
        if isinstance(tensor.module, FakeQuantize) and tensor.module.mode is Mode.observe:
            raise CalibrationError(f"{name} is still calibrating: finish the calibration before the export.")
    try:
        for name, tensor in tensors.items():
            tensor.module.forward = partial(_mark, name, tensor.module)  # type: ignore[method-assign]
        yield tensors
    finally:
        for tensor in tensors.values():
            tensor.module.__dict__.pop("forward", None)


_DECODERS = (FakeQuantize, StoredTensor)


def _marked_tensor(model: nn.Module, name: str, module: nn.Module) -> MarkedTensor:
    assert isinstance(module, _DECODERS)
    parent, _, leaf = name.rpartition(".")
    role = leaf.removesuffix("_quantizer")
    layer = model.get_submodule(parent)
    extras = layer.extras(role) if isinstance(layer, QuantLayer) else {}
    return MarkedTensor(f"{parent}.{role}" if parent else role, module, extras)


def _mark(
    name: str, module: FakeQuantize | StoredTensor, x: torch.Tensor, extras: Extras | None = None
) -> torch.Tensor:
    if isinstance(module, FakeQuantize) and (module.mode is Mode.off or x.numel() == 0):
        return x
    dtype, shape = x.dtype, x.shape
    if isinstance(module, StoredTensor):
        dtype, shape = module.layout.model_dtype, torch.Size(module.shape)
    op = f"{MARKER_DOMAIN}::{MARKER}"
    return torch.onnx.ops.symbolic(op, (x,), {"tensor": name}, dtype=dtype, shape=shape, version=1)
