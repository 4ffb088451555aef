"""Every family of transformers in every format: each class that loads the float folder finds the quantized one to the
last tensor, with the values of the frozen model, or the folder is refused before the work.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto import modeling_auto as auto

from benchmarks.architectures.__main__ import build, result
from quark.errors import CalibrationError, FormatError, NotSupportedError, QuarkError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.flows.check_plan import check_plan
from quark.torch.flows.predicted_size import plan_layers
from quark.torch.model.meta_model import meta_copy
from quark.torch.model.names.other_classes import LOADERS

HEADS = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
CLASSES = {name: head[name] for head in reversed(HEADS) for name in head}
SCHEMES = {
    "quark": "int4_wo_32", "compressed-tensors": "int4_wo_32", "awq": "uint4_wo_32", "gptq": "int4_wo_32", "fp8": "fp8",
}  # fmt: skip
OWN_READER = ("awq", "gptq", "fp8")
"""Formats that transformers reads with packages of others, or on a GPU: here it is asked for names alone."""


def loaded(kind: Any, folder: Path) -> tuple[Any, dict[str, set[str]]] | None:
    """The model and what its loader says; None where the class does not load such a folder."""
    try:
        model, said = kind.from_pretrained(folder, output_loading_info=True)
    except (ValueError, RuntimeError, AttributeError, KeyError, TypeError, QuarkError):
        return None
    return model.eval(), {key: set(map(str, names)) for key, names in said.items()}


def whole(said: dict[str, set[str]]) -> bool:
    return not any(names for key, names in said.items() if key != "unexpected_keys")


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_each_class_that_loads_the_float_folder_loads_the_quantized_one(name: str, tmp_path: Path) -> None:
    import transformers

    try:
        model = build(name, CLASSES[name])[0]
    except Exception as error:  # noqa: BLE001 - sizes that a family does not take
        pytest.skip(f"no tiny model: {error}")
    model.save_pretrained(tmp_path / "float")
    kinds: dict[Any, set[str]] = {}
    for kind in (type(model), *(getattr(transformers, each) for each in LOADERS)):
        found = loaded(kind, tmp_path / "float")
        if found is not None and whole(found[1]) and type(found[0]) not in {type(m) for m in kinds}:
            kinds[kind] = found[1]["unexpected_keys"]
    for form, scheme in SCHEMES.items():
        config = LLMTemplate.get(model.config.model_type).get_config(scheme)
        if not refused(model, config, form):
            _write_and_load(lambda: build(name, CLASSES[name]), config, form, tmp_path / form, kinds)


def refused(model: Any, config: Any, form: str) -> bool:
    """Whether a model is refused for a format on its plan, without weights."""
    meta = meta_copy(model).eval()
    try:
        made = plan_layers(meta, config)
        check_plan(meta, config, made, form)
    except QuarkError:
        return True
    return False


def _write_and_load(make: Any, config: Any, form: str, folder: Path, kinds: dict[Any, set[str]]) -> None:
    (model, data), quantizer = make(), ModelQuantizer(config)
    try:
        frozen = quantizer.freeze(quantizer.quantize_model(model, data))
    except (CalibrationError, NotSupportedError):
        return  # these few tokens do not reach each layer, or what experts compute is found out with weights alone
    export_safetensors(frozen, folder, form)
    if form in OWN_READER:
        other = make()[0]
        for parameter in other.parameters():
            parameter.data.zero_()
        _equal(result(import_model_from_safetensors(other, folder), data[0]), result(frozen, data[0]))
        return
    for kind, left in kinds.items():
        _loads(kind, left, folder, frozen, data[0])


def _loads(kind: Any, left: set[str], folder: Path, frozen: Any, batch: Any) -> None:
    found = loaded(kind, folder)
    if found is None:
        with pytest.raises(FormatError, match="for a scale"):  # said as it is loaded
            kind.from_pretrained(folder)
        assert kind is not type(frozen)
        return
    model, said = found
    assert whole(said), (folder.name, kind, said)
    unexpected = {name.rpartition(".")[0].removesuffix(".weight_quantizer") for name in said["unexpected_keys"]}
    unshared = {name.rpartition(".")[0] for name in frozen.all_tied_weights_keys}  # once they hold codes
    assert unexpected - unshared <= {name.rpartition(".")[0] for name in left}, (folder.name, kind, said)
    assert form_of(model) == folder.name
    if type(model) is not type(frozen) and not takes(model, batch):
        return  # what a head gives its body (features of a prenet) is no batch
    parts = [part for part in frozen.modules() if type(part) is type(model)]
    body = frozen if hasattr(model, "lm_head") else getattr(frozen, "model", None)
    if not parts and (body is None or not hasattr(frozen, "lm_head")):
        return  # what a body gives that is no part of the model (Kosmos 2.5, LongT5), there is nothing to compare with
    _equal(result(model, batch), result(parts[0] if parts else body, batch))


def takes(model: Any, batch: Any) -> bool:
    """Whether the float model of a class, with any weights, runs a batch."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    try:
        result(type(model)(config).eval(), batch)
    except (TypeError, RuntimeError, ValueError):
        return False
    return True


def _equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def form_of(model: Any) -> str:
    """The format that transformers took a model for."""
    return str(model.hf_quantizer.quantization_config.quant_method.value)
