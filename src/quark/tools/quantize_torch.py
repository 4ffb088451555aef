"""`quark quantize` of a folder: a language model in, a quantized one out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from quark.errors import CalibrationError, ConfigError, OutputExistsError
from quark.tools.export_torch import Export

CALIBRATION_LENGTH = 512
CALIBRATION_WINDOWS = 128


def quantize_folder(
    model: Path,
    scheme: str,
    *,
    calib: Path | None,
    samples: int | None,
    exclude: list[str] | None,
    layer: list[str] | None,
    kv_cache: str | None,
    attention: str | None,
    device: str,
    dtype: str,
    export: Export,
) -> None:
    """Load, quantize, export, and say what it took."""
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.tools.models import check_folder, folder_bytes, load_model, load_tokenizer
    from quark.tools.text import token_windows
    from quark.torch import ModelQuantizer

    output = export.output
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]) and not export.force:
        raise OutputExistsError(f"{output} exists already. Choose another output, or replace it with --force.")
    kind = check_folder(model)["model_type"] if kv_cache or attention else "auto"
    config = scheme_config(scheme, exclude, layer, kind, kv_cache, attention)
    check_folder(model)
    export.check(model, [scheme, *(item.rpartition("=")[2] for item in layer or [])])
    _require_calibration(scheme, layer, [kv_cache, attention], calib)
    float_model = load_model(model, device, dtype)
    data = (
        token_windows(load_tokenizer(model), calib, _length(float_model), samples or CALIBRATION_WINDOWS)
        if calib
        else None
    )
    console, start = Console(), time.perf_counter()
    quantizer = ModelQuantizer(config)
    quantized = quantizer.freeze(quantizer.quantize_model(float_model, data))
    before, after = folder_bytes(model), export.write(quantized, model)
    console.print(
        f"{scheme}: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB in {time.perf_counter() - start:.1f} s",
        highlight=False,
    )


def _require_calibration(scheme: str, layers: list[str] | None, inside: list[str | None], calib: Path | None) -> None:
    """Raise before anything is loaded when a scheme has static activations and there is no text."""
    from quark.core.schemes import SCHEMES

    names = (scheme, *(item.rpartition("=")[2] for item in layers or []))
    static = [name for name in names if SCHEMES[name].needs_data] + [name for name in inside if name]
    if static and calib is None:
        raise CalibrationError(
            f"The scheme {static[0]!r} has static activation scales, which need calibration data: pass --calib FILE."
        )


def scheme_config(
    scheme: str,
    exclude: list[str] | None,
    layers: list[str] | None,
    kind: str = "auto",
    kv_cache: str | None = None,
    attention: str | None = None,
) -> Any:
    """The config of a scheme with overrides. Raises ConfigError for a wrong name or form."""
    from quark.torch import LLMTemplate

    rules = {}
    for item in layers or []:
        pattern, separator, name = item.rpartition("=")
        if not separator:
            raise ConfigError(f"--layer takes PATTERN=SCHEME, got {item!r}; for one: '*.down_proj=int8_wo'.")
        rules[pattern] = name
    template = LLMTemplate.get(kind)
    default = list(template.exclude_layers_name)
    return template.get_config(
        scheme,
        kv_cache_scheme=kv_cache,
        attention_scheme=attention,
        layer_config=rules,
        exclude_layers=default + (exclude or []),
    )


def _length(model: Any) -> int:
    """Calibration window: 512 tokens, or what the model takes."""
    return min(CALIBRATION_LENGTH, getattr(model.config, "max_position_embeddings", None) or CALIBRATION_LENGTH)
