"""The inputs of a denoiser while its pipeline makes pictures, recorded to a folder.

A pipeline of diffusion calls its denoiser once for each step, or twice where the picture with the prompt and the one
without it are asked for apart (classifier-free guidance). What a denoiser reads changes with the timestep: noise at
first, a picture at the end. So a few steps of each prompt are kept, spread over the whole schedule:

    kept of a run of N steps, k for each prompt:    step floor((i + o) N / k),  i = 0 .. k - 1
    o of prompt p                                   (0.5 + 0.618 p) mod 1, so that prompts together reach all steps

Nothing of diffusers is called but the pipeline itself: anything that calls a module will do.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.files import atomic_folder
from quark.base.log import logger
from quark.base.progress import progress
from quark.errors import CalibrationError, ConfigError, StructureError
from quark.torch.diffusion.component import TIMESTEPS
from quark.torch.model.calibration_data.stored_batches import StoredBatches, write_batch

GOLDEN = 0.618034
"""Multiples of it, modulo 1, are spread evenly, however many there are."""
DENOISERS = ("transformer", "unet", "prior")
"""The names of the denoiser in pipelines of diffusers; one with a number after it is of other timesteps."""
IDS = "input_ids"
"""The input of text encoders of transformers."""
_NO_INPUTS = ("return_dict",)
"""Arguments that say how a result is returned."""


def record_steps(
    pipeline: Any,
    prompts: Sequence[Any],
    folder: str | os.PathLike[str],
    *,
    steps: int = 4,
    denoiser: nn.Module | None = None,
    seed: int = 0,
    overwrite: bool = False,
    **arguments: Any,
) -> StoredBatches:
    """Run a pipeline on prompts, and write some of what it gives to its denoiser, each call as one `.npz` file.

    What its text encoders get of the prompts lies in folders of their names below, each prompt once: their data.

    Args:
        pipeline: Called as `pipeline(prompt=[prompt], generator=..., **arguments)`.
        prompts: A run each. A mapping gives several arguments of the pipeline: `{"prompt": "a cat", "image": image}`.
        folder: Where batches go: what `stored_batches`, `quark.quantize(model, data=...)` and `--calib` take.
        steps: How many of each run are kept, spread over its schedule. All calls of one timestep are one step.
        denoiser: What is recorded. None: `pipeline.transformer`, `.unet` or `.prior`.
        seed: Of the noise: prompt p has seed + p. Data to measure on need other seeds than data to calibrate with.
        overwrite: Whether a folder that is there is replaced.
        arguments: Of the pipeline, of all runs: `num_inference_steps=30, guidance_scale=5.0, output_type="latent"`.

    Returns:
        The batches, which are read from the folder one at a time.

    Raises:
        ConfigError: There are no prompts, `steps` is under 1, or the pipeline has no denoiser, or several.
        StructureError: The forward of the denoiser takes *args or **kwargs, so that arguments have no names.
        CalibrationError: The pipeline does not call it.
        OutputExistsError, OutputError: Of the folder.
    """
    module = denoiser if denoiser is not None else denoiser_of(pipeline)
    if not prompts or isinstance(prompts, (str, bytes)) or steps < 1:
        raise ConfigError(
            f"record_steps needs a list of prompts, and steps of 1 or more; got {prompts!r:.60}, {steps}."
        )
    with atomic_folder(folder, overwrite) as written:
        count, times = 0, []
        encoders = [_Encoder(written / name, part) for name, part in _text_encoders(pipeline).items()]
        for number, prompt in enumerate(progress(prompts, "prompts", len(prompts))):
            given = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": [prompt]}
            generator = torch.Generator("cpu").manual_seed(seed + number)
            calls = _Calls(written)
            with ExitStack() as hooks, caught(module, calls.take), torch.no_grad():
                for encoder in encoders:
                    hooks.enter_context(encoder.caught())
                pipeline(**given, generator=generator, **arguments)
            kept = calls.keep(steps, (0.5 + GOLDEN * number) % 1)
            for file, time in kept:
                file.rename(written / f"{count:06}.npz")
                count += 1
                times.append(time)
        if not count:
            raise CalibrationError(
                f"{len(prompts)} prompts gave no batch: the pipeline does not call this {type(module).__name__}."
            )
    known = [time for time in times if time is not None]
    of_times = f", of timesteps {min(known):g} to {max(known):g}" if known else ""
    logger.info("%d prompts gave %d batches%s: %s.", len(prompts), count, of_times, folder)
    return StoredBatches(sorted(Path(folder).glob("*.npz")))


def _text_encoders(pipeline: Any) -> dict[str, nn.Module]:
    """The modules of a pipeline that read token ids, by their names."""
    parts = {name: part for name, part in vars(pipeline).items() if isinstance(part, nn.Module)}
    return {name: part for name, part in parts.items() if IDS in inspect.signature(part.forward).parameters}


class _Encoder:
    """The inputs of a text encoder, each text once.

    Args:
        folder: Where batches lie; it is made for the first one.
        module: The encoder.
    """

    def __init__(self, folder: Path, module: nn.Module) -> None:
        self.folder, self.module = folder, module
        self.seen: set[bytes] = set()

    def take(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write a call: its tensors; what else is said only says what is returned."""
        named = inspect.signature(self.module.forward).bind_partial(*args, **kwargs).arguments
        batch = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        if IDS not in batch or (key := batch[IDS].cpu().numpy().tobytes()) in self.seen:
            return
        self.folder.mkdir(exist_ok=True)
        write_batch(self.folder / f"{len(self.seen):06}.npz", batch)
        self.seen.add(key)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Within: calls are taken."""
        hook = self.module.register_forward_pre_hook(self.take, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


class _Calls:
    """The calls of one run, each in a file until it is known which are kept.

    Args:
        folder: Where the files lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[list[Path]] = []
        self.times: list[float | None] = []

    def take(self, batch: dict[str, Any]) -> None:
        """Write a call; one of the timestep of the last call belongs to its step."""
        time = timestep_of(batch)
        if not self.steps or time is None or time != self.times[-1]:
            self.steps.append([])
            self.times.append(time)
        file = self.folder / f"run-{len(self.steps)}-{len(self.steps[-1])}.npz"
        write_batch(file, batch)
        self.steps[-1].append(file)

    def keep(self, count: int, offset: float) -> list[tuple[Path, float | None]]:
        """The files of the steps that are kept and their timesteps; all others are removed."""
        total = len(self.steps)
        wanted = {int((index + offset) * total / count) for index in range(count)} if count < total else {*range(total)}
        for index, files in enumerate(self.steps):
            for file in files if index not in wanted else ():
                file.unlink()
        return [(file, self.times[index]) for index in sorted(wanted) for file in self.steps[index]]


def timestep_of(batch: Any) -> float | None:
    """The timestep of a batch by name, of its first sample; None where it has none."""
    for name in TIMESTEPS if isinstance(batch, Mapping) else ():
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.numel():
            return float(value.flatten()[0])
        if isinstance(value, (int, float)):
            return float(value)
    return None


@contextmanager
def caught(module: nn.Module, take: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Within: each call of a module hands its arguments by name to `take`, without those that are None.

    Raises:
        StructureError: Its forward takes *args or **kwargs.
    """
    signature = inspect.signature(module.forward)
    unnamed = [p.name for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unnamed:
        raise StructureError(f"{type(module).__name__}.forward takes {unnamed[0]!r}, whose parts have no names.")

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = signature.bind_partial(*args, **kwargs).arguments
        take({name: value for name, value in named.items() if value is not None and name not in _NO_INPUTS})

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def denoiser_of(pipeline: Any) -> nn.Module:
    """The denoiser of a pipeline. Raises ConfigError where there is none, or are several."""
    parts = {name: part for name, part in vars(pipeline).items() if isinstance(part, nn.Module)}
    found = [name for name in parts if name.rstrip("_0123456789") in DENOISERS]
    if len(found) != 1:
        what = f"several denoisers ({', '.join(found)})" if found else "no denoiser"
        raise ConfigError(
            f"{type(pipeline).__name__} has {what} "
            f"among its modules ({', '.join(parts) or 'none'}). Possible: denoiser=pipeline.NAME."
        )
    return parts[found[0]]
