"""The costs of quantizing a denoiser: each step beside the float model's, and pictures from equal seeds.

of a step       SQNR of the outputs, of one input: the float model's own
of a picture    SQNR of what the pipeline returns. Errors of all steps add up, and a picture may come out as another
                of the same prompt: few dB here are no proof of a bad picture, many are one of a good one
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.base.progress import progress
from quark.core.array import NumpyArray
from quark.core.metrics import Comparison
from quark.errors import ConfigError
from quark.report.page import Figure, PageTable, Section, check_page, write_page
from quark.torch.calibration.timesteps import ErrorsByTimestep, RangesByTimestep, ranges_by_timestep
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.batches import calibration_step, evaluating, input_device, named_outputs
from quark.torch.model.calibration_data.recorded_steps import denoiser_of

_MOST_PICTURES = 8
"""Of a page."""
_MOST_RANGES = 20


@dataclass
class DenoiserCosts:
    """The result of comparing two denoisers.

    Attributes:
        steps: Of all outputs for the batches.
        by_timestep: The same by timestep.
        ranges: What the quantized layers read in the float model, by timestep.
        pictures: Prompt -> what the pipeline returned with the float and with the quantized denoiser.
    """

    steps: Comparison = field(default_factory=Comparison)
    by_timestep: ErrorsByTimestep = field(default_factory=ErrorsByTimestep)
    ranges: RangesByTimestep = field(default_factory=RangesByTimestep)
    pictures: dict[str, tuple[NumpyArray, NumpyArray]] = field(default_factory=dict)

    @property
    def sqnr(self) -> float:
        """Of the outputs of all batches, in dB."""
        return self.steps.sqnr

    @property
    def picture_sqnr(self) -> float:
        """Of all pictures, in dB; NaN without any."""
        total = Comparison()
        for pair in self.pictures.values():
            total.update(*pair)
        return total.sqnr if self.pictures else float("nan")


def compare_denoisers(
    pipeline: Any,
    quantized: nn.Module,
    batches: Sequence[Any] = (),
    prompts: Sequence[Any] = (),
    *,
    denoiser: nn.Module | None = None,
    seed: int = 1000,
    page: str | os.PathLike[str] | None = None,
    **arguments: Any,
) -> DenoiserCosts:
    """Run a pipeline's denoiser and a quantized one on the same steps, and the pipeline with each on the same noise.

    Args:
        pipeline: Holds the float denoiser. It is as it was afterwards.
        quantized: The same, quantized.
        batches: Steps, as `record_steps` writes them: of other prompts and seeds than those of the calibration.
        prompts: As of `record_steps`: a picture each.
        denoiser: Which of several denoisers of the pipeline it is.
        seed: Of the noise: prompt p has seed + p.
        page: A page (HTML) to write, with the pictures side by side.
        arguments: Of the pipeline: `num_inference_steps=30`, `output_type="latent"` for latents in place of pictures.

    Raises:
        ConfigError: Neither batches nor prompts; the pipeline has no denoiser, or several; the outputs differ in shape.
        MissingDependencyError, OutputExistsError, OutputError: Of the page, before the work.
    """
    before = denoiser if denoiser is not None else denoiser_of(pipeline)
    if not len(batches) and not prompts:
        raise ConfigError("compare_denoisers needs batches, prompts or both: there is nothing to compare on.")
    check_page(page)
    costs = DenoiserCosts()
    with evaluating(before), evaluating(quantized), torch.no_grad():
        for index, batch in enumerate(progress(batches, "compare", total=len(batches))):
            expected, found = (_output(model, batch, index) for model in (before, quantized))
            if expected.shape != found.shape:
                raise ConfigError(f"The outputs differ in shape: {tuple(expected.shape)}, {tuple(found.shape)}.")
            costs.steps.update(expected, found)
            costs.by_timestep.update(batch, expected, found)
        for number, prompt in enumerate(progress(prompts, "prompts", len(prompts))):
            given = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": [prompt]}
            pair = []
            for model in (before, quantized):
                generator = torch.Generator("cpu").manual_seed(seed + number)
                with _in_place_of(pipeline, before, model):
                    pair.append(_as_array(pipeline(**given, generator=generator, **arguments)))
            name = str(given.get("prompt", [number]))
            costs.pictures[f"{name} ({number})"] = (pair[0], pair[1])
    if len(batches):
        costs.ranges = ranges_by_timestep(before, [*quantized_layers(quantized)], batches)
    if page is not None:
        write_page(page, f"{type(before).__name__}: float and quantized", denoiser_sections(costs))
    return costs


def denoiser_sections(costs: DenoiserCosts) -> list[Section]:
    """The sections of a page of costs; one without content is left out by the page."""
    return [timestep_section(costs.by_timestep), range_section(costs.ranges), picture_section(costs)]


def timestep_section(errors: ErrorsByTimestep) -> Section:
    """The SQNR of a denoiser's output by timestep."""
    from quark.report.figures import bars

    rows = [(str(bucket), f"{sqnr:.2f}") for bucket, sqnr in errors.rows()]
    if len(rows) < 2:
        return Section("Error by timestep")
    figure = bars([(str(bucket), (sqnr,)) for bucket, sqnr in errors.rows()], ("output",), "SQNR dB")
    words = "How near the output is to that of the float model, from the first steps (noise) to the last (a picture)."
    return Section("Error by timestep", words, [PageTable(("timesteps", "SQNR dB"), rows)], [Figure(figure)])


def range_section(ranges: RangesByTimestep) -> Section:
    """The layers whose inputs differ most between timesteps."""
    buckets, found = ranges.buckets()
    rows = [(one.name, f"{one.spread:.1f}", *(f"{x:.3g}" for x in one.largest)) for one in found[:_MOST_RANGES]]
    words = (
        "The largest magnitude that a layer reads, by timestep, of the layers where it differs most. A static scale "
        "is that of the widest: a spread of 4 leaves the narrowest timesteps two bits less."
    )
    headers = ("layer", "spread", *(f"at {bucket}" for bucket in buckets))
    return Section("Ranges by timestep", words if rows else "", [PageTable(headers, rows)] if rows else [])


def picture_section(costs: DenoiserCosts) -> Section:
    """The pictures side by side, and how near they are."""
    from quark.report.figures import pictures

    if not costs.pictures:
        return Section("Pictures")
    rows = [(name, f"{Comparison().update(*pair).sqnr:.2f}") for name, pair in costs.pictures.items()]
    shown = [(name, pair) for name, pair in costs.pictures.items() if _picture(pair[0]) is not None][:_MOST_PICTURES]
    drawn = [(name, _picture(first), _picture(second)) for name, (first, second) in shown]
    words = f"From equal noise, float and quantized; {costs.picture_sqnr:.2f} dB over all."
    figures = [Figure(pictures(drawn), "Float, quantized, and the size of the difference.", tall=True)] if drawn else []
    return Section("Pictures", words, [PageTable(("prompt", "SQNR dB"), rows)], figures)


def _picture(x: NumpyArray) -> NumpyArray | None:
    """The first picture in what a pipeline returned, (height, width, 3) or (height, width); None where it holds none.

    Of a video the first frame, of latents their first channel.
    """
    while x.ndim > 3:
        x = x[0]
    if x.ndim == 3 and x.shape[-1] not in (1, 3, 4):
        x = np.moveaxis(x, 0, -1)
    if x.ndim == 3:
        x = x[..., :3] if x.shape[-1] in (3,) else x[..., 0]
    return x if x.ndim >= 2 and min(x.shape[:2]) > 1 else None


def _output(model: nn.Module, batch: Any, index: int) -> torch.Tensor:
    """The first output of a model for the batch of a number."""
    return next(named_outputs(calibration_step(model, batch, input_device(model), index, "batch")))[1]


def _as_array(returned: Any) -> NumpyArray:
    """Return the result of a pipeline as one array: it is a tensor, images, or an object that holds them."""
    for name in ("images", "frames", "sample"):
        returned = getattr(returned, name, returned)
    if isinstance(returned, torch.Tensor):
        return returned.detach().cpu().float().numpy()
    if isinstance(returned, (list, tuple)):
        return np.stack([_as_array(item) for item in returned])
    return np.asarray(returned).astype(np.float32)


@contextmanager
def _in_place_of(pipeline: Any, module: nn.Module, other: nn.Module) -> Iterator[None]:
    """Within: the attributes of a pipeline that are one module are the other."""
    names = [name for name, value in vars(pipeline).items() if value is module]
    for name in names:
        setattr(pipeline, name, other)
    try:
        yield
    finally:
        for name in names:
            setattr(pipeline, name, module)
