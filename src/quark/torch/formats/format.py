"""Format: what a kind of file or folder holds. One tensor in it is a Layout; this is all around the tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quark.core.granularity import HEADS, PerBlock, PerGroup
from quark.core.names.patterns import matches_any
from quark.core.schemes import SCHEMES, scheme_of
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import FormatError, NotSupportedError, ShapeError
from quark.torch.config.llm_template import LLMTemplate
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats.layout import Layout
from quark.torch.layers.attention.cache_view import cache_argument
from quark.torch.layers.attention.heads import holds, is_latent

if TYPE_CHECKING:
    from quark.torch.config.config import QConfig

Named = tuple[str, torch.Tensor]
_KV_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}
"""Leaf of a projection whose output is the cache -> name of its scale beside it, as vLLM reads it."""
INNER = "attn"
"""The end that vLLM puts after the name of an attention module, unless it is called so."""
OF_VALUES = "scale_of_values"
"""The scale of values once more, of a layer that makes keys and values under one."""


@dataclass(frozen=True)
class Folder:
    """A quantized model, as far as a `quantization_config` speaks of it.

    Attributes:
        specs: Layer name -> spec, outputs that are the KV cache left out.
        ignored: Names of the layers that stay in float.
        config: What the user asked for.
        written: The config as a checkpoint holds it.
        rotated: Name of each layer whose input is rotated -> the size of Sylvester's matrix; None: by another one.
        branched: Names of the layers with a low-rank branch.
        cache_specs: Name of each layer whose output is the KV cache -> what is quantized there.
        names: Name of each of these layers -> all names by which readers know it: the module's own, that in
            checkpoints, and where it is asked for those in other classes that load the folder.
        experts: Name of each block of experts that were taken apart -> names of their layers.
        float_experts: Names, in checkpoints, of the layers of experts that stay in float, in one tensor.
        heads: Names of the output heads among these layers.
        embeddings: Names of the embeddings among them.
        float_embeddings: Names by which readers know the embeddings that stay in float.
        by_class: Name of each of these layers that a rule of its class is for -> the name of the class.
        pack_method, weight_format: The options of the export.
    """

    specs: Mapping[str, LayerSpec]
    ignored: list[str]
    config: QConfig
    written: dict[str, Any]
    rotated: Mapping[str, int | None] = field(default_factory=dict)
    branched: tuple[str, ...] = ()
    cache_specs: Mapping[str, LayerSpec] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    float_experts: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    float_embeddings: tuple[str, ...] = ()
    by_class: Mapping[str, str] = field(default_factory=dict)
    pack_method: str = "reorder"
    weight_format: str = "real_quantized"

    def forms(self, layers: Iterable[str]) -> list[str]:
        """All names by which readers know these layers."""
        return [form for layer in layers for form in self.names.get(layer, (layer,))]

    @property
    def ignored_layers(self) -> list[str]:
        """The names in `ignored` that are no patterns."""
        return [name for name in self.ignored if "*" not in name]

    @property
    def cache(self) -> TensorSpec | None:
        """How the KV cache is quantized."""
        return next((spec.output for spec in self.cache_specs.values()), None)

    def export_block(self) -> dict[str, Any]:
        """The `export` entry of a `quantization_config`: options of the export that a loader may need."""
        return {
            # Runtimes take a cache as quantized where these are the patterns of kv_cache_quant_config.
            "kv_cache_group": list(self.config.kv_cache_group or self.config.kv_cache_quant_config),
            "min_kv_scale": self.config.min_kv_scale,
            "pack_method": self.pack_method,
            "weight_format": self.weight_format,
            "weight_merge_groups": None,
        }


@dataclass(frozen=True)
class Stored:
    """The part of the config of a checkpoint folder about how it is stored.

    Attributes:
        config: A config under which a float model gets the layers of the checkpoint.
        pack_method, weight_format: How its tensors lie in the files.
        dtype: Of the float model that was quantized; None where the folder does not say it.
        form: The format as this folder has it, where folders of one format differ in how their tensors are read.
    """

    config: QConfig
    pack_method: str = "reorder"
    weight_format: str = "real_quantized"
    dtype: torch.dtype | None = None
    form: Format | None = None


class Format(ABC):
    """A kind of file: how it holds a quantized layer, and what it cannot hold.

    Attributes:
        name: Name of the format.
        cache: Element types of a KV cache whose scales have a place.
        cache_heads: Whether a KV cache may have a scale for each head.
        cache_apart: Whether keys and values have a scale each, where one layer makes both under one.
    """

    name: ClassVar[str]
    cache: ClassVar[tuple[str, ...]] = ()
    cache_heads: ClassVar[bool] = False
    cache_apart: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, spec: LayerSpec) -> str | None:
        """Why a linear layer of this spec cannot be stored; None if it can."""

    @abstractmethod
    def make_layout(
        self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype, pack_method: str, real: bool
    ) -> Layout:
        """The layout of one tensor of a layer.

        Args:
            spec: Of the tensor.
            layer: Of its layer.
            dtype: Of the float tensor.
            pack_method, real: See Layout.
        """

    def received(self, stored: str, tensor: torch.Tensor) -> Named | None:
        """A tensor of a file under the name that `quark` folders have for it; None for one that is not needed."""
        return stored, tensor

    def said_shape(self, stored: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]] | None:
        """The name and the float shape of a weight, where a tensor of a file is no part of it and says its shape."""
        return None

    def refuse_layer(self, name: str, layer: nn.Module, spec: LayerSpec) -> None:
        """Raise NotSupportedError, naming the layer, for one that cannot be stored."""
        reason = self.refusal(spec) or ("" if isinstance(layer, nn.Linear) else f"a {type(layer).__name__}")
        if reason:
            raise NotSupportedError(f"{name}: the {self.name} format cannot hold {reason}. {self.possible()}")

    def check(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        """Raise NotSupportedError for a model that cannot be stored.

        Args:
            layers: Every module of the model by its name.
            folder: What is quantized.
        """
        for name, spec in folder.specs.items():
            self.refuse_layer(name, layers[name], spec)
        if folder.cache is not None and not self.holds_cache(folder.cache):
            element = folder.cache.dtype.name
            heads = " with a scale for each head" if element in self.cache else ""
            possible = f"a cache in {', '.join(self.cache)} with one scale, or " if self.cache else ""
            raise NotSupportedError(
                f"The {self.name} format has no place for a KV cache in {element}{heads}. Possible: {possible}the "
                "quark and compressed-tensors formats."
            )
        self.check_rotations(layers, folder)
        if folder.branched:
            raise NotSupportedError(
                f"The {self.name} format has no place for low-rank branches ({folder.branched[0]}, of SVDQuant). "
                "Possible: the quark format, or another algorithm."
            )
        unnamed = (why for name in folder.cache_specs if (why := _unnamed(layers, name, folder.config)))
        what = "attention probabilities" if folder.config.softmax_quant_spec is not None else next(unnamed, None)
        if what:
            raise NotSupportedError(
                f"The {self.name} format has no place for scales of {what}. Possible: {_PLACE_OF_SCALES}."
            )

    def holds_cache(self, cache: TensorSpec) -> bool:
        """Return True where the scales of a KV cache have a place."""
        return cache.dtype.name in self.cache and (self.cache_heads or cache.granularity != HEADS)

    def check_rotations(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        """Raise NotSupportedError for inputs that are rotated, where that cannot be said."""
        for name in folder.rotated:
            raise NotSupportedError(
                f"The {self.name} format has no place for the rotation of inputs ({name}). Possible: the quark format; "
                "compressed-tensors, for Hadamard matrices of a power of two; or rotations that fold into weights "
                "(r1 and r2)."
            )

    def check_scheme(self, scheme: str) -> None:
        """Raise NotSupportedError for a named scheme that cannot be stored: known before any model is loaded."""
        reason = self.refusal(scheme_of(scheme))
        if reason:
            raise NotSupportedError(f"The {self.name} format cannot hold {reason} ({scheme}). {self.possible()}")

    def possible(self) -> str:
        """A sentence that names the schemes that this format takes."""
        return f"It takes the schemes {', '.join(n for n, spec in SCHEMES.items() if self.refusal(spec) is None)}."


class FolderFormat(Format):
    """A kind of checkpoint folder. One object of each is registered in `FORMATS`.

    Attributes:
        name: Also the `quant_method` in the config.json of its folders.
        layout: How one tensor is stored.
        options: Whether `pack_method` and `weight_format` can be chosen.
        marker: Endings of the tensor names that only a quantized layer has.
        own_loader: Whether this package makes the layers into which transformers loads it.
        joins_float: Whether transformers makes one tensor of float weights that lie apart in such a folder, as it does
            of those of a float folder.
        leaves: Last part of a name in `quark` folders -> that in these, where they differ.
    """

    layout: ClassVar[type[Layout]]
    options: ClassVar[bool] = False
    marker: ClassVar[tuple[str, ...]] = ()
    own_loader: ClassVar[bool] = False
    joins_float: ClassVar[bool] = True
    leaves: ClassVar[Mapping[str, str]] = {}

    def refuse_layer(self, name: str, layer: nn.Module, spec: LayerSpec) -> None:
        """Also refuse what readers give to the class that the model really has, which holds the weight transposed."""
        if isinstance(layer, nn.Embedding):
            raise NotSupportedError(
                f"{name}: the {self.name} format cannot hold an embedding: transformers does not build one without its "
                "weight. Possible: the quark format, GGUF, ONNX, and compressed-tensors for vLLM (--for vllm)."
            )
        super().refuse_layer(name, layer, spec)
        if hasattr(layer, "stands_for"):
            raise NotSupportedError(
                f"{name}: the {self.name} format cannot hold a {layer.stands_for}. Possible: the quark format, GGUF."
            )

    def undecoded(self, folder: Folder) -> str | None:
        """Return a sentence about what transformers would decode wrongly of a folder that others read, or None."""
        return None

    def unread(self, folder: Folder) -> str | None:
        """Why no program but this package is known to read a folder, a clause; None if one is."""
        return None

    @abstractmethod
    def describe(self, folder: Folder) -> dict[str, Any]:
        """The `quantization_config` of config.json."""

    @abstractmethod
    def read(self, stored: dict[str, Any], quantized: set[str], model: nn.Module) -> Stored:
        """Inverse of `describe`.

        Args:
            stored: A `quantization_config`.
            quantized: Names of the layers that the files hold as quantized.
            model: The float model that they are loaded into.
        """

    def make_layout(
        self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype, pack_method: str, real: bool
    ) -> Layout:
        return self.layout(spec, dtype, pack_method, real)

    def stored_name(self, source: str, suffix: str, spec: LayerSpec | None) -> str:
        """Name in the file: "layer.weight" and "scale" give "layer.weight_scale".

        Args:
            source: Name of a parameter, or of the "input" or "output" of a layer.
            suffix: Key in what the layout stores.
            spec: What is quantized in the layer; None for a tensor of no quantized layer.
        """
        name = f"{source}_{suffix}" if suffix else source
        return _renamed(name, self.leaves) if spec else name

    def received(self, stored: str, tensor: torch.Tensor) -> Named | None:
        return _renamed(stored, {leaf: name for name, leaf in self.leaves.items()}), tensor


def layers_in(names: Iterable[str], marker: tuple[str, ...]) -> set[str]:
    """Names of the layers that have a tensor whose name ends in the marker."""
    return {name.removesuffix(end) for name in names for end in marker if name.endswith(end)}


def only_weight(spec: LayerSpec) -> TensorSpec | None:
    """The weight's spec where nothing else is quantized."""
    return spec.weight if spec == LayerSpec(weight=spec.weight) else None


def one_spec(name: str, specs: Iterable[LayerSpec]) -> LayerSpec:
    """The spec that all layers share. Raises NotSupportedError where they differ."""
    distinct = list(dict.fromkeys(specs))
    if len(distinct) > 1:
        raise NotSupportedError(
            f"The {name} format has one scheme for all its layers; these differ: {distinct[0]}; {distinct[1]}. "
            "Possible: the quark and compressed-tensors formats, or one scheme for all layers."
        )
    return distinct[0]


def require_whole_groups(form: str, name: str, layer: nn.Module, spec: LayerSpec) -> None:
    """Raise ShapeError for a weight whose rows are no whole groups or tiles: kernels of other programs need them."""
    weight: torch.Tensor = getattr(layer, "float_weight", layer.weight)  # type: ignore[arg-type]
    split, columns = spec.weight.granularity if spec.weight else None, weight.shape[-1]
    size = split.size[1] if isinstance(split, PerBlock) else split.size if isinstance(split, PerGroup) else 0
    if size > 0 and columns % size:
        raise ShapeError(
            f"{name}: the {form} format needs whole groups of {size}; a row has {columns} values. Possible: to leave "
            "the layer in float (exclude), or the quark format."
        )


def check_scale_dtype(form: str, name: str, stored: torch.dtype, model: torch.dtype) -> None:
    """Raise NotSupportedError for scales of another dtype than a half-precision model, to which loaders cast them."""
    if model.itemsize == 2 and stored != model:
        raise NotSupportedError(
            f"{name}: the {form} format holds scales in the dtype of the model, {model}; these are {stored}. "
            "Possible: scale_type=float, or the quark format."
        )


def _renamed(name: str, leaves: Mapping[str, str]) -> str:
    """A full name whose last part is replaced by what `leaves` has for it."""
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.{leaves[leaf]}" if leaf in leaves else name


_PLACE_OF_SCALES = (
    "the quark format, for quark alone; for vLLM a folder without them, served with --kv-cache-dtype fp8, which takes "
    "1.0 for each scale"
)


def _unnamed(layers: Mapping[str, nn.Module], name: str, config: QConfig) -> str | None:
    """Return the part of the cache of a layer that other programs' formats have no name for; None: they have."""
    parent, _, leaf = name.rpartition(".")
    if leaf in _KV_SCALES:
        return None
    if holds(leaf) != "kv" or not config.kv_cache_post_rope or cache_argument(layers[parent]) is None:
        return f"the cache of {name}, which is no k_proj or v_proj"
    if is_latent(layers[parent], leaf):
        return f"the cache of {name}: latent attention, to which vLLM gives no scale but in folders of ModelOpt"
    if parent.rpartition(".")[2] == INNER and leaf != "qkv_proj":  # transformers knows attention by that
        return f"the cache of {name}: vLLM takes {INNER}.k_scale for a name inside its own attention"
    return None


def kv_name(source: str, suffix: str) -> str | None:
    """`attn.k_proj.output` and `scale` give `attn.k_scale`; None for other tensors.

    Of a layer that makes both, such as qkv_proj, `scale` gives `attn.k_scale`, and OF_VALUES `attn.v_scale`.
    """
    parent, _, role = source.rpartition(".")
    attention, _, leaf = parent.rpartition(".")
    if role != "output" or suffix not in ("scale", OF_VALUES):
        return None
    part = "v" if suffix == OF_VALUES else "k" if leaf not in _KV_SCALES and holds(leaf) == "kv" else leaf[0]
    return f"{attention}.{part}_scale" if leaf in _KV_SCALES or holds(leaf) == "kv" else None


def kv_source(stored: str) -> str | None:
    """`attn.k_scale` gives `attn.k_proj.output_scale`; None for other tensors."""
    attention, _, leaf = stored.rpartition(".")
    projection = next((p for p, scale in _KV_SCALES.items() if scale == leaf), None)
    return f"{attention}.{projection}.output_scale" if projection else None


POST_ROPE = "kv_cache_post_rope"


def with_cache(config: QConfig, cache: TensorSpec | None, stored: dict[str, Any], model: nn.Module) -> QConfig:
    """A config whose KV cache is quantized by `cache`; our `export` entry says where, if there is one. Other programs
    scale what they store.

    Args:
        config: Of the weights and inputs.
        cache: From the folder; None: the cache is not quantized.
        stored: The `quantization_config`.
        model: Its layers that make keys and values are `k_proj` and `v_proj`, or those of its template.
    """
    if cache is None:
        return config
    patterns = [f"*{name}" for name in _KV_SCALES]
    if not any(matches_any(name, patterns) for name, _ in model.named_modules()):
        patterns = LLMTemplate.get(str(getattr(getattr(model, "config", None), "model_type", ""))).kv_layers_name
    layer = config_of_layer(LayerSpec(output=cache))
    post_rope = bool((stored.get("export") or {}).get(POST_ROPE, True))
    return replace(config, kv_cache_quant_config=dict.fromkeys(patterns, layer), kv_cache_post_rope=post_rope)


def require(stored: dict[str, Any], key: str, quantizer: str) -> Any:
    """An entry of a quantization_config. Raises FormatError where it is absent."""
    if key not in stored:
        raise FormatError(f"The quantization_config of this {quantizer} checkpoint has no {key!r}.")
    return stored[key]
