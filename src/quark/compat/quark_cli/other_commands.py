"""export-onnx, export-oga, onnx-prepare-data, and commands that have no counterpart."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quark.errors import ConfigError, MissingDependencyError, NotSupportedError


def declare_export_onnx(add: Callable[..., Any]) -> None:
    """Declare the arguments of export-onnx."""
    add("--model-name", required=True, help="of timm, which downloads it")
    add("--output-dir", required=True)


def export_onnx(args: argparse.Namespace) -> None:
    """Write a model of timm. Raises ConfigError where the folder is none."""
    import torch

    timm = _required("timm", "timm")

    folder = Path(args.output_dir)
    if not folder.is_dir():
        raise ConfigError(f"--output-dir {folder} is no folder.")
    model = timm.create_model(args.model_name, pretrained=True).eval()
    size = timm.data.resolve_model_data_config(model=model, use_test_size=True)["input_size"]
    file = folder / f"{args.model_name}.onnx"
    torch.onnx.export(
        model, (torch.zeros(1, *size),), str(file), opset_version=17, input_names=["input"], output_names=["output"],
        dynamic_axes={"input": {0: "batch_size"}, "output": {0: "batch_size"}}, dynamo=False,
    )  # fmt: skip
    sys.stdout.write(f"Onnx model is saved at {file}\n")


def declare_export_oga(add: Callable[..., Any]) -> None:
    """Declare the arguments of export-oga."""
    add("-m", "--model_path", required=True)
    add("-o", "--output_path", required=True)


def export_oga(args: argparse.Namespace) -> None:
    """Write a model as the builder of ONNX Runtime GenAI makes it."""
    _required("onnxruntime_genai", "onnxruntime-genai")
    import_module("onnxruntime_genai.models.builder").create_model(
        None, args.model_path, args.output_path, "fp32", "cpu", str(Path("cache_dir"))
    )


def declare_prepare(add: Callable[..., Any]) -> None:
    """Declare the arguments of onnx-prepare-data."""
    add("--val_path", required=True, help="folder of ILSVRC2012_val_*.JPEG, which go to a folder for each class")
    add("--cal_path", required=True, help="where the first image of each class is copied to")


def onnx_prepare_data(args: argparse.Namespace) -> None:
    """Move images to a folder for each class, and copy one of each. Raises ConfigError where there is no folder."""
    source, target = Path(args.val_path), Path(args.cal_path)
    if not source.is_dir():
        raise ConfigError(f"--val_path {source} is no folder.")
    for file in sorted(source.glob("ILSVRC2012_val_*.JPEG")):
        folder = source / file.stem.rpartition("_")[2]
        folder.mkdir(exist_ok=True)
        file.rename(folder / file.name)
    for folder in sorted(entry for entry in source.iterdir() if entry.is_dir()):
        images = sorted(folder.iterdir())
        (target / folder.name).mkdir(parents=True, exist_ok=True)
        if images:
            shutil.copy(images[0], target / folder.name / images[0].name)
    sys.stdout.write("Creating calibration dataset complete.\n")


def absent(what: str, instead: str) -> tuple[str, Callable[[argparse.Namespace], None], Callable[..., None]]:
    """A row of a command that has no counterpart."""

    def refuse(args: argparse.Namespace) -> None:
        raise NotSupportedError(f"{what} is not part of this version. Possible: {instead}")

    def declare(add: Callable[..., Any]) -> None:
        add("arguments", nargs=argparse.REMAINDER)

    return f"not in this version: {instead}", refuse, declare


def _required(package: str, distribution: str) -> Any:
    """The module of a package. Raises MissingDependencyError where it is not installed."""
    if find_spec(package) is None:
        raise MissingDependencyError(f"{package} is not installed: pip install {distribution}.")
    return import_module(package)
