"""What is written into the weight of a loaded layer, and what is copied out of it, is true in both."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel

import quark
from quark.errors import NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, dequantize, export_safetensors
from tests.models.denoisers import denoiser
from tests.models.loaded import DTYPE, Case, held, quantized_folder, stored
from tests.models.model_folders import model_folder

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda w: w.mul_(2),
    "data": lambda w: w.data.copy_(torch.ones_like(w.data)),
    "initialised": lambda w: nn.init.constant_(w, 0.25),
    "a row": lambda w: w[3].zero_(),
    "assigned to a row": lambda w: w.data.__setitem__(3, 0.5),
    "a view of a view": lambda w: w.view(-1)[5:40].view(5, 7).fill_(0.5),
    "the transpose": lambda w: w.t()[2].add_(0.5),
    "parts": lambda w: [part.mul_(index) for index, part in enumerate(w.chunk(2))],
    "an older view": lambda w: [w[1].mul_(0), w[0].mul_(2)] and (lambda a, b: (b.zero_(), a.add_(1)))(w[4], w[5]),
    "out": lambda w: torch.add(torch.ones_like(w.data), 1, out=w),
    "many": lambda w: torch._foreach_mul_([w], 3.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    made = quantized_folder("dense", "int8_wo", tmp_path_factory.mktemp("dense") / "quantized")
    assert made is not None
    return made


@pytest.fixture
def layer(folder: tuple[Path, Any], tmp_path: Path) -> Any:
    return next(iter(stored(Case("transformers", *folder, tmp_path).load()).values()))


@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_what_is_written_is_quantized_into_the_layer(layer: Any, name: str) -> None:
    wanted = layer.quantized_weight().clone()
    WRITES[name](wanted)
    WRITES[name](layer.weight)
    assert layer.codes("weight").dtype == torch.int8
    step = wanted.abs().amax().float() / 127
    assert ((layer.quantized_weight() - wanted).float().abs() <= 3 * step).all()  # some writes quantize several times


@torch.no_grad()
def test_what_is_assigned_is_quantized(layer: Any, folder: tuple[Path, Any], tmp_path: Path) -> None:
    twice = layer.quantized_weight() * 2
    layer.weight = nn.Parameter(twice)
    assert layer.codes("weight").dtype == torch.int8 and torch.allclose(layer.quantized_weight(), twice, atol=0.01)
    other = next(iter(stored(Case("transformers", *folder, tmp_path).load()).values()))
    other.weight = layer.weight
    assert torch.allclose(other.quantized_weight(), twice, atol=0.01)
    with pytest.raises(Exception, match="the values are"):
        layer.weight = nn.Parameter(twice[:3])


@torch.no_grad()
def test_views_are_read_as_floats(layer: Any) -> None:
    plain, weight = layer.quantized_weight(), layer.weight
    for made, wanted in ((weight[2], plain[2]), (weight.t(), plain.t()), (weight.t()[1:3, ::2], plain.t()[1:3, ::2])):
        assert torch.equal(made + 0, wanted) and made.stride() == wanted.stride()
        assert made.tolist() == wanted.tolist()
        assert type(copy.deepcopy(made)) is torch.Tensor
    assert (weight[0].float().numpy() == plain[0].float().numpy()).all()


def test_codes_that_are_copied_into_a_float_layer_are_its_values(layer: Any, tmp_path: Path) -> None:
    """Where a state dict was made anew, without what torch notes on layers; what is copied to be stored is codes."""
    state = layer.state_dict()
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=DTYPE)
    for each in (state, copy.deepcopy(state)):
        plain.load_state_dict(dict(each), strict=False)
        assert torch.equal(plain.weight, layer.quantized_weight())
    codes = layer.codes("weight")
    assert torch.equal(torch.empty_like(codes).copy_(state["weight"]), codes)
    torch.save(state, tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt")
    assert type(again._metadata[""]) is OrderedDict
    read = again["weight"]
    assert type(read) is torch.Tensor and torch.equal(read, codes)
    layer.load_state_dict(state)
    assert type(layer.codes("weight").data) is torch.Tensor


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_wo", "mxfp4"])
def test_what_would_train_codes_is_refused(scheme: str, tmp_path: Path) -> None:
    """By itself torch says so of integers, and trains nothing of FP8."""
    made = quantized_folder("dense", scheme, tmp_path / "quantized")
    assert made is not None
    model = Case("transformers", *made, tmp_path).load()
    assert {name for name, x in model.named_parameters() if x.requires_grad} & set(held(model)) == set()
    assert model.requires_grad_(False) is model
    for module in (model, next(iter(stored(model).values()))):
        with pytest.raises(NotSupportedError, match="quark.torch.dequantize"):
            module.requires_grad_()


@pytest.mark.slow
def test_fp8_codes_that_are_to_be_trained_are_refused(tmp_path: Path) -> None:
    made = quantized_folder("dense", "fp8_wo", tmp_path / "quantized")
    assert made is not None
    model = Case("transformers", *made, tmp_path).load()
    layer: Any = next(iter(stored(model).values()))
    assert not layer.codes("weight").requires_grad
    layer.codes("weight").requires_grad_()
    with pytest.raises(NotSupportedError, match="no gradient"):
        layer(torch.zeros(1, layer.in_features, dtype=DTYPE))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["flux", "unet"])
def test_a_control_network_is_made_of_a_float_copy(name: str, tmp_path: Path) -> None:
    import diffusers

    model, config = denoiser(name, DTYPE), LLMTemplate.get("auto").get_config("int8_wo")
    quantizer = ModelQuantizer(config)
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), tmp_path / "quantized")
    network = type(model).from_pretrained(tmp_path / "quantized", torch_dtype=DTYPE)
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    make: Callable[[Any], Any] = {
        "flux": lambda network: diffusers.FluxControlNetModel.from_transformer(network, **sizes),
        "unet": diffusers.ControlNetModel.from_unet,
    }[name]
    with pytest.raises(NotSupportedError, match="quark.torch.dequantize"):
        make(network)
    control = make(dequantize(copy.deepcopy(network)))
    layers = {name: layer for name, layer in stored(network).items() if name in dict(control.named_modules())}
    assert len(layers) > 10
    for name, layer in layers.items():
        assert torch.equal(control.get_submodule(name).weight.to(DTYPE), layer.quantized_weight())


def test_the_first_parameter_is_in_float_where_a_table_is_quantized(tmp_path: Path) -> None:
    """sentence-transformers and others ask it for the dtype of the model. Codes keep their name in the file."""
    encoder = model_folder("sentence_encoder", tmp_path / "encoder")
    quark.quantize(encoder, "int8_wo", layer=["*embeddings=int8_wo"], output=tmp_path / "out", verdict=False)
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert next(model.parameters()).dtype == torch.float32
    table, float_model = model.get_input_embeddings(), AutoModel.from_pretrained(encoder)
    assert table.weight.dtype == torch.float32 and table.state_dict()["weight"].dtype == torch.int8
    assert model.num_parameters() == float_model.num_parameters()
    model.save_pretrained(tmp_path / "saved")
    again, ids = AutoModel.from_pretrained(tmp_path / "saved"), torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)
