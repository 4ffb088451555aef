"""`quark convert`: a quantized folder or GGUF file in another format, its codes as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quark.base.command_line import results
from quark.base.files import require_config, require_regular
from quark.base.progress import log_to
from quark.commands.options.log_file import check_log_file, say_first
from quark.commands.options.shared import LogFileOption
from quark.errors import CalibrationError, ConfigError

GGUF_SUFFIX = ".gguf"


def convert(
    model: Annotated[Path, typer.Argument(help="A quantized folder, or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="Folder or GGUF file to make.")],
    format: Annotated[
        str, typer.Option("--format", "--export-format", help="quark, awq, gptq, fp8, compressed-tensors or gguf.")
    ],
    requantize: Annotated[
        str | None,
        typer.Option(help="Scheme, or mix of GGUF, to round the values to anew: where the codes have no place."),
    ] = None,
    log_file: LogFileOption = None,
) -> None:
    """Write a quantized model in another format, without the float model: every value stays as it is, to the bit.

    What a format cannot hold to the bit is refused, unless --requantize names a scheme. Nothing is overwritten.

    Example: quark convert ./llama-uint4 --format compressed-tensors -o ./llama-ct

    Example: quark convert ./llama-uint4 --format gguf --requantize q4_k_m -o llama.gguf
    """
    (require_regular if model.suffix == GGUF_SUFFIX else require_config)(model)
    say_first("Converting", model, requantize, output=output)
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.base.files import temporary_folder
    from quark.jobs.folders.export import Export
    from quark.jobs.processes import refuse_processes
    from quark.jobs.words import ONNX

    refuse_processes("quark convert")
    if format == ONNX:
        raise ConfigError("--format onnx: quark.torch.export_onnx writes the ONNX file of a loaded model.")
    export = Export(output, format, "real_quantized", "reorder", "5GB", force=False)
    export.check(model, [], of_folder=False)
    export.check_output(model, None)
    check_log_file(log_file, str(output), [model])
    with log_to(log_file), temporary_folder(output.absolute()) as scratch:
        loaded, source = _load(model, scratch)
        if requantize is not None:
            loaded = _requantized(loaded, requantize, format)
        size = export.write(loaded, source)
    how = f"rounded anew to {requantize}" if requantize else "every value as it was"
    results().print(f"{model} -> {output} ({format}): {size / 1e6:.2f} MB, {how}", highlight=False, soft_wrap=True)


def _load(model: Path, scratch: Path) -> tuple[Any, Path]:
    """The model, and the folder with its tokenizer."""
    from quark.jobs.folders.models import load_model
    from quark.torch.model.model_folder import read_config
    from quark.torch.writers.gguf.model_of_file import model_of_gguf

    if model.suffix == GGUF_SUFFIX:
        companions = scratch / model.stem
        return model_of_gguf(model, companions), companions
    if not read_config(model).get("quantization_config"):
        raise ConfigError(f"{model} is a float model. Possible: quark quantize, which takes a scheme.")
    return load_model(model), model


def _requantized(model: Any, scheme: str, form: str) -> Any:
    """The model with its values rounded to another scheme; what was float before stays so, unless a mix has a type."""
    from quark.core.schemes import scheme_of
    from quark.jobs.folders.schemes import is_mix, scheme_config
    from quark.torch import ModelQuantizer, gguf_config
    from quark.torch.checkpoint.dequantize import dequantize_layers

    mixed = is_mix(scheme, form)
    if not mixed and scheme_of(scheme).needs_data:
        raise CalibrationError(
            f"--requantize {scheme} has static activation scales, which need calibration data, and convert has none. "
            "Possible: a scheme of weights alone, or with dynamic inputs."
        )
    model = dequantize_layers(model)
    quantizer = ModelQuantizer(gguf_config(model, scheme) if mixed else scheme_config(scheme, None, None))
    return quantizer.freeze(quantizer.quantize_model(model))
