"""`quark compare` of a model folder: schemes side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quark.base.log import severity
from quark.base.progress import progress
from quark.commands.folders.measure import ALL, FolderComparison, compare
from quark.commands.results.compared import SchemeResult, show
from quark.errors import QuarkError, one_line
from quark.gguf import MIXES
from quark.jobs.folders.calibration import Calibration
from quark.jobs.folders.models import inputs_of, load_meta_model, load_model
from quark.jobs.folders.schemes import config_of
from quark.jobs.words import GGUF
from quark.torch import ModelQuantizer
from quark.torch.flows.predicted_size import float_bytes, planned


def compare_schemes(
    model: Path,
    names: Sequence[str],
    calib: Path | None,
    data: Path,
    windows: tuple[int, int],
    load: Mapping[str, Any],
    words: str,
    page: Path | None,
) -> None:
    """Quantize by each, in memory, and show what they give.

    Args:
        model: Folder.
        names: Schemes, and mixes of block types.
        calib, data: Files to calibrate with, and to measure on.
        windows: Tokens in a window, and how many windows; 0 for all.
        load: Options of `load_model`: device, dtype, what is accepted.
        words: What is said of the data.
        page: Where the page goes; None: there is none.

    Raises:
        QuarkError: None of them can be used; says why of the last.
    """
    before, trusted = load_model(model, dequantize=True, **load), load["trust_remote_code"]
    inputs = inputs_of(model, before)
    batches = inputs.read(data, windows[1] or ALL, windows[0])
    fitted = Calibration(calib).read(inputs)
    rows: list[SchemeResult] = []
    failure, perplexity = None, None
    for name in progress(names, "schemes", len(names), name=str):
        form = GGUF if name in MIXES else "quark"
        try:
            config = config_of(model, name, form, trust_remote_code=trusted)
            with severity(2):
                quantizer = ModelQuantizer(config)
                after = quantizer.freeze(quantizer.quantize_model(load_model(model, dequantize=True, **load), fitted))
                found = compare(before, after, batches)
            perplexity = found.perplexity and found.perplexity[0]
            rows.append(_row(name, planned(load_meta_model(model, trusted), config, form)[1], found))
        except QuarkError as error:
            failure = error
            rows.append(SchemeResult(name, reason=one_line(error).rstrip(".")))
    if failure is not None and all(row.reason for row in rows):
        raise failure
    size = float_bytes(load_meta_model(model, trusted))
    show(model, SchemeResult("float", size, perplexity=perplexity), rows, words, page)


def _row(name: str, size: int, found: FolderComparison) -> SchemeResult:
    sqnr = min((output.comparison.sqnr for output in found.outputs.values()), default=float("nan"))
    if found.perplexity is None:
        return SchemeResult(name, size, sqnr)
    kl = float(torch.cat(list(found.divergence)).mean())
    return SchemeResult(name, size, sqnr, kl, found.perplexity[1])
