"""Where a cache of keys and values is quantized: on the way into it.

    keys, values = cache.update(keys, values, layer_idx)

is how an attention module of transformers stores new keys and values, and gets all that there are. What it passes there
is what a cache holds: keys after their norm and rotary embedding; with latent attention (MLA) the compressed vector and
the rotary part. A hook on the module gives it a view of its cache, or of none where it has none, whose `update`
quantizes first. So the module computes as it would with a quantized cache, with any cache, and without one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from quark.base.libraries.transformers import cache_class
from quark.core.granularity import HEADS
from quark.errors import NotSupportedError
from quark.torch.layers.attention.heads import holds, stored_heads
from quark.torch.layers.fake_quant import Extras, FakeQuantize

ARGUMENTS = ("past_key_values", "cache", "layer_past", "past_key_value", "layer_state")
"""The names of the argument of forwards that takes the cache; "cache" in transformers from 5.24 on."""

PARTS = ("self_attention_cache", "cross_attention_cache")
"""Caches inside the cache of an encoder and a decoder."""

Stored = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""New keys and values -> those that a quantized cache gives back."""


class CacheQuantize(FakeQuantize):
    """The quantizer of keys or values that acts on the way into a cache: its layer's output passes as it is.

    Attributes:
        heads: How many heads the cache stores, where each has a scale; None where all have one.
    """

    heads: int | None = None

    @classmethod
    def in_place_of(cls, quantizer: FakeQuantize) -> CacheQuantize:
        """One of the same spec, mode and scales as a quantizer that observes nothing."""
        assert quantizer.observer is None
        made = cls(quantizer.spec)
        made.mode = quantizer.mode
        made._buffers.update(quantizer._buffers)
        made._parameters.update(quantizer._parameters)
        return made.train(quantizer.training)

    def forward(self, x: torch.Tensor, extras: Extras | None = None) -> torch.Tensor:
        return x

    def cached(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the cache gives back for x. Raises NotSupportedError for other heads than it has."""
        if self.heads is not None and (x.ndim != 4 or x.shape[1] != self.heads):
            raise NotSupportedError(
                f"A cache stores {tuple(x.shape)}, and no {self.heads} heads in (batch, heads, tokens, size): they "
                "have no scale each. Possible: one scale for all of them (--kv-cache fp8 or int8)."
            )
        return super().forward(x)


def cache_argument(module: nn.Module) -> str | None:
    """Return the name of the argument of a module's forward that takes the cache; None where it takes none."""
    return next((name for name in ARGUMENTS if name in _parameters(module)), None)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of what the forward of a module takes, in their order."""
    kind: Any = type(module)
    return _parameters_of(kind)


@lru_cache(maxsize=1024)
def _parameters_of(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def cache_owner(modules: Mapping[str, nn.Module], layer: str) -> str | None:
    """Name of the module that a layer is in, if that takes a cache; None where it takes none.

    Modules further out are blocks and models, which hand a cache on: also to towers beside the text, which have none.
    """
    parent = layer.rpartition(".")[0]
    while parent in modules and cache_argument(modules[parent]) is None and len(list(modules[parent].children())) == 1:
        parent = parent.rpartition(".")[0]  # a wrapper of the layer alone (Moshi)
    return parent if parent in modules and cache_argument(modules[parent]) is not None else None


@lru_cache(maxsize=1024)
def _calls_update(kind: Any) -> bool:
    """Return True where a method of a class of modules calls `update`: linear attention keeps its state otherwise."""
    own = (member for base in kind.__mro__ if base not in nn.Module.__mro__ for member in vars(base).values())
    return any("update" in inspect.unwrap(f).__code__.co_names for f in own if inspect.isfunction(inspect.unwrap(f)))


def stores_keys(model: nn.Module, modules: Mapping[str, nn.Module], owner: str) -> bool:
    """Return True where a module that takes a cache stores keys in it: one of an encoder is never given one, and linear
    attention has none.

    Args:
        model: The model.
        modules: Its modules by their names.
        owner: Name of the module.
    """
    kind: Any = type(modules[owner])
    if getattr(modules[owner], "is_decoder", True) is False or not _calls_update(kind):
        return False
    find_encoder: Any = getattr(model, "get_encoder", None)
    if find_encoder is None or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    return all(module is not modules[owner] for module in find_encoder().modules())


def feeding_layers(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Those of the layers of these names that make keys or values which a cache holds."""
    modules = dict(model.named_modules())
    owners = {name: cache_owner(modules, name) for name in names}
    storing = {owner: stores_keys(model, modules, owner) for owner in {*owners.values()} if owner is not None}
    return frozenset(name for name, owner in owners.items() if owner is not None and storing[owner])


def quantize_caches(model: nn.Module, layers: Sequence[str]) -> Callable[[], None]:
    """Let modules quantize the keys and values that they store, by the output quantizers of layers.

    Args:
        model: On any device.
        layers: Names of quantized layers that make keys and values.

    Returns:
        The function that undoes it.

    Raises:
        NotSupportedError: A layer is in no module that takes a cache.
    """
    modules = dict(model.named_modules())
    inside: dict[str, list[str]] = {}
    for name in layers:
        owner = cache_owner(modules, name)
        if owner is None:
            parent = modules[name.rpartition(".")[0]]
            raise NotSupportedError(
                f"{name} makes keys or values in a {type(parent).__name__}, whose forward takes no cache "
                f"({', '.join(ARGUMENTS)}). Possible: kv_cache_post_rope=False, which quantizes what the layer gives."
            )
        inside.setdefault(owner, []).append(name.removeprefix(f"{owner}."))
    for name in layers:
        quantizer = modules[name]._modules["output_quantizer"]
        assert isinstance(quantizer, FakeQuantize)
        modules[name]._modules["output_quantizer"] = CacheQuantize.in_place_of(quantizer)
    for owner, own in inside.items():
        _count_heads(model, owner, own)
    views = {owner: GiveView(*_makers(modules[owner], own)) for owner, own in inside.items()}
    handles = [modules[name].register_forward_pre_hook(view, with_kwargs=True) for name, view in views.items()]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _count_heads(model: Any, owner: str, layers: Sequence[str]) -> None:
    """Let the quantizers of a module that have a scale for each head know how many. Raises NotSupportedError."""
    module = model.get_submodule(owner)
    for name in layers:
        quantizer = module.get_submodule(name)._modules["output_quantizer"]
        assert isinstance(quantizer, CacheQuantize)
        if quantizer.spec.granularity != HEADS:
            continue
        config = getattr(model, "config", None)
        quantizer.heads = stored_heads(module, name, config and config.get_text_config(decoder=True))
        if quantizer.heads is None:
            raise NotSupportedError(
                f"{owner}.{name}: {type(module).__name__} does not say how many heads of this layer its cache stores, "
                "so each head cannot have a scale. Possible: one scale for all of them (--kv-cache fp8 or int8)."
            )


def _makers(module: nn.Module, layers: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the layers of a module that make keys, and those that make values.

    A layer that makes both quantizes both, with one scale: so do runtimes with what latent attention stores. Where no
    layer makes values alone, they are made of the keys.
    """
    keys, values = ([name for name in layers if part in holds(name.partition(".")[0])] for part in "kv")
    apart = any(holds(name) == "v" for name, child in module.named_children() if isinstance(child, nn.Linear))
    return keys, values if values or apart else keys


class GiveView:
    """Forward pre-hook of a module: in the place of its cache it gets a view, which quantizes what is stored.

    It holds names and no modules, so that copies of a model quantize by their own layers.

    Args:
        keys, values: Names, in the module, of the layers whose output quantizers are those of keys and of values.
    """

    def __init__(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self.keys, self.values = tuple(keys), tuple(values)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = cache_argument(module)
        assert own is not None
        place = _parameters(module).index(own)
        argument = next((name for name in ARGUMENTS if name in kwargs), own)

        def stored(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _through(module, self.keys, keys), _through(module, self.values, values)

        given = kwargs.get(argument, args[place] if place < len(args) else None)
        view = NoCache(stored, getattr(module, "config", None)) if given is None else _view_of(given, stored)
        if place < len(args):
            return (*args[:place], view, *args[place + 1 :]), kwargs
        return args, {**kwargs, argument: view}


def _through(module: nn.Module, layers: Sequence[str], x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a cache gives back for x, by the output quantizers of layers of a module."""
    for name in layers:
        quantizer = module.get_submodule(name)._modules["output_quantizer"]
        assert isinstance(quantizer, CacheQuantize)
        x = quantizer.cached(x)
    return x


def _view_of(cache: Any, stored: Stored) -> Any:
    """A view of a cache whose `update` stores what `stored` gives. Raises NotSupportedError for one without it."""
    if not hasattr(cache, "update") or not hasattr(cache, "__dict__"):
        raise NotSupportedError(
            f"A cache of the class {type(cache).__name__} has no update(keys, values, layer), where keys and values "
            "are quantized. Possible: a Cache of transformers, or kv_cache_post_rope=False."
        )
    kind: Any = type(cache)
    view = object.__new__(_view_class(kind, tuple(name for name in PARTS if name in cache.__dict__)))
    view.__dict__ = cache.__dict__  # the same state: what is stored in one is in the other
    view.stored = stored
    return view


@lru_cache(maxsize=256)
def _view_class(kind: Any, parts: tuple[str, ...]) -> Any:
    """A class derived from that of a cache, so that whoever asks for its class finds it."""

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return kind.update(self, *self.stored(keys, values), *args, **kwargs)

    def part(name: str, self: Any) -> Any:
        return _view_of(self.__dict__[name], self.stored)

    views = {name: property(partial(part, name)) for name in parts}
    own = {"__slots__": ("stored",), "update": update, "__module__": __name__}
    return type(f"{kind.__name__}View", (kind,), {**own, **views})


class NoCache:
    """An empty cache for a module without one: it stores nothing, whatever class it is asked for.

    Args:
        stored: See `Stored`.
        config: Of the module. By it transformers makes the caches of models that keep more than keys and values.
    """

    def __init__(self, stored: Stored, config: Any = None) -> None:
        self.stored, self.config = stored, config
        self.is_updated: dict[int, bool] = {}
        # Of an encoder and a decoder: neither part stores anything.
        self.self_attention_cache = self.cross_attention_cache = self

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return cache_class("EncoderDecoderCache") or NoCache

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values are all that there are."""
        return self.stored(keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing came before."""
        return 0

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute as an empty cache of the model's own kind has it."""
        kind = cache_class("DynamicCache")
        if name.startswith("__") or "config" not in self.__dict__ or kind is None:
            raise AttributeError(name)
        if "empty" not in self.__dict__:
            self.__dict__["empty"] = kind(config=self.config)
        return getattr(self.__dict__["empty"], name)
