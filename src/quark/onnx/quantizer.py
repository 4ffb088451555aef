"""ModelQuantizer: the flow on one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from quark.core.granularity import PerGroup
from quark.core.scales import ScaleType
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, NotSupportedError, OutputExistsError
from quark.log import logger
from quark.onnx.algorithms import check_algorithms, run_after, run_before, run_precision
from quark.onnx.calibrate import repeatable
from quark.onnx.decide import decide
from quark.onnx.extended import EXTENDED
from quark.onnx.job import Job
from quark.onnx.model import checked_proto, infer_shapes, load, opset, save
from quark.onnx.npu import simulate
from quark.onnx.parameters import onnx_range
from quark.onnx.passes import PASSES, POST_PASSES, run_passes
from quark.onnx.path_reader import PathDataReader
from quark.onnx.scopes import drop_removed, pin
from quark.onnx.settings import Settings
from quark.onnx.statistics import Statistics, fingerprint
from quark.onnx.targets import TARGETS
from quark.onnx_functions import BLOCK_OPSET

if TYPE_CHECKING:
    import onnx_ir as ir

    from quark.onnx.recover import Recovery

MINIMUM_OPSET = 13
GROUP_OPSET = 21


class ModelQuantizer:
    """Quantizes an ONNX model.

    Args:
        config: A QConfig, or the legacy Config; never changed.

    Example:
        >>> ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model("float.onnx", "int8.onnx", reader)
    """

    def __init__(self, config: Any) -> None:
        # The documented configs and their lowering: the quantizer itself knows Settings only.
        from quark.onnx.config import Config, QConfig
        from quark.onnx.lowering import lower

        if not isinstance(config, (QConfig, Config)):
            raise ConfigError(f"ModelQuantizer takes a QConfig or a Config, got {type(config).__name__}.")
        self.config, self._lower = config, lower
        self.settings = lower(config)

    def quantize_model(
        self,
        model_input: str | os.PathLike[str] | onnx.ModelProto,
        model_output: str | os.PathLike[str] | None = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | None = None,
        algorithms: Sequence[Any] | None = None,
    ) -> onnx.ModelProto | None:
        """Quantize a model.

        Args:
            model_input: Path of the float model, or a ModelProto, which is not changed.
            model_output: Path to write; None returns the model instead.
            calibration_data_reader: Anything with `get_next() -> dict | None`, or an iterable of such dicts; of arrays
                where the model has one input.
            calibration_data_path: Instead: a folder or a file of samples, for PathDataReader.
            algorithms: Algorithm configs to run after those of the config.

        Returns:
            The quantized model if `model_output` is None.

        Raises:
            QuarkError: See its children; no file is written then.
        """
        _refuse_overwriting(model_input, model_output)
        reader = _reader(model_input, calibration_data_reader, calibration_data_path)
        settings = self._lower(self.config, tuple(algorithms)) if algorithms else self.settings
        check_algorithms(settings.algorithms)
        model = quantize(load(model_input), settings, reader)
        logger.info("Model quantization has been completed.")
        return self._written(model, model_output)

    def recover(
        self,
        model_input: str | os.PathLike[str] | onnx.ModelProto,
        model_output: str | os.PathLike[str] | None = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | None = None,
        *,
        budget: str | float | None = "10m",
        metric: str = "sqnr",
        target: float | None = None,
    ) -> Recovery:
        """Quantize a model, and better it by other ranges and by algorithms as long as there is time.

        Every fourth sample is held out; a step is kept where the metric gains on these. The result is never worse by
        this measure than the config as it is.

        Args:
            model_input: As for `quantize_model`.
            model_output: Path to write; None returns the model in `Recovery.model`.
            calibration_data_reader: As for `quantize_model`.
            calibration_data_path: The same.
            budget: Seconds, or text like "90s", "10m", "1h"; None for as long as it takes. When it ends, the best
                model so far is the result; an algorithm that runs ends at its next layer.
            metric: "sqnr", "psnr", "cosine" or "l2", between the outputs of the float model and of the quantized one;
                of several outputs the worst counts.
            target: The value of the metric that is enough.

        Raises:
            CalibrationError: Fewer than four samples.
            QuarkError: See its children; no file is written then.
        """
        # The other way round, recovery is made of the functions of this file.
        from quark.onnx.judge import Metric
        from quark.onnx.recover import duration, recover

        _refuse_overwriting(model_input, model_output)
        seconds = None if budget is None else duration(budget)
        measure, reader = Metric(metric), _reader(model_input, calibration_data_reader, calibration_data_path)
        found, model = recover(load(model_input), self.settings, reader, measure, target, seconds)
        return replace(found, model=self._written(model, model_output))

    def _written(self, model: ir.Model, output: str | os.PathLike[str] | None) -> onnx.ModelProto | None:
        """The model, checked; None where it went to a file."""
        if output is None:
            return checked_proto(model)
        save(model, output, self.settings.external_data)
        return None


def _reader(model: Any, reader: Any, path: str | None) -> Any:
    """The calibration data that was given in one of two ways."""
    if path is None:
        return reader
    if reader is not None:
        raise ConfigError("Give a calibration_data_reader or a calibration_data_path, not both.")
    return PathDataReader(model, path)


def _refuse_overwriting(source: Any, output: Any) -> None:
    """Raise OutputExistsError where the output would replace the float model."""
    paths = [Path(path).resolve() for path in (source, output) if isinstance(path, (str, os.PathLike))]
    if len(paths) == 2 and paths[0] == paths[1]:
        raise OutputExistsError(f"{output} is the float model itself. Choose another output.")


def quantize(model: ir.Model, settings: Settings, reader: Any = None) -> ir.Model:
    """Passes, placement, calibration, rewriting; changes and returns the model."""
    identity = fingerprint(model) if settings.statistics else ""
    return convert(model, prepare(model, settings), reader, identity)


def prepare(model: ir.Model, settings: Settings) -> Settings:
    """Run the passes on a float model; the settings are then those of the model as it is, in ONNX's ranges."""
    settings = _supported(settings)
    settings = pin(settings, model)
    infer_shapes(model)
    run_passes(model, replace(settings, convert_opset_version=_opset(model, settings)), PASSES)
    check_float_type(model, settings)
    return drop_removed(settings, model)


def convert(
    model: ir.Model, settings: Settings, reader: Any, identity: str = "", known: dict[str, Statistics] | None = None
) -> ir.Model:
    """Quantize a prepared model, which is changed and returned.

    Args:
        model: The float model.
        settings: Those that `prepare` gave.
        reader: Calibration data.
        identity: Fingerprint of the model before it was prepared, for the statistics file.
        known: Statistics in memory by the fingerprint of what they are of, used and completed instead of a file.
    """
    data = repeatable(reader, model, settings) if settings.algorithms else None
    reader = reader if data is None else data
    changed = run_before(model, settings, data)
    if (simulate(model, settings) or changed) and identity:
        # Statistics of simulated operators, or rescaled layers, are not those of the float model.
        identity = fingerprint(model)
    settings = run_precision(model, settings, data)
    statistics = None
    if known is not None:
        identity = fingerprint(model)
        statistics = known.setdefault(identity, Statistics(identity))
    reference = model.clone()
    twins = dict(zip(model.graph, reference.graph, strict=True))
    job = Job(decide(model, settings, reader, identity, statistics), reference, data)
    job.write(twins)
    run_after(job)
    run_passes(model, settings, POST_PASSES)
    model.producer_name = "quark.onnx"
    return model


def _opset(model: ir.Model, settings: Settings) -> int:
    """The opset to convert to: what was asked for, else the model's own or the first that is needed."""
    needed, asked = _needed_opset(settings), settings.convert_opset_version
    if asked is not None and asked < needed:
        raise ConfigError(f"ConvertOpsetVersion={asked}: what is quantized here needs opset {needed}.")
    return asked or max(opset(model), needed)


def _needed_opset(settings: Settings) -> int:
    """13, the first with per-channel Q/DQ; 14 for the block formats; 21 for 4-bit types and groups."""
    specs = _specs(settings)
    grouped = any(s.has_zero_point and (s.dtype.bits < 8 or isinstance(s.granularity, PerGroup)) for s in specs)
    if settings.quantize_fp16 or (grouped and settings.matmul_nbits is None):
        return GROUP_OPSET
    return BLOCK_OPSET if any(spec.is_block for spec in specs) else MINIMUM_OPSET


def _specs(settings: Settings) -> list[TensorSpec]:
    """Every spec that a tensor may get."""
    layers = [settings.layer, *(layer for _, layer in (*settings.by_name, *settings.by_type))]
    layers += [layer for layer, _ in settings.mixed]
    return [spec for layer in layers if layer for spec in (layer.input, layer.weight, layer.output) if spec]


def _half_scale(spec: TensorSpec | None) -> TensorSpec | None:
    """The spec with scales that float16 holds. Raises NotSupportedError for what has no Q/DQ of float16 tensors."""
    if spec is None:
        return None
    if not spec.has_zero_point or spec.dynamic or spec.dtype.bits > 16:
        raise NotSupportedError(f"QuantizeFP16=True with {spec.dtype}: possible: static integers of 4 to 16 bits.")
    return replace(spec, scale_type=ScaleType.float16) if spec.scale_type is ScaleType.float32 else spec


def check_float_type(model: ir.Model, settings: Settings) -> None:
    """Raise NotSupportedError for a half-precision model, and ConfigError for another, where that is not asked for."""
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    if settings.quantize_fp16:
        if not any(value.dtype is not None and value.dtype.name == "FLOAT16" for value in values):
            raise ConfigError("QuantizeFP16=True is for float16 models; this one has no float16 input or weight.")
        return
    for value in values:
        if value.dtype is not None and value.dtype.name in ("FLOAT16", "BFLOAT16"):
            convert = "set QuantizeFP16=True or ConvertFP16ToFP32=True, or run quark.onnx.tools.convert_fp16_to_fp32"
            advice = convert if value.dtype.name == "FLOAT16" else "convert the model to float32"
            raise NotSupportedError(f"{value.name} is {value.dtype.name.lower()}, the model must be float32: {advice}.")


def _supported(settings: Settings) -> Settings:
    """Settings with ONNX's symmetric ranges. Raises NotSupportedError for specs that cannot be written yet."""
    wanted = TARGETS[settings.target].activation
    given = settings.layer.input
    if wanted and given is not None and not given.dynamic and given.dtype.name != wanted:
        raise ConfigError(
            f"The target {settings.target!r} runs {wanted} activations in integers only; the config has "
            f"{given.dtype}. Possible: {wanted} activations, or the target 'generic'."
        )
    for spec in _specs(settings):
        if spec.dtype.is_float and not (spec.is_block or spec.dtype.name in EXTENDED):
            raise NotSupportedError(f"{spec.dtype} is not part of this version of the ONNX flow.")

    def convert(layer: LayerSpec | None) -> LayerSpec | None:
        if layer is None:
            return None
        parts = {name: onnx_range(getattr(layer, name)) for name in ("weight", "bias", "input", "output")}
        if settings.quantize_fp16:
            parts = {name: _half_scale(spec) for name, spec in parts.items() if name != "bias"}
        return LayerSpec(**parts)

    if settings.quantize_fp16:
        if settings.target == "ort_x64" or settings.matmul_nbits is not None:
            raise ConfigError(
                "QuantizeFP16=True: ort_x64 and MatMulNBits compute in float32; set ConvertFP16ToFP32=True."
            )
        settings = replace(settings, int32_bias=False, int16_bias=False)

    return replace(
        settings,
        layer=convert(settings.layer) or LayerSpec(),
        by_name=tuple((scopes, convert(layer)) for scopes, layer in settings.by_name),
        by_type=tuple((types, convert(layer)) for types, layer in settings.by_type),
        mixed=tuple((convert(layer) or LayerSpec(), names) for layer, names in settings.mixed),
    )
