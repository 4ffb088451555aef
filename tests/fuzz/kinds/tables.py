"""Tables that one job writes and another reads: sensitivities of layers, and times of kernels."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import SOUND, Case, Place, Random, WrongError, pick
from tests.fuzz.damage import damage_bytes, damage_json, odd_file, read_tensors
from tests.fuzz.kinds.onnx_models import bound_of, feeds
from tests.fuzz.oracles import judge_folder, judge_onnx
from tests.fuzz.program import quark, shown
from tests.models.torch_zoo import TEXT

SIZE = 1_115_000
"""Bytes of all tensors: between those of 4 and those of 8 bits."""


def _damaged(random: Random, base: Path, file: Path) -> tuple[str, bool]:
    """A copy of a table with another value, other bytes, or something odd in its place; and whether it is as it was."""
    sound, how = random.random() < SOUND, pick(random, ("json", "json", "json", "bytes", "odd"))
    data, said = base.read_bytes(), "undamaged"
    if not sound and how == "json":
        tree, said = damage_json(random, json.loads(data))
        data = json.dumps(tree).encode()
    elif not sound and how == "bytes":
        data, said = damage_bytes(random, data)
    file.write_bytes(data)
    if not sound and how == "odd":
        said = odd_file(random, file)
    return said, sound


def _sensitivity_command(source: Path, file: Path, output: Path) -> tuple[object, ...]:
    return (
        "quantize", source, "--size", SIZE, "--candidates", "uint4_wo_32,int8_wo", "--calib", TEXT / "heldout.txt",
        "--samples", 1, "--length", 16, "--sensitivity", file, "-o", output,
    )  # fmt: skip


def _judge_budget(source: Path, result: Path) -> float:
    """Of a folder that was to have SIZE bytes: a table that says less of its layers must not make it larger."""
    files = sorted(result.glob("*.safetensors"))
    held = sum(len(tensor.data) for file in files for tensor in read_tensors(file)[0].values())
    if held > SIZE:
        raise WrongError(f"{held} bytes of tensors, where {SIZE} were asked for")
    return judge_folder(source, result)


def sensitivities(random: Random, place: Place) -> Case:
    source, output = place.bases.get("llama"), place.outputs / "result"

    def make_base(file: Path) -> None:
        quark(*_sensitivity_command(source, file, file.with_suffix(".out")))

    base, file = place.bases.made("sensitivity.json", make_base), place.inputs / "sensitivity.json"
    said, sound = _damaged(random, base, file)
    command = _sensitivity_command(source, file, output)
    return Case(
        f"{said}: {shown(*command)}", partial(quark, *command), partial(_judge_budget, source, output), (output,),
        margin=None, sound=sound,
    )  # fmt: skip


def _measure(source: Path, times: Path, output: Path) -> None:
    """Quantize a model, and leave in float what a table of times says is faster there."""
    from quark.errors import SlowerThanFloatError
    from quark.onnx import Config, ModelQuantizer, QuantType
    from quark.onnx.config.config import QuantizationConfig

    options: dict[str, Any] = {"Target": "ort_x64", "MeasurePlacement": str(times)}
    config = Config(QuantizationConfig(activation_type=QuantType.QUInt8, extra_options=options))
    # By these times float may be the faster everywhere; what was measured before that is kept, as it is to be.
    with contextlib.suppress(SlowerThanFloatError):
        ModelQuantizer(config).quantize_model(source, output, [feeds(str(source.parent))])


def _judge_placement(source: Path, result: Path) -> float:
    one = {name: array[:4] for name, array in feeds(str(source.parent)).items()}
    return judge_onnx(source, result if result.exists() else None, one)


def times(random: Random, place: Place) -> Case:
    source, output = place.bases.get("onnx-cnn") / "model.onnx", place.outputs / "result.onnx"
    base = place.bases.made("times.json", lambda file: _measure(source, file, file.with_suffix(".onnx")))
    file = place.inputs / "times.json"
    said, sound = _damaged(random, base, file)
    return Case(
        f"times of kernels: {said}", partial(_measure, source, file, output),
        partial(_judge_placement, source, output), (output, file),
        like="onnx-cnn", bound=partial(bound_of, source.parent), sound=sound,
    )  # fmt: skip
