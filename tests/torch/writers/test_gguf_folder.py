"""Model folders that are made of GGUF files, beside the models that these were written of, gguf, and transformers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quark.errors import FormatError, NonFiniteError, NotSupportedError, QuarkError
from quark.gguf.architectures.architecture import kv_heads
from quark.gguf.architectures.table import ARCHITECTURES
from quark.torch import ModelQuantizer, export_gguf, gguf_config
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.model.passes.unfuse_experts import unfuse_experts
from quark.torch.writers.gguf.folder_of_file import FolderOfFile, folder_of_gguf
from quark.torch.writers.gguf.import_file import decoded_rows
from tests.models.gguf_rows import CONFIGS, VARIANTS, build, write_gguf
from tests.models.torch_zoo import LANGUAGE_MODEL
from tests.torch.writers.test_gguf_damage import Copy

BF16 = torch.bfloat16
IDS = torch.randint(3, 2048, (2, 16), generator=torch.Generator().manual_seed(0))
PAD = 2
"""The token of the example tokenizer that fills up; some classes set its row to 0 when they load."""
TAKEN_FOR = {
    "mistral": "llama", "helium": "llama", "internlm3": "llama", "ministral": "llama", "cwm": "llama",
    "solar_open": "glm4_moe", "glm4_moe_lite": "deepseek_v3",
}  # fmt: skip
"""Models that a file cannot tell from others, which compute the same -> those."""


def written(model: Any, file: Path) -> Path:
    unfuse_experts(model, lambda layer: True)
    write_gguf(model, file, LANGUAGE_MODEL)
    return file


def converted(file: Path, folder: Path, dtype: torch.dtype | None = None) -> FolderOfFile:
    made = folder_of_gguf(file, folder, dtype)
    made.fill()
    return made


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(IDS).logits
    return out


def quantized(mix: str, folder: Path, kind: str = "llama", **options: Any) -> Path:
    model = build(kind, torch.float32, **options)
    quantizer = ModelQuantizer(gguf_config(model, mix))
    return export_gguf(quantizer.freeze(quantizer.quantize_model(model)), folder, "m", LANGUAGE_MODEL)


# From a folder to a file and back -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *VARIANTS])
def test_the_folder_of_a_file_is_that_of_which_the_file_was_made(name: str, tmp_path: Path) -> None:
    kind, options = VARIANTS.get(name, (name, {}))
    model = build(kind, BF16, **(options | {"pad_token_id": PAD}))
    file = written(build(kind, BF16, **(options | {"pad_token_id": PAD})), tmp_path / "m.gguf")
    made = converted(file, tmp_path / "folder")
    assert made.dtype == BF16 and made.tensors.holds_all()
    back = load_float_model(OpenedFolder(tmp_path / "folder"))
    assert back.config.model_type == TAKEN_FOR.get(kind, kind)
    if kind == "helium":  # which rotates neighbours: as a llama, which rotates halves, its products sum otherwise
        torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=0.02)
    else:
        assert torch.equal(logits(back), logits(model))
        architecture, own = ARCHITECTURES[kind], back.state_dict()
        for key, value in model.state_dict().items():
            one = 1.0 if architecture.adds_one(key) else 0.0  # of the sum, a file has the bits of float32
            assert torch.equal(own[key].float() + one, value.float() + one), key
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings"):
        assert getattr(back.config, field, None) == getattr(model.config, field, None), field
    for field in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"):
        assert getattr(back.config, field, None) == getattr(model.config, field, None), field
    if getattr(model.config, "num_attention_heads", None):
        assert kv_heads(back.config) == kv_heads(model.config)
    theirs, ours = (getattr(each.config, "rope_parameters", None) or {} for each in (model, back))
    full = theirs.get("full_attention", theirs)
    assert ours.get("full_attention", ours).get("rope_theta") == full.get("rope_theta")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_a_model_comes_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    """Rows of queries and keys, matrices that lie transposed, norms with one added."""
    model = build(kind, BF16, pad_token_id=PAD)
    converted(written(model, tmp_path / "m.gguf"), tmp_path / "folder")
    assert torch.equal(logits(load_float_model(OpenedFolder(tmp_path / "folder"))), logits(model))


def test_the_tokenizer_and_what_ends_texts_come_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    model = build("llama", BF16, pad_token_id=PAD)
    model.generation_config.eos_token_id = [1, 7]
    folder = converted(written(model, tmp_path / "m.gguf"), tmp_path / "folder").path
    ours, own = (AutoTokenizer.from_pretrained(place) for place in (folder, LANGUAGE_MODEL))
    for text in ("The runner ran: it's 12345 times.\n\n  x = [1, 2]  naïve 日本", " a  b\t", "<s>no</s>"):
        assert ours(text)["input_ids"] == own(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == own.decode(own(text)["input_ids"])
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (own.bos_token, own.eos_token, own.pad_token)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 7]
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert stored["rms_norm_eps"] == 1e-6 and stored["architectures"] == ["LlamaForCausalLM"]


# Values ---------------------------------------------------------------------------------------------------------------


def known_types() -> list[str]:
    """The types of blocks that the gguf package decodes."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        if kind.name in ("F32", "F16", "BF16"):
            continue
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


@pytest.mark.parametrize("name", known_types())
def test_blocks_have_the_values_that_gguf_decodes(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = np.random.default_rng(0).integers(0, 256, (64, 4 * gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    finite = torch.isfinite(expected)
    for dtype in (torch.float32, BF16):
        found = decoded_rows(torch.from_numpy(raw), name, dtype)
        assert found.shape == expected.shape and int(finite.sum()) > 64
        assert torch.equal(found[finite], expected.to(dtype)[finite])


def test_a_type_that_nobody_decodes_is_refused() -> None:
    with pytest.raises(FormatError, match="Q8_K"):
        decoded_rows(torch.zeros(1, 292, dtype=torch.uint8), "Q8_K", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gemma3_text", "phi3", "nemotron", "gpt2", "qwen2_moe"])
def test_values_are_those_that_transformers_reads(kind: str, tmp_path: Path) -> None:
    """Of a file in blocks, rounded by nobody."""
    from transformers import AutoModelForCausalLM

    biases = {"attention_bias": False} if kind == "llama" else {}
    file = quantized("q8_0", tmp_path, kind, **biases)
    converted(file, tmp_path / "folder", torch.float32)
    ours = load_float_model(OpenedFolder(tmp_path / "folder"))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, config=ours.config
    )
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_values_of_blocks_are_rounded_once_to_the_type_of_the_folder(dtype: Any, tmp_path: Path) -> None:
    file = quantized("q4_0", tmp_path, attention_bias=False, hidden_size=256, intermediate_size=256)
    made = converted(file, tmp_path / "folder", dtype)
    # The norms of the model are float32 numbers of any bits.
    assert made.dtype == (dtype or torch.float32) and made.tensors.holds_all() is (made.dtype == torch.float32)
    (tensor,) = [each for each in gguf.GGUFReader(file).tensors if each.name == "blk.0.ffn_up.weight"]
    assert tensor.tensor_type.name == "Q4_0"
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    stored = load_file(tmp_path / "folder/model.safetensors")
    assert torch.equal(stored["model.layers.0.mlp.up_proj.weight"], values.to(made.dtype))


@pytest.mark.slow
def test_the_narrowest_type_that_holds_the_floats_of_a_file_is_taken(tmp_path: Path) -> None:
    half = build("llama", torch.float16, attention_bias=False)
    assert converted(written(half, tmp_path / "half.gguf"), tmp_path / "half").dtype == torch.float16
    whole = build("llama", torch.float32, attention_bias=False)
    assert converted(written(whole, tmp_path / "whole.gguf"), tmp_path / "whole").dtype == torch.float32
    with torch.no_grad():
        whole.model.norm.weight[0] = 1e5
    with pytest.raises(NonFiniteError, match="output_norm.weight of the file has values that no torch.float16 holds"):
        converted(written(whole, tmp_path / "large.gguf"), tmp_path / "large", torch.float16)


# What is no model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return written(build("llama", torch.float32, attention_bias=False), folder / "m.gguf")


def heads(copy: Copy) -> None:
    copy.set("llama.attention.head_count_kv", "<I", 10**6)


def hidden(copy: Copy) -> None:
    copy.set("llama.embedding_length", "<I", 2**31 - 1)


def inner(copy: Copy) -> None:
    copy.set("llama.feed_forward_length", "<I", 2**30)


def heads_of_nothing(copy: Copy) -> None:
    copy.set("llama.attention.head_count", "<I", 0)


def first_token(copy: Copy) -> None:
    copy.set("tokenizer.ggml.bos_token_id", "<I", 10**6)


def not_finite(copy: Copy) -> None:
    start = copy.tensor("blk.0.ffn_up.weight").data_offset
    copy.data[start : start + 4] = struct.pack("<f", float("nan"))


def renamed(before: bytes, after: bytes) -> Any:
    def change(copy: Copy) -> None:
        assert len(before) == len(after) and before in copy.data
        copy.data[:] = bytes(copy.data).replace(before, after)

    return change


def text(value: bytes) -> bytes:
    """A text as files have it."""
    return struct.pack("<Q", len(value)) + value


DAMAGES: dict[str, tuple[Any, str]] = {
    "a million heads": (heads, "head_count_kv|has the shape"),
    "rows of 2 ** 31": (hidden, "no model can be built of.*hidden size"),
    "an inner size of 2 ** 30": (inner, "intermediate_size|has the shape"),
    "no heads": (heads_of_nothing, "no model can be built of: ZeroDivisionError"),
    "a token behind the last": (first_token, "bos_token_id is 1000000, of 2048 tokens"),
    "NaN": (not_finite, "has NaN or infinite values"),
    "no norm": (renamed(b"output_norm.weight", b"output_nrom.weight"), "no place for"),
    "no rule": (renamed(text(b"gpt-2"), text(b"gpt-x")), "'gpt-x', a rule"),
    "another kind": (renamed(text(b"gpt2"), text(b"gpt9")), "'gpt9', a vocabulary"),
    "an architecture of nobody": (renamed(b"llama", b"lalma"), "'lalma' cannot be read yet. Possible: llama, "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_contradicts_itself_is_refused(name: str, sound: Path, tmp_path: Path) -> None:
    change, message = DAMAGES[name]
    copy, file = Copy(sound), tmp_path / "m.gguf"
    change(copy)
    file.write_bytes(copy.data)
    with pytest.raises(QuarkError, match=message) as raised:
        converted(file, tmp_path / "folder")
    assert isinstance(raised.value, (FormatError, NotSupportedError, NonFiniteError))
    assert str(tmp_path / "folder") not in str(raised.value)


@pytest.mark.slow
def test_factors_of_rotations_of_no_known_scaling_are_refused(tmp_path: Path) -> None:
    """Which transformers passes over: the model would be another one."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
    file = written(build("llama", BF16, rope_parameters=rope), tmp_path / "m.gguf")
    with pytest.raises(NotSupportedError, match=r"rope_freqs\.weight\) are those of no scaling"):
        converted(file, tmp_path / "folder")
