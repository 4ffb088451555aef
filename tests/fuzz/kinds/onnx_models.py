"""ONNX models: fields of the messages, bytes of the file, data outside of it, functions and bodies in each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.bases import ONNX
from tests.fuzz.bounds import onnx_bound
from tests.fuzz.case import SOUND, Case, Place, Random, nothing_to_compare, pick
from tests.fuzz.damage import ODD_FILES, damage_bytes
from tests.fuzz.messages import change_a_field
from tests.fuzz.oracles import judge_onnx
from tests.fuzz.program import quark, shown

Damage = Callable[[Random, Path], tuple[str, bool]]
"""Of a model file; says what, and whether values may have changed, so that no bound holds for the result."""


def fields(random: Random, file: Path) -> tuple[str, bool]:
    """One to three fields of any message of the model."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    said = [change_a_field(random, model) for _ in range(pick(random, (1, 1, 1, 3)))]
    file.write_bytes(model.SerializeToString())
    return "; ".join(said), True


def file_bytes(random: Random, file: Path) -> tuple[str, bool]:
    changed, said = damage_bytes(random, file.read_bytes())
    file.write_bytes(changed)
    return said, True


def weights(random: Random, file: Path) -> tuple[str, bool]:
    """One initializer without data, with too little, of another type, twice, or with numbers that are none."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    tensor = pick(random, model.graph.initializer)
    how = pick(random, ("no data", "short", "type", "dims", "twice", "nan", "segment", "gone"))
    if how == "no data":
        tensor.ClearField("raw_data")
    elif how == "short":
        tensor.raw_data = tensor.raw_data[:-4]
    elif how == "type":
        tensor.data_type = pick(random, (0, 10, 6, 16, 22, 99))
        how = f"data_type {tensor.data_type}"
    elif how == "dims":
        tensor.dims.append(pick(random, (0, 2, -1, 2**40)))
    elif how == "twice":
        model.graph.initializer.add().CopyFrom(tensor)
    elif how == "nan":
        tensor.raw_data = np.array([np.nan], np.float32).tobytes() + tensor.raw_data[4:]
    elif how == "segment":
        tensor.segment.begin, tensor.segment.end = 0, 1
    else:
        model.graph.initializer.remove(tensor)
    file.write_bytes(model.SerializeToString())
    return f"initializer {tensor.name}: {how}", True


def outside(random: Random, file: Path) -> tuple[str, bool]:
    """Where data outside of the file are said to be, or what stands there."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    tensors = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not tensors:
        return weights(random, file)
    data = file.parent / "model.data"
    if random.random() < 0.4:
        how = pick(random, (*ODD_FILES, None, _hard_link))
        if how is _hard_link:
            _hard_link(data)
            return "model.data has a second name", False
        data.unlink()
        if how is not None:
            how(data)
        return f"model.data: {how.__name__ if how else 'gone'}", True
    tensor = pick(random, tensors)
    key = pick(random, ("location", "offset", "length", "checksum"))
    values = {
        "location": ("../model.data", "/etc/hostname", "", "nothing", "a\0b", "x" * 5000, "./model.data", "in/../x"),
        "offset": ("-1", "1", "99999999999", "a", "", "1e3"),
        "length": ("0", "-1", "4", "99999999999", "a", ""),
        "checksum": ("0", "a"),
    }  # fmt: skip
    entry = next((entry for entry in tensor.external_data if entry.key == key), None) or tensor.external_data.add()
    entry.key, entry.value = key, pick(random, values[key])
    file.write_bytes(model.SerializeToString())
    return f"{tensor.name}: external {key} = {entry.value[:40]!r}", True


def _hard_link(data: Path) -> None:
    data.with_name("other.data").hardlink_to(data)


def names(random: Random, file: Path) -> tuple[str, bool]:
    """One value renamed everywhere: odd, and sound."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    old = pick(random, [tensor.name for tensor in model.graph.initializer] or [model.graph.input[0].name])
    new = pick(random, ("x" * 5000, "a\0b", "é/β", "../../up", " ", "a\nb", "%s{}", "quark", "x" * 255))
    for tensor in model.graph.initializer:
        tensor.name = new if tensor.name == old else tensor.name
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = new if name == old else name
    file.write_bytes(model.SerializeToString())
    return f"{old} is called {new[:20]!r}", False


def nested(random: Random, file: Path) -> tuple[str, bool]:
    """Functions that call each other twice at each level, or themselves; bodies in bodies."""
    import onnx
    from onnx import helper

    model = onnx.load(file, load_external_data=False)
    levels, how = int(random.integers(2, 40)), pick(random, ("calls", "circle", "bodies"))
    output = model.graph.output[0]
    last = next(node for node in model.graph.node if output.name in node.output)
    last.output[list(last.output).index(output.name)] = "before_the_last"
    if how == "bodies":
        info = helper.make_tensor_value_info(output.name, output.type.tensor_type.elem_type, None)
        body = helper.make_graph([helper.make_node("Identity", ["before_the_last"], [output.name])], "b", [], [info])
        for _ in range(min(levels, 12)):  # each level holds the one below twice
            one = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("c", 9, [], [True]))
            chosen = helper.make_node("If", ["yes"], [output.name], then_branch=body, else_branch=body)
            body = helper.make_graph([one, chosen], "b", [], [info])
        model.graph.node.extend(body.node)
        return _written(model, file, f"{min(levels, 12)} bodies"), False
    opset = list(model.opset_import)
    for level in range(levels):
        inner = (level + 1) % levels if how == "circle" else level + 1
        name = f"f{inner}" if how == "circle" or inner < levels else "Identity"
        domain = "nest" if name != "Identity" else ""
        nodes = [
            helper.make_node(name, ["a"], ["b"], domain=domain),
            helper.make_node(name, ["b"], ["c"], domain=domain),
        ]
        imports = [*opset, helper.make_opsetid("nest", 1)]
        model.functions.append(helper.make_function("nest", f"f{level}", ["a"], ["c"], nodes, imports))
    model.opset_import.append(helper.make_opsetid("nest", 1))
    model.graph.node.append(helper.make_node("f0", ["before_the_last"], [output.name], domain="nest"))
    return _written(model, file, f"{levels} functions, {how}"), False


def _written(model: Any, file: Path, said: str) -> str:
    file.write_bytes(model.SerializeToString())
    return said


def odd_files(random: Random, file: Path) -> tuple[str, bool]:
    how = pick(random, ODD_FILES)
    file.unlink()
    how(file)
    return f"model.onnx is {how.__name__}", True


DAMAGES: tuple[Damage, ...] = (fields, fields, fields, file_bytes, weights, weights, outside, names, nested, odd_files)
ROWS = 4
"""Of a sample, where the model takes any number."""

CONFIGS = ("A8W8", "A8W8", "XINT8", "A16W8", "BF16", "UINT8_DYNAMIC_QUANT")

NOTHING_TO_DO = ("onnx-layer_norms", "UINT8_DYNAMIC_QUANT")
"""No operator of it has a dynamic kernel."""


def feeds(base: str, count: int = 2) -> dict[str, Any]:
    """Samples for the undamaged model: for each input, `count` times its rows, along the first axis."""
    import onnx

    from tests.models.onnx_zoo import feed

    model = onnx.load(Path(base) / "model.onnx", load_external_data=False)
    samples = [feed(model, seed, open_size=ROWS) for seed in range(count)]
    return {name: np.concatenate([sample[name] for sample in samples]) for name in samples[0]}


def bound_of(base: Path) -> float:
    """What rounding of every tensor of an undamaged base leaves, in dB."""
    return onnx_bound(base / "model.onnx", feeds(str(base)), ROWS)


def onnx_case(place: Place, base: str, way: str, damage: Callable[[Path], tuple[str, bool]] | None) -> Case:
    """A base, damaged or not, quantized by the preset `way`, or inspected."""
    sound = place.bases.get(base)
    source = Path(shutil.copytree(sound, place.inputs / "model")) / "model.onnx"
    said, any_value = damage(source) if damage else ("undamaged", False)
    data, output = place.inputs / "data.npz", place.outputs / "result.onnx"
    samples = feeds(str(sound))
    np.savez(data, **samples)
    one = {name: array[:ROWS] for name, array in samples.items()}
    command: tuple[object, ...] = (
        "quantize",
        source,
        "--config",
        way,
        "--calib",
        data,
        "--batch-size",
        ROWS,
        "-o",
        output,
    )
    if way == "UINT8_DYNAMIC_QUANT":
        command = ("quantize", source, "--config", way, "-o", output)
    if way == "inspect":
        command = (way, source)
    return Case(
        f"{base}: {said}: {shown(*command)}",
        partial(quark, *command),
        nothing_to_compare if way == "inspect" else partial(judge_onnx, source, output, one),
        (output, output.with_name("result.onnx.data"), output.with_name("result.onnx_data")),
        margin=None if any_value else 10.0,
        like=base,
        bound=partial(bound_of, sound),
        # Integers of float16 need QuantizeFP16.
        sound=damage is None and base != "onnx-half" and (base, way) != NOTHING_TO_DO,
    )


def make(random: Random, place: Place) -> Case:
    base = pick(random, ("onnx-outside", "onnx-outside", *ONNX))
    way = pick(random, (*CONFIGS, "inspect"))
    damage = None if random.random() < SOUND else partial(pick(random, DAMAGES), random)
    return onnx_case(place, base, way, damage)
