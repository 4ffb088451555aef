"""What the models of two folders give for the same batches: outputs, perplexity, latency, the damage of each layer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.progress import progress
from quark.core.metrics import Comparison, kl_by_row
from quark.errors import ConfigError

if TYPE_CHECKING:
    from quark.jobs.folders.model_inputs import ModelInputs, StepInputs

ALL = 1 << 62
"""More samples than there are."""
WHY_SLOW = (
    "Latency is that of PyTorch with weights that are decoded in each forward (fake quantization), so it is no faster "
    "here; the program that the format is for multiplies codes, and so does quark.torch.accelerate."
)
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
        divergence: Of each window of tokens, the KL divergence at each of its tokens in nats, (length,) in float64;
            of other models empty.
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


@dataclass(frozen=True)
class MeasuredFolders:
    """Two models and what was measured of them.

    Attributes:
        model, quantized: Their places.
        before, after: The float and the quantized model.
        inputs: What they take.
        batches: What ran.
        comparison: Of the outputs.
        sizes: Bytes of each.
        seconds: Latency of each for the first batch.
        damage: Layer -> SQNR in dB of its weight and of its output; see `layer_damage`.
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

    @property
    def outputs(self) -> Mapping[str, Comparison]:
        """How near each output is."""
        return {name: output.comparison for name, output in self.comparison.outputs.items()}


def measure_folders(
    model: Path, quantized: Path, loaded: tuple[Any, Any], inputs: ModelInputs | StepInputs, batches: Sequence[Any]
) -> MeasuredFolders:
    """Run the models of two folders on the batches. Raises ConfigError where their outputs have other shapes."""
    from quark.jobs.folders.models import folder_bytes  # imports torch and transformers: after --help

    comparison = compare_outputs(*loaded, batches)
    sizes = [folder_bytes(model), quantized.stat().st_size if quantized.is_file() else folder_bytes(quantized)]
    seconds = [latency(each, batches[0]) for each in loaded]
    damage = layer_damage(*loaded, batches[0])
    return MeasuredFolders(model, quantized, *loaded, inputs, batches, comparison, sizes, seconds, damage)


class NextTokens:
    """What two models of text give the next token: likelihoods of the real one, and the divergence between them."""

    def __init__(self) -> None:
        self.likelihoods, self.tokens = [0.0, 0.0], 0
        self.divergence: list[Any] = []

    def update(self, ids: Any, logits: Sequence[Any]) -> None:
        """Add the logits of both models for token ids, (samples, length)."""
        import torch

        from quark.torch.llm.text import negative_log_likelihood

        self.tokens += ids.numel() - len(ids)
        rows = [values.flatten(0, -2) for values in logits]
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


def compare_outputs(before: Any, after: Any, batches: Sequence[Any]) -> FolderComparison:
    """Run both models on the batches, of one sample each. Raises CalibrationError for one that they do not take."""
    import torch

    from quark.torch.calibration.timesteps import ErrorsByTimestep
    from quark.torch.model.batches import calibration_step, input_device, named_outputs

    device, by_timestep, text = input_device(before), ErrorsByTimestep(), NextTokens()
    outputs: dict[str, Output] = {}
    with torch.no_grad():
        for index, batch in enumerate(progress(batches, "compare", total=len(batches))):
            made = [calibration_step(model, batch, device, index, "batch") for model in (before, after)]
            pair = [dict(named_outputs(output)) for output in made]
            for name, expected in pair[0].items():
                found = pair[1].get(name)
                if found is None or found.shape != expected.shape:
                    raise ConfigError(f"The output {name!r} is of another shape, or missing, in the quantized model.")
                outputs.setdefault(name, Output()).update(expected, found, "logits" in name)
            if pair[0]:
                by_timestep.update(batch, *(next(iter(each.values())) for each in pair))
            if isinstance(batch, torch.Tensor) and "logits" in pair[0]:
                text.update(batch.to(device), [values["logits"] for values in pair])
    return FolderComparison(text.perplexity, outputs, text.divergence, by_timestep or None)


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


def coded_layers(model: Any) -> dict[str, Any]:
    """Layers whose weights come from codes, by name: quantized ones, or float ones that were decoded when loaded."""
    from quark.torch.layers.replace import quantized_layers  # imports torch: after --help

    return quantized_layers(model) or {name: model.get_submodule(name) for name in getattr(model, "decoded_layers", ())}


def decoded_weight(layer: Any) -> Any:
    """The values that a layer of `coded_layers` computes with."""
    from quark.torch.layers import QuantLayer

    weight: Any = layer.weight
    return layer.quantized("weight", weight) if isinstance(layer, QuantLayer) else weight


def layer_damage(before: Any, after: Any, batch: Any) -> dict[str, tuple[float, float]]:
    """Weight SQNR and output SQNR in dB of each of `coded_layers`, on one batch.

    The output SQNR compares what the layer gives inside the quantized model with what it gives inside the float
    model: errors of the layers before are part of it. It is NaN for an expert that did not get the same number of
    tokens in both, or none.
    """
    import torch

    from quark.core.metrics import sqnr
    from quark.torch.model.passes import prepare

    layers = coded_layers(after)
    prepare(before, layers.__contains__)  # the same layers, where the model had them in another form
    float_outputs = _layer_outputs(before, list(layers), batch)
    outputs = _layer_outputs(after, list(layers), batch)
    damage = {}
    with torch.no_grad():
        for name, layer in layers.items():
            weight = before.get_submodule(name).weight
            decoded = decoded_weight(layer)
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
