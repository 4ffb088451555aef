"""Convert: a quantized folder or GGUF file in another format, its codes as they are; or a file as float values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quark.base.files import (
    atomic_folder,
    check_apart,
    check_file,
    check_folder,
    require_config,
    require_regular,
    temporary_folder,
)
from quark.base.log import logger
from quark.errors import CalibrationError, ConfigError, UsageError
from quark.jobs.folders.export import Export
from quark.jobs.folders.gguf_files import dtype_named
from quark.jobs.options import option, same_as
from quark.jobs.processes import refuse_processes
from quark.jobs.request import FolderRequest, JobRequest, Kinds, ModelRequest, is_gguf, is_tensor_file
from quark.jobs.words import ONNX

FLOAT = "float"
"""The format of a folder, or of one file, of float values."""


@dataclass(frozen=True, kw_only=True)
class ConvertRequest(ModelRequest):
    """Options for a quantized model; see the help texts."""

    output: Path = option(Path(), "Folder or file to write.", "--output", "-o", metavar="PATH", required=True)
    format: str | None = option(
        None,
        "Format to write: quark, awq, gptq, fp8, compressed-tensors or gguf; of a GGUF file also float (default), the "
        "model folder with float values; of a safetensors file in FP8 float, one file.",
        "--format",
        "--export-format",
    )
    dtype: str = option(
        "auto",
        "With --format float: float32, float16, bfloat16, or auto: 16 bits where they hold the float tensors of the "
        "file, else float32. Of a file in FP8 auto is the type of its float tensors.",
    )
    requantize: str | None = option(
        None, "Scheme or GGUF mix to quantize to again, if the format cannot store the codes."
    )
    force: bool = same_as(JobRequest, "force")
    log_file: Path | None = same_as(JobRequest, "log_file")


CONVERT: Kinds[ConvertRequest, ConvertRequest] = (ConvertRequest, ConvertRequest)


@dataclass(frozen=True)
class ConversionJob:
    """A conversion that is ready to run.

    Attributes:
        request: What was asked for.
        export: Where and how it is written.
    """

    request: ConvertRequest
    export: Export


@dataclass(frozen=True)
class ConvertedModel:
    """A model in another format.

    Attributes:
        path: What a program opens.
        size: Bytes of its weights.
        rounded: The type to which values of blocks, or codes times scales, were rounded; "" where all are as they were.
    """

    path: Path
    size: int
    rounded: str = ""


def require_quantized_model(model: Path) -> None:
    """Raise FormatError for a path where neither a GGUF or safetensors file nor a folder of a model can be."""
    (require_regular if is_gguf(model) or is_tensor_file(model) else require_config)(model)


def resolve_conversion(request: ConvertRequest) -> ConversionJob:
    """Return the conversion of a request. Raises QuarkError where it cannot be, or may not be written."""
    refuse_processes("quark convert")
    if request.format is None:
        if not is_gguf(request.model) and not is_tensor_file(request.model):
            raise UsageError(f"Missing option --format, which {request.model} needs.")
        request = replace(request, format=FLOAT)
    if request.format == ONNX:
        raise ConfigError("--format onnx: quark.torch.export_onnx writes the ONNX file of a loaded model.")
    form = str(request.format)
    if is_tensor_file(request.model):
        _check_tensor_file(request)
    export = Export(request.model, request.output, form, "real_quantized", "reorder", "5GB", request.force)
    if form == FLOAT:
        one_file = is_tensor_file(request.model)
        if not one_file:
            _check_float(request)
        check_apart(request.output, request.model)
        (check_file if one_file else check_folder)(request.output, request.force)
        return ConversionJob(request, export)
    if request.dtype != "auto":
        raise ConfigError(f"--dtype applies to --format float, and not to {form}, whose codes stay as they are.")
    export.check([])
    check_apart(export.path, request.model)
    export.check_output(None)
    return ConversionJob(request, export)


def _check_tensor_file(request: ConvertRequest) -> None:
    """Raise ConfigError for what does not go with a safetensors file, which becomes another one."""
    if request.format != FLOAT or request.requantize is not None:
        asked = f"--requantize {request.requantize}" if request.requantize else f"--format {request.format}"
        raise ConfigError(
            f"{asked}: {request.model} is one file, which is converted to float values. Possible: quark quantize "
            f"{request.model} --for comfyui (or --export-format gguf), which reads weights in FP8."
        )
    if not is_tensor_file(request.output):
        folder = request.output
        file = folder / f"{request.model.stem}-float.safetensors" if folder.is_dir() else f"{folder}.safetensors"
        raise ConfigError(
            f"--output {folder}: {request.model} is one file, and says nothing of the config of a folder. Possible: "
            f"-o {file}, a file of float values, of which from_single_file of diffusers makes a model."
        )
    dtype_named(request.dtype)


def _check_float(request: ConvertRequest) -> None:
    """Raise ConfigError for what does not go with --format float."""
    if not is_gguf(request.model):
        raise ConfigError(f"--format float is of a GGUF file, and {request.model} is a folder. Possible: quark, gguf.")
    if request.requantize is not None:
        raise ConfigError(
            f"--requantize {request.requantize} does not apply to --format float. Possible: quark quantize "
            f"{request.model} --scheme {request.requantize}."
        )
    dtype_named(request.dtype)


def run_conversion(job: ConversionJob) -> ConvertedModel:
    """Write the model in the other format.

    Raises:
        QuarkError: It cannot be read, or the format has no place for it.
    """
    request = job.request
    if request.format == FLOAT:
        return _as_float(request)
    with temporary_folder(request.output.absolute()) as scratch:
        loaded, source = _load(request, scratch)
        if request.requantize is not None:
            loaded = _requantized(loaded, request.requantize, request)
        export = replace(job.export, source=source)
        return ConvertedModel(export.path, export.write(loaded))


def _as_float(request: ConvertRequest) -> ConvertedModel:
    """Write the model folder of a GGUF file, or the float values of a safetensors file."""
    if is_tensor_file(request.model):
        from quark.torch.writers.comfyui.float_file import write_float

        made = write_float(request.model, request.output, request.force, dtype_named(request.dtype))
        logger.info("Exported to %s.", request.output)
        return ConvertedModel(request.output, *made)
    from quark.jobs.folders.models import folder_bytes
    from quark.torch.writers.gguf.folder_of_file import folder_of_gguf

    with atomic_folder(request.output, request.force) as folder:
        source = folder_of_gguf(request.model, folder, dtype_named(request.dtype))
        source.fill()
        exact, dtype = source.tensors.holds_all(), str(source.dtype).removeprefix("torch.")
        size = folder_bytes(folder)
    logger.info("Exported to %s.", request.output)
    return ConvertedModel(request.output, size, "" if exact else dtype)


def _load(request: ConvertRequest, scratch: Path) -> tuple[Any, Path]:
    """The model, and the folder with its tokenizer."""
    from quark.jobs.folders.models import load_model, open_folder
    from quark.torch.checkpoint.sources.methods import AS_FLOAT
    from quark.torch.writers.gguf.model_of_file import model_of_gguf

    model = request.model
    if is_gguf(model):
        companions = scratch / model.stem
        return model_of_gguf(model, companions), companions
    folder = open_folder(model)
    folder.check()
    if not folder.config.get("quantization_config"):
        raise ConfigError(f"{model} is a float model. Possible: quark quantize, which takes a scheme.")
    if folder.method in AS_FLOAT and request.requantize is None:
        raise ConfigError(
            f"{model} is quantized ({folder.method!r}), and its codes are not taken over into other formats. Possible: "
            "--requantize SCHEME, which rounds their values again."
        )
    return load_model(folder), model


def _requantized(model: Any, scheme: str, request: ConvertRequest) -> Any:
    """The model with its values rounded to another scheme; what was float before stays so, unless a mix has a type."""
    from quark.core.schemes import scheme_of
    from quark.jobs.folders.schemes import is_mix, scheme_config
    from quark.torch import ModelQuantizer, gguf_config
    from quark.torch.checkpoint.dequantize import dequantize

    mixed = is_mix(scheme, str(request.format))
    if not mixed and scheme_of(scheme).needs_data:
        raise CalibrationError(
            f"--requantize {scheme} has static activation scales, which need calibration data, and convert has none. "
            "Possible: a scheme of weights alone, or with dynamic inputs."
        )
    model = dequantize(model)
    asked = FolderRequest(model=request.model)
    quantizer = ModelQuantizer(gguf_config(model, scheme) if mixed else scheme_config(asked, None, scheme))
    return quantizer.freeze(quantizer.quantize_as_planned(model))
