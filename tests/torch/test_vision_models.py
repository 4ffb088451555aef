"""A network in the style of torchvision and timm, which are no requirement: quantized, saved, loaded again, as ONNX.

It has what theirs have and language models lack: functional activations and sums in the forward, batch norms behind
convolutions, depthwise ones, squeeze and excitation, scales of layers and positions as bare parameters, paths that are
dropped in training, one Linear for queries, keys and values, and a block whose shortcut is empty.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quark.core.metrics import sqnr
from quark.jobs.words import torch_algorithms
from quark.torch import LLMTemplate, ModelQuantizer, export_onnx, load_params, save_params
from quark.torch.layers.replace import quantized_layers
from tests.models.onnx_sessions import session


class DropPath(nn.Module):
    """A residual branch that is left out of some samples in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * (torch.rand(len(x), *[1] * (x.ndim - 1)) > 0.1)


class SqueezeExcite(nn.Module):
    """Channels are weighed by what the mean of the picture says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)
        self.activation, self.gate = nn.SiLU(inplace=True), nn.Hardsigmoid(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.fc2(self.activation(self.fc1(mean))))


class ConvBlock(nn.Module):
    """A bottleneck with a depthwise convolution; the shortcut is None where nothing changes."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU6(inplace=True))
        self.conv2 = nn.Conv2d(out, out, 3, stride, padding=1, groups=out, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.se, self.drop_path = SqueezeExcite(out), DropPath()
        changes = width != out or stride != 1
        self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride), nn.BatchNorm2d(out)) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn2(self.conv2(self.conv1(x))), inplace=True)
        x = self.drop_path(self.se(x))
        x += shortcut
        return F.relu_(x)


class LayerScale(nn.Module):
    """A factor for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class Attention(nn.Module):
    """One Linear makes queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(x).reshape(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(mixed.transpose(1, 2).reshape(rows, tokens, width))


class TransformerBlock(nn.Module):
    """Attention and two Linear layers, each scaled and dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(width), Attention(width, 4), LayerScale(width)
        self.norm2, self.ls2, self.drop_path = nn.LayerNorm(width), LayerScale(width), DropPath()
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class Hybrid(nn.Module):
    """Convolutions, then patches of them as tokens; pictures (rows, 3, 32, 32) -> logits (rows, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(inplace=True))
        self.stages = nn.Sequential(ConvBlock(16, 16, 1), ConvBlock(16, 32, 2))
        self.patch_embed = nn.Conv2d(32, 64, 2, 2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 64))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 64) * 0.1)
        self.blocks = nn.ModuleList(TransformerBlock(64) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(self.stages(self.stem(x))).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def hybrid() -> Hybrid:
    """The same weights each time, and norms that have seen pictures."""
    torch.manual_seed(0)
    model = Hybrid()
    for _ in range(3):
        model(torch.randn(8, 3, 32, 32))
    return model.eval()


RUNS = [
    pytest.param("int8", None, 35.0, id="int8"),
    pytest.param("int8_wo", None, 38.0, id="int8_wo"),
    pytest.param("fp8", None, 22.0, id="fp8"),
    pytest.param("int4_wo_per_channel", "gptq", 30.0, id="int4 gptq"),
    pytest.param("int8", "smooth", 35.0, id="int8 smooth"),
]
"""Scheme, algorithm, and the least SQNR of the logits in dB: 3 to 5 below what was measured, of GPTQ 9, where rounding
to nearest has 12.7."""


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "algorithm", "least"), RUNS)
def test_a_vision_model_is_quantized_saved_loaded_and_exported(
    scheme: str, algorithm: str | None, least: float, tmp_path: Path
) -> None:
    model, data = hybrid(), [torch.randn(4, 3, 32, 32) for _ in range(4)]
    before = copy.deepcopy(model.state_dict())
    algorithms = torch_algorithms([algorithm]) if algorithm else None
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config(scheme, algorithms))
    frozen = quantizer.freeze(quantizer.quantize_model(copy.deepcopy(model), data))
    layers = {name for name, each in model.named_modules() if isinstance(each, (nn.Conv2d, nn.Linear))}
    assert quantized_layers(frozen).keys() == layers - {"patch_embed"}  # of such a name is what '@non_text' leaves out
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted, plain = frozen(x), model(x)
    assert sqnr(plain, wanted) > least
    saved = save_params(frozen, "hybrid", export_dir=tmp_path, compressed=True)
    with torch.no_grad():
        loaded = load_params(hybrid(), json_path=saved, safetensors_path=saved.with_suffix(".safetensors"))
        assert torch.equal(loaded(x), wanted)
    made = session(export_onnx(frozen, tmp_path / "onnx", x)).run(None, {"x": x.numpy()})[0]
    assert sqnr(wanted, torch.from_numpy(made)) > 45
