"""Tensors of the pretended device, and what happens when an operator meets them.

A device tensor wraps one of the host. For PyTorch's own code, which asks a tensor's device in many places and knows no
CUDA on this machine, it is on "meta:0" or "meta:1": a device with an index, which real meta tensors lack. So gradients,
composite operators and casts go where the tensor was by PyTorch's own rules; Python alone is told "cuda:0".

Refused, as CUDA does: an operator on tensors of two devices, or of a device and of the host unless that one has no
dimension; a generator of another device; `numpy()`; an address in a module that hands addresses to compiled code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended_gpu.meter import VIEWS, WAITS, Meter, is_pinned, life_of, line_of_quark, lives, pin

ADDRESSES = 1 << 46
"""Added to an address: it tells tensors apart, and is none of the host's."""


current: list[Meter] = []
"""The meter of the device that is there; threads share it."""

MIXES = frozenset({"_to_copy", "copy_", "copy", "_copy_from", "_copy_from_and_resize"})
"""Operators that carry values from one device to another."""
INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
"""Operators whose indices may lie on the host."""


class DeviceTensor(torch.Tensor):
    """A tensor of the pretended device.

    Attributes:
        host: The tensor that holds its values.
        index: Of its device.
        life: Its memory.
    """

    host: torch.Tensor
    index: int
    life: Any

    @staticmethod
    def __new__(cls, host: torch.Tensor, index: int = 0, requires_grad: bool = False) -> DeviceTensor:
        if isinstance(host, DeviceTensor):  # as nn.Parameter(data, requires_grad) is called by the class of a parameter
            return torch.nn.Parameter(host.detach(), requires_grad)  # type: ignore[return-value]
        new = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=torch.device("meta", index), requires_grad=requires_grad,
        )  # fmt: skip
        new.host, new.index, new.life = host, index, life_of(host, index)
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(f, args, kwargs or {})

    device = property(lambda self: torch.device("cuda", self.index))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return self.index

    def untyped_storage(self) -> Any:
        return DeviceStorage(self.host.untyped_storage(), self.index)

    def storage(self) -> Any:
        raise TypeError("A typed storage of a device tensor is not pretended.")

    def data_ptr(self) -> int:
        if "ctypes" in sys._getframe(1).f_globals:
            raise RuntimeError(f"The address of a tensor on {self.device} was about to be handed to compiled code.")
        return self.host.data_ptr() + ADDRESSES if self.numel() else 0

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    __array__ = numpy
    __dlpack__ = numpy

    def tolist(self) -> Any:
        _waited("tolist", self)
        return self.host.detach().tolist()

    def is_pinned(self, *args: Any) -> bool:
        return False

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{torch.Tensor.__repr__(self.host.detach())[:-1]}, device='{self.device}')"

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.dim() == 0 else object.__format__(self, form)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        made = DeviceTensor(_copied_storage(self.host, memo), self.index, self.requires_grad)
        extra = {k: v for k, v in self.__dict__.items() if k not in ("host", "index", "life")}
        memo[id(self)] = made
        import copy

        for key, value in extra.items():
            setattr(made, key, copy.deepcopy(value, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        _waited("save", self)
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (self.host.detach(), self.index, self.requires_grad, is_parameter)


class DeviceStorage:
    """The storage of a device tensor: for its identity, its size, and to point another tensor at it."""

    def __init__(self, host: torch.UntypedStorage, index: int) -> None:
        self.host, self.index = host, index
        self._cdata = host._cdata
        self.device = torch.device("cuda", index)

    def data_ptr(self) -> int:
        return self.host.data_ptr() + ADDRESSES if self.host.nbytes() else 0

    def nbytes(self) -> int:
        return self.host.nbytes()

    size = __len__ = nbytes

    def resize_(self, nbytes: int) -> None:
        """Free the memory that is there, or give some to all tensors that lie here."""
        self.host.resize_(nbytes)
        life = lives.get((self._cdata, self.device.index))
        if life is not None:
            life.resize(nbytes)

    def __hash__(self) -> int:
        return hash(self._cdata)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceStorage) and self._cdata == other._cdata


def _copied_storage(host: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy that shares memory with copies of what the original shares it with."""
    key = ("storage", host.untyped_storage()._cdata)
    if key not in memo:
        memo[key] = host.untyped_storage().clone()  # type: ignore[index]
    return torch.empty(0, dtype=host.dtype).set_(memo[key], host.storage_offset(), host.shape, host.stride())  # type: ignore[index]


map_location: ContextVar[Any] = ContextVar("map_location", default=None)
"""What `torch.load` was given."""


def _rebuilt(host: torch.Tensor, index: int, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    where = map_location.get()
    if isinstance(where, dict):
        where = where.get(f"cuda:{index}")
    elif callable(where):
        raise NotImplementedError("map_location as a function is not pretended.")
    device = torch.device("cuda", index) if where is None else torch.device(where)
    made = host if device.type == "cpu" else DeviceTensor(host, device.index or 0)
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuilt])


def on_host(x: Any) -> Any:
    """The values of device tensors in a structure, without counting a wait: for tests that compare."""
    return tree_map(lambda t: t.host.detach() if isinstance(t, DeviceTensor) else t, x)


def run(f: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator whose tensors may be of the device, on the host tensors behind them."""
    name = f.__name__.split(".")[0]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, DeviceTensor)]
    asked = kwargs.get("device")
    target = _index_of(asked) if asked is not None else None
    if not ours and target is None:
        return f(*args, **kwargs)
    if any(x.is_meta and x.device.index is not None for x in tensors):
        raise NotImplementedError(f"{f}: PyTorch made a tensor of the pretended device from Python numbers, unseen.")
    _check(f, name, args, kwargs, tensors, ours)
    if name not in VIEWS and any(x.numel() and x.host.untyped_storage().nbytes() == 0 for x in ours):
        raise RuntimeError("CUDA error: an illegal memory access was encountered (the storage was resized to 0)")
    if asked is None and ours:
        target = args[0].index if name == "copy_" and isinstance(args[0], DeviceTensor) else ours[0].index
        if name == "copy_" and not isinstance(args[0], DeviceTensor):
            target = None
    _count(name, args, kwargs, ours, target)
    if name == "_to_copy" and any(x.is_meta and not isinstance(x, DeviceTensor) for x in tensors):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    host_args, host_kwargs = tree_map(_host, (args, dict(kwargs)))
    if target is not None and asked is not None:
        host_kwargs["device"] = torch.device("cpu")
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    if name in ("_to_copy", "copy_") and current:
        made = _copied(f, name, host_args, host_kwargs, args[name == "copy_"], target)
    else:
        made = f(*host_args, **host_kwargs)
    if name == "_to_copy" and made is host_args[0]:
        made = made.clone()
    return _wrapped(f, made, args, kwargs, target)


def _copied(f: Any, name: str, args: Any, kwargs: Any, source: Any, target: int | None) -> Any:
    """The result of a copy; one that nobody waits for is noted.

    Args:
        f, name: The operator.
        args, kwargs: On host tensors.
        source: The tensor that is copied, as it was given.
        target: The device of the result; None: the host.
    """
    copies = current[-1].copies
    queued = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
    if not isinstance(source, DeviceTensor):
        if not queued or not is_pinned(source) or target is None:
            return f(*args, **kwargs)
        return copies.from_host(source, target, line_of_quark(), lambda: f(*args, **kwargs))
    if target is not None:
        copies.between(source.index, target)
        return f(*args, **kwargs)
    if name == "copy_":
        copies.before_to_host(args[0])
        queued = queued and is_pinned(args[0])
    made = f(*args, **kwargs)
    if queued:  # PyTorch makes what a device copies to the host without a wait in pinned memory
        made = pin(made.clone() if made is source.host else made)
        copies.to_host(made, source.index, line_of_quark())
    return made


def _wrapped(f: Any, made: Any, args: Any, kwargs: Any, target: int | None) -> Any:
    """What an operator returns: the tensors that it wrote into, and new ones of the device."""
    returns = f._schema.returns
    outputs = made if isinstance(made, (tuple, list)) and len(returns) > 1 else (made,)
    results = []
    for output, declared in zip(outputs, returns, strict=False):
        alias = declared.alias_info
        if alias is not None and alias.is_write:
            results.append(_written(f, alias, args, kwargs))
        else:
            results.append(tree_map(lambda x: _new(x, target), output))
    if not returns:
        return None
    return results[0] if len(returns) == 1 else type(made)(results) if type(made) in (tuple, list) else tuple(results)


def _written(f: Any, alias: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The argument that an operator wrote into; its shape follows that of the host tensor."""
    for position, argument in enumerate(f._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & alias.before_set:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(given, DeviceTensor) and (
                given.shape != given.host.shape or torch.Tensor.stride(given) != given.host.stride()
            ):
                point_at(given, DeviceTensor(given.host, given.index))
            return given
    raise NotImplementedError(f"{f} writes into what its schema does not name.")


def point_at(x: torch.Tensor, other: torch.Tensor) -> None:
    """x.data = other, both of the device."""
    torch._C.TensorBase.data.__set__(x, other)  # type: ignore[attr-defined]
    x.host, x.index, x.life = other.host, other.index, other.life  # type: ignore[attr-defined]


def _new(x: Any, target: int | None) -> Any:
    return DeviceTensor(x, target) if isinstance(x, torch.Tensor) and target is not None else x


def _host(x: Any) -> Any:
    return x.host if isinstance(x, DeviceTensor) else x


def _index_of(device: torch.device) -> int | None:
    """Which device of ours is meant; "cuda" itself comes from inside of functions that PyTorch wrote in Python."""
    return device.index or 0 if device.type == "cuda" else device.index if device.type == "meta" else None


def _check(f: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Any], ours: Sequence[DeviceTensor]) -> None:
    """Raise what CUDA raises where tensors of several devices meet."""
    if name in MIXES or not ours:
        return
    if name in INDEXES:
        values = args[2] if len(args) > 2 else None
        indices = [x for x in args[1] if x is not None]
        if not isinstance(args[0], DeviceTensor) and any(isinstance(x, DeviceTensor) for x in indices):
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({args[0].device})"
            )
        tensors = [x for x in (args[0], values) if x is not None] + [x for x in indices if isinstance(x, DeviceTensor)]
    devices = {str(x.device) for x in tensors if isinstance(x, DeviceTensor) or x.dim() > 0 or _is_written(f, x, args)}
    if len(devices) > 1:
        first, second, *_ = sorted(devices, reverse=True)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
            f"(when checking argument in method wrapper_CUDA_{f})"
        )


def _is_written(f: Any, x: Any, args: Sequence[Any]) -> bool:
    return f.__name__.split(".")[0].endswith("_") and bool(args) and args[0] is x


def _count(name: str, args: Any, kwargs: Any, ours: Sequence[DeviceTensor], target: int | None) -> None:
    if not current:
        return
    meter = current[-1]
    if name in ("_to_copy", "copy_"):
        source = args[1] if name == "copy_" else args[0]
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        nbytes = source.numel() * source.element_size()
        if isinstance(source, DeviceTensor) and target is None:
            if blocking or (name == "copy_" and not is_pinned(args[0])):
                meter.wait("to cpu", nbytes, source.index)
            else:
                meter.queue("to cpu", nbytes)
            return
        if not isinstance(source, DeviceTensor):
            if blocking or not is_pinned(source):
                if blocking:
                    meter.copies.settle(target)
                meter.upload("to device", nbytes)
            else:
                meter.queue("to device", nbytes)
            return
    if name in WAITS or (name in INDEXES and _by_mask(name, args)):
        meter.wait(name, index=ours[0].index if ours else target)
    if name in INDEXES:
        for index in args[1]:
            if index is not None and not isinstance(index, DeviceTensor):
                meter.upload("index", index.numel() * index.element_size())
    if name == "repeat_interleave" and len(args) > 1 and "output_size" not in kwargs:
        meter.wait(name, index=ours[0].index)
    meter.launch(name)


def _by_mask(name: str, args: Any) -> bool:
    """Whether indices are a mask whose number of elements has to be known; a fill under one needs it not."""
    masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
    fills = "put" in name and args[2].numel() == 1
    return bool(masks) and not fills


def _waited(name: str, x: DeviceTensor) -> None:
    if current:
        current[-1].wait(name, x.numel() * x.element_size(), x.index)
