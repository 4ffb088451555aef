"""The preparation of a float model: its settings are checked, and passes bring it into the form that they need."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from quark.core.granularity import PerGroup
from quark.core.names.patterns import Scope, require_matches
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.calibration.qparams import onnx_range
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import STANDS_FOR, is_op
from quark.onnx.graph.model_file import infer_shapes, name_nodes, opset
from quark.onnx.graph.scopes import nodes_of, outside
from quark.onnx.operators.targets import TARGETS, Target
from quark.onnx.passes import run_passes
from quark.onnx.passes.balance_columns import balance_columns
from quark.onnx.passes.convert_float import convert_fp16_to_fp32
from quark.onnx.passes.convert_nchw_to_nhwc import convert_nchw_to_nhwc
from quark.onnx.passes.convert_opset_version import convert_opset_version
from quark.onnx.passes.fix_shapes import fix_shapes
from quark.onnx.passes.hoist_constants import hoist_constants
from quark.onnx.passes.simplify import join_constants, simplify
from quark.onnx.placement.kept_codes import refuse_finished
from quark.onnx.qdq.qdq_nodes import EXTENDED
from quark.onnx_ops.element_types import BLOCKED_OPSET, FIRST_OPSET, PER_CHANNEL_OPSET
from quark.onnx_ops.operators import BLOCK_OPSET

CONVERT_OPSET, SIMPLIFY = convert_opset_version.__name__, simplify.__name__
OF_THE_WHOLE = [CONVERT_OPSET, *(step.__name__ for step in (fix_shapes, convert_fp16_to_fp32, convert_nchw_to_nhwc))]
"""Passes that change the model and its bodies at once, or its inputs."""


def prepare(model: ir.Model, settings: Settings, passed: Settings | None = None) -> Settings:
    """Run the passes on a float model; the settings are then those of the model as it is, in ONNX's ranges.

    Args:
        model: Changed.
        settings: What is asked for.
        passed: Settings with which the passes have been run on it: they are not run again (`same_passes`).
    """
    _refuse_unsupported(settings)
    refuse_finished(model)
    _inline_functions(model)
    _require_tensors(settings, model)
    target_opset = _opset(model, settings)
    settings = _pin_scopes(_with_onnx_ranges(settings), model)
    if passed is None:
        infer_shapes(model)
        run_passes(model, {**settings.passes, CONVERT_OPSET: target_opset})
    _arrange_weights(model, settings)
    _check_float_type(model, settings)
    return _drop_removed(settings, model)


def same_passes(one: Settings, other: Settings) -> bool:
    """True where the passes make one model by both settings, and no scope names a node that they may have removed."""
    scopes = [(s.nodes, s.exclude, s.by_name, s.first, s.last) for s in (one.specs, other.specs)]
    same = (one.passes, _needed_opset(one)) == (other.passes, _needed_opset(other))
    return same and not any(any(each) for each in scopes)


def _inline_functions(model: ir.Model) -> None:
    """Write functions out where they are called, as runtimes do at load: what they hold is then quantized too.

    Functions stay where one has other opsets than the model: there the same nodes mean something else.
    """
    imports = model.opset_imports
    functions = model.functions.values()
    same = all(imports.get(domain, v) == v for function in functions for domain, v in function.opset_imports.items())
    if functions and same:
        InlinePass()(model)
        name_nodes(model)


def prepare_body(model: ir.Model, settings: Settings) -> None:
    """Run the passes on a body as a model, which is changed; `settings` are those of the model around it, prepared."""
    passes = {**settings.passes, **dict.fromkeys(OF_THE_WHOLE)}
    if passes.get(SIMPLIFY):
        # onnxslim, which keywords ask for, has seen the bodies in the model around them.
        passes[SIMPLIFY] = True
    infer_shapes(model)
    run_passes(model, passes)
    _arrange_weights(model, settings)


def _arrange_weights(model: ir.Model, settings: Settings) -> None:
    """Make weights that get codes whole, constants of bodies constants, and columns of one scale equal in range."""
    specs, weight = settings.specs, settings.specs.layer.weight
    if settings.qdq.matmul_nbits is not None:
        return
    if specs.weights_apart and settings.passes.get(SIMPLIFY, True) not in (None, False):
        join_constants(model)
        hoist_constants(model)
    in_integers = weight is not None and weight.has_zero_point and not (specs.weights_only or weight.is_block)
    if in_integers and (specs.all_op_types or not specs.op_types or "MatMul" in specs.op_types):
        excluded = {name for scope in specs.exclude if isinstance(scope, frozenset) for name in scope}
        balance_columns(model, excluded)


def _pin_scopes(settings: Settings, model: ir.Model) -> Settings:
    """Settings whose scopes are the names of the nodes that they match in this model.

    Raises:
        ConfigError: A scope matches no node.
    """

    def names(scopes: tuple[Scope, ...], where: str, inner: bool) -> tuple[Scope, ...]:
        return (frozenset(node.name or "" for node in nodes_of(scopes, model, where, inner)),)

    bodies = settings.specs.bodies
    nodes = model.graph.all_nodes() if bodies else model.graph
    require_matches(settings.specs.nodes, [node.name or "" for node in nodes], "NodesToQuantize")
    by_name = tuple((names(scopes, "specific_layer_config", bodies), layer) for scopes, layer in settings.specs.by_name)
    beyond = outside(settings.specs.first, settings.specs.last, model)
    # Nodes of bodies may be excluded in any case: these are quantized unasked where there is nothing else.
    exclude = (*names(settings.specs.exclude, "exclude", True), frozenset(node.name or "" for node in beyond))
    return replace(settings, specs=replace(settings.specs, exclude=exclude, first=(), last=(), by_name=by_name))


def _require_tensors(settings: Settings, model: ir.Model) -> None:
    """Raise ConfigError for an override of a tensor that is nowhere, which no graph of several would find missing."""
    if not settings.specs.bodies:
        return
    graphs = [model.graph, *model.graph.subgraphs()]
    known = {value.name or "" for graph in graphs for value in (*graph.inputs, *graph.initializers.values())}
    known |= {value.name or "" for node in model.graph.all_nodes() for value in node.outputs}
    for name, _ in settings.specs.overrides:
        if name not in known:
            raise ConfigError(f"TensorQuantOverrides: no tensor is named {name!r}. {did_you_mean(name, known)}")


def _drop_removed(settings: Settings, model: ir.Model) -> Settings:
    """Settings whose NodesToQuantize are those that the passes left.

    Raises:
        ConfigError: There were some, and none is left.
    """
    nodes = model.graph.all_nodes() if settings.specs.bodies else model.graph
    names = {name: node.name or "" for node in nodes for name in (node.name, node.meta.get(STANDS_FOR)) if name}
    left = tuple(node for name, node in names.items() if name in settings.specs.nodes)
    if settings.specs.nodes and not left:
        raise ConfigError(
            f"NodesToQuantize: the graph passes removed {', '.join(settings.specs.nodes)}. "
            "Possible: SkipPreprocess=True."
        )
    return replace(settings, specs=replace(settings.specs, nodes=left))


def _opset(model: ir.Model, settings: Settings) -> int:
    """The opset to convert to: what was asked for, else the model's own or the first that is needed."""
    needed, given = _needed_opset(settings), settings.passes.get(CONVERT_OPSET)
    if not isinstance(given, int):
        return max(opset(model), needed)
    if given < needed:
        raise ConfigError(f"ConvertOpsetVersion={given}: what is quantized here needs opset {needed}.")
    return given


def _needed_opset(settings: Settings) -> int:
    """13, the first with per-channel Q/DQ; 14 for the block formats; 19 for FP8; 21 for 4-bit types and groups."""
    specs = _specs(settings)
    grouped = any(s.has_zero_point and (s.dtype.bits < 8 or isinstance(s.granularity, PerGroup)) for s in specs)
    if settings.qdq.matmul_nbits is None and (settings.qdq.quantize_fp16 or grouped):
        return BLOCKED_OPSET
    least = BLOCK_OPSET if any(spec.is_block for spec in specs) else PER_CHANNEL_OPSET
    return max([least, *(FIRST_OPSET.get(s.dtype.onnx, 0) for s in specs if s.dtype.is_float and not s.is_block)])


def _specs(settings: Settings) -> list[TensorSpec]:
    """Every spec that a tensor may get."""
    layers = [settings.specs.layer, *(layer for _, layer in (*settings.specs.by_name, *settings.specs.by_type))]
    layers += [layer for layer, _ in settings.specs.mixed]
    return [spec for layer in layers if layer for spec in (layer.input, layer.weight, layer.output) if spec]


def _half_scale(spec: TensorSpec | None) -> TensorSpec | None:
    """The spec with scales that float16 holds. Raises NotSupportedError for what has no Q/DQ of float16 tensors."""
    if spec is None:
        return None
    if not spec.has_zero_point or spec.dynamic or spec.dtype.bits > 16:
        raise NotSupportedError(f"QuantizeFP16=True with {spec.dtype}: possible: static integers of 4 to 16 bits.")
    return replace(spec, scale_type=ScaleType.float16) if spec.scale_type is ScaleType.float32 else spec


def _check_float_type(model: ir.Model, settings: Settings) -> None:
    """Raise NotSupportedError for a half-precision model, and ConfigError for another, where that is not asked for."""
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    if settings.qdq.quantize_fp16:
        if not any(value.dtype is not None and value.dtype.name == "FLOAT16" for value in values):
            raise ConfigError("QuantizeFP16=True is for float16 models; this one has no float16 input or weight.")
        return
    for value in values:
        if value.is_graph_input() and all(is_op(use.node, "Cast") for use in value.uses()):
            continue
        if value.dtype is not None and value.dtype.name in ("FLOAT16", "BFLOAT16"):
            convert = "set QuantizeFP16=True or ConvertFP16ToFP32=True, or run quark.onnx.tools.convert_fp16_to_fp32"
            advice = convert if value.dtype.name == "FLOAT16" else "convert the model to float32"
            raise NotSupportedError(f"{value.name} is {value.dtype.name.lower()}, the model must be float32: {advice}.")


def _refuse_unsupported(settings: Settings) -> None:
    """Raise for specs that the target does not run, or that cannot be written.

    Raises:
        ConfigError: The target needs another element type, or another float type of the model.
        NotSupportedError: An element type is not part of the ONNX flow.
    """
    target, given = TARGETS[settings.qdq.target], settings.specs.layer.input
    if target.activations and given is not None and not given.dynamic and not _runs(target, given):
        integers = target.symmetric and given.has_zero_point
        wanted = f"{'symmetric ' if integers else ''}{' or '.join(sorted(target.activations))}"
        kind = "asymmetric " if integers and not given.symmetric else ""
        raise ConfigError(
            f"The target {target.name!r} runs {wanted} activations in integers only; the config has "
            f"{kind}{given.dtype}. Possible: {wanted} activations, or the target 'generic'."
        )
    for spec in _specs(settings):
        names = {spec.dtype.name, spec.dtype.onnx}
        if spec.dtype.is_float and not spec.is_block and names.isdisjoint([*EXTENDED, *FIRST_OPSET]):
            raise NotSupportedError(f"{spec.dtype} is not part of this version of the ONNX flow.")
    if settings.qdq.quantize_fp16 and target.activations:
        raise ConfigError(f"QuantizeFP16=True: {target.name} computes in float32; set ConvertFP16ToFP32=True.")


def _with_onnx_ranges(settings: Settings) -> Settings:
    """The settings with ONNX's symmetric ranges; for a half-precision model with float16 scales and float biases."""

    def convert(layer: LayerSpec) -> LayerSpec:
        specs = {role: onnx_range(getattr(layer, role)) for role in ("weight", "bias", "input", "output")}
        if settings.qdq.quantize_fp16:
            specs = {role: _half_scale(spec) for role, spec in specs.items() if role != "bias"}
        return LayerSpec(**specs)

    mixed = tuple((convert(layer), names) for layer, names in settings.specs.mixed)
    specs, qdq = replace(settings.specs.with_layers(convert), mixed=mixed), settings.qdq
    if settings.qdq.quantize_fp16:
        specs, qdq = replace(specs, int32_bias=False), replace(qdq, int16_bias=False)
    return replace(settings, specs=specs, qdq=qdq)


def _runs(target: Target, spec: TensorSpec) -> bool:
    """True where the integer kernels of a target read activations of a spec."""
    return spec.dtype.name in target.activations and (spec.symmetric or not target.symmetric)
