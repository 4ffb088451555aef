"""Models that a package, or quark itself, has loaded from a quantized folder, beside what is in the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from torch import nn

from quark.errors import ShapeError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.layers.replace import quantized_layers
from quark.torch.layers.stored_codes.layer import StoredLayer
from quark.torch.plan import divides
from tests.models.denoisers import denoiser, step
from tests.models.families import family
from tests.models.torch_zoo import LANGUAGE_MODEL

DTYPE = torch.bfloat16
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
TEXTS = ["a model is made smaller", "the cat sleeps"]


def _encoder() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=2048, num_attention_heads=4, initializer_range=0.1, **SIZES)).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "dense": partial(family, "llama", **SIZES),
    "mixture": partial(family, "qwen3_moe", **SIZES, moe_intermediate_size=128, head_dim=32),
    "denoiser": partial(denoiser, "flux", DTYPE),
    "encoder": _encoder,
}
TARGETS: dict[str, Any] = {
    "dense": ["q_proj", "down_proj"],
    "mixture": ["q_proj", "v_proj"],  # PEFT asks for the fused tensor of experts, which a quantized model has not
    "denoiser": ["to_q", "proj_out"],
    "encoder": ["query", "output.dense"],
}
"""The layers that get adapters."""
READERS = {
    "transformers": "dense",
    "diffusers": "denoiser",
    "import": "dense",
    "mixture": "mixture",
    "sentence_transformers": "encoder",
}
"""Who loads a folder -> the kind of model in it. A mixture is loaded by transformers, too."""


def float_model(kind: str) -> Any:
    model = MODELS[kind]()
    for value in model.parameters():  # not its table of positions, which from_pretrained leaves in float32
        value.data = value.data.to(DTYPE)
    if kind != "denoiser":
        model.config.dtype = DTYPE
    return model


def batch(kind: str, seed: int = 3, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    return step("flux", seed, dtype) if kind == "denoiser" else {"input_ids": (torch.arange(16)[None] * seed) % 50}


def quantized_folder(kind: str, scheme: str, folder: Path) -> tuple[Path, Any] | None:
    """The folder and the frozen model of it; None where the groups of the scheme do not divide it."""
    model, config = float_model(kind), LLMTemplate.get("auto").get_config(scheme)
    quantizer, batches = ModelQuantizer(config), [batch(kind, seed) for seed in (1, 2)]
    if not divides(config, model):
        with pytest.raises(ShapeError, match="Possible"):
            quantizer.quantize_model(model, batches)
        return None
    frozen = quantizer.freeze(quantizer.quantize_model(model, batches))
    export_safetensors(frozen, folder)
    if kind == "encoder":
        _list_modules(folder)
    return folder, frozen


def _list_modules(folder: Path) -> None:
    """Make a folder of sentence-transformers of that of an encoder."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / file, folder / file)
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate({"Transformer": "", "Pooling": "1_Pooling"}.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


class Case:
    """A folder of a scheme and one of READERS.

    Attributes:
        frozen: The model that was quantized in memory and written there.
    """

    def __init__(self, reader: str, folder: Path, frozen: Any, tmp_path: Path) -> None:
        self.kind = READERS[reader]
        self.reader, self.folder, self.frozen, self.tmp_path = reader, folder, frozen, tmp_path

    def float_model(self) -> Any:
        return float_model(self.kind)

    def load(self, dtype: torch.dtype = DTYPE) -> Any:
        if self.reader == "import":
            return import_model_from_safetensors(self.float_model(), self.folder)
        return self.read(self.folder, dtype)

    def read(self, folder: Path, dtype: torch.dtype = DTYPE) -> Any:
        """What the package of the model loads, whatever is in the folder."""
        if self.kind == "encoder":
            from sentence_transformers import SentenceTransformer

            return SentenceTransformer(str(folder), model_kwargs={"torch_dtype": dtype})
        return type(self.frozen).from_pretrained(folder, torch_dtype=dtype).eval()

    def network(self, model: Any) -> Any:
        """The model of transformers or diffusers, which SentenceTransformer holds in a module."""
        return model[0].model if self.kind == "encoder" else model

    def call(self, network: Any, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return cast(torch.Tensor, network(**batch(self.kind, dtype=dtype), return_dict=False)[0])

    def run(self, model: Any, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        with torch.no_grad():
            if self.kind == "encoder":
                return cast(torch.Tensor, model.encode(TEXTS, convert_to_tensor=True))
            return self.call(model, dtype)

    @property
    def expected(self) -> torch.Tensor:
        model = self.frozen
        if self.kind == "encoder":
            model = self.read(self.folder)
            model[0].model = self.frozen
        return self.run(model)

    def adapted(self, model: Any) -> list[nn.Parameter]:
        """The adapters that PEFT puts on a network, with values."""
        torch.manual_seed(0)
        asked = peft.LoraConfig(r=2, target_modules=TARGETS[self.kind], init_lora_weights=False)
        peft.inject_adapter_in_model(asked, model)
        for name, value in model.named_parameters():
            value.requires_grad_("lora_" in name)
        return [value for name, value in model.named_parameters() if "lora_" in name]

    def gradients(self, network: Any, adapters: list[nn.Parameter]) -> list[torch.Tensor]:
        """Of the adapters after a step, which every one has."""
        self.call(network).float().square().mean().backward()
        found = [x.grad for x in adapters if x.grad is not None and bool(x.grad.any())]
        assert len(found) == len(adapters)
        for x in adapters:
            x.grad = None
        return found


def stored(model: nn.Module) -> dict[str, StoredLayer]:
    found = {name: layer for name, layer in quantized_layers(model).items() if isinstance(layer, StoredLayer)}
    assert found
    return found


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """What quantized layers hold, without adapters: codes, scales, zero points."""
    return {
        f"{name.replace('.base_layer', '')}.{leaf}": x.clone()
        for name, layer in stored(model).items()
        for leaf, x in layer.state_dict().items()
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert x.dtype == other[name].dtype and torch.equal(x.double(), other[name].double()), name


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Any] | None]:
    """A kind of model and a scheme -> as of `quantized_folder`, made once."""

    @cache
    def made(kind: str, scheme: str) -> tuple[Path, Any] | None:
        return quantized_folder(kind, scheme, tmp_path_factory.mktemp(f"{kind}-{scheme}") / "quantized")

    return made
