"""`quark evaluate` of two folders."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from quark.command_line import new_table, results
from quark.core.metrics import Comparison
from quark.errors import ConfigError
from quark.files import require_regular
from quark.log import progress

ALL = 1 << 62
"""More samples than there are."""
LARGEST_PIECE = 1 << 22
"""Values of an output that are compared at once, in float64."""


@dataclass
class Output:
    """One output of both models: how near they are, and for logits how often the greatest is the same."""

    comparison: Comparison = field(default_factory=Comparison)
    agreed: int = 0
    rows: int = 0

    def update(self, expected: Any, found: Any, classes: bool) -> None:
        """Add the values of one batch; with `classes` the last axis is that of classes or tokens."""
        expected, found = (x.reshape(-1, x.shape[-1] if x.ndim else 1) for x in (expected, found))
        for one, other in zip(*(x.split(max(1, LARGEST_PIECE // x.shape[1])) for x in (expected, found)), strict=True):
            self.comparison.update(one, other)
            if classes:
                self.agreed += int((one.argmax(1) == other.argmax(1)).sum())
                self.rows += len(one)


@dataclass(frozen=True)
class FolderComparison:
    """What running both models on the same batches showed.

    Attributes:
        perplexity: Of the float and of the quantized model; None where they do not give the next token.
        outputs: By name.
    """

    perplexity: tuple[float, float] | None
    outputs: Mapping[str, Output]


def evaluate_folders(
    float_model: Path,
    quantized: Path,
    data: Path,
    *,
    length: int,
    windows: int,
    layers: int,
    device: str,
    dtype: str,
    load: Mapping[str, bool],
) -> None:
    """Compare outputs, perplexity, size, latency and the damage of each layer."""
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.commands.models import folder_bytes, inputs_of, load_model
    from quark.torch.layers.replace import quantized_layers
    from quark.torch.model.model_folder import read_config

    if quantized.suffix == ".gguf":
        from quark.torch import import_model_from_gguf

        require_regular(quantized)
        before, after = (load_model(float_model, device, dtype, **load) for _ in range(2))
        import_model_from_gguf(after, quantized)
    else:
        _same_architecture(read_config(float_model), read_config(quantized))
        before, after = (load_model(folder, device, dtype, **load) for folder in (float_model, quantized))
    if not quantized_layers(after):
        raise ConfigError(f"{quantized} holds no quantized layer; it is a float model.")
    batches = inputs_of(float_model, before).read(data, windows or ALL, length)
    report = compare(before, after, batches)
    console = results()
    size = quantized.stat().st_size if quantized.is_file() else folder_bytes(quantized)
    sizes = (folder_bytes(float_model), size)
    console.print(_summary(sizes, report.perplexity, [latency(model, batches[0]) for model in (before, after)]))
    console.print(_outputs(report.outputs, len(batches)))
    console.print(_worst_layers(layer_damage(before, after, batches[0]), layers))


def _same_architecture(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise ConfigError when two configs describe models whose layers cannot be compared."""
    for key in ("model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size"):
        named = before.get(key) is not None or key != "architectures"  # which a float model may leave out
        if named and before.get(key) != after.get(key):
            raise ConfigError(
                f"The two models differ in {key}: {before.get(key)} (float) and {after.get(key)} (quantized). "
                "Compare a quantized model with the float model that it was made from."
            )


def compare(before: Any, after: Any, batches: Sequence[Any]) -> FolderComparison:
    """Run both models on the batches, of one sample each."""
    import torch

    from quark.torch.llm.text import negative_log_likelihood
    from quark.torch.model.batches import forward_batch, input_device, named_outputs

    device = input_device(before)
    outputs: dict[str, Output] = {}
    likelihoods, tokens = [0.0, 0.0], 0
    with torch.no_grad():
        for batch in progress(batches, "compare", total=len(batches)):
            pair = [dict(named_outputs(forward_batch(model, batch, device))) for model in (before, after)]
            for name, expected in pair[0].items():
                found = pair[1].get(name)
                if found is None or found.shape != expected.shape:
                    raise ConfigError(f"The output {name!r} is of another shape, or missing, in the quantized model.")
                outputs.setdefault(name, Output()).update(expected, found, "logits" in name)
            if isinstance(batch, torch.Tensor) and "logits" in pair[0]:
                ids = batch.to(device)
                tokens += ids.numel() - len(ids)
                for index, values in enumerate(pair):
                    likelihoods[index] += negative_log_likelihood(values["logits"], ids)
    first, second = (math.exp(value / tokens) if tokens else math.nan for value in likelihoods)
    return FolderComparison((first, second) if tokens else None, outputs)


def latency(model: Any, batch: Any) -> float:
    """The median of five runs on a batch, in seconds."""
    import torch

    from quark.torch.model.batches import forward_batch, input_device, named_outputs

    device, times = input_device(model), []
    with torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            next(named_outputs(forward_batch(model, batch, device)))[1].flatten()[0].item()  # waits for a device
            times.append(time.perf_counter() - start)
    return sorted(times)[2]


def layer_damage(before: Any, after: Any, batch: Any) -> dict[str, tuple[float, float]]:
    """Weight SQNR and output SQNR in dB of each quantized layer, on one batch.

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
    float_outputs = _layer_outputs(before, list(layers), batch)
    outputs = _layer_outputs(after, list(layers), batch)
    damage = {}
    with torch.no_grad():
        for name, layer in layers.items():
            weight = before.get_submodule(name).weight
            decoded = layer.quantized("weight", cast(torch.Tensor, layer.weight))
            expected, found = float_outputs.get(name), outputs.get(name)
            same = expected is not None and found is not None and expected.shape == found.shape and found.numel() > 0
            damage[name] = (sqnr(weight, decoded), sqnr(expected, found) if same else math.nan)
    return damage


def _layer_outputs(model: Any, names: Sequence[str], batch: Any) -> dict[str, Any]:
    import torch

    from quark.torch.model.batches import forward_batch, input_device

    found: dict[str, Any] = {}

    def note(name: str, module: Any, args: Any, output: Any) -> None:
        found[name] = output.detach()

    with ExitStack() as hooks, torch.no_grad():
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(note, name)))
        forward_batch(model, batch, input_device(model))
    return found


def _summary(sizes: Sequence[int], perplexity: tuple[float, float] | None, seconds: Sequence[float]) -> Table:
    table = new_table(
        "", "size MB", *(["perplexity"] if perplexity else []), "latency ms", title="Float against quantized"
    )
    for index, name in enumerate(("float", "quantized")):
        cells = [f"{sizes[index] / 1e6:.2f}"]
        if perplexity:
            change = f" ({perplexity[1] / perplexity[0] - 1:+.2%})" if index else ""
            cells.append(f"{perplexity[index]:.3f}{change}")
        table.add_row(name, *cells, f"{seconds[index] * 1e3:.1f}")
    return table


def _outputs(outputs: Mapping[str, Output], samples: int) -> Table:
    table = new_table("output", "SQNR dB", "cosine", "same greatest", title=f"Outputs over {samples} samples")
    for name, output in outputs.items():
        agreement = f"{output.agreed / output.rows:.2%}" if output.rows else ""
        table.add_row(name, f"{output.comparison.sqnr:.2f}", f"{output.comparison.cosine:.6f}", agreement)
    return table


def _worst_layers(damage: dict[str, tuple[float, float]], count: int) -> Table:
    table = new_table("layer", "weight SQNR dB", "output SQNR dB", title="Layers, worst output first")
    known = {name: pair for name, pair in damage.items() if not math.isnan(pair[1])}
    for name, (weight, output) in sorted(known.items(), key=lambda item: item[1][1])[:count]:
        table.add_row(name, f"{weight:.1f}", f"{output:.1f}")
    return table
