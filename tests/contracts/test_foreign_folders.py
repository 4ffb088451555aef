"""Folders that other programs quantized: every door reads the same values, or says the same sentence."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import quark
from quark.compat.llm_scripts.model_loading import get_model
from quark.errors import QuarkError, one_line
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.from_disk import stream
from quark.torch.model.names import source_names
from tests.commands.program import quark as program
from tests.models.doors import SCHEME, float_folder, same_through_every_door
from tests.models.foreign import FOREIGN, encode_folder, foreign_folder
from tests.models.torch_zoo import LANGUAGE_MODEL

KINDS = [*((kind, "llama") for kind in FOREIGN), ("bitsandbytes nf4", "mixtral"), ("torchao", "nemotron_h")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model_type"), KINDS)
def test_every_door_writes_what_the_values_give(kind: str, model_type: str, tmp_path: Path) -> None:
    source, values = foreign_folder(kind, tmp_path / "source", model_type)
    model = load_float_model(OpenedFolder(source))
    own = model.state_dict()
    named = {name: own[target] for target, name in source_names(model, values).items() if target in own}
    assert len(named) > 3
    for name, x in named.items():
        torch.testing.assert_close(x.float(), values[name], rtol=2**-8, atol=0)
    tensors = same_through_every_door(source, tmp_path)
    said = json.loads((tmp_path / "memory" / "config.json").read_text())
    assert "quantization" not in said and said["quantization_config"]["quant_method"] == "quark"
    floats = _as_floats(source, values, tmp_path / "floats")
    quark.quantize(floats, SCHEME, output=tmp_path / "of_floats")
    for name, x in load_file(tmp_path / "of_floats" / "model.safetensors").items():
        assert torch.equal(x.reshape(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8)), name


def _as_floats(source: Path, values: dict[str, torch.Tensor], folder: Path) -> Path:
    """The float folder that a foreign one stands for."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    coded = tuple(name.removesuffix("weight") for name in values)
    kept = {n: x for n, x in load_file(source / "model.safetensors").items() if not n.startswith(coded)}
    rounded = {name: x.to(getattr(torch, config["dtype"])) for name, x in values.items()}
    save_file(kept | rounded, folder / "model.safetensors", {"format": "pt"})
    said = {name: value for name, value in config.items() if not name.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


# What commands show. -------------------------------------------------------------------------------------------------

TEXT = LANGUAGE_MODEL.parent / "text" / "heldout.txt"
ON = ("--data", TEXT, "--windows", 1, "--length", 16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOREIGN)
def test_every_command_takes_such_a_folder(kind: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(LANGUAGE_MODEL, folder)
    values = encode_folder(kind, folder)
    plan = succeed("plan", folder, "--scheme", "int8_wo")
    succeed("quantize", folder, "--scheme", "int8_wo", "-o", out)
    assert plan.splitlines()[-1] == succeed("plan", LANGUAGE_MODEL, "--scheme", "int8_wo").splitlines()[-1]
    assert re.search(r"model\.layers\.\*\.mlp\.up_proj +\S 5 +\S", succeed("inspect", folder))
    measured = quark.evaluate(LANGUAGE_MODEL, folder, data=TEXT, windows=2, length=32)
    again = quark.evaluate(folder, out, data=TEXT, windows=2, length=32)
    as_float = quark.evaluate(_as_floats(folder, values, tmp_path / "floats"), out, data=TEXT, windows=2, length=32)
    assert {f"{name}.weight" for name in measured.damage} == values.keys()
    assert measured.comparison.perplexity[1] == again.comparison.perplexity[0] == as_float.comparison.perplexity[0]
    assert all(5 < weight < 60 for weight, _ in measured.damage.values()), measured.damage
    assert 0 < again.comparison.kl < measured.comparison.kl
    succeed("evaluate", LANGUAGE_MODEL, folder, *ON, "--report", tmp_path / "page.html")
    assert "decoded" in (tmp_path / "page.html").read_text(encoding="utf-8")
    succeed("compare", folder, "--schemes", "int8_wo", *ON)
    if kind == "mlx":  # which takes half a minute
        succeed("quantize", folder, "--bits", "4", "--calib", TEXT, "--samples", "2", "-o", tmp_path / "bits")
    line = ("convert", folder, "--format", "quark", "-o", tmp_path / "converted")
    assert "its codes are not taken over into other formats. Possible: --requantize SCHEME" in said(*line)
    succeed(*line, "--requantize", "int8_wo")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "converted" / "model.safetensors").read_bytes()


def succeed(*arguments: object) -> str:
    done = program(*arguments)
    assert done.code == 0, done.err
    return done.out


# What doors say. -----------------------------------------------------------------------------------------------------


def said(*arguments: object) -> str:
    """The error line of a command that fails, without the name of the program."""
    done = program(*arguments)
    assert (done.code, done.err.count("\n")) == (1, 1), (arguments, done)
    return done.err.removeprefix("quark: ").strip()


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(QuarkError) as caught:
        call()
    return one_line(caught.value)


def sentences(folder: Path, other: Path, tmp_path: Path) -> dict[str, str]:
    """Door -> what it says of a folder that it does not read, or of it beside a float one of its architecture."""
    out, config = tmp_path / "out", LLMTemplate.get("auto").get_config("int8_wo")
    lines: dict[str, tuple[object, ...]] = {
        "plan": ("plan", folder, "--scheme", "int8_wo"),
        "plan for": ("plan", folder, "--for", "vllm"),
        "quantize": ("quantize", folder, "--scheme", "int8_wo", "-o", out),
        "quantize in memory": ("quantize", folder, "--scheme", "int8_wo", "-o", out, "--no-stream"),
        "quantize streamed": ("quantize", folder, "--scheme", "int8_wo", "-o", out, "--stream"),
        "quantize gguf": ("quantize", folder, "--scheme", "q4_0", "--format", "gguf", "-o", out),
        "budget": ("quantize", folder, "--bits", "4", "-o", out),
        "evaluate": ("evaluate", folder, other, *ON),
        "evaluate, as the second": ("evaluate", other, folder, *ON),
        "compare": ("compare", folder, "--schemes", "int8_wo", *ON),
        "convert": ("convert", folder, "--format", "awq", "-o", out),
        "convert again": ("convert", folder, "--format", "awq", "--requantize", "int4_wo_32", "-o", out),
    }
    calls: dict[str, Callable[[], Any]] = {
        "quark.quantize": lambda: quark.quantize(folder, "int8_wo", output=out),
        "load_float_model": lambda: load_float_model(OpenedFolder(folder)),
        "load_float_model, float": lambda: load_float_model(OpenedFolder(folder), dequantize=True),
        "get_model": lambda: get_model(folder, device="cpu"),
        "stream": lambda: stream(config, OpenedFolder(folder), out),
        "file to file": lambda: ModelQuantizer(config).direct_quantize_checkpoint(folder, out),
    }
    found = {door: said(*line) for door, line in lines.items()}
    found |= {door: raised(call) for door, call in calls.items()}
    assert not out.exists()
    shown = program("inspect", folder)
    last = (shown.out if shown.code == 0 else shown.err).strip().splitlines()[-1].removeprefix("quark: ")
    return {**found, "inspect": last}


def in_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        kept = {name: value for name, value in config.items() if not name.startswith("quantization")}
        (folder / "config.json").write_text(json.dumps(kept | changes))

    return change


def with_tiles(folder: Path) -> None:
    """One weight of torchao in the layout of a GPU."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as stored:
        metadata = dict(stored.metadata())
    name = next(name for name, row in metadata.items() if "IntxUnpackedToInt8Tensor" in row)
    metadata[name] = metadata[name].replace("IntxUnpackedToInt8Tensor", "Int4TilePackedTo4dTensor")
    save_file(load_file(file), file, metadata)


def without(end: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with safe_open(folder / "model.safetensors", "pt") as stored:
            metadata = stored.metadata()
        kept = {name: x for name, x in load_file(folder / "model.safetensors").items() if not name.endswith(end)}
        save_file(kept, folder / "model.safetensors", metadata)

    return change


def as_pickle(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / name)
        for file in [file for file in folder.iterdir() if file.name != name]:
            file.unlink()

    return change


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "int-quantized",
              "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}  # fmt: skip
NONE_OF = "and none of its 48 tensors holds such codes"
REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    **{f"floats as {method}": ("", in_config(quantization_config=section), NONE_OF) for method, section in {
        "gptq": GPTQ, "awq": {**GPTQ, "quant_method": "awq", "version": "gemm", "zero_point": True},
        "compressed-tensors": COMPRESSED, **{name: {"quant_method": name, "quant_algo": "FP8"} for name in
        ("fp8", "mxfp4", "modelopt", "bitsandbytes", "torchao")}}.items()},
    "floats as mlx": ("", in_config(quantization={"group_size": 64, "bits": 4}), NONE_OF),
    **{f"{kind} as floats": (kind, in_config(), f"as in folders of {kind.split()[0]}") for kind in FOREIGN},
    **{f"{kind} as gptq": (kind, in_config(quantization_config=GPTQ), "says that it is quantized by 'gptq'")
       for kind in FOREIGN},
    "torchao as mlx": ("torchao", in_config(quantization={"group_size": 64, "bits": 4}), "as in folders of torchao"),
    "hqq": ("", in_config(quantization_config={"quant_method": "hqq"}), "is quantized ('hqq'). Possible: float"),
    "no method": ("", in_config(quantization_config={"some": 1}), "is quantized (None). Possible: float"),
    "tiles of a GPU": ("torchao", with_tiles, "Int4TilePackedTo4dTensor"),
    "a mode of MLX": ("mlx", in_config(quantization={"bits": 4, "mode": "fp5"}), "the mode 'fp5' of MLX is not read"),
    "other groups of MLX": ("mlx", in_config(quantization={"group_size": 64, "bits": 3}), "groups of 64 in 3 bits"),
    "no scales of MLX": ("mlx", without(".biases"), "The checkpoint has no tensor"),
    "no scales of bitsandbytes": ("bitsandbytes nf4", without(".absmax"), "The checkpoint has no tensor"),
    "no scales of torchao": ("torchao", without("_scale"), "The checkpoint has no scale of"),
    "a pickle": ("", as_pickle("model.pt"), "model.pt is a pickle, whose reader would run what it contains"),
    **{f"a folder of {name}": ("", as_pickle(name), "is a pickle, whose reader would run what it contains")
       for name in ("model.pt", "pytorch_model.bin", "consolidated.00.pth", "weights.ckpt")},
}  # fmt: skip
"""Case -> a kind of folder ("" for float), what is done to it, and a part of the sentence."""


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_every_door_says_the_same_of_what_is_not_read(case: str, tmp_path: Path) -> None:
    kind, change, words = REFUSED[case]
    folder = tmp_path / "source"
    if kind:
        foreign_folder(kind, folder)
        float_folder("llama", tmp_path / "float")
    else:
        shutil.copytree(LANGUAGE_MODEL, folder)
    change(folder)
    folder = folder / "model.pt" if case == "a pickle" else folder
    found = sentences(folder, tmp_path / "float" if kind else LANGUAGE_MODEL, tmp_path)
    assert len(set(found.values())) == 1, found
    assert words in found["plan"]
