"""What `quark quantize` of a folder finds out before it loads a weight: whether data, memory and disk will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.commands.folders.export import Export

if TYPE_CHECKING:
    from quark.commands.folders.model_inputs import ModelInputs

STORED_FLOAT = "fake_quantized"
"""The weight format that is as large as the float model."""


def preflight_data(
    model: Path,
    config: Any,
    samples: Callable[[ModelInputs], list[Any] | None],
    export: Export,
    dtype: str,
    load: Mapping[str, bool],
) -> list[Any] | None:
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
        OutputError, TooLittleMemoryError: The disk or the memory is too small.
    """
    import torch

    from quark.commands.folders.models import inputs_of, load_meta_model
    from quark.torch.algorithms import algorithms_of
    from quark.torch.checkpoint.shards import predicted_bytes
    from quark.torch.flows.predicted_size import planned
    from quark.torch.flows.preflight import estimate, preflight

    meta = load_meta_model(model, load["trust_remote_code"])
    if dtype != "auto":
        meta = meta.to(getattr(torch, dtype))
    data = samples(inputs_of(model, meta))
    output = predicted_bytes(meta, None)
    weights = estimate(meta, output, algorithms_of(config.algo_config or []), data, whole=True)
    if export.weight_format != STORED_FLOAT:
        weights = replace(weights, output=planned(meta, config, export.form)[1])
    preflight(weights, export.output, data, "--stream, fewer --samples, or a machine with more")
    return data
