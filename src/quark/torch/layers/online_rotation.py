"""Rotations that run with the model: of a layer's input (R1 online, R4) and of queries and keys (R3).

    y = W x = (W Q) (Q^T x)         the weight holds W Q, and the layer's input is rotated before it is quantized
    q k^T = (q Q) (k Q)^T           after the rotary embedding, so that rotated keys are what a cache holds

The input is rotated by a forward pre-hook: whatever watches the layer sees the rotated input. In a checkpoint the
matrix is the layer's `input_rotation`, (size, size): int8 with entries +-1 for a Hadamard matrix, else float64; rows
are scaled to length 1 when it is read. R3 stores nothing: it follows from the config and the size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from quark.core.solvers.hadamard import Rotation, is_hadamard, is_sylvester
from quark.errors import ConfigError, NotSupportedError
from quark.torch.config.algo_configs import OnlineRotationConfig, RotationConfig
from quark.torch.config.config import algorithms_in

BUFFER = "input_rotation"
"""Name of the stored matrix, on the layer."""


def rotate_input(layer: nn.Module, rotation: Rotation) -> None:
    """Rotate what the layer reads, from now on; its weight must hold the inverse."""
    layer.online_rotation = rotation  # type: ignore[assignment]
    layer.register_forward_pre_hook(_rotated)


def undo_input_rotation(layer: nn.Module) -> None:
    """Rotate the weight back and leave the input alone; nothing happens to a layer that was not rotated."""
    rotation = getattr(layer, "online_rotation", None)
    if isinstance(rotation, Rotation) and isinstance(layer.weight, torch.Tensor):
        with torch.no_grad():
            layer.weight.copy_(rotation.undo(layer.weight.double()))
        del layer.online_rotation
        hooks = layer._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _rotated]:
            del hooks[key]


def input_rotations(model: nn.Module) -> Iterator[tuple[str, Rotation]]:
    """Full name and rotation of every layer whose input is rotated by this session (not by a loaded checkpoint)."""
    for name, module in model.named_modules():
        rotation = getattr(module, "online_rotation", None)
        if isinstance(rotation, Rotation) and BUFFER not in module._buffers:
            yield name, rotation


def rotated_inputs(model: nn.Module) -> dict[str, int | None]:
    """Full name of every layer whose input is rotated -> the size of Sylvester's matrix, where that is what rotates."""
    found: dict[str, int | None] = {}
    for name, module in model.named_modules():
        stored, rotation = module._buffers.get(BUFFER), getattr(module, "online_rotation", None)
        if stored is not None:
            signs, size = stored.cpu().sign().double(), len(stored)
            sylvester = is_sylvester(size) and torch.equal(signs, stored_matrix(Rotation(size)).double())
            found[name] = size if sylvester else None
        elif isinstance(rotation, Rotation):
            found[name] = rotation.size if rotation == Rotation(rotation.size) and is_sylvester(rotation.size) else None
    return found


def stored_matrix(rotation: Rotation, device: str = "cpu") -> torch.Tensor:
    """The matrix as a checkpoint holds it."""
    dtype = torch.int8 if rotation.is_hadamard else torch.float64
    if device == "meta":
        return torch.empty(rotation.size, rotation.size, dtype=dtype, device=device)
    matrix = torch.from_numpy(rotation.matrix())
    return matrix.sign().to(dtype) if rotation.is_hadamard else matrix


def hold_rotations(model: nn.Module, config: RotationConfig) -> None:
    """Make room for the stored matrices of a checkpoint, and rotate with them once they are loaded."""
    listed = config.online_config.online_rotation_layers if config.online_config else None
    modules = dict(model.named_modules())
    for name in listed or []:
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"online_rotation_layers: {name!r} is no linear layer of this model.")
        size = config.rotation_size or layer.in_features
        dtype = torch.int8 if is_hadamard(size) else torch.float64
        layer.register_buffer(BUFFER, torch.empty(size, size, dtype=dtype, device=layer.weight.device))
        layer.register_forward_pre_hook(_rotated)
    if config.r3:
        rotate_queries_and_keys(model, config.rotation_size)


def record_rotations(stored: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A `QConfig.to_dict()` whose rotation lists the layers of this model whose inputs are rotated.

    It stands first, and has the list where that is empty, too: vLLM looks at the first algorithm alone
    (`OrthogonalTransform.setup_transform`), and reads the list of a rotation without asking for it.
    """
    names = [name for name, _ in input_rotations(model)]
    for algo in algorithms_in(stored):
        if algo.get("name") in ("rotation", "quarot") and (names or not algo.get("online_config")):
            online = algo.get("online_config") or asdict(OnlineRotationConfig(shared_parallel=False))
            algo["online_config"] = {**online, "online_rotation_layers": names}
    (stored.get("algo_config") or []).sort(key=lambda algo: algo.get("name") not in ("rotation", "quarot"))
    return stored


def _rotated(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: the first argument, rotated."""
    rotation: Any = getattr(layer, "online_rotation", None)
    if rotation is None:
        stored = layer.get_buffer(BUFFER)
        rotation = StoredRotation(stored)
        if type(stored) is torch.Tensor:
            layer.online_rotation = rotation
    return (rotation.apply(args[0]), *args[1:])


class StoredRotation:
    """The rotation of a loaded checkpoint, applied as fast as one of this session where it has the same matrix.

    Args:
        stored: The matrix, its rows of any one length. While a graph is traced its values are not known.
    """

    def __init__(self, stored: torch.Tensor) -> None:
        self.matrix = stored.double()
        self.matrix = self.matrix / self.matrix[0].norm()
        self.signs: torch.Tensor | None = None
        if type(stored) is torch.Tensor:
            ours = torch.from_numpy(Rotation(len(stored)).matrix()).to(stored.device)
            # The first column of ours is positive. 2e-3: what bfloat16, to which a loader may have rounded, changes.
            signs = self.matrix[:, 0].sign()
            if bool(((self.matrix - signs[:, None] * ours).abs() <= 2e-3 * ours.abs().amax()).all()):
                self.signs = signs

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x rotated, in blocks of the size of the matrix; the dtype stays."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, len(self.matrix))
        if self.signs is not None:
            return Rotation(len(self.matrix)).apply(wide * self.signs.to(wide)).reshape(x.shape).to(x.dtype)
        return (wide @ self.matrix.to(wide)).reshape(x.shape).to(x.dtype)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        """Return x rotated back, in blocks of the size of the matrix; the dtype stays."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, len(self.matrix))
        return (wide @ self.matrix.to(wide).T).reshape(x.shape).to(x.dtype)


# Queries and keys -----------------------------------------------------------------------------------------------------


class RotatedAttention:
    """Stands as `forward` on an attention module and rotates queries and keys after their rotary embedding.

    Copies and pickles with its module.

    Args:
        attention: A module whose forward calls a function with "rotary" in its name that returns queries and keys.
        rotation_size: As in RotationConfig.
    """

    def __init__(self, attention: nn.Module, rotation_size: int | None) -> None:
        self.attention = attention
        self.rotation_size = rotation_size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = _patched_forward(_class(self.attention), self.rotation_size)
        assert forward is not None
        return forward(self.attention, *args, **kwargs)


def rotate_queries_and_keys(model: nn.Module, rotation_size: int | None = None) -> int:
    """Rotate queries and keys in every attention module with a rotary embedding; return how many there are."""
    count = 0
    for module in model.modules():
        # What accelerate puts around a forward, to move tensors between devices, calls the method of this name.
        place = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
        own = module.__dict__.get(place)
        of_class = own is None or (isinstance(own, MethodType) and own.__func__ is type(module).forward)
        if _patched_forward(_class(module), rotation_size) is not None and of_class:
            module.__dict__[place] = RotatedAttention(module, rotation_size)
            count += 1
    return count


def head_rotation_size(head: int, rotation_size: int | None) -> int:
    """The size to rotate heads with: theirs, or the smaller `rotation_size`.

    Raises ConfigError if that does not divide the head.
    """
    if rotation_size is None or rotation_size >= head:
        return head
    if head % rotation_size:
        raise ConfigError(f"rotation_size={rotation_size} does not divide heads of {head} features.")
    return rotation_size


def _class(module: nn.Module) -> Any:
    return type(module)


@cache
def _patched_forward(cls: Any, rotation_size: int | None) -> Callable[..., Any] | None:
    """The forward of an attention class with its rotary function followed by the rotation; None for other classes."""
    forward = inspect.unwrap(cls.forward)
    if not isinstance(forward, FunctionType):
        return None
    names = [n for n in forward.__code__.co_names if "rotary" in n and isinstance(forward.__globals__.get(n), Callable)]  # type: ignore[arg-type]
    if not names:
        return None
    patched = {name: _then_rotate(forward.__globals__[name], rotation_size) for name in names}
    code, closure = forward.__code__, forward.__closure__
    copied = FunctionType(code, {**forward.__globals__, **patched}, forward.__name__, forward.__defaults__, closure)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _then_rotate(rotary: Callable[..., Any], rotation_size: int | None) -> Callable[..., Any]:
    def rotated(*args: Any, **kwargs: Any) -> Any:
        result = rotary(*args, **kwargs)
        if not (isinstance(result, tuple) and len(result) == 2 and result[0].shape[-1] == result[1].shape[-1]):
            raise NotSupportedError(f"r3: {rotary.__name__} does not return queries and keys.")
        rotation = Rotation(head_rotation_size(result[0].shape[-1], rotation_size))
        return tuple(rotation.apply(x) for x in result)

    return rotated
