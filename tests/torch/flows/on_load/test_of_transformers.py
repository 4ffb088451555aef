"""What a config says beside a scheme, where layers are placed, how much memory it takes, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.quantizers.auto import AutoHfQuantizer

import quark
from quark.errors import ConfigError, FormatError, NonFiniteError, NotSupportedError
from quark.torch import QuantizeOnLoad
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.meta_model import meta_copy
from tests.models.families import family
from tests.models.on_load import WITHOUT_DATA, assert_same, assert_same_files, float_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "float"
    family("llama").to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, *words: Any, **options: Any) -> Any:
    """The model of a folder, quantized while it loads."""
    config = QuantizeOnLoad(*(words or ("int8_wo",)))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def changed(folder: Path, to: Path, tensors: Mapping[str, torch.Tensor | None]) -> Path:
    """A copy of a folder in which some tensors are others, or are not there."""
    shutil.copytree(folder, to)
    stored = {**load_file(folder / WEIGHTS), **tensors}
    save_file({k: v for k, v in stored.items() if v is not None}, to / WEIGHTS, {"format": "pt"})
    return to


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exclude", "layers"),
    [
        ("llama", ["*.o_proj"], {"*.down_proj": "int4_wo_32"}),
        ("llama", [], {"lm_head": "fp8_wo"}),
        ("tied", [], {"lm_head": "fp8_wo"}),
        ("tied", [], {"model.embed_tokens": "int4_wo_32"}),
        ("tied", [], {"model.embed_tokens": "int4_wo_32", "lm_head": "int8_dynamic"}),
        ("gpt2", ["*.c_attn"], {"*.mlp.c_proj": "fp8_wo"}),
        ("qwen3_moe", ["*.self_attn.*"], {"*.down_proj": "nvfp4_weight_only"}),
        ("qwen3_moe", ["*.experts.*"], {}),
        ("gpt_oss", [], {}),
        ("llama4_text", [], {}),
        ("mixtral", [], {}),
    ],
)
def test_exclusions_schemes_of_layers_and_ties_are_those_of_the_command(
    name: str, exclude: list[str], layers: dict[str, str], tmp_path: Path
) -> None:
    float_model(name).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    rules = tuple(f"{pattern}={scheme}" for pattern, scheme in layers.items())
    quark.quantize(tmp_path / "float", "int8_wo", output=tmp_path / "out", exclude=exclude, layer=rules or None)
    model = load(tmp_path / "float", "int8_wo", exclude, layers)
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    model.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", tmp_path / "out")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


@pytest.mark.slow
def test_a_type_that_is_asked_for_is_the_one_that_is_quantized_in(llama: Path, tmp_path: Path) -> None:
    quark.quantize(llama, "int8_wo", output=tmp_path / "out", dtype="float32")
    model = load(llama, dtype=torch.float32)
    assert model.dtype == torch.float32
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path / "out"))


@pytest.mark.slow
def test_shards_are_read_as_one_file_is(llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    # Of a pair that shares a scale one half lies in another file.
    assert_same(load(tmp_path / "shards", "nvfp4_weight_only"), load(llama, "nvfp4_weight_only"))


@pytest.mark.slow
def test_other_classes_have_the_same_layers(llama: Path) -> None:
    whole, config = load(llama), QuantizeOnLoad("int8_wo")
    base = AutoModel.from_pretrained(llama, quantization_config=config)
    assert_same(base, whole.model)
    classifier = AutoModelForSequenceClassification.from_pretrained(llama, quantization_config=config)
    assert_same(classifier.model, whole.model)
    assert isinstance(classifier.score, torch.nn.Linear) and "score" not in quantized_layers(classifier)


@pytest.mark.slow
def test_a_model_lies_where_its_device_map_says(llama: Path) -> None:
    plain = load(llama)
    for place in ("auto", "cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}):
        assert_same(load(llama, device_map=place), plain)
    empty = load(llama, device_map={"": "meta"})
    assert {tensor.device.type for tensor in empty.state_dict().values()} == {"meta"}
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in plain.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in empty.state_dict().items()} == shapes


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_wo_32", "int8_wo"])
def test_device_maps_are_made_by_the_size_of_the_codes(llama: Path, scheme: str) -> None:
    config = QuantizeOnLoad(scheme)
    quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=False)  # type: ignore[no-untyped-call]
    empty = meta_copy(AutoModelForCausalLM.from_pretrained(llama))
    floats = dict(empty.named_parameters())
    quantizer.preprocess_model(empty, checkpoint_files=[str(llama / WEIGHTS)])
    quantizer.get_weight_conversions()
    sizes = [quantizer.param_element_size(empty, name, tensor) * tensor.numel() for name, tensor in floats.items()]
    stored = load(llama, scheme).state_dict().values()
    assert sum(sizes) == pytest.approx(sum(tensor.nbytes for tensor in stored), abs=1)


@pytest.mark.slow
def test_the_config_of_the_model_is_that_of_a_quantized_folder(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    config = json.loads(model.config.to_json_string())
    model.save_pretrained(tmp_path / "saved")
    assert (
        config["quantization_config"] == json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    )
    assert model.quantization_method == model.config.quantization_config.quant_method == "quark"


@pytest.mark.slow
def test_the_objects_of_the_user_stay_as_they_are(llama: Path) -> None:
    exclude, layers = ["*.o_proj"], {"*.down_proj": "fp8_wo"}
    config = QuantizeOnLoad("int8_wo", exclude, layers)
    said = config.to_dict()
    of_model = AutoModelForCausalLM.from_pretrained(llama).config
    AutoModelForCausalLM.from_pretrained(llama, config=of_model, quantization_config=config)
    assert (exclude, layers, config.to_dict()) == (["*.o_proj"], {"*.down_proj": "fp8_wo"}, said)
    assert not hasattr(of_model, "quantization_config")
    exclude.append("*")
    assert config.exclude == ["*.o_proj"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("int9",), "Unknown scheme 'int9'. Did you mean 'int8'"),
        (("int4",), "'int4' is a family"),
        (("int8_wo", [], {"*.o_proj": "intx"}), "Unknown scheme 'intx'"),
        (("int8_wo", [], ["*.o_proj=fp8_wo"]), "layers: expected names with values"),
        (("int8_wo", 3), "exclude: expected a list"),
        (("int8",), "The scheme int8 has static scales, .* `quark quantize FOLDER --scheme int8 --calib DATA -o OUT`"),
        (("int8_wo", [], {"*.o_proj": "fp8"}), "The scheme fp8 has static scales"),
        (("q4_k_m",), "gives each tensor of a GGUF file a type of its own"),
    ],
)
def test_wrong_words_are_refused_at_once(words: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        QuantizeOnLoad(*words)
    assert "\n" not in str(error.value)


def test_each_scheme_is_taken_or_needs_data() -> None:
    from quark.core.schemes import SCHEMES

    for name in SCHEMES:
        if name in WITHOUT_DATA:
            QuantizeOnLoad(name)
        else:
            with pytest.raises(ConfigError, match=f"The scheme {name} has static scales"):
                QuantizeOnLoad(name)


@pytest.mark.slow
def test_what_fits_no_layer_or_no_place_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the pattern '\*\.zzz' matches no layer"):
        load(llama, "int8_wo", [], {"*.zzz": "fp8_wo"})
    with pytest.raises(ConfigError, match=r"exclude: the pattern '\*\.zzz' matches no layer"):
        load(llama, "int8_wo", ["*.zzz"])
    with pytest.raises(NotSupportedError, match="no part on the disk"):
        load(llama, device_map={"": "disk"}, offload_folder=tmp_path)
    with pytest.raises(TypeError, match="load_in_8bit"):
        load(llama, load_in_8bit=True)


@pytest.mark.slow
def test_other_folders_than_whole_float_ones_are_refused(llama: Path, tmp_path: Path) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    for name in (down, "model.norm.weight"):
        with pytest.raises(FormatError, match=rf"lacks 1 tensors of LlamaForCausalLM, .*: {re.escape(name)}"):
            load(changed(llama, tmp_path / f"without {name}", {name: None}))
    with pytest.raises(FormatError, match="holds 1 tensors that LlamaForCausalLM has no place for: model.more"):
        load(changed(llama, tmp_path / "more", {"model.more": torch.ones(2)}))
    with pytest.raises(FormatError, match="has shape"):
        load(changed(llama, tmp_path / "shape", {down: torch.ones(64, 64)}))
    with pytest.raises(FormatError, match="holds int8 in the files"):
        load(changed(llama, tmp_path / "codes", {down: torch.ones(64, 128, dtype=torch.int8)}))
    values = torch.ones(64, 128)
    values[3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match=rf"{re.escape(down)}: 1 of 8192 values"):
        load(changed(llama, tmp_path / "nan", {down: values}))
    shutil.copytree(llama, tmp_path / "pickle")
    torch.save(load_file(llama / WEIGHTS), tmp_path / "pickle/pytorch_model.bin")
    (tmp_path / "pickle" / WEIGHTS).unlink()
    with pytest.raises(NotSupportedError, match=r"safetensors files, not pytorch_model\.bin"):
        load(tmp_path / "pickle")


@pytest.mark.slow
def test_a_quantized_folder_is_refused(llama: Path, tmp_path: Path) -> None:
    load(llama).save_pretrained(tmp_path / "quantized")
    with pytest.raises(
        ValueError, match="The model is quantized with QuarkConfig but you are passing a QuantizeOnLoad"
    ):
        load(tmp_path / "quantized")
    odd = changed(llama, tmp_path / "odd", {})
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "strange"}}))
    # A method that transformers does not know, it leaves out.
    with pytest.raises(NotSupportedError, match="is quantized already .quant_method 'strange'."):
        load(odd)


MEASURE = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM
from quark.torch import QuantizeOnLoad

def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=QuantizeOnLoad(sys.argv[3]))

def kilobytes(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

load(sys.argv[1])  # what is imported and compiled is no part of the model
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmHWM")
model = load(sys.argv[2])
tensors = [*model.parameters(), *model.buffers()]
print(1024 * (kilobytes("VmHWM") - before), sum(x.nbytes for x in tensors))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("name", "scheme"), [("llama", "int4_wo_32"), ("qwen3_moe", "int8_wo")])
def test_memory_is_that_of_the_quantized_model_and_two_tensors(
    llama: Path, tmp_path: Path, name: str, scheme: str
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    merged = 0
    if name == "qwen3_moe":
        sizes |= {"hidden_size": 512, "moe_intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 16}
        merged = 3  # as read, stacked, and joined: so transformers merges gate and up of all experts of a layer
    model = family(name, dtype=torch.bfloat16, **sizes)
    largest = max(parameter.nbytes for parameter in model.parameters())
    total = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "float")
    del model
    command = [sys.executable, "-c", MEASURE, str(llama), str(tmp_path / "float"), scheme]
    grown, quantized = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
    assert grown <= 1.1 * quantized + (2 + merged) * largest < total
