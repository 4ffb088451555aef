"""Layers whose weight the model reads itself, beside calling them or instead: they have to stay in float.

`F.linear(x, self.dt_proj.weight)` never calls the layer, so its quantizers would never run; and
`x.to(self.projection.weight.dtype)` would cast to the dtype of codes, once codes are what the layer holds. Which layers
these are is seen in one small forward.

A model that changes such weights (`self.blocks[3].output.weight.div_(2)`) is refused: it would do so again to the ones
that were written.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Sized
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from quark.base.libraries.diffusers import is_network
from quark.errors import NotSupportedError
from quark.torch.model.batches import evaluating, forward_batch, main_inputs, text_config
from quark.torch.model.meta_model import without_values

_HARMLESS = frozenset(
    f"torch.Tensor.{name}"
    for name in ("device.__get__", "shape.__get__", "ndim.__get__", "is_meta.__get__", "requires_grad.__get__",
                 "is_cuda.__get__", "is_cpu.__get__", "layout.__get__", "size", "dim", "numel", "stride", "data_ptr",
                 "__hash__", "get_device")
)  # fmt: skip
"""The attributes that codes have as the float weight does."""
CHANGES = re.compile(r"torch\.Tensor\.(?!requires_grad_$)(?:\w*[^_]_|__i(?:add|sub|mul|truediv|div)__|__setitem__)")
"""Functions that write into their first argument."""

_WEIGHT_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:device|shape|size|ndim)\b)")
"""In the source of a module: the weight of a child, taken for more than its place or shape."""
_OWN_CALL = re.compile(r"self\.(\w+)\(")
"""There, too: a function of the module itself, or a child."""
TOKENS = 8
"""Of the text that a model of transformers is tried with."""


def weights_read_elsewhere(model: nn.Module, data: Iterable[Any] | None = None) -> set[str]:
    """Names of the modules whose `weight` is used while none of the modules that hold it is running.

    Args:
        model: A float model, on any device. Of transformers and diffusers a copy without values runs, as far as it
            can, so that a model in memory and a skeleton have the same layers.
        data: Calibration batches, of which the first is run where the model is none of transformers; one-shot
            iterators are left alone.

    Returns:
        The names, and those of the layers at the same place in modules of the same class: an expert that got no token
        is as the others. Where the forward fails, for classes that it did not come through also those that the code of
        their forward names.

    Raises:
        NotSupportedError: The forward changes a weight there, which is then as it was.
    """
    with torch.random.fork_rng(devices=[]):  # a shuffled loader draws when it is begun
        if hasattr(model, "main_input_name") or is_network(model):
            model = without_values(model)
        batch = example(model, data)
    if batch is None:
        return set()
    watch, finished = _Watch(model), False
    # A model that a dummy input does not suit is quantized all the same, as far as is known of it.
    with ExitStack() as stack, suppress(Exception):
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(watch.end)
        stack.enter_context(watch)
        forward_batch(model, batch, _device(model))
        finished = True
    if watch.changed is not None:
        raise NotSupportedError(
            f"The forward of this model changes the weight of {watch.changed} ({watch.by}) while that layer is not "
            "running: it would change the weights of the quantized model once more. Possible: a setting of its config "
            "that leaves them alone, or a class that does not."
        )
    return _with_siblings(model, watch.found if finished else watch.found | _named_in_code(model, watch.passed))


def _with_siblings(model: nn.Module, found: set[str]) -> set[str]:
    """The names, and those of equal name in modules of equal class."""
    places = {name: (type(model.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]) for name in found}
    places = {name: place for name, place in places.items() if place[0] is not nn.ModuleList}
    known = set(places.values())
    return found | {
        f"{name}.{leaf}".lstrip(".")
        for name, module in model.named_modules()
        for leaf in module._modules
        if (type(module), leaf) in known
    }


def _named_in_code(model: nn.Module, passed: Container[Kind]) -> set[str]:
    """Names of children whose weight the forward of their parent's class takes for more than its place or shape.

    Args:
        model: The model.
        passed: The modules that are left out, by their kinds: what their forward reads was seen.
    """
    parents = {name: module for name, module in model.named_modules() if _kind(module) not in passed}
    reads = {kind: set(_WEIGHT_READ.findall(_code_of_forward(kind))) for kind in set(map(type, parents.values()))}
    return {
        f"{name}.{leaf}".lstrip(".")
        for name, module in parents.items()
        for leaf in reads[type(module)] & module._modules.keys()
    }


Kind = tuple[type[nn.Module], frozenset[str]]
"""Class of a module, and the names of its children: with others, the class may take another way."""


def _kind(module: nn.Module) -> Kind:
    return type(module), frozenset(name for name, child in module._modules.items() if child is not None)


def _code_of_forward(kind: type[nn.Module]) -> str:
    """The source of a class's forward, and of its own functions that this may call: not of what makes its weights."""
    code, found, names = "", {"forward"}, ["forward"]
    while names:
        with suppress(OSError, TypeError):  # a class without a file
            source = inspect.getsource(getattr(kind, names.pop()))
            called = {name for name in _OWN_CALL.findall(source) if inspect.isfunction(getattr(kind, name, None))}
            names += called - found - vars(nn.Module).keys()
            found, code = found | called, code + source
    return code


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Inputs that are no tokens -> the shape of one."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224) or 224
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return {
        "pixel_values": (1, getattr(vision, "num_channels", 3), height, width),
        "input_features": (1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)),
        "input_values": (1, 16000),
    }


def example(model: Any, data: Iterable[Any] | None = None) -> Any:
    """A batch to try a model with: of what a model of transformers takes, else the first of the data, or None."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "main_input_name"):
        return next(iter(data), None) if isinstance(data, Sized) else None
    device = _device(model)
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    words = getattr(text_config(config), "vocab_size", None) or TOKENS
    # Different tokens, so that more than one expert gets some.
    tokens = (torch.arange(1, TOKENS + 1, device=device) % words)[None]
    shapes = _shapes(config)
    wanted = list(main_inputs(type(model)))
    if wanted == ["input_ids"] and not model.can_generate() and hasattr(config, "vision_config"):
        wanted.append("pixel_values")
    batch = {n: torch.zeros(shapes[n], dtype=dtype, device=device) for n in wanted if n in shapes}
    if "input_ids" in wanted:
        batch["input_ids"] = tokens
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = tokens
    return batch or None


OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
"""The inputs of an encoder of text, of one shape (samples, tokens)."""


def masked(model: Any, batch: Any) -> Any:
    """The batch, and of an encoder of text the further inputs that a tokenizer gives, with which samples are padded.

    Args:
        model: Of transformers.
        batch: Of `example`.
    """
    if not batch or {*batch} != {"input_ids"} or model.can_generate():
        return batch
    taken, ids = inspect.signature(type(model).forward).parameters, batch["input_ids"]
    further = {"attention_mask": torch.ones_like(ids)}
    if (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        further["token_type_ids"] = torch.zeros_like(ids)
    return {**batch, **{name: x for name, x in further.items() if name in taken}}


def _device(model: nn.Module) -> torch.device:
    """Of the first parameter, the meta device too."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class _Watch(TorchFunctionMode):
    """Sees every function that gets a weight, and which modules are running then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.passed: set[Kind] = set()
        self.changed: str | None = None
        self.by = ""
        self._names: dict[int, list[str]] = {}
        self._holders: dict[int, list[nn.Module]] = {}
        self._running: list[nn.Module] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(lambda m, *_: self.passed.add(_kind(m))))
            weight = module._parameters.get("weight")
            if weight is not None:
                self._names.setdefault(id(weight), []).append(name)
                self._holders.setdefault(id(weight), []).append(module)
                self._handles.append(module.register_forward_pre_hook(lambda m, _: self._running.append(m)))
                self._handles.append(module.register_forward_hook(lambda *_: self._running.pop() and None))

    def end(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            names = self._names.get(id(leaf), ()) if isinstance(leaf, nn.Parameter) else ()
            inside = not names or any(module in self._running for module in self._holders[id(leaf)])
            function = resolve_name(func) or ""
            if not inside and args and leaf is args[0] and CHANGES.fullmatch(function):
                self.changed, self.by = min(names), function.rpartition(".")[2]
                raise NotSupportedError(f"{self.changed}: {self.by}")  # before it is done
            if not inside and function not in _HARMLESS:
                self.found.update(names)
        return func(*args, **(kwargs or {}))
