"""Plan: module name -> LayerSpec. Made once from a config and a model, frozen, printed before any work is done."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from quark.base.log import logger, severity
from quark.core.names.patterns import first_match, matches, matches_any, require_matches, unmatched
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, NotSupportedError, ShapeError, StructureError
from quark.report.page import PageTable
from quark.report.shown import Shown
from quark.torch.calibration.experts import expert_of
from quark.torch.config.algo_configs import SVDQuantConfig
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import lower_layer, lower_tensor
from quark.torch.config.selectors import patterns_of, required_patterns, routers, selected_names
from quark.torch.layers import LAYERS, ONLY_WHEN_NAMED, QuantLayer, layer_class
from quark.torch.layers.attention.cache_rules import cache_feeding, require_cache_patterns, with_cache
from quark.torch.layers.attention.probabilities import attention_modules
from quark.torch.layers.low_rank import BRANCH
from quark.torch.layers.shapes import check_shapes
from quark.torch.model.passes import unconverted
from quark.torch.model.passes.unfuse_experts import fused_blocks, layer_names

if TYPE_CHECKING:
    from rich.table import Table

_UNFIT_SHARE = 0.1
"""Share of the weights of linear layers that may stay in float because groups do not divide them; above it that is an
error.
"""
_WORTH_SAYING = 0.01
"""Share of all weights from which on it is said that they have no quantized form."""
_MOST_IN_FLOAT = 0.5
"""Share of all weights that may stay in float because of that, as convolutions do, before it is a warning."""


def _first_and_last(names: Sequence[str]) -> str:
    """Names of layers that share a row: "model.layers.0.mlp.up_proj ... down_proj"."""
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1].rsplit('.', 1)[-1]}"


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """The specs of the layers of one model, and the layers that stay in float. It prints as a table.

    Attributes:
        layers: Full module name -> spec, in the order of the model; only layers that change.
        excluded: Full names of the layers that could have been quantized and stay in float.
        unknown: Full names of modules whose weights have no quantized form and stay in float: layers derived from a
            supported class with a forward of their own, and others that hold a share of the weights, such as GRU.
        probabilities: Full name of an attention module -> spec of its probabilities.
        to_exclude: What a stored config must exclude, so that a runtime, which knows no selectors and may have layers
            in place of what stays in float, quantizes what this plan does.
        read_elsewhere: Those of `excluded` whose weight the model reads itself; see `weights_read_elsewhere`.
        unfit: Those of `excluded` that groups or blocks do not divide; see `_unfit`.
        beside: Full name -> spec of layers that the model's class does not build and its folder holds.
    """

    layers: dict[str, LayerSpec]
    excluded: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    probabilities: dict[str, TensorSpec] = field(default_factory=dict)
    to_exclude: tuple[str, ...] = ()
    read_elsewhere: frozenset[str] = frozenset()
    unfit: frozenset[str] = frozenset()
    beside: dict[str, LayerSpec] = field(default_factory=dict)

    @property
    def needs_data(self) -> bool:
        """True where activations must be calibrated."""
        return any(spec.needs_data for spec in self.layers.values())

    def bits(self, name: str) -> float | None:
        """Bits of a weight element of a layer, without its scales; None if it stays in float."""
        spec = self.layers.get(name)
        return spec.weight.dtype.bits if spec and spec.weight else None

    def table(self, model: nn.Module, carried: Mapping[str, tuple[int, ...]] | None = None) -> Table:
        """The plan as a table: layers of equal shape and spec share a row.

        Args:
            model: That it was made of.
            carried: Name -> shape of the weight of layers beside the model; see `carried_beside`.
        """
        # rich is imported when a table is really printed, not with the package.
        from rich.table import Column, Table

        layers = Column("layers", overflow="fold")  # names differ at their ends
        table = Table(layers, "count", "weight shape", "weight", "input", "output", title="Plan")
        rows: dict[tuple[str, ...], list[str]] = {}
        for name in [*self.layers, *self.excluded, *self.unknown]:
            key = (self.weight_shape(model, name), *self._specs(name))
            rows.setdefault(key, []).append(name)
        for name, size in (carried or {}).items():
            spec = self.beside.get(name, LayerSpec())
            kept = "float" if spec.weight else "as in the source"
            key = (str(tuple(size)), *(str(t or kept) for t in (spec.weight, spec.input, spec.output)))
            rows.setdefault(key, []).append(name)
        for key, names in rows.items():
            table.add_row(_first_and_last(names), str(len(names)), *key)
        return table

    def tables(self) -> Sequence[PageTable]:
        """Layers of equal spec in a row; their shapes, which need the model, are in `table`."""
        rows: dict[tuple[str, ...], list[str]] = {}
        for name in [*self.layers, *self.excluded, *self.unknown]:
            rows.setdefault(self._specs(name), []).append(name)
        cells = [(_first_and_last(names), str(len(names)), *specs) for specs, names in rows.items()]
        return [PageTable(("layers", "count", "weight", "input", "output"), cells, "Plan")]

    def _specs(self, name: str) -> tuple[str, ...]:
        """The labels of weight, input and output of a layer."""
        spec, in_float = self.layers.get(name, LayerSpec()), self.float_label(name)
        return tuple(str(each or in_float) for each in (spec.weight, spec.input, spec.output))

    def weight_shape(self, model: nn.Module, name: str) -> str:
        """The shape of the weight of a layer, as the table shows it."""
        module = model.get_submodule(name)
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            return str(tuple(cast(torch.Tensor, module.weight).shape))
        return f"{_own_weights(module):,} values"

    def without_form(self, model: nn.Module) -> str:
        """Return the part of a model that stays in float for want of a quantized form, with its share; "" for none.

        Args:
            model: That it was made of.
        """
        total = sum(parameter.numel() for parameter in model.parameters()) or 1
        names: dict[str, list[str]] = {}
        weights: dict[str, int] = {}
        for name in self.unknown:
            module = model.get_submodule(name)
            kind = type(module).__name__
            names.setdefault(kind, []).append(name or "the model")
            weights[kind] = weights.get(kind, 0) + _own_weights(module)
        more = {kind: f" and {len(each) - 1} more" if each[1:] else "" for kind, each in names.items()}
        return ", ".join(
            f"{kind} ({each[0]}{more[kind]}, {weights[kind] / total:.0%} of the weights)"
            for kind, each in names.items()
            if weights[kind] >= _WORTH_SAYING * total
        )

    def float_label(self, name: str) -> str:
        """Return the words of the table for a tensor that is not quantized."""
        if name in self.read_elsewhere:
            return "float (weight read by the model)"
        if name in self.unfit:
            return "float (groups do not divide it)"
        return "float (own forward)" if name in self.unknown else "float"


@dataclass(frozen=True)
class Choice:
    """Which layer gets which spec: exclude > layer_quant_config > layer_type_quant_config > global.

    A layer that feeds a quantized cache has its output quantized whatever else is said of it.
    """

    config: QConfig
    patterns: tuple[str, ...]
    selected: frozenset[str]
    feeding: frozenset[str]

    def excludes(self, name: str) -> bool:
        """Return True where the exclude list names the layer."""
        return name in self.selected or matches_any(name, self.patterns)

    def spec(self, name: str, kind: type[nn.Module]) -> LayerSpec:
        """The spec of a layer of this name and class; an empty one leaves it in float."""
        linear, only_when_named = issubclass(kind, nn.Linear), issubclass(kind, ONLY_WHEN_NAMED)
        chosen = None if self.excludes(name) else layer_config(self.config, name, kind, only_when_named)
        spec = lower_layer(chosen, per_token=linear)
        if only_when_named:  # a table, whose input is indices
            spec = replace(spec, input=None)
        return with_cache(spec, self.config, name, self.feeding) if linear else spec

    def wanted(self, name: str) -> bool:
        """Return True where a linear layer of this name is to be quantized."""
        return self.spec(name, nn.Linear) != LayerSpec()


def layer_config(
    config: QConfig, name: str, kind: type[nn.Module] | None, only_when_named: bool
) -> QLayerConfig | None:
    """Return the config of a layer that is not excluded: by name, by class, or that of all but layers to be named."""
    by_name = first_match(name, config.layer_quant_config)
    if by_name is not None:
        return by_name
    for layer_type, by_type in config.layer_type_quant_config.items():
        if kind is not None and issubclass(kind, layer_type):
            return by_type
    return None if only_when_named else config.global_quant_config


def chooser(config: QConfig, model: nn.Module) -> Choice:
    """The choices that a config makes on a model."""
    selected = selected_names(config.exclude, model)
    selected -= _named_alone(config, model, selected)
    return Choice(config, tuple(patterns_of(config.exclude)), frozenset(selected), cache_feeding(config, model))


def _named_alone(config: QConfig, model: nn.Module, selected: Collection[str]) -> set[str]:
    """Layers that an entry of `layer_quant_config` names, and none beside those that selectors exclude.

    A selector says what is usually left in float. An entry that is about that alone (`lm_head`) is meant; one that is
    about others as well (`*.layers.0.*`) is not about a router among them.
    """
    layers = quantizable_layers(model) if selected and config.layer_quant_config else set()
    named, others = set(), layers.difference(selected)
    for pattern in (name for name in config.layer_quant_config if name not in config.kv_cache_quant_config):
        found = {name for name in layers.intersection(selected) if matches(name, pattern)}
        if found and not any(matches(name, pattern) for name in others):
            named |= found
    return named


def quantizable_layers(model: nn.Module) -> set[str]:
    """The layers that can be quantized, experts that are kept in one tensor among them."""
    names = {name for name, module in model.named_modules() if layer_class(module)}
    return names | {
        layer for block, leaves in fused_blocks(model).items() for layer in layer_names(model, block, leaves)
    }


def make_plan(
    config: QConfig,
    model: nn.Module,
    strict: bool = True,
    read_elsewhere: Collection[str] = (),
    beside: Collection[str] = (),
) -> Plan:
    """Decide what happens to each layer: exclude > layer_quant_config > layer_type_quant_config > global.

    Args:
        config: The user's config; it is not changed.
        model: The float model (any device, meta too).
        strict: Whether a pattern that matches nothing is an error. Loading a checkpoint is not strict: its names
            were resolved when it was written.
        read_elsewhere: From `weights_read_elsewhere`: layers that stay in float.
        beside: Names of layers that the model's class does not build and its folder holds, which patterns may name.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to quantize.
        ShapeError: A granularity does not fit a weight; names the layer.
        StructureError: A weight is no parameter; names the layer.
    """
    candidates = {name: module for name, module in model.named_modules() if layer_class(module)}
    if strict:
        _require_present(config, model, candidates, beside)
    choice = chooser(config, model)
    layers, errors = _choose_specs(choice, candidates, read_elsewhere, strict)
    excluded = [name for name in candidates if name not in layers]
    unfit = _unfit(model, layers, errors)
    if strict:
        _say_lost(config, choice, candidates)
    unknown = _without_form(model, candidates)
    if strict and not layers:
        raise _nothing_to_quantize(model, len(candidates))
    _require_calibrated_experts(config, layers, strict)
    probabilities = _probabilities(config, model)
    outside = frozenset(n for n in excluded if n in read_elsewhere and not choice.excludes(n))
    if outside:
        shown = ", ".join(sorted(outside)[:3]) + (" ..." if len(outside) > 3 else "")
        logger.info("%d layers stay in float, as the model reads their weight itself: %s.", len(outside), shown)
    to_exclude = _to_exclude(model, choice, layers, excluded, probabilities)
    return Plan(layers, tuple(excluded), unknown, probabilities, to_exclude, outside, unfit)


def _own_weights(module: nn.Module) -> int:
    """How many values there are in the parameters of a module itself that are no vectors."""
    return sum(p.numel() for p in module._parameters.values() if p is not None and p.dim() > 1)


def _without_form(model: nn.Module, candidates: Collection[str]) -> tuple[str, ...]:
    """Modules whose weights have no quantized form: derived from a layer, or with a share of the weights."""
    worth = _WORTH_SAYING * sum(parameter.numel() for parameter in model.parameters())
    return tuple(
        name
        for name, module in model.named_modules()
        if name not in candidates
        and (isinstance(module, tuple(LAYERS)) or (not isinstance(module, QuantLayer) and _own_weights(module) > worth))
    )


def _choose_specs(
    choice: Choice, candidates: Mapping[str, nn.Module], read_elsewhere: Collection[str], strict: bool
) -> tuple[dict[str, LayerSpec], dict[str, ShapeError]]:
    """The specs of the layers that are quantized; and of those that a spec for many does not fit, the errors."""
    layers: dict[str, LayerSpec] = {}
    errors: dict[str, ShapeError] = {}
    for name, module in candidates.items():
        spec = LayerSpec() if name in read_elsewhere else choice.spec(name, type(module))
        if spec == LayerSpec():
            continue
        error = _misfit(name, module, spec)
        if error is None:
            layers[name] = spec
        elif not strict or spec.output is not None or first_match(name, choice.config.layer_quant_config) is not None:
            raise error
        else:
            errors[name] = error
    return layers, errors


def _misfit(name: str, module: nn.Module, spec: LayerSpec) -> ShapeError | None:
    """Return an error where a spec does not fit the weight of a layer. Raises as `_require_parameters` does."""
    _require_parameters(name, module)
    shape = tuple(cast(torch.Tensor, module.weight).shape)
    try:
        check_shapes(name, type(module).__name__, shape, getattr(module, "in_features", None), spec)
    except ShapeError as error:
        return error
    return None


def _nothing_to_quantize(model: nn.Module, candidates: int) -> ConfigError:
    """Return an error for a model of which no layer gets a scheme, of so many supported ones."""
    if any(isinstance(module, QuantLayer) for module in model.modules()):
        return ConfigError(
            "The model holds quantized layers already, and none that is left in float gets a scheme from this "
            "config. Possible: to name such layers, the float model, or quark convert --requantize."
        )
    kinds = sorted({type(module).__name__ for module in model.modules() if not list(module.children())})
    return ConfigError(
        f"Nothing to quantize: of {candidates} supported layers all are excluded or without a config. "
        f"The leaf modules of this model are {', '.join(kinds)}; supported: Linear, Conv2d, ConvTranspose2d, and "
        "Embedding, EmbeddingBag where a layer or type entry names them."
    )


def divides(config: QConfig, model: nn.Module, read_elsewhere: Collection[str] = ()) -> bool:
    """Return True where a config's groups and blocks divide the weights of a model, but for a few; see `_unfit`."""
    try:
        with severity(2):  # what a plan says is said when it is carried out
            make_plan(config, model, read_elsewhere=read_elsewhere)
    except ShapeError:
        return False
    return True


def _require_calibrated_experts(config: QConfig, layers: Mapping[str, LayerSpec], strict: bool) -> None:
    """Raise ConfigError where calibrate_all_experts would change nothing."""
    if not config.calibrate_all_experts or not strict:
        return
    experts = {name: spec for name, spec in layers.items() if expert_of(name) is not None}
    if not experts:
        raise ConfigError("calibrate_all_experts=True: no layer of an expert is quantized. Possible: leave it.")
    if not config.algo_config and not any(spec.needs_data for spec in experts.values()):
        raise ConfigError(
            "calibrate_all_experts=True: experts of this scheme need no calibration data. Possible: leave it, or an "
            "algorithm (gptq, awq ...)."
        )


def _require_present(
    config: QConfig, model: nn.Module, candidates: Mapping[str, nn.Module], beside: Collection[str]
) -> None:
    """Say `unmatched` of a pattern or a class in the config that nothing in the model has."""
    # Experts that are kept fused may be excluded by the names that their layers would have.
    names = {name for name, _ in model.named_modules()} | quantizable_layers(model) | {*beside}
    if any(isinstance(algorithm, SVDQuantConfig) for algorithm in config.algo_config or []):
        names |= {f"{name}.{BRANCH}" for name in candidates}  # float in any case; the documented examples exclude them
    require_matches(required_patterns(config.exclude), names, "exclude")
    require_layers(required_patterns(config.exclude), names, candidates)
    require_matches(config.layer_quant_config, [*candidates, *beside], "layer_quant_config")
    require_cache_patterns(config, model, candidates)
    require_types(config, {type(module) for module in candidates.values()}, "no quantizable layer")


def _say_lost(config: QConfig, choice: Choice, candidates: Collection[str]) -> None:
    """Warn of an entry for layers that are all excluded: it changes nothing."""
    excluded = [name for name in candidates if choice.excludes(name)]
    others = set(candidates).difference(excluded)
    for pattern in (name for name in config.layer_quant_config if name not in config.kv_cache_quant_config):
        found = [name for name in excluded if matches(name, pattern)]
        if found and not any(matches(name, pattern) for name in others):
            logger.warning(
                "layer_quant_config: %r changes nothing, as `exclude` names all that it matches (%s%s).",
                pattern, found[0], ", ..." if len(found) > 1 else "",
            )  # fmt: skip


def _unfit(model: nn.Module, layers: Collection[str], errors: Mapping[str, ShapeError]) -> frozenset[str]:
    """The layers that stay in float as groups do not divide them: convolutions, and a few small linear layers.

    Raises the first error where that leaves no layer, or where linear layers among them hold more than _UNFIT_SHARE of
    the weights of all linear layers: then the scheme does not suit the model.
    """
    if not errors:
        return frozenset()
    weights = {name: cast(torch.Tensor, model.get_submodule(name).weight) for name in (*errors, *layers)}

    def size(names: Iterable[str]) -> int:
        return sum(weights[name].numel() for name in names)

    linear = [name for name, weight in weights.items() if weight.ndim == 2]
    few = [name for name in linear if name in errors]
    if not layers or size(few) > _UNFIT_SHARE * size(linear):
        raise errors[next(iter(few or errors))]
    share = size(errors) / size(weights)
    counts = Counter(type(model.get_submodule(name)).__name__ for name in errors)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    logger.log(
        logging.WARNING if share > _MOST_IN_FLOAT else logging.INFO,
        "%d of %d layers, with %.0f %% of the weights, stay in float, as the scheme does not fit them: %s. %s",
        len(errors), len(weights), 100 * share, kinds, next(iter(errors.values())),
    )  # fmt: skip
    return frozenset(errors)


def _probabilities(config: QConfig, model: nn.Module) -> dict[str, TensorSpec]:
    """Name of an attention module -> spec of its probabilities, where they are quantized."""
    spec = lower_tensor(config.softmax_quant_spec)
    if spec is None:
        return {}
    patterns = patterns_of(config.exclude)
    names = [name for name in attention_modules(model) if not matches_any(name, patterns)]
    if not names:
        raise NotSupportedError(f"softmax_quant_spec: {type(model).__name__} has no attention module.")
    return dict.fromkeys(names, spec)


def _to_exclude(
    model: nn.Module,
    choice: Choice,
    layers: Mapping[str, LayerSpec],
    excluded: Sequence[str],
    probabilities: Mapping[str, TensorSpec],
) -> tuple[str, ...]:
    """See `Plan.to_exclude`."""
    names = [name for name in excluded if not isinstance(model.get_submodule(name), ONLY_WHEN_NAMED)]
    # Routers are linear layers in runtimes, whatever class transformers has for them.
    names += sorted(routers(model) - layers.keys() - set(names))
    # A layer without weights to quantize whose output feeds the cache is excluded and quantized at once.
    names += [name for name in layers if choice.excludes(name)]
    if probabilities:
        names += [name for name in attention_modules(model) if name not in probabilities]
    return (*names, *unconverted(model))


def require_layers(patterns: list[str], names: set[str], candidates: Collection[str]) -> None:
    """Say `unmatched` of an exclude pattern that names a block and none of the layers in it: it excludes nothing."""
    for pattern in patterns:
        matched = [name for name in names if matches(name, pattern)]
        inside = any(layer.startswith(f"{name}.") for name in matched for layer in candidates)
        if inside and not any(name in candidates for name in matched):
            unmatched(
                f"exclude: {pattern!r} matches the module {matched[0]!r} but none of the layers in it. "
                f"Possible: {pattern + '.*'!r}."
            )


def require_types(config: QConfig, present: set[type[nn.Module]], none: str) -> None:
    """Say `unmatched`, beginning with what `none` says, of a class in the config that no layer is of."""
    for layer_type in config.layer_type_quant_config:
        if not any(issubclass(kind, layer_type) for kind in present):
            names = sorted({kind.__name__ for kind in present})
            unmatched(
                f"layer_type_quant_config: {none} is a {layer_type.__name__}. Present: {', '.join(names) or 'none'}."
            )


def _require_parameters(name: str, module: nn.Module) -> None:
    """Raise StructureError, naming the layer, where its weight or bias is computed from other parameters; ConfigError
    where it has none before its first forward.

    A hook or a parametrization (pruning, weight_norm, spectral_norm) makes it anew in each forward, so that quantized
    values written to it would be gone.
    """
    if isinstance(module._parameters.get("weight"), nn.UninitializedParameter):
        raise ConfigError(f"{name} ({type(module).__name__}) has no weight yet: run the model on one batch first.")
    for role in ("weight", "bias"):
        if getattr(module, role, None) is not None and role not in (*module._parameters, *module._buffers):
            raise StructureError(
                f"{name}.{role} is no parameter but computed in each forward (pruning, weight_norm, spectral_norm). "
                f"Make it one first, by torch.nn.utils.prune.remove(layer, {role!r}), remove_weight_norm, "
                f"remove_spectral_norm or parametrize.remove_parametrizations(layer, {role!r})."
            )
