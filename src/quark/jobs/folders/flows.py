"""The three flows of `quark quantize` of a folder: a model in memory, block by block, from file to file.

All give the same files. From file to file needs no data; block by block needs a block of memory, and a model in memory
can be anything that transformers loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quark.base.log import logger
from quark.base.memory_and_disk import available_memory
from quark.errors import ConfigError, FormatError, NotSupportedError
from quark.jobs.folders.calibration import Calibration
from quark.jobs.folders.export import Export
from quark.jobs.request import FolderRequest
from quark.jobs.words import ONNX

STORED_FLOAT = "fake_quantized"
"""The weight format that is as large as the float model."""


@dataclass(frozen=True)
class FolderFlow:
    """How a folder is quantized and written.

    Attributes:
        request: What was asked for.
        config: A QConfig.
        calibration: The data.
        export: Where the result goes, and as what.
        before: Is told of the float model in memory, and of its samples.
    """

    request: FolderRequest
    config: Any
    calibration: Calibration
    export: Export
    before: Callable[[Any, Sequence[Any] | None], None]


def write_folder(flow: FolderFlow) -> tuple[int, list[Any]]:
    """Quantize a folder in the way that suits it; with --stream block by block, or with --no-stream in memory.

    Returns:
        The bytes of its weights on disk, and the `quant_errors` of a model in memory.
    """
    stream, calibration = flow.request.stream, flow.calibration
    of_weights = stream is None and calibration == Calibration()
    if of_weights and _from_file_to_file(flow):
        return flow.export.size(), []
    if calibration.synthetic is not None:
        if stream:
            raise ConfigError("--synthetic with --stream: only a model in memory writes texts. Possible: one of them.")
        stream = False
    return (_streamed(flow), []) if _streams(flow, stream) else _in_memory(flow)


def _in_memory(flow: FolderFlow) -> tuple[int, list[Any]]:
    """Write the quantized model, after `before` has had the float one.

    Returns:
        The bytes of its weights on disk, and its `quant_errors`.
    """
    from quark.jobs.folders.models import check_loading, inputs_of, is_read, load_model
    from quark.torch import ModelQuantizer
    from quark.torch.algorithms import algorithms_of

    request, model, config, calibration = flow.request, flow.request.model, flow.config, flow.calibration
    check_loading(request.load)
    other = not is_read(model)
    data = None if other else _preflight_data(flow)
    float_model = load_model(model, request.load, dequantize=True)
    if other:  # only the model that is loaded says what it takes
        data = calibration.read(inputs_of(model, float_model))
    data = calibration.with_synthetic(float_model, data)
    flow.before(float_model, data)
    data = calibration.joined(float_model, data, algorithms_of(config.algo_config or []))
    quantizer = ModelQuantizer(config)
    quantized: Any = quantizer.freeze(quantizer.quantize_model(float_model, data))
    return flow.export.write(quantized), quantized.quant_errors


def _say_time(flow: FolderFlow, meta: Any, data: Sequence[Any] | None) -> None:
    """Log what the steps will take by estimate, where the data are tokens."""
    from quark.torch.algorithms import algorithms_of
    from quark.torch.flows.effort_costs import measured_speed, step_costs
    from quark.torch.model.batches import longest_in, named_device, tokens_in

    tokens = tokens_in(data)
    algorithms = algorithms_of(flow.config.algo_config or [])
    if not tokens or not algorithms:
        return
    written = (flow.calibration.synthetic or 0) * longest_in(data)
    speed = measured_speed(meta, named_device(flow.request.device))
    costs = step_costs(meta, algorithms, tokens, written, speed)
    if costs.seconds:
        logger.info("Estimated time: %s.", costs)


def _from_file_to_file(flow: FolderFlow) -> bool:
    """Write the same files tensor by tensor, without a model in memory.

    Returns:
        Whether that was possible: where no data are needed, of a folder of float weights that is as it should be.
        Where it was not, nothing is left, and a model in memory does it, or says what is wrong.
    """
    from quark.jobs.folders.models import check_loading, is_read
    from quark.torch.flows.file2file import quantize_files

    request, config, export = flow.request, flow.config, flow.export
    inside = config.algo_config or config.kv_cache_quant_config or config.softmax_quant_spec
    if export.form == ONNX or inside or not is_read(request.model):
        return False
    check_loading(request.load)
    if request.dtype != "auto":
        return False
    try:
        quantize_files(
            config, request.model, export.path, devices=[request.device], overwrite=export.force,
            keep_unexpected=request.keep_unexpected, target=export.target(),
            trust_remote_code=request.trust_remote_code,
        )  # fmt: skip
    except (FormatError, NotSupportedError) as error:
        logger.debug("Not from file to file: %s", error)
        return False
    return True


def _streamed(flow: FolderFlow) -> int:
    """The same without a model in memory, whose errors are in the log only."""
    from quark.jobs.folders.models import inputs_of, load_meta_model
    from quark.torch.flows.from_disk import stream

    request, export, model = flow.request, flow.export, flow.request.model
    if request.dtype != "auto":
        raise ConfigError(
            f"--dtype {request.dtype}: streaming computes in the dtype of the model. Possible: --dtype auto."
        )
    data = flow.calibration.read(inputs_of(model, load_meta_model(model, request.trust_remote_code)))
    stream(
        flow.config, model, export.path, data, device=request.device, overwrite=export.force,
        keep_unexpected=request.keep_unexpected, target=export.target(), trust_remote_code=request.trust_remote_code,
    )  # fmt: skip
    return export.size()


def _streams(flow: FolderFlow, stream: bool | None) -> bool:
    """Whether to go block by block: where it is asked for, or memory is too small. Raises ConfigError."""
    from quark.jobs.folders.models import float_bytes
    from quark.torch.calibration.distributed import from_first

    form, summed = flow.export.form, flow.request.save_imatrix
    if form == ONNX and stream:
        raise ConfigError(
            f"--stream with --export-format {form}: block by block folders and GGUF files are written. Possible: "
            "another --export-format, or no --stream."
        )
    if stream and summed is not None:
        raise ConfigError("--save-imatrix with --stream: only a model in memory is summed up. Possible: one of them.")
    if summed is not None:
        return False
    if stream is None:
        # What is free of the memory differs between processes.
        size = float_bytes(flow.request.model, flow.request.trust_remote_code)
        stream = not from_first(fits_memory(size))
    return form != ONNX and stream


def fits_memory(weight_bytes: int) -> bool:
    """Whether a model and its quantized copy fit into what is free of the memory; where that is unknown, yes."""
    available = available_memory()
    return available is None or 1.5 * weight_bytes < available


def _preflight_data(flow: FolderFlow) -> Sequence[Any] | None:
    """The calibration data, once it is known that the job fits into memory and onto the disk.

    Raises:
        CalibrationError, FormatError: The data cannot be read, or never reach what needs them.
        NotSupportedError, ShapeError: The format has no place for what is planned, or its readers would not find it.
        OutputError, TooLittleMemoryError: The disk or the memory is too small.
    """
    import torch

    from quark.jobs.folders.models import inputs_of, load_meta_model
    from quark.torch.algorithms import algorithms_of
    from quark.torch.checkpoint.shards import predicted_bytes
    from quark.torch.flows.check_plan import check_data, check_plan
    from quark.torch.flows.predicted_size import planned
    from quark.torch.flows.preflight import estimate, preflight

    request, config, export = flow.request, flow.config, flow.export
    meta = load_meta_model(request.model, request.trust_remote_code)
    if request.dtype != "auto":
        meta = meta.to(getattr(torch, request.dtype))
    data = flow.calibration.read(inputs_of(request.model, meta))
    output = predicted_bytes(meta, None)
    weights = estimate(meta, output, algorithms_of(config.algo_config or []), data, whole=True)
    plan, size = planned(meta, config, export.form)
    if export.weight_format != STORED_FLOAT:
        weights = replace(weights, output=size)
    undecoded = check_plan(meta, config, plan, export.form, export.reader)
    if undecoded is not None:
        logger.warning("%s", undecoded)
    check_data(meta, plan, data)
    preflight(weights, export.output, data, "--stream, fewer --samples, or a machine with more")
    _say_time(flow, meta, data)
    return data
