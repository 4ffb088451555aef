"""`quark quantize`: a model folder in, a quantized model folder out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quark.errors import OutputExistsError

CALIBRATION_LENGTH = 512


def quantize(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face causal language model.")],
    scheme: Annotated[str, typer.Option(help="Name of a scheme; `quark schemes` lists them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.")],
    calib: Annotated[Path | None, typer.Option(help="Text file for static activation scales.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Most calibration windows of 512 tokens.")] = 128,
    exclude: Annotated[list[str] | None, typer.Option(help="Pattern of layers to keep in float; repeatable.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="PATTERN=SCHEME for some layers; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Compute in float32, float16, bfloat16; auto: as stored.")] = "auto",
    weight_format: Annotated[str, typer.Option(help="real_quantized or fake_quantized.")] = "real_quantized",
    pack_method: Annotated[str, typer.Option(help="Order of 4-bit codes: reorder or order.")] = "reorder",
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder.")] = False,
) -> None:
    """Quantize a language model and write a checkpoint that transformers and vLLM load.

    Example: quark quantize ./llama --scheme uint4_wo_128 -o ./llama-uint4
    """
    # The flow imports torch: after the arguments are parsed, so that --help is instant.
    from quark.tools.models import folder_bytes, load_model, load_tokenizer
    from quark.tools.text import token_windows
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.exporter import check_options

    if output.exists() and any(output.iterdir() if output.is_dir() else [output]) and not force:
        raise OutputExistsError(f"{output} exists already. Choose another output, or replace it with --force.")
    check_options("quark", weight_format, pack_method, max_shard_size)
    config = scheme_config(scheme, exclude, layer)
    _require_calibration(scheme, layer, calib)
    float_model = load_model(model, device, dtype)
    data = token_windows(load_tokenizer(model), calib, _length(float_model), samples) if calib else None
    console, start = Console(), time.perf_counter()
    quantizer = ModelQuantizer(config)
    quantized = quantizer.freeze(quantizer.quantize_model(float_model, data))
    export_safetensors(
        quantized, output, "quark", weight_format, pack_method, max_shard_size=max_shard_size, overwrite=force
    )
    before, after = folder_bytes(model), folder_bytes(output)
    console.print(
        f"{scheme}: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB in {time.perf_counter() - start:.1f} s",
        highlight=False,
    )


def _require_calibration(scheme: str, layers: list[str] | None, calib: Path | None) -> None:
    """Raise before anything is loaded when a scheme has static activations and there is no text."""
    from quark.core.schemes import SCHEMES
    from quark.errors import CalibrationError

    static = [n for n in (scheme, *(item.rpartition("=")[2] for item in layers or [])) if SCHEMES[n].needs_data]
    if static and calib is None:
        raise CalibrationError(
            f"The scheme {static[0]!r} has static activation scales, which need calibration data: pass --calib FILE."
        )


def scheme_config(scheme: str, exclude: list[str] | None, layers: list[str] | None) -> Any:
    """The config of a scheme with overrides. Raises ConfigError for a wrong name or form."""
    from quark.errors import ConfigError
    from quark.torch import LLMTemplate

    rules = {}
    for item in layers or []:
        pattern, separator, name = item.rpartition("=")
        if not separator:
            raise ConfigError(f"--layer takes PATTERN=SCHEME, got {item!r}; for one: '*.down_proj=int8_wo'.")
        rules[pattern] = name
    template = LLMTemplate.get("auto")
    default = list(template.exclude_layers_name)
    return template.get_config(scheme, layer_config=rules, exclude_layers=default + (exclude or []))


def _length(model: Any) -> int:
    """Calibration window: 512 tokens, or what the model takes."""
    return min(CALIBRATION_LENGTH, getattr(model.config, "max_position_embeddings", None) or CALIBRATION_LENGTH)
