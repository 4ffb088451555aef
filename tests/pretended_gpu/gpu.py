"""The device while it is there: how Python's words for it ("cuda", `torch.cuda`) come to mean the pretended one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # wraps the handlers of modes, and looks at what is patched here while it is imported
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from quark.base.progress import seconds_and_peak
from tests.pretended_gpu import tensor
from tests.pretended_gpu.meter import Meter, bound, is_pinned, pin
from tests.pretended_gpu.tensor import DeviceTensor, point_at

MEMORY = 80 << 30
"""Bytes that the device says it has."""


class PretendedGpu:
    """Within: devices "cuda:0" ... are there, their work is counted, and the clock of progress stands still.

    Args:
        count: How many.
        where: Whether the lines that launch and wait are noted, which takes time.
        memory: Bytes that each says it has.
        most: Bytes beyond those there are now that fit onto each; what is more raises an error. None: all fits.

    Attributes:
        meter: The counters.
    """

    def __init__(self, count: int = 1, where: bool = True, memory: int = MEMORY, most: int | None = None) -> None:
        self.most = most
        self.count, self.memory, self.meter, self.selected = count, memory, Meter(where), 0

    def __enter__(self) -> PretendedGpu:
        self._stack = ExitStack()
        tensor.current.append(self.meter)
        self._stack.callback(tensor.current.pop)
        self.meter.reset()
        if self.most is not None:
            full = {index: self.meter.alive(index) + self.most for index in range(self.count)}
            self._stack.enter_context(mock.patch.dict(bound, full))
        for patch in (*self._patches_of_cuda(), *self._patches_of_torch()):
            self._stack.enter_context(patch)
        # A line of progress, which is said when ten seconds are over, reads values that the device has to bring.
        self._stack.enter_context(mock.patch.object(seconds_and_peak, "seconds_now", lambda: 0.0))
        self._stack.enter_context(self._modes())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        if error[0] is None:
            self.meter.copies.end()

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with _Operators(), _Words(self):
            yield

    def device(self, given: Any) -> torch.device:
        """The device that PyTorch's own code is told for what Python calls `given`."""
        device = torch.device(given)
        if device.type != "cuda":
            return device
        index = self.selected if device.index is None else device.index
        if index >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device}; there are {self.count})")
        return torch.device("meta", index)

    def _index(self, device: Any = None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return self.selected if found is None else found

    def _select(self, device: Any) -> None:
        self.selected = self._index(device)

    def _patches_of_cuda(self) -> list[Any]:
        properties = SimpleNamespace(
            name="pretended", total_memory=self.memory, major=9, minor=0, multi_processor_count=132, gcnArchName="",
            warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
        )  # fmt: skip
        queries: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda *a: None,
            "device_count": lambda: self.count,
            "current_device": lambda: self.selected,
            "set_device": self._select,
            "synchronize": lambda d=None: self.meter.wait("synchronize", index=self._index(d)),
            "empty_cache": lambda: None,
            "ipc_collect": lambda: None,
            "memory_allocated": lambda d=None: self.meter.alive(self._index(d)),
            "memory_reserved": lambda d=None: self.meter.alive(self._index(d)),
            "max_memory_allocated": lambda d=None: self.meter.peak(self._index(d)),
            "max_memory_reserved": lambda d=None: self.meter.peak(self._index(d)),
            "reset_peak_memory_stats": lambda d=None: None,
            "mem_get_info": lambda d=None: (self.memory - self.meter.alive(self._index(d)), self.memory),
            "get_device_name": lambda d=None: "pretended",
            "get_device_capability": lambda d=None: (9, 0),
            "get_device_properties": lambda d=None: properties,
            "is_bf16_supported": lambda *a, **k: True,
            "manual_seed": torch.default_generator.manual_seed,
            "manual_seed_all": lambda seed: None,
            "get_rng_state": lambda d=None: torch.default_generator.get_state(),
            "set_rng_state": lambda state, d=None: torch.default_generator.set_state(state),
            "current_stream": lambda d=None: _Stream(),
            "default_stream": lambda d=None: _Stream(),
        }
        patches = [mock.patch.object(torch.cuda, name, value) for name, value in queries.items()]
        patches += [
            mock.patch.object(torch.cuda, "Stream", _Stream),
            mock.patch.object(torch.cuda, "Event", _Event),
            mock.patch.object(torch.cuda, "stream", _within),
            mock.patch.object(torch.cuda, "device", lambda d: _Selected(self, d)),
        ]
        return patches

    def _patches_of_torch(self) -> list[Any]:
        load = torch.load

        def loaded(*args: Any, map_location: Any = None, **kwargs: Any) -> Any:
            token = tensor.map_location.set(map_location)
            try:
                return load(*args, map_location=map_location, **kwargs)
            finally:
                tensor.map_location.reset(token)

        started = threading.Thread.run

        def within_modes(thread: threading.Thread) -> None:
            with self._modes():
                started(thread)

        backward = torch.autograd.graph._engine_run_backward

        def within_words(*args: Any, **kwargs: Any) -> Any:
            # Python's own gradients run behind a call that these words have seen already.
            with _Words(self):
                return backward(*args, **kwargs)

        same_kind = torch._has_compatible_shallow_copy_type

        def is_same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
            either = isinstance(a, DeviceTensor) or isinstance(b, DeviceTensor)
            # What somebody holds by a weak reference cannot become another tensor in place: it is replaced.
            return not (a.is_meta or b.is_meta or weakref.getweakrefs(a)) if either else same_kind(a, b)

        return [
            mock.patch.object(torch, "load", loaded),
            mock.patch.object(torch.export, "export", _exported_on_host(torch.export.export)),
            mock.patch.object(threading.Thread, "run", within_modes),
            mock.patch.object(torch.autograd.graph, "_engine_run_backward", within_words),
            mock.patch.object(torch.autograd, "_engine_run_backward", within_words),
            mock.patch.object(torch, "Generator", _Generators),
            mock.patch.object(torch, "_has_compatible_shallow_copy_type", is_same_kind),
            *self._patches_of_accelerator(),
        ]

    def _patches_of_accelerator(self) -> list[Any]:
        queries: dict[str, Callable[..., Any]] = {
            "is_available": lambda *a: True,
            "current_accelerator": lambda *a, **k: torch.device("cuda"),
            "current_stream": lambda *a: _Stream(),
            "current_device_index": lambda: self.selected,
            "device_count": lambda: self.count,
            "synchronize": lambda d=None: self.meter.wait("synchronize", index=self._index(d)),
        }
        return [mock.patch.object(torch.accelerator, name, value) for name, value in queries.items()]


def _exported_on_host(export: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.export.export` of a module on the device, which traces it on the host: tracing has tensors of its own."""

    def exported(module: torch.nn.Module, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        tables = [table for m in module.modules() for table in (m._parameters, m._buffers)]
        before = [dict(table) for table in tables]
        moved: dict[int, Any] = {}

        def host(x: Any) -> Any:
            if isinstance(x, DeviceTensor) and id(x) not in moved:
                is_parameter = isinstance(x, torch.nn.Parameter)
                moved[id(x)] = torch.nn.Parameter(x.host, x.requires_grad) if is_parameter else x.host
            return moved.get(id(x), x)

        words = torch.overrides._pop_mode()  # type: ignore[attr-defined]
        try:
            with _disable_current_modes():
                for table in tables:
                    table.update({name: host(x) for name, x in table.items()})
                return export(module, *tree_map(host, (args, kwargs)), **options)
        finally:
            torch.overrides._push_mode(words)  # type: ignore[attr-defined]
            for table, content in zip(tables, before, strict=True):
                table.update(content)

    return exported


class _Operators(TorchDispatchMode):
    """Sees operators that no device tensor takes part in, but that make one."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tensor.run(f, args, kwargs or {})


class _Words(TorchFunctionMode):
    """Sees what Python calls, before PyTorch's own code does: where it says "cuda", that is told "meta:0"."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(f, "__name__", "")
        if name == "__set__" and f == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            return _set_data(*args)
        special = getattr(self, f"call_{name}", None)
        if special is not None:
            return special(f, args, kwargs)
        args, kwargs = self._translated(args, kwargs)
        _check_generator(args, kwargs)
        if kwargs.pop("pin_memory", False):
            return _pinned_copy(f(*args, **kwargs))
        return f(*args, **kwargs)

    def _translated(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("device") is not None:
            kwargs["device"] = self._where(kwargs["device"])
        return tuple(self.gpu.device(a) if isinstance(a, torch.device) else a for a in args), kwargs

    def _where(self, device: Any) -> Any:
        return self.gpu.device(f"cuda:{device}" if isinstance(device, int) else device)

    def call_to(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # By name or by the device of another tensor; as C++ reads both, they are told here.
        x, *rest = args
        rest = [self.gpu.device(a) if isinstance(a, (str, torch.device)) else a for a in rest]
        if rest and isinstance(rest[0], torch.Tensor):
            other = rest.pop(0)
            rest = [self.gpu.device(other.device), other.dtype, *rest]
        other = kwargs.pop("other", None)
        if other is not None:
            rest = [self.gpu.device(other.device), other.dtype, *rest]
        args, kwargs = self._translated((x, *rest), kwargs)
        return f(*args, **kwargs)

    def call_cuda(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, *rest = args
        device = rest.pop(0) if rest else kwargs.pop("device", None)
        where = self._where("cuda" if device is None else device)
        return torch.Tensor.to(x, where, *rest, **kwargs)

    def call_tensor(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.pop("device", None)
        grad = kwargs.pop("requires_grad", False)
        if isinstance(args[0], DeviceTensor):
            made = args[0].detach().clone()
            made = made if kwargs.get("dtype") is None else made.to(kwargs["dtype"])
        else:
            args = ([*map(_number, args[0])], *args[1:]) if isinstance(args[0], (list, tuple)) else args
            made = f(*args, **kwargs)
        return (made if device is None else made.to(self._where(device))).requires_grad_(grad)

    def call_as_tensor(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        data, device = args[0], kwargs.pop("device", None)
        dtype = kwargs.pop("dtype", args[1] if len(args) > 1 else None)
        if isinstance(data, torch.Tensor):
            made = data if dtype is None else data.to(dtype)
        else:
            data = [*map(_number, data)] if isinstance(data, (list, tuple)) else data
            made = f(data, dtype=dtype)
        return made if device is None else made.to(self._where(device))

    call_asarray = call_as_tensor

    def call_new_tensor(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, data = args
        kwargs = {"dtype": x.dtype, "device": x.device} | kwargs
        return self.call_tensor(torch.tensor, (data,), kwargs)

    def call___getitem__(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return f(args[0], _index(args[1]))

    def call___setitem__(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return f(args[0], _index(args[1]), args[2])

    def call_scaled_dot_product_attention(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The host's kernel, so that results equal the host's; for a device without kernels PyTorch takes it apart."""
        if not isinstance(args[0], DeviceTensor):
            return f(*args, **kwargs)
        names = ("attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args[3:], strict=False)) | kwargs
        hosts = [x.host for x in args[:3]]
        mask = given.get("attn_mask")
        said = given | {"attn_mask": mask.host if isinstance(mask, DeviceTensor) else mask}
        with torch._C.DisableTorchFunction():
            choice = torch._fused_sdp_choice(*hosts, **said)
        if choice != 1:
            return f(*args, **kwargs)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=args[0].dtype).masked_fill_(~mask, float("-inf"))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *args[:3], given.get("dropout_p", 0.0), given.get("is_causal", False), attn_mask=mask,
            scale=given.get("scale"),
        )[0]  # fmt: skip

    def call_pin_memory(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], DeviceTensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return _pinned_copy(args[0])

    def call_is_pinned(self, f: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        return not isinstance(args[0], DeviceTensor) and is_pinned(args[0])


def _pinned_copy(x: torch.Tensor) -> torch.Tensor:
    return pin(x.clone())


def _index(index: Any) -> Any:
    """An index, its lists of numbers as tensors of the host, which PyTorch would make without their values."""
    if isinstance(index, tuple):
        return tuple(_index(part) if isinstance(part, (list, range)) else part for part in index)
    return torch.tensor(list(index)) if isinstance(index, (list, range)) else index


def _number(x: Any) -> Any:
    """An element of a list that becomes a tensor."""
    return x.item() if isinstance(x, DeviceTensor) and x.dim() == 0 else x


def _set_data(x: torch.Tensor, other: torch.Tensor) -> None:
    """x.data = other. A tensor that moves to another kind of device stays the same object, as it does in PyTorch."""
    if isinstance(x, DeviceTensor) and isinstance(other, DeviceTensor) and x.index == other.index:
        point_at(x, other)
    elif isinstance(x, DeviceTensor) or isinstance(other, DeviceTensor):
        new = other.detach().requires_grad_(x.requires_grad)
        if isinstance(x, torch.nn.Parameter):
            new = torch.nn.Parameter(new, x.requires_grad)
        kept = {key: value for key, value in x.__dict__.items() if key not in ("host", "index", "life", "_is_param")}
        if x.grad is not None:  # PyTorch lets it stay where it was until it is moved, too
            new.grad, x.grad = x.grad.to(torch.Tensor.device.__get__(other), other.dtype), None  # type: ignore[attr-defined]
        torch.utils.swap_tensors(x, new)
        x.__dict__.update(kept)
    else:
        torch._C.TensorBase.data.__set__(x, other)  # type: ignore[attr-defined]


class _Generator(torch.Generator):
    """A generator of the device: it draws what one of the host draws."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]


def _check_generator(args: Any, kwargs: dict[str, Any]) -> None:
    """Raise what CUDA raises where a generator of another device draws."""
    generator, device = kwargs.get("generator"), kwargs.get("device")
    if generator is None:
        return
    given = "cuda" if isinstance(generator, _Generator) else "cpu"
    on_device = (
        any(isinstance(x, DeviceTensor) for x in args) if device is None else torch.device(device).type == "meta"
    )
    if (given == "cuda") != on_device:
        wanted = "cuda" if on_device else "cpu"
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{given}'")


class _IsGenerator(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _HOST_GENERATOR)


_HOST_GENERATOR = torch.Generator


class _Generators(metaclass=_IsGenerator):
    """`torch.Generator` where a device is there."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator() if torch.device(device).type == "cuda" else _HOST_GENERATOR(device)


class _Stream:
    """All of them are one, which does all that it is told in its order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None:
        if tensor.current:
            tensor.current[-1].wait("synchronize")

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Event:
    """A place among what devices were told: who waits for it, waits for what came before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._until = 0

    def record(self, *args: Any) -> None:
        if tensor.current:
            self._until = tensor.current[-1].copies.number

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        if tensor.current:  # the device is fast
            tensor.current[-1].copies.settle(until=self._until)
        return True

    def synchronize(self) -> None:
        if tensor.current:
            tensor.current[-1].wait("synchronize", until=self._until)


def _within(stream: Any) -> Any:
    return stream or _Stream()


class _Selected:
    def __init__(self, gpu: PretendedGpu, device: Any) -> None:
        self.gpu, self.index = gpu, gpu._index(device)

    def __enter__(self) -> None:
        self.before, self.gpu.selected = self.gpu.selected, self.index

    def __exit__(self, *error: Any) -> None:
        self.gpu.selected = self.before
