"""Records one small forward of any model as a dataflow graph (`quark.torch.model.dataflow`).

Nothing is interpreted symbolically and no architecture is known by name: module hooks and a TorchFunctionMode watch an
ordinary forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from quark.errors import StructureError
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.dataflow import MOVING_FUNCTIONS, TOTALS, Node, RecordedTensor, Trace


def record(model: nn.Module, run: Callable[[], object]) -> Trace:
    """Run one forward without gradients and record it.

    Args:
        model: Any module; names in the graph are relative to it. It runs in its present mode of training; fake
            quantizers are off meanwhile, so that the float model is what is recorded.
        run: Calls the model once: `lambda: model(ids)`. A few tokens are enough.

    Raises:
        StructureError: The forward compiles a part of itself, as flex_attention does, which nothing watches.
        Whatever the forward raises.
    """
    recorder = _Recorder(model)
    try:
        with torch.no_grad(), quantizers_off(quantized_layers(model).values()), recorder.hooked(), recorder:
            run()
    except RuntimeError as error:
        if not type(error).__module__.startswith("torch._dynamo"):
            raise
        raise StructureError(
            f"{type(model).__name__} compiles a part of its own forward, as flex_attention does, so what it computes "
            "cannot be recorded. Possible: an algorithm that rescales and rotates nothing (gptq, qronos)."
        ) from error
    return recorder.finished()


def is_linear(module: nn.Module) -> bool:
    """Return True where a module computes x W^T + b with a weight (out_features, in_features)."""
    return isinstance(module, nn.Linear)


class _Recorder(TorchFunctionMode):
    """Writes down what it sees. Tensors are kept alive until the end, so that their ids stay unique."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.values: list[RecordedTensor] = []
        self.nodes: list[Node] = []
        self.spans: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.index: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []
        self.scope = [""]
        self.started: list[tuple[tuple[int, ...], int]] = []
        named = list(model.named_parameters(remove_duplicate=False))
        self.parameters = {id(tensor): name for name, tensor in reversed(named)}

    def finished(self) -> Trace:
        linears = tuple(name for name, module in self.model.named_modules() if is_linear(module))
        return Trace(tuple(self.values), tuple(self.nodes), linears, self.spans)

    # Tensors

    def value(self, tensor: torch.Tensor) -> int:
        """The value that a tensor holds now; a tensor not seen before is an input or a constant."""
        if id(tensor) not in self.index:
            self.bind(tensor, RecordedTensor(tuple(tensor.shape), tensor.dtype, None, self.parameters.get(id(tensor))))
        return self.index[id(tensor)]

    def bind(self, tensor: torch.Tensor, value: RecordedTensor) -> int:
        self.index[id(tensor)] = len(self.values)
        self.values.append(value)
        self.alive.append(tensor)
        return len(self.values) - 1

    def read(self, tree: Any) -> tuple[int, ...]:
        """The values of all floating-point tensors in nested arguments, without repetition."""
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        return tuple(dict.fromkeys(self.value(tensor) for tensor in tensors))

    # Operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        written = _changed_tensor(name, args, kwargs)
        # What is like another tensor has its shape, not its values.
        inputs = () if name.endswith("_like") or name.startswith("new_") else self.read((args, kwargs))
        result = func(*args, **kwargs)
        results = [written] if written is not None else tree_leaves(result)
        results = [t for t in results if isinstance(t, torch.Tensor) and t.is_floating_point()]
        fresh = [t for t in results if written is not None or self.index.get(id(t)) not in inputs]
        if fresh and name != "__set__":
            again = _again(func, args, kwargs) if name in MOVING_FUNCTIONS | TOTALS else None
            self.add(name, None, inputs, fresh, again)
        return result

    def add(
        self, kind: str, module: str | None, inputs: tuple[int, ...], tensors: list[torch.Tensor], again: Any
    ) -> None:
        at = len(self.nodes)
        # Every view of a tensor that is written to holds a new value as well.
        views = [t for t in self.alive if _same_storage(t, tensors[0])] if id(tensors[0]) in self.index else []
        outputs = tuple(self.bind(t, RecordedTensor(tuple(t.shape), t.dtype, at)) for t in tensors)
        self.index.update({id(view): outputs[0] for view in views})
        move, total = (None, again) if kind in TOTALS else (again, None)
        self.nodes.append(Node(at, kind, module, self.scope[-1], inputs, outputs, move, total))

    # Modules

    @contextmanager
    def hooked(self) -> Iterator[None]:
        def before(name: str, enter: Any, m: nn.Module, args: Any, kwargs: Any) -> None:
            enter(name, self.read((args, kwargs)))

        def after(name: str, leave: Any, m: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            leave(name, m, result)

        with ExitStack() as hooks:
            for name, module in _observed(self.model):
                leaf = _is_leaf(module)
                enter, leave = (self.enter_leaf, self.leave_leaf) if leaf else (self.enter, self.leave)
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name, enter), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(after, name, leave), with_kwargs=True))
            yield

    def enter(self, name: str, inputs: tuple[int, ...]) -> None:
        self.scope.append(name)
        self.spans[name] = (inputs, ())

    def leave(self, name: str, module: nn.Module, result: Any) -> None:
        self.scope.pop()
        self.spans[name] = (self.spans[name][0], self.read(result))

    def enter_leaf(self, name: str, inputs: tuple[int, ...]) -> None:
        self.started.append((inputs, len(self.nodes)))

    def leave_leaf(self, name: str, module: nn.Module, result: Any) -> None:
        """Replace what was recorded inside of a leaf module by one node."""
        entered, mark = self.started.pop()
        inside, self.nodes = self.nodes[mark:], self.nodes[:mark]
        results = [
            t
            for t in tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.is_floating_point() and self.index.get(id(t)) not in entered
        ]
        if not results:
            return
        read = set(chain.from_iterable(node.inputs for node in inside))
        written = set(chain.from_iterable(node.outputs for node in inside))
        if written.isdisjoint(self.index.get(id(t)) for t in results):
            # An operation that no mode sees (a custom autograd function) may have read anything.
            read = {*entered, *self.read(list(module.parameters()))}
        inputs = tuple(value for value in entered if value in read)
        parameters = tuple(value for value in sorted(read) if self.values[value].parameter and value not in inputs)
        self.add(type(module).__name__, name, inputs + parameters, results, None)


def _observed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules except what is inside of a leaf module."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not any(name.startswith(prefix) for prefix in inside):
            yield name, module
            if _is_leaf(module) and name:
                inside += (f"{name}.",)


def _is_leaf(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, QuantLayer) or not list(module.children())


def _changed_tensor(name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The tensor that an operation changes in place."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    in_place = name == "__setitem__" or augmented or (name.endswith("_") and not name.endswith("__"))
    target = args[0] if in_place and args else None
    return target if isinstance(target, torch.Tensor) and target.is_floating_point() else None


def _again(func: Any, args: Any, kwargs: Any) -> Callable[[torch.Tensor], Any] | None:
    """The operation as a function of its first operand; None if it reads other floating-point tensors too, or places
    that a tensor without values has.
    """
    rest = (args[1:], kwargs)
    others = [leaf for leaf in tree_leaves(rest) if isinstance(leaf, torch.Tensor)]
    if not args or any(other.is_floating_point() or other.is_meta for other in others):
        return None
    moved_args, moved_kwargs = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, rest)
    if getattr(func, "__name__", "") == "view" and not any(isinstance(leaf, torch.dtype) for leaf in tree_leaves(rest)):
        func = torch.Tensor.reshape  # the same values, of a tensor in another order of memory, too
    return lambda tensor: func(tensor, *moved_args, **moved_kwargs)


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except NotImplementedError:  # a wrapper of torch.func has no storage of its own
        return False
