"""What is not quantized is in the new folder as the old one had it, of every family whose files hold other tensors than
its model: experts one by one, query, key and value in one, transposed. Through every door, and for each that reads it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.architectures.__main__ import build, result
from quark.errors import StructureError
from quark.torch import LLMTemplate, ModelQuantizer, QConfig, export_safetensors, import_model_from_safetensors
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.stored_types import forms_of
from quark.torch.flows.from_disk import stream
from quark.torch.model.passes.unfuse_experts import fused_blocks
from tests.contracts.test_reader_classes import CLASSES, loaded, refused, whole

EVERYDAY = ("mixtral",)
FAMILIES = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in CLASSES]
DOORS: dict[str, Any] = {
    "files": lambda config, source, output: ModelQuantizer(config).direct_quantize_checkpoint(source, output),
    "streamed": lambda config, source, output: stream(config, OpenedFolder(source), output),
}


def float_folder(name: str, folder: Path) -> tuple[Any, list[Any]]:
    """A folder of a tiny model in bfloat16, and its batches. Skips a family that has no forms of its own."""
    try:
        model, data = build(name, CLASSES[name])
    except Exception as error:  # noqa: BLE001 - sizes that a family does not take
        pytest.skip(f"no tiny model: {error}")
    if not forms_of(model, None) and not fused_blocks(model):
        pytest.skip("its files hold the tensors of the model")
    for parameter in model.parameters():  # and no buffers, of which Llama 4 has complex ones
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder)
    return model, data


def left_in_float(folder: Path) -> list[str]:
    """Patterns of the layers whose tensors the files of a folder hold otherwise, and of experts."""
    meta = OpenedFolder(folder).skeleton
    names = [name for form in forms_of(meta, OpenedFolder(folder)) for name in form.members]
    names += [f"{block}." for block in fused_blocks(meta)]
    return [f"{name.rpartition('.')[0]}*" for name in names]


def check_kept(source: Path, output: Path, model: Any) -> None:
    """Every tensor of a source lies in the output, to the bit, but those of layers in codes and those that are tied."""
    quantized = quantized_layers_in(output)
    quantized |= {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
    old, new = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    lost = [name for name in old if name not in new and name.removesuffix(".weight") not in quantized]
    assert not lost, (output.name, lost)
    for name, tensor in old.items():
        if name.removesuffix(".weight") not in quantized:
            assert new[name].dtype == tensor.dtype and torch.equal(new[name], tensor), (output.name, name)


def equal(got: Any, expected: Any, batch: Any) -> None:
    torch.testing.assert_close(result(got, batch), result(expected, batch), rtol=0, atol=0)


def quantized_layers_in(folder: Path) -> set[str]:
    """Names in the file."""
    tensors = load_file(folder / "model.safetensors")
    return {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_stays_in_float_is_copied_as_it_was(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "float"
    model, data = float_folder(name, source)
    excluded = left_in_float(source)

    def config() -> QConfig:
        found = LLMTemplate.get(model.config.model_type).get_config("int8_wo")
        return replace(found, exclude=[*found.exclude, *excluded])

    def frozen() -> Any:
        quantizer = ModelQuantizer(config())
        return quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(source))))

    if not refused(OpenedFolder(source).skeleton, config(), "quark"):
        memory, written = frozen(), tmp_path / "memory"
        export_safetensors(memory, written)
        check_kept(source, written, model)
        again = loaded(type(model), written)
        assert again is not None and whole(again[1]), again
        equal(again[0], memory, data[0])
        equal(import_model_from_safetensors(load_float_model(OpenedFolder(source)), written).eval(), memory, data[0])
        for door in DOORS:
            try:
                DOORS[door](config(), source, tmp_path / door)
            except StructureError:  # blocks that cannot be run by themselves
                assert door == "streamed"
            else:
                assert (tmp_path / door / "model.safetensors").read_bytes() == (
                    written / "model.safetensors"
                ).read_bytes(), door
    if not refused(OpenedFolder(source).skeleton, config(), "compressed-tensors"):
        memory = frozen()
        export_safetensors(memory, tmp_path / "server", "compressed-tensors", reader="vllm")
        check_kept(source, tmp_path / "server", model)
        equal(
            import_model_from_safetensors(load_float_model(OpenedFolder(source)), tmp_path / "server").eval(),
            memory,
            data[0],
        )
        with caplog.at_level(logging.WARNING):
            export_safetensors(memory, tmp_path / "packed", "compressed-tensors")
        again = loaded(type(model), tmp_path / "packed")
        assert again is not None and whole(again[1]), again
        if "asks for it by a part of their names" in caplog.text:  # scales in float32
            with pytest.raises(RuntimeError, match="dtype"):
                result(again[0], data[0])
        else:
            equal(again[0], memory, data[0])
        equal(
            import_model_from_safetensors(load_float_model(OpenedFolder(source)), tmp_path / "packed").eval(),
            memory,
            data[0],
        )
