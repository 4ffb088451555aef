"""`quark.quantize`: a module, a folder or an ONNX file, and what it says of wrong words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import quark
from quark.errors import ConfigError, FormatError, NotSupportedError, SlowerThanFloatError
from quark.jobs.run_file import Recovering
from quark.torch import LLMTemplate, ModelQuantizer, QConfig
from quark.torch.layers.replace import quantized_layers
from tests.models.onnx_zoo import cnn, images, mlp, vectors
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama, token_batches

pytestmark = pytest.mark.slow  # each quantizes a model


def test_a_family_is_the_scheme_of_the_goal() -> None:
    tokens = token_batches(1)[0]
    made = quark.quantize(tiny_llama(), "int4")
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("uint4_wo_128"))
    by_hand = quantizer.freeze(quantizer.quantize_model(tiny_llama()))
    with torch.no_grad():
        assert torch.equal(made(tokens).logits, by_hand(tokens).logits)


def test_a_family_has_groups_that_divide_the_module() -> None:
    model = tiny_llama(hidden_size=192, num_attention_heads=6, num_key_value_heads=3, intermediate_size=384)
    made = quark.quantize(model, "int4")
    assert {layer.spec.weight.granularity.size for layer in quantized_layers(made).values()} == {64}


def test_data_bring_the_algorithm_of_the_effort() -> None:
    tokens = token_batches(2)
    made = quark.quantize(tiny_llama(), "int4", data=tokens, algorithm="gptq:refine_passes=0")
    plain = quark.quantize(tiny_llama(), "int4", data=tokens, effort="fast")
    assert isinstance(made.quant_config, QConfig) and made.quant_config.algo_config[0].refine_passes == 0
    assert plain.quant_config.algo_config is None


def test_an_onnx_file_runs_in_onnxruntime(tmp_path: Path) -> None:
    import onnx

    onnx.save(cnn(), tmp_path / "float.onnx")
    x = images(1)[0] if isinstance(images(1), list) else images(1)
    made = quark.quantize(tmp_path / "float.onnx", output=tmp_path / "int8.onnx")
    feed = x if isinstance(x, dict) else {"x": np.asarray(x)}
    before, after = (onnxruntime.InferenceSession(str(f)).run(None, feed)[0] for f in (tmp_path / "float.onnx", made))
    assert made == tmp_path / "int8.onnx" and made.stat().st_size < (tmp_path / "float.onnx").stat().st_size
    assert np.abs(before - after).max() < 0.1 * np.abs(before).max()


@pytest.mark.parametrize("named", [False, True])
def test_an_array_of_all_samples_keeps_the_batch_axis(named: bool, tmp_path: Path) -> None:
    """The file is that of the same samples one by one."""
    import onnx

    onnx.save(cnn(), tmp_path / "float.onnx")
    x = np.concatenate([feed["x"] for feed in images(2)])
    options: dict[str, Any] = {"effort": "fast", "scheme": "A8W8", "goal": "npu"}
    data = {"x": x} if named else x
    made = quark.quantize(tmp_path / "float.onnx", data=data, output=tmp_path / "all.onnx", **options)
    each = [{"x": row[None]} for row in x]
    same = quark.quantize(tmp_path / "float.onnx", data=each, output=tmp_path / "each.onnx", **options)
    assert made.read_bytes() == same.read_bytes()


def test_data_that_are_read_once_serve_a_second_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where integer kernels are slower than those of the float model."""
    import onnx

    read = []

    def slower(_: Recovering, __: Any, ___: Any, ____: Any, reader: Any, *others: Any) -> None:
        read.append(len(list(reader)))
        raise SlowerThanFloatError("slower")

    monkeypatch.setattr(Recovering, "run", slower)
    onnx.save(mlp(), tmp_path / "float.onnx")
    made = quark.quantize(tmp_path / "float.onnx", data=iter(vectors(3)), output=tmp_path / "out.onnx", measure=False)
    assert read == [3]
    feed = vectors(1)[0]
    before, after = (onnxruntime.InferenceSession(str(f)).run(None, feed)[0] for f in (tmp_path / "float.onnx", made))
    assert np.abs(before - after).max() < 0.1 * np.abs(before).max()


@pytest.mark.parametrize("with_data", [False, True])
def test_a_convolutional_network_needs_no_scheme(with_data: bool) -> None:
    """Groups of 128 do not divide three channels; labels beside the images are left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    x = torch.randn(16, 3, 8, 8)
    before = model(x).detach()
    batches = [(x[i : i + 4], torch.zeros(4, dtype=torch.long)) for i in range(0, 16, 4)]
    made = quark.quantize(model, data=batches) if with_data else quark.quantize(model)
    assert 0 < float((made(x).detach() - before).norm() / before.norm()) < 0.05


def test_wrong_words_are_refused_before_any_work(tmp_path: Path) -> None:
    model = nn.Linear(128, 4)
    before = model.weight.clone()
    for words, error, message in (
        ({"scheme": "int44"}, ConfigError, "Did you mean"),
        ({"goal": "vlm"}, ConfigError, "Did you mean 'vllm'"),
        ({"goal": "vllm", "scheme": "mx9"}, NotSupportedError, "It loads"),
        ({"algorithm": "gtpq"}, ConfigError, "Did you mean 'gptq'"),
    ):
        with pytest.raises(error, match=message):
            quark.quantize(model, **words)  # type: ignore[arg-type]
    assert torch.equal(model.weight, before)
    with pytest.raises(ConfigError, match="needs output="):
        quark.quantize(tmp_path)
    with pytest.raises(FormatError):
        quark.quantize(tmp_path / "missing", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AttributeError, match="Possible: quantize"):
        quark.quantise  # type: ignore[attr-defined]  # noqa: B018


def test_a_quantizer_takes_a_name_and_a_config_prints_as_a_table() -> None:
    text = repr(ModelQuantizer("uint4_wo_128").config)
    assert "weight uint4 group 128 asymmetric" in text and text.count("\n") < 5 and len(text) < 300
    with pytest.raises(ConfigError, match="'int4' is a family: 'int4_wo_128'"):
        ModelQuantizer("int4")
    import quark.onnx

    assert (
        quark.onnx.ModelQuantizer("A8W8").settings
        == quark.onnx.ModelQuantizer(quark.onnx.Config(quark.onnx.get_default_config("A8W8"))).settings
    )
    with pytest.raises(ConfigError, match="Did you mean 'A8W8'"):
        quark.onnx.ModelQuantizer("A8W7")


def test_a_folder_takes_bits_between_those_of_the_schemes(tmp_path: Path) -> None:
    """4.25 bits of a weight, scales included, are a choice for each layer; a module in memory cannot have one."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    text = tmp_path / "text.txt"
    text.write_text((TEXT / "heldout.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    tiny_llama(vocab_size=2048, max_position_embeddings=64).save_pretrained(tmp_path / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / name, tmp_path / "llama" / name)
    made = quark.quantize(tmp_path / "llama", bits=4.25, data=text, samples=4, output=tmp_path / "out", effort="fast")
    layers = quantized_layers(AutoModelForCausalLM.from_pretrained(made))
    held = load_file(Path(made) / "model.safetensors")
    bits = 8 * sum(tensor.nbytes for name, tensor in held.items() if name.rpartition(".")[0] in layers)
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())  # type: ignore[operator]
    assert 4 < bits / weights <= 4.25
    assert len({layer.spec.weight for layer in layers.values()}) > 1
    with pytest.raises(ConfigError, match="A budget for a module"):
        quark.quantize(tiny_llama(), bits=4.25, data=token_batches(1))
