"""Every option of a request does something, or is refused: none is taken and forgotten.

Each is added to a command that works without it. What is printed, or a file that is written, is then another, or the
command ends with an error that says why not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.jobs.compare import COMPARE
from quark.jobs.convert import CONVERT
from quark.jobs.evaluate import EVALUATE
from quark.jobs.options import flag_of
from quark.jobs.request import QUANTIZE, options_of
from tests.commands.program import quark
from tests.models.onnx_zoo import Builder
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama

CALIB = TEXT / "calibration.txt"
WORDS = {
    "goal": "transformers", "effort": "fast", "calib": CALIB, "data": CALIB, "text": CALIB, "samples": 3, "length": 32,
    "windows": 2, "seed": 3, "synthetic": 2, "exclude": "*down_proj", "algorithm": "gptq", "scheme": "int4_wo_32",
    "bits": 6, "size": "50%", "candidates": "int8_wo", "layer": "*q_proj=int4_wo_32", "component": "x",
    "kv_cache": "fp8", "attention": "fp8", "device": "nonsense", "dtype": "float99", "export_format": "awq",
    "weight_format": "fake_quantized", "pack_method": "order", "max_shard_size": "99KB", "config": "XINT8",
    "target": "npu", "mean": "0.5", "std": "0.5", "budget": "5s", "metric": "psnr", "reach": 30,
    "prefer": "size",
    "layers": 1, "threads": 0, "prompt": "x", "requantize": "int4_wo_32", "schemes": "int4_wo_32", "format": "awq",
    "report": "page.html", "log_file": "log.jsonl", "write_recipe": "recipe.yaml", "sensitivity": "table.json",
    "imatrix": "in.gguf", "save_imatrix": "out.gguf", "statistics": "statistics.json", "profile": "times.json",
    "process_timeout": 60,
}  # fmt: skip
"""Of an option with a value: one that is not its default, with which a command without it differs or ends."""
ALONE = {
    "packing": "--no-packing", "recover": "--recover", "measure": "--measure", "allow_wider": "--allow-wider",
    "calibrate_all_experts": "--calibrate-all-experts",
}  # fmt: skip
PERMITS = ("force", "trust_remote_code", "keep_unexpected", "allow_noop", "allow_damage")
"""These permit what is refused otherwise: where nothing is, they have nothing to do."""
SAME = ("stream", "batch_size")
"""These say how the same is made."""


@dataclass(frozen=True)
class Door:
    """A command that works, for a model of one kind.

    Attributes:
        words: The command line; IN, OUT, DATA and MADE stand for files of the test.
        kinds: The pair of requests of the command.
        file: Whether the model is an ONNX file.
        skipped: Options that say what the words say already, by another name or none, and those with no effect on the
            small model.
    """

    words: str
    kinds: Any
    file: bool = False
    skipped: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """Those that it may get."""
        known = options_of(self.kinds[self.file])
        given = {name for name, each in known.items() if flag_of(each) in self.words.split()}
        return [name for name in known if name not in {*given, *self.skipped, *PERMITS, *SAME, "output"}]


DOORS = {
    "plan an ONNX file": Door("plan IN.onnx --config A8W8 --calib DATA.npz", QUANTIZE, True),
    "plan a folder": Door("plan IN --scheme int8_wo", QUANTIZE),
    # A plan shows no algorithm but by the data that it needs.
    "plan a folder with data": Door(f"plan IN --scheme int8 --calib {CALIB}", QUANTIZE, False, ("algorithm",)),
    "plan a GGUF file": Door("plan IN --scheme q8_0 --export-format gguf", QUANTIZE),
    "quantize an ONNX file": Door("quantize IN.onnx -o OUT.onnx --config INT8_CPU --calib DATA.npz", QUANTIZE, True),
    # What is measured may be faster as it is.
    "quantize an ONNX file without data": Door(
        "quantize IN.onnx -o OUT.onnx --config INT8_CPU_WEIGHTS", QUANTIZE, True, ("measure",)
    ),
    "quantize a folder": Door("quantize IN -o OUT --scheme int8_wo", QUANTIZE),
    "quantize to a GGUF file": Door("quantize IN -o OUT.gguf --scheme q8_0 --export-format gguf", QUANTIZE),
    "evaluate an ONNX file": Door("evaluate IN.onnx MADE.onnx --data DATA.npz", EVALUATE, True),
    "evaluate a folder": Door(f"evaluate IN MADE --data {CALIB} --windows 1 --length 16", EVALUATE),
    "compare an ONNX file": Door("compare IN.onnx --schemes A8W8 --calib DATA.npz", COMPARE, True),
    "compare a folder": Door(f"compare IN --schemes int8_wo --calib {CALIB} --windows 1 --length 16", COMPARE),
    "convert a folder": Door("convert MADE -o OUT --format compressed-tensors", CONVERT),
}
CHEAP = ("plan an ONNX file",)
CASES = [
    pytest.param(door, name, marks=[] if door in CHEAP else [pytest.mark.slow])
    for door, each in DOORS.items()
    for name in each.options
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and data."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("options")
    builder = Builder()
    hidden = builder.node("MatMul", ["x", builder.constant("a", builder.random.normal(0, 0.1, (32, 64)))], "hidden")
    builder.node("Relu", [hidden], "y")
    onnx.save(builder.model({"x": ["n", 32]}, {"y": ["n", 64]}), folder / "IN.onnx")
    np.savez(folder / "DATA.npz", x=np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32))
    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder / "IN")
    tokenizer.save_pretrained(folder / "IN")
    assert not quark("quantize", folder / "IN", "-o", folder / "MADE", "--scheme", "int8_wo").code
    assert not quark("quantize", folder / "IN.onnx", "-o", folder / "MADE.onnx", "--config", "INT8_CPU_WEIGHTS").code
    return folder


def came_of(made: Path, folder: Path, words: list[str]) -> tuple[object, str, dict[str, bytes]]:
    """The exit code of a command, what it printed without times and places, and what it wrote."""
    folder.mkdir()
    places = {word: str(made / word) for word in ("IN", "IN.onnx", "MADE", "MADE.onnx", "DATA.npz")}
    places |= {word: str(folder / word) for word in ("OUT", "OUT.onnx", "OUT.gguf")}
    done = quark(*(places.get(word, word) for word in words))
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    # A recipe, and what names it, say what was asked for: that is no effect.
    written = {name: b"" if name.endswith((".yaml", ".md")) else data for name, data in files.items()}
    said = done.out + "".join(line for line in done.log.splitlines() if "changes no value" in line)
    return done.code, re.sub(r"[\d.]+ s\b|[\d.]+ *│\n|" + re.escape(str(folder)), "", said), written


@pytest.fixture(scope="module")
def without(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of doors that were gone through: what comes without a further option."""
    return {}


@pytest.mark.parametrize(("door", "name"), CASES)
def test_an_option_does_something_or_is_refused(
    door: str, name: str, made: Path, without: dict[str, Any], tmp_path: Path
) -> None:
    words, known = DOORS[door].words.split(), options_of(*DOORS[door].kinds)
    if door not in without:
        without[door] = came_of(made, tmp_path / "without", words)
        assert not without[door][0]
    word = WORDS.get(name, "")
    if str(word).rpartition(".")[2] in ("html", "jsonl", "yaml", "json", "gguf"):
        word = tmp_path / "with" / str(word)
    more = [ALONE[name]] if name in ALONE else [flag_of(known[name]), str(word)]
    code, printed, written = came_of(made, tmp_path / "with", [*words, *more])
    assert code or (printed, written) != without[door][1:]
