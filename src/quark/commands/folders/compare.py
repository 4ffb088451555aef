"""`quark compare` of a model folder: schemes side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quark.commands.folders.calibration import Calibration
from quark.commands.folders.measure import ALL, FolderComparison, compare
from quark.commands.folders.models import inputs_of, load_meta_model, load_model
from quark.commands.folders.quantize import scheme_config
from quark.commands.results.compared import SchemeResult, show
from quark.errors import QuarkError, one_line
from quark.log import severity
from quark.torch import ModelQuantizer
from quark.torch.checkpoint.shards import predicted_bytes
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.model.passes import prepare
from quark.torch.plan import chooser, make_plan


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
        names: Schemes.
        calib, data: Files to calibrate with, and to measure on.
        windows: Tokens in a window, and how many windows; 0 for all.
        load: Options of `load_model`: device, dtype, what is accepted.
        words: What is said of the data.
        page: Where the page goes; None: there is none.

    Raises:
        ConfigError: There is no such scheme.
        QuarkError: None of them can be used; says why of the last.
    """
    # What is unknown is said before the first is tried.
    configs = {name: scheme_config(name, None, None) for name in names}
    before = load_model(model, **load)
    inputs = inputs_of(model, before)
    batches = inputs.read(data, windows[1] or ALL, windows[0])
    fitted = Calibration(calib).read(inputs)
    rows: list[SchemeResult] = []
    failure, perplexity = None, None
    for name, config in configs.items():
        try:
            with severity(2):
                quantizer = ModelQuantizer(config)
                after = quantizer.freeze(quantizer.quantize_model(load_model(model, **load), fitted))
                found = compare(before, after, batches)
            perplexity = found.perplexity and found.perplexity[0]
            rows.append(_row(name, _bytes(model, config), found))
        except QuarkError as error:
            failure = error
            rows.append(SchemeResult(name, reason=one_line(error).rstrip(".")))
    if failure is not None and all(row.reason for row in rows):
        raise failure
    show(model, SchemeResult("float", _bytes(model, None), perplexity=perplexity), rows, words, page)


def _row(name: str, size: int, found: FolderComparison) -> SchemeResult:
    sqnr = min((output.comparison.sqnr for output in found.outputs.values()), default=float("nan"))
    if found.perplexity is None:
        return SchemeResult(name, size, sqnr)
    kl = float(torch.cat(list(found.divergence)).mean())
    return SchemeResult(name, size, sqnr, kl, found.perplexity[1])


def _bytes(model: Path, config: Any | None) -> int:
    """Bytes of the weights in the quark format, by the plan."""
    meta = load_meta_model(model)
    if config is None:
        return predicted_bytes(meta, None)
    prepare(meta, chooser(config, meta).wanted)
    return predicted_bytes(meta, make_plan(config, meta, read_elsewhere=weights_read_elsewhere(meta)))
