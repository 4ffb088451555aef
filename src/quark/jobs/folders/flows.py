"""The three flows of `quark quantize` of a folder: a model in memory, block by block, from file to file.

All give the same files. From file to file needs no data; block by block needs a block of memory, and a model in memory
can be anything that transformers loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.log import logger
from quark.base.memory_and_disk import available_memory
from quark.errors import ConfigError, FormatError, NotSupportedError
from quark.jobs.folders.calibration import Calibration
from quark.jobs.folders.export import Export

if TYPE_CHECKING:
    from quark.jobs.folders.model_inputs import ModelInputs
    from quark.jobs.folders.step_inputs import StepInputs

Samples = Callable[["ModelInputs | StepInputs"], Sequence[Any] | None]
"""The calibration data for a model that takes these inputs."""
STREAMED = "quark"
"""The format that is written block by block, and from file to file."""
STORED_FLOAT = "fake_quantized"
"""The weight format that is as large as the float model."""


def write_folder(
    model: Path,
    config: Any,
    calibration: Calibration,
    device: str,
    dtype: str,
    export: Export,
    stream: bool | None,
    load: Mapping[str, bool],
    before: Callable[[Any, Sequence[Any] | None], None],
) -> tuple[int, list[Any]]:
    """Quantize a folder in the way that suits it; with `stream` block by block, or with False in memory.

    Returns:
        The bytes of its weights on disk, and the `quant_errors` of a model in memory.
    """
    from quark.jobs.folders.models import folder_bytes

    of_weights = stream is None and calibration == Calibration()
    if of_weights and _from_file_to_file(model, config, device, dtype, export, load):
        return folder_bytes(export.output), []
    if calibration.synthetic is not None:
        if stream:
            raise ConfigError("--synthetic with --stream: only a model in memory writes texts. Possible: one of them.")
        stream = False
    if _streams(stream, export, model, load):
        return _streamed(model, config, calibration.read, device, dtype, export, load["keep_unexpected"]), []
    return _in_memory(model, config, calibration, device, dtype, export, load, before)


def _in_memory(
    model: Path,
    config: Any,
    calibration: Calibration,
    device: str,
    dtype: str,
    export: Export,
    load: Mapping[str, bool],
    before: Callable[[Any, Sequence[Any] | None], None],
) -> tuple[int, list[Any]]:
    """Write the quantized model, after `before` has had the float one.

    Returns:
        The bytes of its weights on disk, and its `quant_errors`.
    """
    from quark.jobs.folders.models import check_loading, inputs_of, is_read, load_model
    from quark.torch import ModelQuantizer
    from quark.torch.algorithms import algorithms_of

    check_loading(device, dtype)
    other = not is_read(model)
    data = None if other else _preflight_data(model, config, calibration.read, export, dtype, load)
    float_model = load_model(model, device, dtype, dequantize=True, **load)
    if other:  # only the model that is loaded says what it takes
        data = calibration.read(inputs_of(model, float_model))
    data = calibration.with_synthetic(float_model, data)
    before(float_model, data)
    data = calibration.joined(float_model, data, algorithms_of(config.algo_config or []))
    quantizer = ModelQuantizer(config)
    quantized: Any = quantizer.freeze(quantizer.quantize_model(float_model, data))
    return export.write(quantized, model), quantized.quant_errors


def _from_file_to_file(
    model: Path, config: Any, device: str, dtype: str, export: Export, load: Mapping[str, bool]
) -> bool:
    """Write the same files tensor by tensor, without a model in memory.

    Returns:
        Whether that was possible: where no data are needed, of a folder of float weights that is as it should be.
        Where it was not, nothing is left, and a model in memory does it, or says what is wrong.
    """
    from quark.jobs.folders.models import check_loading, is_read
    from quark.torch.flows.file2file import quantize_files

    inside = config.algo_config or config.kv_cache_quant_config or config.softmax_quant_spec
    if export.form != STREAMED or load["trust_remote_code"] or inside or not is_read(model):
        return False
    check_loading(device, dtype)
    if dtype != "auto":
        return False
    try:
        quantize_files(
            config, model, export.output, devices=[device], keep_unexpected=load["keep_unexpected"], **export.options
        )
    except (FormatError, NotSupportedError) as error:
        logger.debug("Not from file to file: %s", error)
        return False
    return True


def _streamed(
    model: Path, config: Any, samples: Samples, device: str, dtype: str, export: Export, keep_unexpected: bool
) -> int:
    """The same without a model in memory, whose errors are in the log only."""
    from quark.jobs.folders.models import folder_bytes, inputs_of, load_meta_model
    from quark.torch.flows.from_disk import stream

    if dtype != "auto":
        raise ConfigError(f"--dtype {dtype}: streaming computes in the dtype of the model. Possible: --dtype auto.")
    data = samples(inputs_of(model, load_meta_model(model)))
    stream(config, model, export.output, data, device=device, keep_unexpected=keep_unexpected, **export.options)
    return folder_bytes(export.output)


def _streams(stream: bool | None, export: Export, model: Path, load: Mapping[str, bool]) -> bool:
    """Whether to go block by block: where it is asked for, or memory is too small. Raises ConfigError."""
    from quark.jobs.folders.models import float_bytes
    from quark.torch.calibration.distributed import from_first

    if export.form != STREAMED and stream:
        raise ConfigError(
            f"--stream with --export-format {export.form}: block by block only the {STREAMED} format is written. "
            f"Possible: --export-format {STREAMED}, or no --stream."
        )
    if stream and load["trust_remote_code"]:
        raise ConfigError("--trust-remote-code with --stream: block by block, a class of transformers is needed.")
    if load["trust_remote_code"]:
        return False
    if stream is None:
        # What is free of the memory differs between processes.
        stream = not from_first(_fits_memory(float_bytes(model)))
    return export.form == STREAMED and stream


def _fits_memory(weight_bytes: int) -> bool:
    """Whether a model and its quantized copy fit into what is free of the memory; where that is unknown, yes."""
    available = available_memory()
    return available is None or 1.5 * weight_bytes < available


def _preflight_data(
    model: Path,
    config: Any,
    samples: Samples,
    export: Export,
    dtype: str,
    load: Mapping[str, bool],
) -> Sequence[Any] | None:
    """The calibration data, once it is known that the job fits into memory and onto the disk.

    Args:
        model: Folder of a float model.
        config: A QConfig.
        samples: Reads the data for a model that takes these inputs.
        export: Where the result goes, and as what.
        dtype: To compute in; "auto": as stored.
        load: Options of `load_meta_model`.

    Raises:
        CalibrationError, FormatError: The data cannot be read.
        NotSupportedError, ShapeError: The format has no place for what is planned, or its readers would not find it.
        OutputError, TooLittleMemoryError: The disk or the memory is too small.
    """
    import torch

    from quark.jobs.folders.models import inputs_of, load_meta_model
    from quark.torch.algorithms import algorithms_of
    from quark.torch.checkpoint.shards import predicted_bytes
    from quark.torch.flows.check_plan import check_plan
    from quark.torch.flows.predicted_size import planned
    from quark.torch.flows.preflight import estimate, preflight

    meta = load_meta_model(model, load["trust_remote_code"])
    if dtype != "auto":
        meta = meta.to(getattr(torch, dtype))
    data = samples(inputs_of(model, meta))
    output = predicted_bytes(meta, None)
    weights = estimate(meta, output, algorithms_of(config.algo_config or []), data, whole=True)
    plan, size = planned(meta, config, export.form)
    if export.weight_format != STORED_FLOAT:
        weights = replace(weights, output=size)
    undecoded = check_plan(meta, config, plan, export.form, export.reader)
    if undecoded is not None:
        logger.warning("%s", undecoded)
    preflight(weights, export.output, data, "--stream, fewer --samples, or a machine with more")
    return data
