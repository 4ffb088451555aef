"""`--report` of model folders: the page of two models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from quark.commands.results.tables import counted
from quark.jobs.evaluate import MeasuredPipeline
from quark.jobs.folders.compared.measure import IN_BLOCKS, WHY_SLOW, MeasuredFolders
from quark.jobs.folders.compared.replies import replies_table
from quark.report.figures import MOST_BARS, OUTLIER, bars, heat_map, histogram, token_divergence
from quark.report.page import Figure, PageTable, Section
from quark.torch.checkpoint.sources.methods import method_of
from quark.torch.flows.compared.channel_outliers import ChannelOutliers
from quark.torch.flows.compared.coded_layers import coded_layers
from quark.torch.flows.compared.denoiser_costs import picture_section, range_section, timestep_section
from quark.torch.flows.compared.layer_damage import worst_first
from quark.torch.layers.base import QuantLayer
from quark.torch.model.model_folder import read_config
from quark.torch.writers.model_card import described

MOST_TOKENS, CONTEXT = 20, 12


def folder_sections(measured: MeasuredFolders, words: str = "") -> list[Section]:
    """The page of two folders.

    Args:
        measured: What was found.
        words: What was done, where that is known.
    """
    errors, ranges = measured.comparison.by_timestep, measured.by_timestep
    return [
        Section("What was done", words, [_what_was_done(measured)]),
        _costs(measured),
        Section("Answers of both models", tables=[replies_table(measured.replies)] if measured.replies else []),
        _tokens(measured),
        *([] if errors is None else [timestep_section(errors)]),
        *([] if errors is None or ranges is None else [range_section(ranges)]),
        damage_section(measured.damage),
        *([Section("Costs of layers", tables=[measured.tables(MOST_BARS)[-1]])] if measured.costs else []),
        _ranges(measured),
        *([] if measured.channels is None else [_channels(measured.channels)]),
    ]


def pipeline_sections(measured: MeasuredPipeline, words: str = "") -> list[Section]:
    """The page of a pipeline of diffusers: pictures of the float and the quantized one, then the page of each denoiser.

    Args:
        measured: What was found.
        words: What was done, where that is known.
    """
    pictures = [picture_section(each) for each in measured.pictures.values()]
    return [*pictures, *(section for each in measured.components.values() for section in folder_sections(each, words))]


def _what_was_done(measured: MeasuredFolders) -> PageTable:
    gguf = measured.quantized.is_file()  # has no config.json: that of the float model says what it is
    config = read_config(measured.model if gguf else measured.quantized)
    layers = coded_layers(measured.after).values()
    schemes = Counter(described(layer.spec) if isinstance(layer, QuantLayer) else "decoded" for layer in layers)
    rows = [
        ("float model", str(measured.model)),
        ("quantized model", str(measured.quantized)),
        ("model type", str(config.get("model_type") or config.get("_class_name"))),
        ("format", "gguf" if gguf else str(method_of(config))),
        *((counted(count, "layer"), scheme) for scheme, count in schemes.most_common()),
        ("measured on", measured.samples),
    ]
    return PageTable(("", ""), rows)


def _costs(measured: MeasuredFolders) -> Section:
    perplexity = measured.comparison.perplexity
    times = ["latency ms"] if measured.seconds else []
    headers = ["", "size MB", "of float", *(["perplexity", "change"] if perplexity else []), *times]
    rows = []
    for i, name in enumerate(("float", "quantized")):
        cells = [f"{measured.sizes[i] / 1e6:.2f}", f"{measured.sizes[1] / measured.sizes[0]:.1%}" if i else ""]
        if perplexity:
            cells += [f"{perplexity[i]:.3f}", f"{perplexity[1] / perplexity[0] - 1:+.2%}" if i else ""]
        rows.append([name, *cells, *(f"{seconds * 1e3:.1f}" for seconds in measured.seconds[i : i + 1])])
    words = WHY_SLOW if measured.seconds else IN_BLOCKS
    of_task = [task.table() for task in (measured.task, measured.harness) if task is not None]
    return Section("Size, latency, outputs", words, [PageTable(headers, rows), _outputs(measured), *of_task])


def _outputs(measured: MeasuredFolders) -> PageTable:
    rows = [
        (name, f"{output.comparison.sqnr:.2f}", f"{output.comparison.cosine:.6f}",
         f"{output.agreed / output.rows:.2%}" if output.rows else "")
        for name, output in measured.comparison.outputs.items()
    ]  # fmt: skip
    title = f"Outputs over {measured.samples}"
    return PageTable(("output", "SQNR dB", "cosine", "same top-1"), rows, title)


def _tokens(measured: MeasuredFolders) -> Section:
    """How far the next token's distribution moved, at each token, and where most."""
    if not measured.comparison.divergence:
        return Section("KL divergence by token")
    values = torch.cat(list(measured.comparison.divergence))
    if any(isinstance(batch, Mapping) for batch in measured.batches):  # with images or sounds among the tokens
        return Section("KL divergence by token", figures=[Figure(token_divergence(values.numpy()))])
    windows = [batch.flatten().tolist() for batch in measured.batches]
    # Of a text with an answer, the divergence begins at the last token before that.
    before = [len(window) - len(each) for window, each in zip(windows, measured.comparison.divergence, strict=True)]
    starts = [0]
    for each in measured.comparison.divergence:
        starts.append(starts[-1] + len(each))
    rows = []
    for place in values.nan_to_num(math.inf).argsort(descending=True)[:MOST_TOKENS].tolist():
        index = next(i for i, start in enumerate(starts) if start > place) - 1
        at = place - starts[index] + before[index]
        read = measured.inputs.words(windows[index][max(0, at - CONTEXT + 1) : at + 1])
        rows.append((f"{float(values[place]):.4g}", str(index), str(at), "".join(read[:-1]) + f"[{read[-1]}]"))
    table = PageTable(("KL, nats", "window", "token", "what was read"), rows, f"The {len(rows)} tokens that moved most")
    shares = [f"{float(values.quantile(q)):.3g} at {q:.0%}" for q in (0.5, 0.9, 0.99)]
    words = (
        "How far the distribution of the next token is from that of the float model, for each token of the data. "
        f"Mean {float(values.mean()):.4g} nats; {', '.join(shares)} of the tokens."
    )
    return Section("KL divergence by token", words, [table], [Figure(token_divergence(values.numpy()))])


def damage_section(damage: Mapping[str, tuple[float, float]]) -> Section:
    """Return a section with the loss of each layer, in the order of the model."""
    worst = sorted(damage, key=lambda name: worst_first(damage[name][1]))[:MOST_BARS]
    drawn = [(name, pair) for name, pair in damage.items() if name in set(worst)]
    some = "" if len(drawn) == len(damage) else f" The {len(drawn)} worst of {len(damage)} are drawn."
    words = (
        "SQNR in dB, in the order of the model: 6 dB more is half the error. That of an output counts the errors of "
        f"the layers before, too; that of a weight is its own.{some}"
    )
    rows = [
        (name, f"{weight:.1f}", "" if math.isnan(output) else f"{output:.1f}")
        for name, (weight, output) in damage.items()
    ]
    table = PageTable(("layer", "weight SQNR dB", "output SQNR dB"), rows, "As a table", folded=True)
    figures = [Figure(bars(drawn, ("weight", "output"), "SQNR dB"), tall=True)] if drawn else []
    if whole := heat_map({name: output for name, (_, output) in damage.items()}, "SQNR dB", low_is_worst=True):
        figures.insert(0, Figure(whole, "The outputs of all layers at once."))
    return Section("Damage by layer", words, [table], figures)


def _ranges(measured: MeasuredFolders) -> Section:
    """Histograms of the layers whose outputs lost most."""
    words = "Float values of the first sample, worst output first; lines where the codes end."
    return Section(
        "Ranges of the worst layers",
        words,
        figures=[Figure(histogram(each), each.caption) for each in measured.histograms],
    )


def _channels(found: ChannelOutliers) -> Section:
    """Pictures of what the layers read whose outputs lost most, by channel, and all layers as a table."""
    words = (
        "The largest magnitude of each channel that the quantized layers read, worst output first. An outlier is more "
        f"than {OUTLIER:g} times the median of the channels that are not always 0. If inputs are quantized with one "
        "scale for all channels, the others have few codes beside it. Possible: SmoothQuant, a rotation, or a scale "
        "for each group."
    )
    table = replace(found, shown=len(found.layers)).tables()[0]
    figures = [Figure(svg, each.caption) for svg, each in zip(found.drawn(), found.layers.values(), strict=False)]
    return Section(
        "Outliers by channel", words if figures else "", [replace(table, title="As a table", folded=True)], figures
    )
