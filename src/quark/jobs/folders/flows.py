"""The three flows of `quark quantize` of a folder: a model in memory, block by block, from file to file.

All give the same files. From file to file needs no data; block by block needs a block of memory, and a model in memory
can be anything that transformers loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quark.base.log import logger
from quark.base.memory_and_disk import available_memory
from quark.errors import ConfigError, FormatError, NotSupportedError
from quark.jobs.folders.calibration import NO_DATA
from quark.jobs.folders.export import Export
from quark.jobs.folders.imatrix import Imatrices
from quark.jobs.folders.job import FolderJob
from quark.jobs.words import ONNX, algorithms_in

if TYPE_CHECKING:
    from quark.torch.flows.predicted_size import FolderPlan

_STORED_FLOAT = "fake_quantized"
"""The weight format that is as large as the float model."""


def write_folder(job: FolderJob, export: Export) -> tuple[int, list[Any]]:
    """Quantize a folder in the way that suits it; with --stream block by block, or with --no-stream in memory.

    Args:
        job: As `configure` leaves it.
        export: Where the result goes, and as what.

    Returns:
        The bytes of its weights on disk, and the `quant_errors` of a model in memory.
    """
    stream, calibration = job.request.stream, job.calibration
    of_weights = stream is None and calibration == NO_DATA
    if of_weights and _from_file_to_file(job, export):
        return export.size(), []
    if calibration.synthetic is not None:
        if stream:
            raise ConfigError("--synthetic with --stream: only a model in memory writes texts. Possible: one of them.")
        stream = False
    return (_streamed(job, export), []) if _streams(job, stream) else _in_memory(job, export)


def _in_memory(job: FolderJob, export: Export) -> tuple[int, list[Any]]:
    """Write the quantized model.

    Returns:
        The bytes of its weights on disk, and its `quant_errors`.
    """
    from quark.jobs.folders.models import check_loading, inputs_of, load_model
    from quark.torch import ModelQuantizer
    from quark.torch.calibration.distributed import require_shared

    request, calibration = job.request, job.calibration
    check_loading(request.load)
    require_shared(export.path.parent)  # it is written at the end
    data = None if job.plan is None else _preflight_data(job, job.plan, export)
    float_model = load_model(job.folder, request.load, dequantize=True)
    if job.plan is None:  # only the model that is loaded says what it takes
        data = calibration.read(inputs_of(request.model, float_model))
    data = calibration.with_synthetic(float_model, data)
    Imatrices.of(request).save(float_model, data, request.calib)
    data = calibration.joined(float_model, data, algorithms_in(job.config))
    quantizer, plan = ModelQuantizer(job.config), _plan_for(job, data)
    layers = None if plan is None else plan.layers
    quantized: Any = quantizer.freeze(quantizer.quantize_as_planned(float_model, data, layers))
    return export.write(quantized, job.folder), quantized.quant_errors


def _plan_for(job: FolderJob, data: Sequence[Any] | None) -> FolderPlan | None:
    """The plan of a job, but where data say more of the model: only they run a network of diffusers."""
    return None if data is not None and job.folder.is_network else job.plan


def _say_time(job: FolderJob, meta: Any, data: Sequence[Any] | None) -> None:
    """Log what the steps will take by estimate, where the data are tokens."""
    algorithms = algorithms_in(job.config)
    if not algorithms:
        return
    from quark.torch.flows.effort_costs import measured_speed, step_costs
    from quark.torch.model.batches import longest_in, named_device, tokens_in

    if not (tokens := tokens_in(data)):
        return
    written = (job.calibration.synthetic or 0) * longest_in(data)
    speed = measured_speed(meta, named_device(job.request.device))
    costs = step_costs(meta, algorithms, tokens, written, speed)
    if costs.seconds:
        logger.info("Estimated time: %s.", costs)


def _from_file_to_file(job: FolderJob, export: Export) -> bool:
    """Write the same files tensor by tensor, without a model in memory.

    Returns:
        Whether that was possible: where no data are needed, of a folder of float weights that is as it should be.
        Where it was not, nothing is left, and a model in memory does it, or says what is wrong.
    """
    from quark.jobs.folders.models import check_loading
    from quark.torch.flows.file2file import quantize_files

    request, config = job.request, job.config
    inside = config.algo_config or config.kv_cache_quant_config or config.softmax_quant_spec
    if job.form == ONNX or inside or job.plan is None:
        return False
    check_loading(request.load)
    if request.dtype != "auto":
        return False
    try:
        quantize_files(
            config, job.folder, export.path, devices=[request.device], overwrite=export.force,
            keep_unexpected=request.keep_unexpected, target=export.target(), plan=job.plan,
        )  # fmt: skip
    except (FormatError, NotSupportedError) as error:
        logger.debug("Not from file to file: %s", error)
        return False
    return True


def _streamed(job: FolderJob, export: Export) -> int:
    """Quantize a folder block by block, and write it. Returns the bytes of its weights on disk."""
    from quark.jobs.folders.models import inputs_of, skeleton_of
    from quark.torch.flows.from_disk import stream

    request, model = job.request, job.request.model
    if request.dtype != "auto":
        raise ConfigError(
            f"--dtype {request.dtype}: streaming computes in the dtype of the model. Possible: --dtype auto."
        )
    data = job.calibration.read(inputs_of(model, skeleton_of(job.folder)))
    stream(
        job.config, job.folder, export.path, data, device=request.device, overwrite=export.force,
        keep_unexpected=request.keep_unexpected, target=export.target(), plan=_plan_for(job, data),
    )  # fmt: skip
    return export.size()


def _streams(job: FolderJob, stream: bool | None) -> bool:
    """Return True where a job goes block by block: it is asked for, or memory is too small. Raises ConfigError."""
    from quark.jobs.folders.models import float_bytes
    from quark.torch.calibration.distributed import from_first

    form, summed = job.form, job.request.save_imatrix
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
        stream = not from_first(fits_memory(float_bytes(job.folder)))
    return form != ONNX and stream


def fits_memory(weight_bytes: int) -> bool:
    """Return True where a model and its quantized copy fit into the free memory, or that is unknown."""
    available = available_memory()
    return available is None or 1.5 * weight_bytes < available


def _preflight_data(job: FolderJob, plan: FolderPlan, export: Export) -> Sequence[Any] | None:
    """The calibration data, once it is known that the job fits into memory and onto the disk.

    Raises:
        CalibrationError, FormatError: The data cannot be read, or never reach what needs them.
        NotSupportedError, ShapeError: The format has no place for what is planned, or its readers would not find it.
        OutputError, TooLittleMemoryError: The disk or the memory is too small.
    """
    from quark.jobs.folders.models import inputs_of
    from quark.torch.calibration.device_memory import check_device
    from quark.torch.checkpoint.shards import predicted_bytes
    from quark.torch.flows.check_plan import check_data, check_plan
    from quark.torch.flows.preflight import estimate, preflight
    from quark.torch.model.batches import named_device

    config, meta = job.config, plan.meta
    data = job.calibration.read(inputs_of(job.request.model, meta))
    output = predicted_bytes(meta, None) if export.weight_format == _STORED_FLOAT else plan.after
    undecoded = check_plan(meta, config, plan.layers, job.form, job.reader, plan.folder)
    if undecoded is not None:
        logger.warning("%s", undecoded)
    check_data(meta, plan.layers, data)
    needed = estimate(meta, output, algorithms_in(config), data, whole=True)
    preflight(needed, export.output, data, "--stream, fewer --samples, or a machine with more")
    possible = "--stream, where one block visits the device, or --device cpu"
    check_device(named_device(job.request.device), needed.weights + needed.solver, "The model", possible)
    _say_time(job, meta, data)
    return data
