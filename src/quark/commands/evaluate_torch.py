"""`quark evaluate` of two folders."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from quark.errors import ConfigError


@dataclass(frozen=True)
class Result:
    """One model's figures: bytes on disk, perplexity, seconds for one window."""

    size: int
    perplexity: float
    latency: float


def evaluate_folders(
    float_model: Path,
    quantized: Path,
    text: Path,
    *,
    length: int,
    windows: int,
    layers: int,
    device: str,
    dtype: str,
) -> None:
    """Compare perplexity, size, latency and the damage of each layer."""
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.commands.models import folder_bytes, load_model, load_tokenizer
    from quark.commands.text import token_windows
    from quark.torch.layers.replace import quantized_layers
    from quark.torch.model.meta_model import read_config

    _same_architecture(read_config(float_model), read_config(quantized))
    data = token_windows(load_tokenizer(float_model), text, length, windows or None)
    before, after = load_model(float_model, device, dtype), load_model(quantized, device, dtype)
    if not quantized_layers(after):
        raise ConfigError(f"{quantized} holds no quantized layer; it is a float model.")
    rows = {"float": measure(before, folder_bytes(float_model), data)}
    rows["quantized"] = measure(after, folder_bytes(quantized), data)
    console = Console()
    console.print(_summary(rows))
    console.print(_worst_layers(layer_damage(before, after, data[0]), layers))


def _same_architecture(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise ConfigError when two configs describe models whose layers cannot be compared."""
    for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        if before.get(key) != after.get(key):
            raise ConfigError(
                f"The two models differ in {key}: {before.get(key)} (float) and {after.get(key)} (quantized). "
                "Compare a quantized model with the float model that it was made from."
            )


def measure(model: Any, size: int, data: Sequence[Any]) -> Result:
    """Perplexity on all windows and the median latency of one."""
    import torch

    from quark.commands.text import perplexity

    value = perplexity(model, data)
    times = []
    device = next(model.parameters()).device
    with torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            model(data[0].to(device)).logits[0, 0, 0].item()
            times.append(time.perf_counter() - start)
    return Result(size, value, sorted(times)[len(times) // 2])


def layer_damage(before: Any, after: Any, window: Any) -> dict[str, tuple[float, float]]:
    """Weight SQNR and output SQNR in dB of each quantized layer, on one window.

    The output SQNR compares what the layer gives inside the quantized model with what it gives inside the float
    model: errors of the layers before are part of it. It is NaN for an expert that did not get the same number of
    tokens in both, or none.
    """
    import torch

    from quark.core.metrics import sqnr
    from quark.torch.layers.replace import quantized_layers
    from quark.torch.model.passes import prepare

    layers = quantized_layers(after)
    prepare(before, layers.__contains__)  # the same layers, where the model had them in another form
    float_outputs = _outputs(before, list(layers), window)
    outputs = _outputs(after, list(layers), window)
    damage = {}
    with torch.no_grad():
        for name, layer in layers.items():
            weight = before.get_submodule(name).weight
            decoded = layer.quantized("weight", cast(torch.Tensor, layer.weight))
            expected, found = float_outputs[name], outputs[name]
            same = expected.shape == found.shape and found.numel() > 0
            damage[name] = (sqnr(weight, decoded), sqnr(expected, found) if same else math.nan)
    return damage


def _outputs(model: Any, names: Sequence[str], window: Any) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _m, _i, out, name=name: found.update({name: out.detach()})
        )
        for name in names
    ]
    try:
        with torch.no_grad():
            model(window.to(next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _summary(rows: dict[str, Result]) -> Table:
    table = Table("", "size MB", "perplexity", "latency ms", title="Float against quantized")
    base = rows["float"]
    for name, row in rows.items():
        change = "" if row is base else f" ({row.perplexity / base.perplexity - 1:+.2%})"
        table.add_row(name, f"{row.size / 1e6:.2f}", f"{row.perplexity:.3f}{change}", f"{row.latency * 1e3:.1f}")
    return table


def _worst_layers(damage: dict[str, tuple[float, float]], count: int) -> Table:
    table = Table("layer", "weight SQNR dB", "output SQNR dB", title="Layers, worst output first")
    known = {name: pair for name, pair in damage.items() if not math.isnan(pair[1])}
    for name, (weight, output) in sorted(known.items(), key=lambda item: item[1][1])[:count]:
        table.add_row(name, f"{weight:.1f}", f"{output:.1f}")
    return table
