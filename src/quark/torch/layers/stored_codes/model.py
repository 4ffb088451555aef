"""Answers of a loaded model that are those of its float model, where the package of its class refuses or miscounts.

model.to(dtype), .half(), .float()   the dtype of computing; transformers and diffusers refuse all casts
model.requires_grad_()               a sentence; codes have no gradient
model.num_parameters()               of the float model; codes are packed, or no parameters
next(model.parameters()).dtype       of a parameter in float, where one follows tables of embeddings
DistributedDataParallel(model)       sends no codes around, which each process has read; gloo knows no FP8
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.errors import NotSupportedError
from quark.torch.layers.stored_codes.layer import NOT_TRAINED, ROLES, StoredLayer

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""The attribute in which DistributedDataParallel looks for names; PEFT's wrappers give that of the model inside."""
PEFT_PREFIX = "base_model.model."


def answer_as_float(model: Any) -> None:
    """Put these answers on a model. Each is a partial of it: one that is copied or pickled with it is of the copy."""
    _begin_in_float(model)
    setattr(model, DDP_IGNORES, TensorsOfFolder(model))
    if hasattr(model, "num_parameters"):  # of transformers or diffusers
        for name, answer in _ANSWERS.items():
            setattr(model, name, partial(answer, model))


def _begin_in_float(model: nn.Module) -> None:
    """Let a parameter in float be the first, as many libraries ask the first one for the dtype of a model.

    Tables of embeddings, with which most models begin, hold their codes as buffers then. A model whose next parameter
    is codes, too, stays as it is.
    """
    tables: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if not isinstance(module, StoredLayer) or module.decoder(name) is None:
                for table, role in tables:
                    coded = table._parameters.pop(role)
                    assert coded is not None
                    table._buffers[role] = coded.data
                return
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                return
            tables.append((module, name))


def forget_answers(model: nn.Module) -> None:
    """Let the methods of its class answer again."""
    for name in (*_ANSWERS, DDP_IGNORES):
        model.__dict__.pop(name, None)


def _to(model: Any, *args: Any, **options: Any) -> Any:
    """`to`, whose dtype is that of computing, see `StoredLayer`; the class moves between devices.

    A dtype that the model has is nothing to do: tensors that are wider by design stay so.
    """
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **options)
    if dtype is None:
        return type(model).to(model, *args, **options)
    if dtype != model.dtype:
        nn.Module.to(model, dtype=dtype)
    if memory_format is not None:
        nn.Module.to(model, memory_format=memory_format)  # type: ignore[call-overload]
    return model if device is None else type(model).to(model, device, non_blocking=non_blocking)


def _num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """`num_parameters`, codes as the values that they stand for."""
    count: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    for layer in model.modules():
        if isinstance(layer, StoredLayer) and not only_trainable:
            left_out = exclude_embeddings and isinstance(layer, nn.Embedding)
            for role in () if left_out else ROLES:
                coded = layer._parameters.get(role)
                count += layer.float_numel(role) - (0 if coded is None else coded.numel())
    return count


def _requires_grad(model: Any, requires_grad: bool = True) -> Any:
    """`requires_grad_`. Raises NotSupportedError where all parameters are to be trained."""
    if requires_grad:
        raise NotSupportedError(NOT_TRAINED)
    return type(model).requires_grad_(model, False)


_CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}
_ANSWERS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "requires_grad_": _requires_grad,
    "num_parameters": _num_parameters,
    **{name: partial(_to, dtype=dtype) for name, dtype in _CASTS.items()},
}


class TensorsOfFolder:
    """The names of the tensors of loaded layers, as they are when DistributedDataParallel asks.

    Args:
        model: That was loaded; PEFT may stand around it by then.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[str]:
        for name, layer in self.model.named_modules():
            if isinstance(layer, StoredLayer):
                for leaf, _ in (*layer.named_parameters(), *layer.named_buffers()):
                    own = f"{name}.{leaf}" if name else leaf
                    yield from (own, f"{PEFT_PREFIX}{own}")
