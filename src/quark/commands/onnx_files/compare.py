"""`quark compare` of an ONNX file: presets side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quark.base.log import severity
from quark.base.progress import progress
from quark.commands.results.compared import SchemeResult, show
from quark.errors import QuarkError, one_line
from quark.jobs.run_file import named_config
from quark.jobs.words import members
from quark.onnx import ModelQuantizer, PathDataReader
from quark.onnx.calibration.data.inputs import file_bytes
from quark.onnx.config.preset_rows import QROWS, ROWS
from quark.onnx.evaluation.compare_models import compare_models


def compare_presets(
    model: Path,
    names: Sequence[str],
    calib: PathDataReader | None,
    data: PathDataReader,
    samples: int | None,
    threads: int,
    words: str,
    page: Path | None,
) -> None:
    """Quantize by each, into a temporary folder, and show what they give.

    Raises:
        ConfigError: There is no such preset.
        QuarkError: None of them can be used; says why of the last.
    """
    # What is unknown is said before the first is tried.
    names = members(names, [*ROWS, *QROWS])
    quantizers = {name: ModelQuantizer(named_config(name)) for name in names}
    rows: list[SchemeResult] = []
    latency, failure = 0.0, None
    for name in progress(quantizers, "configurations", len(quantizers), name=str):
        quantizer = quantizers[name]
        quantizer.settings = replace(quantizer.settings, least_sqnr=None)  # how bad it is, is what is asked
        try:
            with tempfile.TemporaryDirectory() as folder, severity(2):
                file = Path(folder) / "quantized.onnx"
                for reader in filter(None, (calib, data)):
                    reader.rewind()
                quantizer.quantize_model(model, file, calib)
                data.rewind()
                found = compare_models(model, file, data, samples, threads)
                latency, seconds = found.latency
                sqnr = min((output.sqnr for output in found.outputs.values()), default=float("nan"))
                rows.append(SchemeResult(name, file_bytes(file), sqnr, seconds=seconds))
        except QuarkError as error:
            failure = error
            rows.append(SchemeResult(name, reason=one_line(error).rstrip(".")))
    if failure is not None and all(row.reason for row in rows):
        raise failure
    show(model, SchemeResult("float", file_bytes(model), seconds=latency), rows, words, page)
