"""A folder is loaded whole, as the class that it names, or refused by name: never with random or lost weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.errors import FormatError
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.model.model_folder import check_sizes
from tests.models.model_folders import model_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("folders")
    return {name: model_folder(name, base / name) for name in ("qwen3", "classifier")}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def without(*parts: str) -> Callable[[Path], None]:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return lambda folder: rewrite(folder, drop)


def configured(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        stored = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({key: value for key, value in stored.items() if value is not ...}))

    return change


def whole(tensors: dict[str, torch.Tensor]) -> None:
    """Of the same size in bytes as float32, which a flipped byte in the header makes of it."""
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int32)


def endless(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][5] = torch.nan


def longer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(65)


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no q_proj": ("qwen3", without("0.self_attn.q_proj"), "layers.0.self_attn.q_proj.weight"),
    "no layer": ("qwen3", without("layers.1."), "and 6 more"),
    "no head": ("qwen3", without("lm_head"), "lm_head.weight"),
    "an unknown tensor": ("qwen3", lambda f: rewrite(f, lambda t: t.update(extra=torch.ones(2))), "extra"),
    "a longer norm": ("qwen3", lambda f: rewrite(f, longer), "model.norm.weight has shape (65,)"),
    "a norm that is NaN": ("qwen3", lambda f: rewrite(f, endless), "model.norm.weight cannot be read: its values"),
    "a norm of integers": ("qwen3", lambda f: rewrite(f, whole), "model.norm.weight holds int32 in the files"),
    "a classifier as a language model": ("classifier", configured(architectures=["BertForMaskedLM"]), "has no cls."),
    "another kind of config": ("classifier", configured(model_type="llama"), "do not belong together"),
    "an unknown model_type": ("qwen3", configured(model_type="qwen33"), "qwen33"),
    "no such class": ("qwen3", configured(architectures=["Qwen33ForCausalLM"]), "'Qwen33ForCausalLM'"),
    "a class that is no model": ("qwen3", configured(architectures=["AutoConfig"]), "'AutoConfig'"),
    "a name that is no text": ("qwen3", configured(architectures=[5]), "names the class 5|in list 'architectures'"),
    "architectures is a text": ("qwen3", configured(architectures="Qwen3ForCausalLM"), "possible: a list"),
    "a size as text": ("qwen3", configured(hidden_size="64"), "hidden_size"),
    "another size": ("qwen3", configured(hidden_size=128), "in the files, and config.json calls for"),
    "a huge size": ("qwen3", configured(hidden_size=10**9), "hidden_size is 1000000000"),
    "many layers": ("qwen3", configured(num_hidden_layers=10**5), "num_hidden_layers is 100000"),
    "many heads": ("qwen3", configured(num_key_value_heads=10**9), "num_key_value_heads is 1000000000"),
    "many labels": ("classifier", configured(num_labels=10**9), "num_labels is 1000000000"),
    "more experts than there are": ("qwen3", configured(num_experts_per_tok=9, num_experts=8), "is 9, of 8 experts"),
    "experts below none": ("qwen3", configured(num_experts_per_tok=-1), "num_experts_per_tok is -1"),
    "no heads": ("qwen3", configured(num_attention_heads=0), "cannot be loaded"),
    "quantization as a number": ("qwen3", configured(quantization_config=5), "quantization_config is 5"),
    "quantized by others": ("qwen3", configured(quantization_config={"quant_method": "gptq", "bits": 4}), "none of"),
    "code of its own": ("qwen3", configured(auto_map={"AutoModelForCausalLM": "evil.Evil"}, architectures=["Evil"]),
                        "--trust-remote-code"),
    "nothing but a list": ("qwen3", lambda f: (f / "config.json").write_text("[]") and None, "no model_type"),
    "weights of another name": ("qwen3", configured(transformers_weights="o.safetensors"), "transformers_weights is"),
    "code from the network": ("qwen3", configured(attn_implementation="some/kernel"), "code to be downloaded"),
    "a base of all classes": ("qwen3", configured(architectures=["PreTrainedModel"]), "is no whole model"),
    "a base of some classes": ("qwen3", configured(architectures=["Qwen3PreTrainedModel"]), "is no whole model"),
    "deep nesting": ("qwen3", lambda f: (f / "config.json").write_text("[" * 10**5) and None, "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_folder_that_is_not_what_it_says_is_refused_by_name(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    name, damage, message = DAMAGE[case]
    folder = tmp_path / "model"
    shutil.copytree(folders[name], folder)
    damage(folder)
    with pytest.raises(FormatError) as caught:
        load_float_model(OpenedFolder(folder))
    assert any(said in str(caught.value) for said in message.split("|"))  # older transformers refuse some themselves
    assert "\n" not in str(caught.value)


def test_a_number_below_none_may_be_the_default_of_its_class(tmp_path: Path) -> None:
    """ViLT's num_images is -1: as many as there are."""
    check_sizes(tmp_path, {"model_type": "vilt", "num_images": -1}, {})
    with pytest.raises(FormatError, match="num_images is -2"):
        check_sizes(tmp_path, {"model_type": "vilt", "num_images": -2}, {})
    with pytest.raises(FormatError, match="num_images is -1"):
        check_sizes(tmp_path, {"model_type": "bert", "num_images": -1}, {})


@pytest.mark.slow
def test_a_model_with_a_generate_of_its_own_has_a_skeleton(tmp_path: Path) -> None:
    """SpeechT5 generates, and has nothing of what transformers' models that generate have."""
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "vocab_size": 8}
    config = SpeechT5Config(**sizes, architectures=["SpeechT5ForTextToSpeech"])
    config.save_pretrained(tmp_path)
    skeleton = OpenedFolder(tmp_path).skeleton
    assert isinstance(skeleton, SpeechT5ForTextToSpeech) and skeleton.device.type == "meta"


def test_tensors_that_the_class_does_not_use_are_kept_on_request(folders: dict[str, Path], tmp_path: Path) -> None:
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    folder, out, extra = tmp_path / "model", tmp_path / "out", torch.arange(3.0)
    shutil.copytree(folders["qwen3"], folder)
    rewrite(folder, lambda tensors: tensors.update({"vision.extra": extra}))
    model = load_float_model(OpenedFolder(folder), keep_unexpected=True)
    quantizer = ModelQuantizer(LLMTemplate.get("qwen3").get_config("int8_wo"))
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), out)
    assert torch.equal(load_file(out / "model.safetensors")["vision.extra"], extra)


def test_no_code_of_a_folder_runs(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen3"], folder)
    configured(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, model_type="evil")(folder)
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(FormatError):
        load_float_model(OpenedFolder(folder))
    assert not marker.exists()


def test_old_files_of_torch_are_read_and_never_run(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen3"], folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    torch.save(tensors, folder / "pytorch_model.bin")
    file.unlink()
    assert torch.equal(load_float_model(OpenedFolder(folder)).lm_head.weight, tensors["lm_head.weight"])
    torch.save({"a": Path}, folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"pytorch_model.bin"):
        load_float_model(OpenedFolder(folder))


def test_without_a_named_class_it_is_the_causal_language_model(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("qwen3", "classifier"):
        shutil.copytree(folders[name], tmp_path / name)
        configured(architectures=...)(tmp_path / name)
    assert type(load_float_model(OpenedFolder(tmp_path / "qwen3"))).__name__ == "Qwen3ForCausalLM"
    with pytest.raises(FormatError, match="has no cls"):
        load_float_model(OpenedFolder(tmp_path / "classifier"))


def test_files_from_before_torch_wrote_archives_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen3"], folder)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    load_float_model(OpenedFolder(folder))
    (folder / "model.safetensors").unlink()
    assert {name: x.shape for name, x in OpenedFolder(folder).metas.items()} == {
        name: x.shape for name, x in tensors.items()
    }


def test_what_a_legacy_constructor_made_is_read_from_disk_too(tmp_path: Path) -> None:
    """`nn.Parameter(torch.FloatTensor(n))` is never on the meta device; streaming wrote what lay in the memory."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=2, d_inner=64)
    XLNetLMHeadModel(config).save_pretrained(tmp_path)
    assert all(tensor.is_meta for tensor in OpenedFolder(tmp_path).skeleton.parameters())


@pytest.mark.parametrize("in_memory", [False, True])
def test_buffers_of_old_checkpoints_come_along(in_memory: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    from quark.torch import LLMTemplate, ModelQuantizer, QuantFlow, export_safetensors

    folder, out, ids = tmp_path / "model", tmp_path / "out", torch.arange(8)[None]
    shutil.copytree(folders["classifier"], folder)
    rewrite(folder, lambda tensors: tensors.update({"bert.embeddings.position_ids": ids}))
    quantizer = ModelQuantizer(LLMTemplate.get("bert").get_config("int8_wo"))
    if in_memory:
        export_safetensors(quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(folder)))), out)
    else:
        quantizer = ModelQuantizer(replace(quantizer.config, quant_flow=QuantFlow.file2file))
        quantizer.direct_quantize_checkpoint(folder, out)
    assert torch.equal(load_file(out / "model.safetensors")["bert.embeddings.position_ids"], ids)


class Runs:
    """What a pickle of it does when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def test_a_pickle_of_more_than_tensors_is_refused_in_two_lines(tmp_path: Path) -> None:
    """What torch says of it is a page with escape codes, and advises to read it all the same."""
    marker = tmp_path / "ran"
    torch.save({"a": Runs(marker)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"bin is a pickle of more than tensors.*model\.safetensors") as caught:
        OpenedFolder(tmp_path).metas  # noqa: B018
    assert len(str(caught.value)) < 120 + len(str(tmp_path)) + 60
    assert not marker.exists()
