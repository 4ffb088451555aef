"""Diffusion pipelines of scripts: what reaches a network of the pipeline is its calibration data.

A pipeline (diffusers) calls `pipe.unet` or `pipe.transformer` once a step. The calls are caught with their arguments by
name, so that a batch is what `model(**batch)` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from quark.base.log import logger
from quark.errors import CalibrationError, NotSupportedError
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import lower_layer
from quark.torch.model.batches import to_device
from quark.torch.model.calibration_data.recorded_steps import caught
from quark.torch.quantizer import ModelQuantizer


@torch.no_grad()
def get_calib_dataloader(
    pipe: Callable[..., Any],
    target_module: nn.Module,
    prompts: Sequence[str],
    n_steps: int = 20,
    seed: int = 42,
    device: str | torch.device | None = None,
    **pipe_kwargs: Any,
) -> DataLoader[dict[str, Any]]:
    """Run a pipeline on prompts and keep what it gives to one of its networks.

    Args:
        pipe: Called as `pipe(prompt=[...], num_inference_steps=n_steps, generator=..., **pipe_kwargs)`.
        target_module: The network that is to be quantized.
        prompts: One run of the pipeline each: len(prompts) * n_steps batches, which wait in host memory.
        n_steps: Steps of a run.
        seed: Of the generator of each run.
        device: Where batches are when they are read; None: where the network is.

    Raises:
        StructureError: The forward of the network takes *args or **kwargs, so that arguments have no names.
        CalibrationError: The pipeline does not call the network.
    """
    batches: list[dict[str, Any]] = []
    host = torch.device("cpu")
    with caught(target_module, lambda batch: batches.append(to_device(batch, host))):
        for prompt in prompts:
            generator = torch.Generator("cpu").manual_seed(seed)
            pipe(prompt=[prompt], num_inference_steps=n_steps, generator=generator, **pipe_kwargs)
    if not batches:
        raise CalibrationError(
            f"{len(prompts)} prompts gave no batch: the pipeline does not call this {type(target_module).__name__}."
        )
    logger.info("%d prompts of %d steps gave %d batches.", len(prompts), n_steps, len(batches))
    parameter = next(target_module.parameters(), None)
    place = torch.device(device or (parameter.device if parameter is not None else "cpu"))
    return DataLoader(batches, batch_size=1, collate_fn=lambda one: to_device(one[0], place))  # type: ignore[arg-type]


def qconfig_needs_activation_calibration(qconfig: QConfig) -> bool:
    """Return True where a layer has static input or output scales, which data must find."""
    layers = [qconfig.global_quant_config, *qconfig.layer_type_quant_config.values()]
    layers += qconfig.layer_quant_config.values()
    return any(lower_layer(layer).needs_data for layer in layers)


def quantize_diffusion_model_in_place(model: nn.Module, qconfig: QConfig) -> None:
    """Quantize and freeze a network without data: weights only, or dynamic activations.

    Raises:
        NotSupportedError: The config has static activation scales; says how they are found.
    """
    if qconfig_needs_activation_calibration(qconfig):
        raise NotSupportedError(
            "The config has static activation scales, which need data. Possible: get_calib_dataloader(pipe, model, "
            "prompts) and ModelQuantizer(config).quantize_model(model, data)."
        )
    ModelQuantizer(qconfig).quantize_model(model)
    ModelQuantizer.freeze(model)
