"""Compares the results of two models, saved in two folders: `python -m quark.onnx.tools.evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from quark.base.command_line import program, results, run
from quark.base.data_files.arrays import read_npy
from quark.core.array import NumpyArray
from quark.core.metrics import Comparison, Metric
from quark.errors import ConfigError, FormatError
from quark.onnx.calibration.data.sample_files import IMAGES, read_image

KINDS = IMAGES | {".npy"}
TITLES = {"cosine": "cosine similarity", "l2": "L2 distance", "psnr": "PSNR (dB)"}
"""Metrics that are shown."""


def compare_folders(baseline: Path, quantized: Path) -> dict[str, Comparison]:
    """Compare the files of two folders by name.

    Args:
        baseline: Results of the float model: .npy, .png or .jpg.
        quantized: Results of the quantized model under the same names.

    Returns:
        File name -> the comparison of the two arrays or images.

    Raises:
        FormatError: A folder is empty, a file is missing, cannot be read, or has another shape.
        MissingDependencyError: Images need pillow.
    """
    names, others = _names(baseline), _names(quantized)
    for folder, missing in ((quantized, names - others), (baseline, others - names)):
        if missing:
            raise FormatError(f"{folder} lacks {len(missing)} files that the other folder has: {min(missing)}, ...")
    found = {}
    for name in sorted(names):
        x, y = _read_numbers(baseline / name), _read_numbers(quantized / name)
        if x.shape != y.shape:
            raise FormatError(f"{name} has the shape {list(x.shape)} in {baseline} and {list(y.shape)} in {quantized}.")
        found[name] = Comparison().update(x, y)
    return found


def _names(folder: Path) -> set[str]:
    if not folder.is_dir():
        raise FormatError(f"{folder} is not a folder.")
    names = {file.name for file in folder.iterdir() if file.suffix.lower() in KINDS}
    if not names:
        raise FormatError(f"{folder} holds no results; possible: files of {', '.join(sorted(KINDS))}.")
    return names


def _read_numbers(path: Path) -> NumpyArray:
    array = read_image(path) if path.suffix.lower() in IMAGES else read_npy(path)
    if array.dtype.kind not in "biuf":
        raise FormatError(f"{path} holds {array.dtype}, not numbers.")
    return array


def show(baseline: Path, quantized: Path) -> None:
    """Print the mean and the worst of each metric over all files."""
    found = compare_folders(baseline, quantized)
    table = Table("metric", "mean", "worst", "worst file", title=f"{len(found)} results")
    for name, title in TITLES.items():
        values = {file: getattr(comparison, name) for file, comparison in found.items()}
        file = Metric(name).worst_of(values)
        table.add_row(title, f"{sum(values.values()) / len(values):.6g}", f"{values[file]:.6g}", file)
    results().print(table)


def main() -> None:
    """The program; the folders come by position or by flag."""
    example = "--baseline_results_folder float --quantized_results_folder int8"
    run(program(_compare, epilog=f"Example: python -m quark.onnx.tools.evaluate {example}"))


def _compare(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="BASELINE QUANTIZED",
            help="Folders with the results of the float and of the quantized model: .npy, .png or .jpg files.",
        ),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline_results_folder", metavar="FOLDER", help="The first, by name.")
    ] = None,
    quantized: Annotated[
        Path | None, typer.Option("--quantized_results_folder", metavar="FOLDER", help="The second, by name.")
    ] = None,
) -> None:
    """Compare the results of a quantized model with those of the float model.

    Cosine similarity, L2 distance and PSNR (the peak is the largest magnitude of the float result; inf where both are
    equal).
    """
    by_position, by_flag = folders or [], [folder for folder in (baseline, quantized) if folder]
    if sorted((len(by_flag), len(by_position))) != [0, 2]:
        raise ConfigError(
            "Two folders are needed: --baseline_results_folder A --quantized_results_folder B, or just A B."
        )
    show(*(by_flag or by_position))
