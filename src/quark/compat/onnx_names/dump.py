"""Dumps what a quantized model computes for one sample: the codes of its tensors, and the floats of all nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.base.files import atomic_folder, check_apart, check_place
from quark.core.array import NumpyArray
from quark.errors import CalibrationError, ConfigError
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.random_reader import RandomDataReader
from quark.onnx.calibration.data.readers import samples
from quark.onnx.config.config import Config, QuantizationConfig
from quark.onnx.config.lowering.lower import lower
from quark.onnx.graph.model_file import constant, read
from quark.onnx.graph.sessions import run_sample
from quark.onnx_ops.graph_writer import free_name
from quark.onnx_ops.saving import model_files

__all__ = ["dump_model"]

DECODERS = ("DequantizeLinear", "ExtendedDequantizeLinear")


def dump_model(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    dump_data_reader: Any = None,
    random_data_reader_input_shape: Mapping[str, Sequence[int]] | None = None,
    dump_float: bool = False,
    output_dir: str | os.PathLike[str] = "./dump_results",
) -> None:
    """Write the codes of every quantized tensor, weights too, for the first sample of a reader.

    For each DequantizeLinear, `<its output>.bin` holds the codes in their element type, `<its output>.txt` the same as
    text, a code a line. "/" becomes "_" in names.

    Args:
        model_input: The quantized model.
        dump_data_reader: Anything with `get_next()`, or an iterable of samples; None for random data.
        random_data_reader_input_shape: Input name -> shape of random data.
        dump_float: Write what every node gives as `<output>_float.bin`, float32, and `<output>_float.txt` too.
        output_dir: The folder, which appears whole or not at all. Where it is there, what else it holds stays.

    Raises:
        ConfigError: The model has no quantized tensors, and floats are not asked for.
        CalibrationError: There is no sample, or it does not fit the model.
        OutputError: The folder cannot be written.
    """
    check_place(output_dir, overwrite=True)
    check_apart(output_dir, *model_files(model_input))
    model = read(model_input)
    codes = _coded(model)
    if not codes and not dump_float:
        raise ConfigError("The model has no DequantizeLinear, so no codes to dump. Possible: dump_float=True.")
    reader = dump_data_reader
    if reader is None:
        reader = RandomDataReader(model, random_data_reader_input_shape)
    feed = next(iter(samples(reader, model_inputs(model), 1)), None)
    if feed is None:
        raise CalibrationError("dump_model needs a sample, and the reader gives none.")
    arrays = _computed(model, codes, dump_float, feed)
    with atomic_folder(output_dir, overwrite=True, anything=True) as folder:
        if Path(output_dir).is_dir():  # an earlier dump: scripts are run again
            shutil.copytree(output_dir, folder, dirs_exist_ok=True)
        used: set[str] = set()
        for name, source in codes.items():
            stored = constant(source)
            _write(folder, name, "", arrays[source.name or ""] if stored is None else stored, used)
        for value in _floats(model) if dump_float else ():
            _write(folder, value.name or "", "_float", arrays[value.name or ""].astype(np.float32), used)


def _coded(model: ir.Model) -> dict[str, ir.Value]:
    """Output of each DequantizeLinear -> the codes that it reads."""
    decoders = [node for node in model.graph if node.op_type in DECODERS]
    return {node.outputs[0].name or "": node.inputs[0] for node in decoders if node.inputs[0] is not None}


def _floats(model: ir.Model) -> list[ir.Value]:
    """Return the outputs of the nodes that are tensors of floats."""
    values = [value for node in model.graph for value in node.outputs if value.name]
    return [value for value in values if value.dtype is not None and value.dtype.is_floating_point()]


def _computed(
    model: ir.Model, codes: Mapping[str, ir.Value], floats: bool, feed: Mapping[str, NumpyArray]
) -> dict[str, NumpyArray]:
    """The tensors that a run gives, by name."""
    wanted = [value.name or "" for value in codes.values() if constant(value) is None]
    wanted = list(dict.fromkeys([*wanted, *(value.name or "" for value in (_floats(model) if floats else ()))]))
    inputs = {value.name for value in model.graph.inputs}
    computed = [name for name in wanted if name not in inputs]
    with model_session(model, computed, lower(Config(QuantizationConfig()))) as session:
        arrays = dict(zip(computed, run_sample(session, computed, feed), strict=True)) if computed else {}
    return {name: np.asarray(arrays[name] if name in arrays else feed[name]) for name in wanted}


def _write(folder: Path, name: str, suffix: str, array: NumpyArray, used: set[str]) -> None:
    file = free_name(name.replace("/", "_").replace("\\", "_") + suffix, used)
    used.add(file)
    flat = np.ascontiguousarray(array).ravel()
    flat.tofile(folder / f"{file}.bin")
    (folder / f"{file}.txt").write_text("".join(f"{value}\n" for value in flat.tolist()), "utf-8")
