"""Settings: what the ONNX flow is asked to do. Every config and option is lowered to one, once; frozen.

Nothing after lowering reads a config or an option by name. The six parts are lowered by a file each in lowering/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from quark.core.names.patterns import Scope
from quark.core.spec import LayerSpec
from quark.onnx.operators import ACTIVATIONS, FUSE_ACTIVATIONS

FUSED = frozenset(product(FUSE_ACTIVATIONS, ACTIVATIONS))


@dataclass(frozen=True)
class Override:
    """The differences of one tensor; None leaves it as it is.

    Attributes:
        dtype: Integer type, a name of core's.
        symmetric: Whether the zero point is fixed.
        axis: Axis of the channels of a weight, each with its own scale.
        scale, zero_point: Instead of what calibration finds; both or none.
        low, high: The range instead of the one that calibration finds; both or none.
    """

    dtype: str | None = None
    symmetric: bool | None = None
    axis: int | None = None
    scale: float | None = None
    zero_point: int | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class SpecSettings:
    """Which tensors are quantized, and to what.

    Attributes:
        layer: Specs of inputs, weights, biases and outputs of every quantized node. A bias spec of None keeps the
            bias in float; `int32_bias` overrules it.
        by_name: (scopes, specs) in order; specs None keeps the nodes in float.
        by_type: (op types, specs) in order; specs None keeps the nodes in float.
        mixed: (specs, names) that the search for mixed precision gives to layers. Names None: to any; empty: to those
            that no other entry names.
        exclude: Nodes that stay in float; over everything.
        first, last: Nodes that quantization begins and ends with: all that is before or after stays in float.
        op_types: Op types that are quantized; empty: those with a rule.
        all_op_types: Every op type of the model that can be, whatever `op_types` says.
        extra_op_types: Op types beside the default ones.
        nodes: Only these nodes; empty: all.
        weights_only: Quantize weights, not activations.
        int32_bias: Bias as int32 with scale = input scale * weight scale.
        matmul_const_only: Leave MatMul without a constant operand in float.
        channel_axes: (op type, axis of the output channels of its weight), checked.
        refine_block_axis: Let blocks lie along the axis that each op reduces, whatever axis the spec has.
        refine_weight_scales: Where no activation has Q/DQ, give weights that one scale serves badly scales of channels.
        unsigned_relu: Give the outputs of Relu, and of Clip from 0, a zero point of their own.
        overrides: (tensor, what differs for it and all that share its scale).
        bodies: Quantize the bodies of If, Loop and Scan too.
        is_body: The model is such a body: a name or op type that it does not have is one of the model around it.
    """

    layer: LayerSpec
    by_name: tuple[tuple[tuple[Scope, ...], LayerSpec | None], ...] = ()
    by_type: tuple[tuple[tuple[str, ...], LayerSpec | None], ...] = ()
    mixed: tuple[tuple[LayerSpec, tuple[str, ...] | None], ...] = ()
    exclude: tuple[Scope, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    all_op_types: bool = False
    extra_op_types: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    weights_only: bool = False
    int32_bias: bool = True
    matmul_const_only: bool = False
    channel_axes: tuple[tuple[str, int], ...] = ()
    refine_block_axis: bool = True
    refine_weight_scales: bool = True
    unsigned_relu: bool = False
    overrides: tuple[tuple[str, Override], ...] = ()
    bodies: bool = False
    is_body: bool = False

    @property
    def weights_apart(self) -> bool:
        """True where activations have no Q/DQ, and stay in float or are quantized as they come; weights have codes."""
        return self.layer.input is None or self.layer.input.dynamic

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> SpecSettings:
        """With the specs of every layer changed, but for those of mixed precision."""
        return replace(
            self,
            layer=change(self.layer),
            by_name=tuple((scopes, layer and change(layer)) for scopes, layer in self.by_name),
            by_type=tuple((op_types, layer and change(layer)) for op_types, layer in self.by_type),
        )


@dataclass(frozen=True)
class QDQSettings:
    """Where Q/DQ stand, and how they and the constants after them are written.

    Attributes:
        target: Name of a target profile: a row of `operators/targets.py`.
        target_given: Whether the user named it.
        fused: (op type, op type of its only reader): nothing is quantized between the two.
        float_output_types: Op types whose output is not quantized on their behalf.
        float_outputs: Nodes of which the same holds.
        fold_relu: Drop a Relu or Clip whose effect the quantized range already has.
        align: Op types ("Concat", "Pool", "Pad", "Slice", "Eltwise") whose inputs and output share one scale.
        force_pass_through: Quantize data-movement ops even where their input is not quantized.
        dedicated_pairs: One Q/DQ pair for each reader of a tensor.
        dedicated_dequantize: One DequantizeLinear for each reader of a tensor.
        dual_pairs: Two pairs where precisions meet (`placement/dual_pairs.py`); else the specs of that layer win.
        propagate_specs: What shares a scale with a tensor of such a layer has its type too.
        float_weights: Store weights in float, after a pair of Q/DQ.
        int16_bias: Biases as int16, of a coarser scale where they do not fit.
        fit_int32_bias: Enlarge the scale of a weight where its int32 bias would not fit.
        matmul_nbits: Accuracy level (0 to 4) of the MatMulNBits nodes that MatMul with 4-bit weights become; None:
            weights after a blocked DequantizeLinear.
        quantize_fp16: The model is float16, and so are its scales; biases stay float16.
        contrib_domain: Write Q/DQ in the com.microsoft domain.
        cast_bfloat16: Write bfloat16 as pairs of Cast.
        clip_bfloat16: Clip activations to the range of bfloat16 before they are quantized to it.
    """

    target: str = "generic"
    target_given: bool = False
    fused: frozenset[tuple[str, str]] = FUSED
    float_output_types: tuple[str, ...] = ()
    float_outputs: tuple[str, ...] = ()
    fold_relu: bool = False
    align: tuple[str, ...] = ()
    force_pass_through: bool = False
    dedicated_pairs: bool = False
    dedicated_dequantize: bool = False
    dual_pairs: bool = False
    propagate_specs: bool = False
    float_weights: bool = False
    int16_bias: bool = False
    fit_int32_bias: bool = True
    matmul_nbits: int | None = None
    quantize_fp16: bool = False
    contrib_domain: bool = False
    cast_bfloat16: bool = False
    clip_bfloat16: bool = False


@dataclass(frozen=True)
class CalibrationSettings:
    """How the ranges of activations are found.

    Attributes:
        samples: Most samples read; None for all.
        statistics: File of calibration statistics: read if it exists, completed and written; None for no file.
        range_file: JSON file of the ranges: used if it exists, else written; None for no file.
        ranges: (tensor, (low, high)) that a search chose for it and all that share its scale; tensors that are not
            quantized are passed over.
        figures: Write a figure of the histogram of each tensor.
        percentile: For the percentile observer.
        percentile_candidates: For the layerwise percentile observer, with `percentile_metric` ("mae" or "mse").
        symmetric_range: MinMax: True makes the range symmetric, whatever the spec is. Percentiles: see
            `quark.core.observers.percentile`. None: as the spec asks for.
        entropy_levels: Levels of the quantized distribution of the entropy observer; None for those of the type.
        random_data: Calibrate on random data where no reader is given.
        random_shapes: (input name, shape) of random data, for inputs with unknown dimensions.
        random_ranges: (input name, (low, high)) of random data.
        providers: Execution providers.
    """

    samples: int | None = None
    statistics: str | None = None
    range_file: str | None = None
    ranges: tuple[tuple[str, tuple[float, float]], ...] = ()
    figures: bool = False
    percentile: float = 99.999
    percentile_candidates: tuple[float, ...] = (99.99, 99.999, 99.99999)
    percentile_metric: str = "mae"
    symmetric_range: bool | None = None
    entropy_levels: int | None = None
    random_data: bool = False
    random_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    random_ranges: tuple[tuple[str, tuple[float, ...]], ...] = ()
    providers: tuple[str, ...] = ("CPUExecutionProvider",)

    @property
    def files(self) -> list[str]:
        """The files that ranges are read from, or written to."""
        return [path for path in (self.statistics, self.range_file) if path is not None]

    @property
    def of_one_tensor(self) -> CalibrationSettings:
        """These settings without the ranges of tensors by name: no statistic of a tensor depends on these."""
        return replace(self, ranges=()) if self.ranges else self


@dataclass(frozen=True)
class NPUSettings:
    """The NPU's operators and its rules for power-of-two scales.

    Attributes:
        conversions: Operators that are computed as the NPU computes them (`npu/simulation.py`).
        rules: The rules that scales are adjusted to (`npu/rules.py`).
        rounds: Most rounds of adjusting.
        check: Whether a broken rule is an error.
    """

    conversions: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    rounds: int = 5
    check: bool = False


@dataclass(frozen=True)
class MeasurementSettings:
    """The timing of kernels, by which nodes that are faster in float stay there.

    Attributes:
        enabled: Whether they are.
        profile: JSON file of the times: used, and completed on the machine that it is of; None for one in the user's
            cache folder.
        threads: Within an operator.
        whole_file: Whether what was written is timed as a whole, too, and refused where it is slower than float.
        node_seconds: (node, seconds in float) of the nodes that were timed; empty before.
    """

    enabled: bool = False
    profile: str | None = None
    threads: int = 1
    whole_file: bool = False
    node_seconds: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Settings:
    """All that is done to a model.

    Attributes:
        specs: Which tensors are quantized, and to what.
        passes: Name of a graph pass -> its argument, True, or False or None to leave it out. One without an entry has
            the default of its row.
        qdq: Where Q/DQ stand, and how they are written.
        calibration: How the ranges of activations are found.
        npu: The NPU's operators and rules.
        measurement: Whether kernels are timed.
        equalization: A CLEConfig that runs before the algorithms, silent where nothing qualifies; None for none.
        equalize_if_better: Only if the outputs are then no further from the float ones, on calibration samples.
        ends_decided: Whether it is decided which nodes at both ends of the graph stay in float, as codes would lose
            what they compute (`calibration/front_ends.py`).
        algorithms: Algorithm configs in their order.
        correct_biases: Correct the biases, where there are samples enough (`algorithms/rescaling/bias_correction.py`).
        allow_noop: Let an algorithm that finds nothing to do pass, with a warning; else it is an error.
        least_sqnr: In dB, what the outputs must keep on calibration samples; None: it is logged only.
        tries_advice: Where they keep less, try which nodes in float would help before the error names them.
        external_data: Write weights beside the model, in `<name>.onnx.data`.
        custom_libraries: Libraries of the model's own operators.
        crypto: Keep everything about the model in memory, and out of the log.
        encrypt: Write the output encrypted, where there is a key.
        metrics: Compare the outputs with those of the float model when the work is done.
        metrics_data: The reader of the samples for that; None for those of calibration.
        prepared_file: Where to write the float model when its passes are done; None: nowhere.
        value_infos: Write type and shape of every tensor within the model.
        overwrite: Whether an output is replaced that is there when it is written; else it may have come since the work
            began, from another run.
    """

    specs: SpecSettings
    passes: Mapping[str, object] = field(default_factory=dict)
    qdq: QDQSettings = QDQSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    npu: NPUSettings = NPUSettings()
    measurement: MeasurementSettings = MeasurementSettings()
    equalization: object = None
    equalize_if_better: bool = False
    ends_decided: bool = False
    algorithms: tuple[object, ...] = ()
    correct_biases: bool = False
    allow_noop: bool = True
    least_sqnr: float | None = None
    tries_advice: bool = True
    external_data: bool = False
    custom_libraries: tuple[str, ...] = ()
    crypto: bool = False
    encrypt: bool = False
    metrics: bool = False
    metrics_data: object = None
    prepared_file: str | None = None
    value_infos: bool = False
    overwrite: bool = True
