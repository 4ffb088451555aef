"""`python -m benchmarks.pictures [NAME ...]`: the pictures in docs/pictures, each from what quark does to a model.

    layer_errors    SQNR of the output of each layer in 4 bits, blocks by kinds of layer
    bits            bits of a weight that a budget gives each layer
    outliers        largest value of each channel before a layer: as it is, smoothed, rotated
    memory          peak of the process by the size of the model: in memory, block by block, from file to file
    qdq             the first nodes of an ONNX file, before and after it is quantized

They are drawn on the example models; `memory` makes models of random weights. Its figures are of this machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from quark.report.figures import ELSEWHERE as COLOURS

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "docs" / "pictures"
MODELS = ROOT / "examples" / "models"
FOLDER, TEXT = MODELS / "language_model", MODELS / "text" / "calibration.txt"
WIDTH, MARGIN = 480, 12
STYLE = f"""
text {{ font: 12px system-ui, sans-serif; fill: #24292f }} .card {{ fill: #ffffff }} .node {{ fill: #f0f2f4 }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #d5dae0 }} .card {{ fill: #1c2128 }} .node {{ fill: #2d333b }} }}
.head {{ font-weight: bold }} .end {{ text-anchor: end }} .mid {{ text-anchor: middle }}
.first {{ fill: {COLOURS["first"]} }} .second {{ fill: {COLOURS["second"]} }} .third {{ fill: {COLOURS["third"]} }}
.line, .node {{ stroke: {COLOURS["grid"]} }} .line, .thick {{ fill: none }} .thick {{ stroke-width: 2 }}
.of-first {{ stroke: {COLOURS["first"]} }} .of-second {{ stroke: {COLOURS["second"]} }}
.of-third {{ stroke: {COLOURS["third"]} }} .of-bad {{ stroke: {COLOURS["bad"]} }}
"""


class Drawing:
    """An SVG picture on a card of its own, which is dark where the reader's system is.

    Args:
        title: What is seen, for those who cannot see it.
        height: Pixels, of WIDTH.
    """

    def __init__(self, title: str, height: int) -> None:
        self._height, self._title, self._parts = height, title, list[str]()

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, strength: float = 1.0) -> None:
        shade = "" if strength == 1 else f' fill-opacity="{strength:.2f}"'
        size = f'width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" {size} rx="3" class="{kind}"{shade}/>')

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        steps = "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
        self._parts.append(f'<path d="M{steps}" class="{kind}"/>')

    def save(self, name: str) -> None:
        width, height = WIDTH + 2 * MARGIN, self._height + 2 * MARGIN
        size = f'width="{width}" height="{height}" viewBox="{-MARGIN} {-MARGIN} {width} {height}"'
        head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{escape(self._title)}</title>"]
        card = f'<rect x="{-MARGIN}" y="{-MARGIN}" width="{width}" height="{height}" rx="8" class="card"/>'
        PLACE.mkdir(exist_ok=True)
        text = "\n".join([*head, f"<style>{STYLE}</style>", card, *self._parts, "</svg>\n"])
        (PLACE / f"{name}.svg").write_text(text, encoding="utf-8", newline="\n")


def grid(
    title: str, corner: str, values: Mapping[str, float], strength: Callable[[float], float], worst: str = ""
) -> Drawing:
    """Blocks by kinds of layer: a cell for each layer, the stronger its colour the more `strength` gives of its value.

    Args:
        title: Of the picture.
        corner: What the numbers are.
        values: By the names of layers, such as model.layers.0.mlp.up_proj.
        strength: Value -> 0 to 1.
        worst: A layer that has a frame; none where it is empty.
    """
    place = {name: (int(name.split(".")[2]), name.split(".")[-1]) for name in values}
    blocks = max(block for block, _ in place.values()) + 1
    kinds = list(dict.fromkeys(kind for _, kind in place.values()))
    left, top, height = 92, 44, 26
    width = (WIDTH - left) / blocks
    drawing = Drawing(title, top + height * len(kinds) + 4)
    drawing.text(0, 14, corner, "head")
    for block in range(blocks):
        drawing.text(left + (block + 0.5) * width, top - 8, f"block {block}", "mid")
    for row, kind in enumerate(kinds):
        drawing.text(left - 8, top + (row + 0.66) * height, kind, "end")
    for name, (block, kind) in place.items():
        x, y = left + block * width + 1, top + kinds.index(kind) * height + 1
        drawing.box(x, y, width - 2, height - 2, "second", 0.08 + 0.62 * strength(values[name]))
        if name == worst:
            drawing.box(x, y, width - 2, height - 2, "thick of-bad")
        drawing.text(x + width / 2, y + 16, f"{values[name]:.1f}", "mid")
    return drawing


def windows(count: int, length: int) -> list[Any]:
    """Windows of tokens of the calibration text of the example model, each (1, length)."""
    from transformers import AutoTokenizer

    from quark.torch.llm.text import token_windows

    return list(token_windows(AutoTokenizer.from_pretrained(FOLDER), TEXT, length, count))


def float_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER).float().eval()


def layer_errors() -> None:
    import quark
    from quark.torch import layer_errors as measured

    errors = measured(float_model(), quark.quantize(float_model(), "int4_wo_128"), windows(4, 256))
    values = {name: found.output for name, found in errors.layers.items() if ".layers." in name}
    low, high = min(values.values()), max(values.values())
    title = "Output SQNR of each layer of the example language model in int4_wo_128, in dB; the lowest has a frame"
    worst = min(values, key=values.__getitem__)
    corner = "Output SQNR in dB, int4_wo_128"
    grid(title, corner, values, lambda v: (high - v) / (high - low), worst).save("layer_errors")


def bits() -> None:
    from quark.torch.bit_budget.measure import measure_sensitivity

    candidates = ["uint2_wo_64", "int3_wo_128", "int3_wo_32", "uint4_wo_128", "uint4_wo_32", "mxfp6_e2m3_weight_only"]
    table = measure_sensitivity(FOLDER, windows(4, 256), candidates)
    choice = table.choose(bits=4)
    values = {
        layer: group.sizes[choice.schemes[layer]] * 8 / group.weights
        for group in table.groups
        for layer in group.layers
    }
    title = "Bits of a weight that a budget of 4 bits gives each layer of the example language model"
    corner = f"Bits of a weight, {choice.bits:.2f} on average"
    grid(title, corner, values, lambda v: (v - 2.25) / 4).save("bits")


def outliers() -> None:
    import torch

    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.quantization import RotationConfig, SmoothQuantConfig

    batches, block = windows(2, 128), 1
    plain = LLMTemplate.get("llama").get_config("int8")
    ways = {
        "as it is": [],
        "SmoothQuant": [SmoothQuantConfig(alpha=0.8)],
        "rotated (R4)": [RotationConfig(r1=False, r2=False, r4=True)],
    }
    kinds = dict(zip(ways, ("second", "first", "third"), strict=True))
    drawing = Drawing(
        "Largest value of each channel of the input of a down projection: as it is a few channels stand out, smoothed "
        "and rotated none does", 322
    )  # fmt: skip
    drawing.text(0, 14, f"Largest |x| of each channel before down_proj of block {block}", "head")
    for row, (name, algorithms) in enumerate(ways.items()):
        model = ModelQuantizer(replace(plain, algo_config=algorithms)).quantize_model(float_model(), batches)
        layer, seen = model.model.layers[block].mlp.down_proj, []
        layer.input_quantizer.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].abs().flatten(0, -2).amax(0))
        )
        with torch.no_grad():
            for batch in batches:
                model(batch)
        peaks = torch.stack(seen).amax(0).numpy()
        bottom, most, step = 110 + row * 94, float(peaks.max()), WIDTH / len(peaks)
        points = [(round(index * step, 1), round(bottom - 60 * peak / most, 1)) for index, peak in enumerate(peaks)]
        drawing.text(0, bottom - 68, f"{name}: the largest is {most / np.median(peaks):.1f} times the median")
        drawing.path([(0, bottom), *points, (WIDTH, bottom)], kinds[name])
        drawing.path([(0, bottom - 60), (WIDTH, bottom - 60)], "line")
    drawing.text(WIDTH, 318, "channels; the line is the end of the int8 range", "end")
    drawing.save("outliers")


WAYS = {
    "in memory": """
model = ModelQuantizer(config("int8")).quantize_model(AutoModelForCausalLM.from_pretrained(source, dtype="auto"), data)
export_safetensors(model, output)
""",
    "block by block": 'stream(config("int8"), Path(source), Path(output), data)',
    "from file to file": 'ModelQuantizer(config("uint4_wo_128")).direct_quantize_checkpoint(source, output, workers=1)',
}
"""How a model becomes quantized -> the code that does it, in a process of its own."""
MEASURED = r"""
import re, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.flows.from_disk import stream
source, output = sys.argv[1:]
config = LLMTemplate.get("auto").get_config
data = [torch.arange(128)[None] + 128 * number for number in range(2)]
{way}
# The peak that `resource` says is at least that of the process which started this one.
print(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""


def memory() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 2048, "num_attention_heads": 8}
    peaks: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for blocks in (4, 12, 24, 36):
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "model"
            model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=blocks, num_key_value_heads=8))
            model.to(torch.bfloat16).save_pretrained(source)
            gb = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 1e9
            del model
            for way, code in WAYS.items():
                command = [sys.executable, "-c", MEASURED.format(way=code), str(source), f"{place}/{way}"]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                peaks[way].append((gb, int(done.stdout.split()[-1]) * 1024 / 1e9))
                print(way, peaks[way][-1], flush=True)
    _draw_memory(peaks)


def _draw_memory(peaks: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    drawing = Drawing(
        "Peak memory by size of the model: in memory it grows with the model, block by block and from file to file it "
        "does not", 300
    )  # fmt: skip
    left, right, bottom, top = 34, WIDTH - 6, 262, 34
    across = max(gb for points in peaks.values() for gb, _ in points)
    up = max(peak for points in peaks.values() for _, peak in points) * 1.1
    drawing.text(0, 14, "Peak memory of the process, GB", "head")
    drawing.text(right, bottom + 32, "size of the float model, GB", "end")
    for value in np.arange(0, up, 0.5):
        y = bottom - (bottom - top) * value / up
        drawing.path([(left, y), (right, y)], "line")
        drawing.text(left - 6, y + 4, f"{value:.1f}", "end")
    for kind, (way, points) in zip(("second", "first", "third"), peaks.items(), strict=True):
        ends = [
            (left + (right - left) * gb / across, bottom - (bottom - top) * peak / up) for gb, peak in sorted(points)
        ]
        drawing.path(ends, f"thick of-{kind}")
        drawing.text(ends[-1][0] - 4, ends[-1][1] + (16 if kind == "third" else -8), way, f"end {kind}")  # the lowest
    for gb, _ in next(iter(peaks.values())):
        drawing.text(left + (right - left) * gb / across, bottom + 16, f"{gb:.2f}", "mid" if gb < across else "end")
    drawing.save("memory")


SHORT = {"QuantizeLinear": "Quantize", "DequantizeLinear": "Dequantize", "BatchNormalization": "BatchNorm"}


def qdq() -> None:
    import onnx

    from quark.onnx import Config, ModelQuantizer, get_default_config

    samples = np.load(MODELS / "digits_cnn" / "data.npz")["calibration_images"][:64].astype(np.float32) / 16
    source = MODELS / "digits_cnn" / "model.onnx"
    made = ModelQuantizer(Config(global_quant_config=get_default_config("A8W8"))).quantize_model(source, None, samples)
    drawing = Drawing("The first nodes of an ONNX file in float, and the same with Quantize and Dequantize nodes", 386)
    drawing.text(70, 14, "float", "head mid")
    drawing.text(240, 14, "quantized", "head mid")
    _draw_chain(drawing, onnx.load(source).graph, 70, 6)
    _draw_chain(drawing, made.graph, 240, 9)
    drawing.save("qdq")


def _draw_chain(drawing: Drawing, graph: Any, middle: float, count: int) -> None:
    """The first nodes that read one another, from the input down, with the quantized constants that they read."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    decoded = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    value, y, width, height = graph.input[0].name, 30, 106, 26
    drawing.text(middle, y + 6, value, "mid")
    for _ in range(count):
        node = next(node for node in graph.node if value in node.input)
        y += 38
        drawing.path([(middle, y - 26), (middle, y - 14)], "line")
        kind = {"QuantizeLinear": "first", "DequantizeLinear": "first"}.get(node.op_type)
        drawing.box(middle - width / 2, y - 14, width, height, kind or "node", 0.35 if kind else 1.0)
        drawing.text(middle, y + 3, SHORT.get(node.op_type, node.op_type), "mid")
        read = [constants[decoded[name]] for name in node.input[1:] if name in decoded]
        if read:
            roles = zip(("weight", "bias"), read, strict=True)
            types = ", ".join(f"{role} {type_name(tensor)}" for role, tensor in roles)
            drawing.path([(middle + width / 2, y - 1), (middle + 75, y - 1)], "line")
            drawing.box(middle + 75, y - 14, 160, height, "third", 0.35)
            drawing.text(middle + 155, y + 3, types, "mid")
        value = node.output[0]


def type_name(tensor: Any) -> str:
    import onnx

    return onnx.TensorProto.DataType.Name(tensor.data_type).lower()


PICTURES: dict[str, Callable[[], None]] = {
    "layer_errors": layer_errors, "bits": bits, "outliers": outliers, "memory": memory, "qdq": qdq,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="which; all without")
    for name in parser.parse_args().names or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
