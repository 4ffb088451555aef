"""Outputs of the models of two folders for the same batches, perplexity, latency, the damage of each layer."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quark.base.progress import progress
from quark.core.metrics import Comparison, kl_by_row
from quark.errors import ConfigError, NonFiniteError
from quark.report.page import PageTable
from quark.report.shown import Shown

if TYPE_CHECKING:
    from quark.jobs.folders.compared.replies import Reply
    from quark.jobs.folders.compared.task_scores import TaskScores
    from quark.jobs.folders.model_inputs import ModelInputs, StepInputs
    from quark.report.figures import ClippedHistogram
    from quark.torch.calibration.timesteps import RangesByTimestep
    from quark.torch.flows.compared.channel_outliers import ChannelOutliers
    from quark.torch.flows.compared.layer_damage import LayerDamage
    from quark.torch.flows.parted import PartedModel

ALL = 1 << 62
"""More samples than there are."""
WHY_SLOW = (
    "Latency is that of PyTorch with weights that are decoded in each forward (fake quantization), so it is no faster "
    "here; the program that the format is for multiplies codes, and so does quark.torch.accelerate."
)
IN_BLOCKS = "Both models ran block by block, with the weights of one block in memory, so there is no latency."
LARGEST_PIECE = 1 << 18
"""Values of an output that are compared at once, in float64: larger arrays are asked of the system, and cleared by it,
each time."""


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
    """The result of running both models on the same batches.

    Attributes:
        perplexity: Of the float and of the quantized model; None where they do not give the next token.
        outputs: By name.
        divergence: Of each window of tokens, the KL divergence at each of its tokens in nats, (length,) in float64,
            of one with an answer from its last token before that on; of other models empty.
        by_timestep: Of a denoiser, how near its first output is by timestep: `ErrorsByTimestep`; of others None.
    """

    perplexity: tuple[float, float] | None
    outputs: Mapping[str, Output]
    divergence: Sequence[Any] = ()
    by_timestep: Any = None

    @property
    def kl(self) -> float | None:
        """The mean KL divergence of the next token in nats; None where the models do not give it."""
        if not self.divergence:
            return None
        import torch

        return float(torch.cat(list(self.divergence)).mean())


@dataclass(frozen=True, repr=False)
class MeasuredFolders(Shown):
    """Two models and what was measured of them.

    Attributes:
        model, quantized: Their places.
        before, after: The float and the quantized model; without weights where these were read block by block.
        inputs: What they take.
        batches: What ran.
        comparison: Of the outputs.
        sizes: Bytes of each.
        seconds: Latency of each for the first batch; empty where weights were read block by block.
        damage: Layer -> SQNR in dB of its weight and of its output; see `LayerDamage`.
        costs: Layer -> what it costs the output by itself, see `ErrorOfLayer`; empty where that is not asked for.
        histograms: Of the worst layers, where a page is asked for; else empty.
        channels: What the quantized layers read by channel, the worst output first, where a page is asked for.
        by_timestep: What layers of a denoiser read by timestep, where a page is asked for; else None.
        task: What both reach on a task, where the data or `metric` make one; else None.
        harness: What both reach on the tasks of lm-eval that were asked for; else None.
        replies: What both answer to a few prompts, where a page is asked for and both are in memory.
    """

    model: Path
    quantized: Path
    before: Any
    after: Any
    inputs: ModelInputs | StepInputs
    batches: Sequence[Any]
    comparison: FolderComparison
    sizes: Sequence[int]
    seconds: Sequence[float]
    damage: Mapping[str, tuple[float, float]]
    costs: Mapping[str, float] = field(default_factory=dict)
    histograms: Sequence[ClippedHistogram] = ()
    by_timestep: RangesByTimestep | None = None
    task: TaskScores | None = None
    harness: TaskScores | None = None
    replies: Sequence[Reply] = ()
    channels: ChannelOutliers | None = None

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """Of the float and of the quantized model on a task; None without one that has it."""
        return None if self.task is None else self.task.scores.get("accuracy")

    @property
    def outputs(self) -> Mapping[str, Comparison]:
        """How near each output is."""
        return {name: output.comparison for name, output in self.comparison.outputs.items()}

    @property
    def samples(self) -> str:
        """The samples that were measured: "2 samples", or "the answers of 12 documents (57 tokens)"."""
        from quark.torch.llm.answers import AnsweredTexts  # imports torch, which has measured them

        count = len(self.batches)
        answers = isinstance(self.batches, AnsweredTexts)
        return str(self.batches) if answers else f"{count} sample{'' if count == 1 else 's'}"

    def tables(self, layers: int = 10) -> list[PageTable]:
        """Both models, their outputs, tasks, timesteps, and the layers whose outputs lost most.

        Args:
            layers: How many of these.
        """
        found = [self._both(), self._outputs(), *(task.table() for task in (self.task, self.harness) if task)]
        if self.comparison.by_timestep:
            rows = [(str(bucket), f"{sqnr:.2f}") for bucket, sqnr in self.comparison.by_timestep.rows()]
            found.append(PageTable(("timesteps", "SQNR dB"), rows, "Outputs by timestep"))
        return [table for table in (*found, self._layers(layers)) if table.rows]

    def _layers(self, count: int) -> PageTable:
        """So many layers: those that cost the output most, where that was measured, else whose outputs lost most."""
        from quark.torch.flows.compared.layer_errors import alone_words

        known = {name: pair for name, pair in self.damage.items() if not math.isnan(pair[1])}
        if not self.costs:
            worst = sorted(known.items(), key=lambda item: item[1][1])[:count]
            cells = [(name, f"{weight:.1f}", f"{output:.1f}") for name, (weight, output) in worst]
            return PageTable(("layer", "weight SQNR dB", "output SQNR dB"), cells, "Layers, worst output first")
        names = sorted(self.costs, key=self.costs.__getitem__, reverse=True)[:count]
        of_all = [(name, f"{self.costs[name]:.3g}", *(f"{each:.1f}" for each in self.damage[name])) for name in names]
        headers = ("layer", alone_words("logits" in self.comparison.outputs), "weight SQNR dB", "output SQNR dB")
        return PageTable(headers, of_all, "Layers, by what each costs the output by itself")

    def _both(self) -> PageTable:
        """Sizes, perplexity, divergence and latency."""
        perplexity, kl = self.comparison.perplexity, self.comparison.kl
        of_text = [*(["perplexity"] if perplexity else []), *([] if kl is None else ["KL nats"])]
        headers, rows = ["", "size MB", *of_text, *(["latency ms"] if self.seconds else [])], []
        for index, name in enumerate(("float", "quantized")):
            cells = [f"{self.sizes[index] / 1e6:.2f}"]
            if perplexity:
                change = f" ({perplexity[1] / perplexity[0] - 1:+.2%})" if index else ""
                cells.append(f"{perplexity[index]:.3f}{change}")
            if kl is not None:
                cells.append(f"{kl:.4g}" if index else "")
            rows.append([name, *cells, *(f"{seconds * 1e3:.1f}" for seconds in self.seconds[index : index + 1])])
        return PageTable(headers, rows, "Float against quantized")

    def _outputs(self) -> PageTable:
        """How near each output is."""
        rows = [
            (name, f"{found.comparison.sqnr:.2f}", f"{found.comparison.cosine:.6f}",
             f"{found.agreed / found.rows:.2%}" if found.rows else "")
            for name, found in self.comparison.outputs.items()
        ]  # fmt: skip
        return PageTable(("output", "SQNR dB", "cosine", "same top-1"), rows, f"Outputs over {self.samples}")


def measure_folders(
    model: Path,
    quantized: Path,
    models: tuple[PartedModel, PartedModel],
    inputs: ModelInputs | StepInputs,
    batches: Sequence[Any],
    page: bool = False,
    costs: bool = False,
) -> MeasuredFolders:
    """Run the models of two folders on the batches.

    Args:
        model, quantized: Their places.
        models: The float and the quantized one.
        inputs: What they take.
        batches: To run, of one sample each.
        page: Whether to collect what a page shows beside figures.
        costs: Whether to run the float model once more for each layer, on the first batch, with this one quantized.

    Raises:
        ConfigError: Their outputs have other shapes; or costs of layers are asked for, and weights come and go.
        CalibrationError: They do not take a batch.
        NonFiniteError: The outputs of one are no numbers; names it.
    """
    from quark.jobs.folders.models import folder_bytes
    from quark.torch.flows.compared.layer_damage import LayerDamage  # imports torch: after --help

    before, after = (each.model for each in models)
    if costs and models[0].is_streamed:
        raise ConfigError("--layer-costs needs both models in memory. Possible: --no-stream, or leave it out.")
    layers = LayerDamage(before, after, page)
    if page:
        from quark.torch.calibration.timesteps import ranges_of_batches

        with ranges_of_batches({name: before.get_submodule(name) for name in layers.names}, batches) as ranges:
            comparison = compare_outputs(*models, batches, layers, ranges)
    else:
        ranges, comparison = None, compare_outputs(*models, batches, layers)
    _require_numbers(comparison, (model, quantized))
    sizes = [folder_bytes(model), quantized.stat().st_size if quantized.is_file() else folder_bytes(quantized)]
    in_memory = not models[0].is_streamed
    seconds = [latency(each, batches[0]) for each in (before, after)] if in_memory else []
    replies: Sequence[Reply] = ()
    if page and in_memory and not inputs.is_network:
        from quark.jobs.folders.compared.replies import replies_of

        replies = replies_of(before, after, cast("ModelInputs", inputs), max(seconds))
    found = _costs(before, layers, batches[0]) if costs else {}
    return MeasuredFolders(
        model, quantized, before, after, inputs, batches, comparison, sizes, seconds, layers.damage, found,
        layers.histograms, ranges, replies=replies,
        channels=layers.channels if page else None,
    )  # fmt: skip


def _costs(before: Any, layers: LayerDamage, batch: Any) -> dict[str, float]:
    """Layer -> what it costs the output by itself, on a batch."""
    import torch

    from quark.torch.flows.compared.layer_errors import costs_alone
    from quark.torch.model.batches import evaluating

    with evaluating(before), torch.no_grad():
        return costs_alone(before, layers.coded, layers.moves, [batch])[0]


def _require_numbers(comparison: FolderComparison, places: tuple[Path, Path]) -> None:
    """Raise NonFiniteError where perplexity or, without it, the distance of an output is NaN: no table may show it."""
    wrong = [place for place, value in zip(places, comparison.perplexity or (), strict=False) if math.isnan(value)]
    if comparison.perplexity is None and any(math.isnan(each.comparison.sqnr) for each in comparison.outputs.values()):
        wrong = list(places)
    if wrong:
        raise NonFiniteError(
            f"{' or '.join(map(str, wrong))}: outputs are NaN or infinite for these data. Possible: the weights are "
            "damaged, or overflow in their type."
        )


class NextTokens:
    """The likelihoods that two models of text give the real next token, and the divergence between them."""

    def __init__(self) -> None:
        self.likelihoods, self.tokens = [0.0, 0.0], 0
        self.divergence: list[Any] = []

    def update(self, ids: Any, logits: Sequence[Any], placeholders: Collection[int] = ()) -> None:
        """Add the logits of both models for token ids, (samples, length).

        Args:
            ids: That both read.
            logits: (samples, length, vocabulary) of each.
            placeholders: Ids that stand for images or sounds, which nobody predicts.
        """
        import torch
        from torch.nn.functional import pad

        from quark.torch.llm.text import IGNORED, negative_log_likelihood

        rows = [values.flatten(0, -2) for values in logits]
        for token in placeholders:
            ids = ids.masked_fill(ids == token, IGNORED)
        if placeholders:
            predicted = pad(ids[:, 1:] != IGNORED, (0, 1), value=True).flatten()
            rows = [values[predicted] for values in rows]
        self.tokens += int((ids[:, 1:] != IGNORED).sum()) if placeholders else ids.numel() - len(ids)
        size = max(1, LARGEST_PIECE // rows[0].shape[-1])
        parts = zip(*(torch.split(x, size) for x in rows), strict=True)
        self.divergence.append(torch.cat([kl_by_row(*part) for part in parts]).cpu())
        for index, values in enumerate(logits):
            self.likelihoods[index] += negative_log_likelihood(values, ids)

    @property
    def perplexity(self) -> tuple[float, float] | None:
        """Of both; None without tokens."""
        first, second = (math.exp(value / self.tokens) if self.tokens else math.nan for value in self.likelihoods)
        return (first, second) if self.tokens else None


class ComparedOutputs:
    """The outputs of a float and a quantized model, batch by batch.

    Args:
        model: One of both.
    """

    def __init__(self, model: Any) -> None:
        from quark.torch.calibration.timesteps import ErrorsByTimestep  # imports torch: after --help
        from quark.torch.model.calibration_data import placeholders_of

        config = getattr(model, "config", None)
        goes_on = getattr(model, "can_generate", None)
        self.continues_text = goes_on is not None and goes_on() and not getattr(config, "is_encoder_decoder", False)
        self.placeholders = placeholders_of(config).values()
        self.outputs: dict[str, Output] = {}
        self.by_timestep, self.text = ErrorsByTimestep(), NextTokens()

    def update(self, batch: Any, made: Sequence[Any], start: int = 1) -> None:
        """Add what both models made of a batch.

        Args:
            batch: A sample.
            made: Of each model.
            start: Of token ids, how many stand before those whose logits count.

        Raises:
            ConfigError: Outputs of other shapes.
        """
        from quark.torch.model.batches import named_outputs

        pair = [dict(named_outputs(output)) for output in made]
        for name, expected in pair[0].items():
            found = pair[1].get(name)
            if found is None or found.shape != expected.shape:
                raise ConfigError(f"The output {name!r} is of another shape, or missing, in the quantized model.")
            if start > 1 and name == "logits":
                pair[0][name], pair[1][name] = expected, found = expected[:, start - 1 :], found[:, start - 1 :]
            self.outputs.setdefault(name, Output()).update(expected, found, "logits" in name)
        if pair[0]:
            self.by_timestep.update(batch, *(next(iter(each.values())) for each in pair))
        ids = self._ids_of(batch, pair[0].get("logits"))
        if ids is not None:
            self.text.update(ids[:, start - 1 :], [values["logits"] for values in pair], self.placeholders)

    def _ids_of(self, batch: Any, logits: Any) -> Any:
        """The token ids of a batch, beside the logits of their device; None where these do not go on with a text."""
        import torch

        ids = batch.get("input_ids") if isinstance(batch, Mapping) and self.continues_text else batch
        if logits is None or not isinstance(ids, torch.Tensor) or (ids is not batch and ids.shape != logits.shape[:2]):
            return None
        return ids.to(logits.device)

    def result(self) -> FolderComparison:
        """Return the result over all batches."""
        text = self.text
        return FolderComparison(text.perplexity, self.outputs, text.divergence, self.by_timestep or None)


def compare_outputs(
    before: PartedModel,
    after: PartedModel,
    batches: Sequence[Any],
    layers: LayerDamage | None = None,
    ranges: RangesByTimestep | None = None,
) -> FolderComparison:
    """Run both models on the batches, of one sample each: at once, or block by block.

    Args:
        before, after: The float and the quantized model.
        batches: To run; of `AnsweredTexts` the answers count alone.
        layers: Looks at layers on the first batch, and at what they read on all.
        ranges: Notes what layers read.

    Raises:
        CalibrationError: A batch that they do not take.
        ConfigError: Their outputs have other shapes.
    """
    from quark.torch.flows.parted import parts_of
    from quark.torch.llm.answers import AnsweredTexts

    starts = batches.starts if isinstance(batches, AnsweredTexts) else [1] * len(batches)
    compared, blocks = ComparedOutputs(before.model), before.find_blocks(batches[0], layers.names if layers else ())
    visits = ((part, index) for part in parts_of((before, after), batches, blocks) for index in range(len(batches)))
    for part, index in progress(visits, "compare", total=(1 + len(blocks)) * len(batches)):
        if ranges is not None:
            ranges.call = index
        with ExitStack() as looks:
            if layers:
                looks.enter_context(layers.reading(part.holds))
            if layers and index == 0:
                looks.enter_context(layers.watching(part.holds))
            made = part.run(index, batches[index])
        if part.block is None:
            compared.update(batches[index], made, starts[index])
    return compared.result()


def latency(model: Any, batch: Any) -> float:
    """The median of five runs on a batch, in seconds."""
    import torch

    from quark.torch.model.batches import evaluating, forward_batch, input_device, named_outputs

    device, times = input_device(model), []
    with evaluating(model), torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            next(named_outputs(forward_batch(model, batch, device)))[1].flatten()[0].item()  # waits for a device
            times.append(time.perf_counter() - start)
    return sorted(times)[2]
