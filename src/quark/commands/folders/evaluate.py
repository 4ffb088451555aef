"""`quark evaluate` of two folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from quark.base.command_line import new_table, results
from quark.base.files import require_regular
from quark.commands.folders.measure import ALL, WHY_SLOW, Output, measure_folders
from quark.commands.results.counted import counted
from quark.errors import ConfigError


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
    page: Path | None = None,
) -> None:
    """Compare outputs, perplexity, size, latency and the damage of each layer."""
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.jobs.folders.models import inputs_of, load_model
    from quark.torch.layers.replace import quantized_layers
    from quark.torch.model.model_folder import read_config

    if quantized.suffix == ".gguf":
        from quark.torch import import_model_from_gguf

        require_regular(quantized)
        before, after = (load_model(float_model, device, dtype, dequantize=True, **load) for _ in range(2))
        import_model_from_gguf(after, quantized)
    else:
        _same_architecture(read_config(float_model), read_config(quantized))
        before = load_model(float_model, device, dtype, dequantize=True, **load)
        after = load_model(quantized, device, dtype, **load)
    if not quantized_layers(after):
        raise ConfigError(f"{quantized} holds no quantized layer; it is a float model.")
    inputs = inputs_of(float_model, before)
    batches = inputs.read(data, windows or ALL, length)
    found = measure_folders(float_model, quantized, before, after, batches)
    console = results()
    console.print(_summary(found.sizes, found.comparison.perplexity, found.seconds))
    console.print(WHY_SLOW, highlight=False, soft_wrap=True)
    console.print(_outputs(found.comparison.outputs, f"{counted(len(batches), 'sample')} of {data.name}"))
    console.print(_worst_layers(found.damage, layers))
    if page is not None:
        from quark.commands.folders.report import folder_sections
        from quark.report.page import write_page

        sections = folder_sections(float_model, quantized, found, inputs)
        console.print(f"Report: {write_page(page, f'{quantized.name} against {float_model.name}', sections)}")


def _same_architecture(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise ConfigError when two configs describe models whose layers cannot be compared."""
    for key in ("model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size"):
        named = before.get(key) is not None or key != "architectures"  # which a float model may leave out
        if named and before.get(key) != after.get(key):
            raise ConfigError(
                f"The two models differ in {key}: {before.get(key)} (float) and {after.get(key)} (quantized). "
                "Compare a quantized model with the float model that it was made from."
            )


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


def _outputs(outputs: Mapping[str, Output], words: str) -> Table:
    table = new_table("output", "SQNR dB", "cosine", "same greatest", title=f"Outputs over {words}")
    for name, output in outputs.items():
        agreement = f"{output.agreed / output.rows:.2%}" if output.rows else ""
        table.add_row(name, f"{output.comparison.sqnr:.2f}", f"{output.comparison.cosine:.6f}", agreement)
    return table


def _worst_layers(damage: Mapping[str, tuple[float, float]], count: int) -> Table:
    table = new_table("layer", "weight SQNR dB", "output SQNR dB", title="Layers, worst output first")
    known = {name: pair for name, pair in damage.items() if not math.isnan(pair[1])}
    for name, (weight, output) in sorted(known.items(), key=lambda item: item[1][1])[:count]:
        table.add_row(name, f"{weight:.1f}", f"{output:.1f}")
    return table
