"""Runs a model on batches as users have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.base.progress import progress
from quark.errors import CalibrationError, ConfigError, QuarkError, one_line
from quark.torch.model.half_products import half_products

_ONE_LENGTH = (
    ". Batches are cut to the positions that their masks say are real, and numbered after that. Possible, for a model "
    "that takes one length alone: masks of ones, with which all positions count"
)
"""Said where a batch with a mask fails."""


def main_inputs(kind: Any) -> tuple[str, ...]:
    """The arguments that a class of transformers calls its main ones: one, or several (OneFormer)."""
    named = kind.main_input_name
    return (named,) if isinstance(named, str) else tuple(named)


def run_batches(model: nn.Module, data: Iterable[Any]) -> int:
    """Forward every batch without gradients, in evaluation mode; return how many there were."""
    device = input_device(model)
    count = 0
    with evaluating(model), torch.no_grad():
        for batch in progress(data, "calibration", total=len(data) if isinstance(data, Sized) else None):
            calibration_step(model, batch, device, count)
            count += 1
    return count


def calibration_step(
    model: nn.Module, batch: Any, device: torch.device, index: int, what: str = "calibration batch"
) -> Any:
    """Return the output of the model for the batch of a number.

    Raises CalibrationError, which shows the batch, for one that the model does not take.
    """
    try:
        return forward_batch(model, batch, device)
    except (TypeError, AssertionError, RuntimeError, LookupError, ValueError, AttributeError) as error:
        # An exported graph asserts the shapes that it was exported with. Memory that is short is no fault of a batch.
        if isinstance(error, (QuarkError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
            raise
        masked = isinstance(batch, Mapping) and any(str(key).endswith("mask") for key in batch)
        raise CalibrationError(
            f"The model does not take {what} {index}, {_described(batch)}: "
            f"{type(error).__name__}: {one_line(error)}"
            f"{_ONE_LENGTH if masked else ''}"
        ) from error


def _described(batch: Any) -> str:
    """A batch in a few words: "list (float32 (4, 3, 8, 8), int64 (4,))"."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        return f"{kind} ({', '.join(f'{key}: {_described(value)}' for key, value in batch.items())})"
    return f"{kind} ({', '.join(map(_described, batch))})" if isinstance(batch, (list, tuple)) else f"({kind})"


def forward_batch(model: nn.Module, batch: Any, device: torch.device) -> Any:
    """Call the model on a tensor, a mapping (dict, BatchEncoding) or a tuple or list of arguments."""
    if isinstance(batch, torch.Tensor):
        return model(to_device(batch, device))
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return model(**{key: to_device(batch[key], device) for key in batch.keys()})  # noqa: SIM118 (BatchEncoding)
    if isinstance(batch, (tuple, list)) and batch:
        if len(batch) == 1 and isinstance(batch[0], Mapping):
            return forward_batch(model, batch[0], device)
        if len(batch) == 1 and isinstance(batch[0], tuple) and batch[0] and isinstance(batch[0][-1], Mapping):
            return model(to_device(batch, device))  # recorded (arguments, keywords), which the model takes apart
        return model(*(to_device(item, device) for item in batch))
    raise CalibrationError(
        f"A calibration batch is a {type(batch).__name__}; possible: a torch.Tensor, a dict or BatchEncoding of "
        "keyword arguments, or a tuple or list of positional arguments."
    )


def named_outputs(output: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The floating-point tensors of what a model returns, by name; caches are no output."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.numel():
            yield prefix or "output", output
    elif hasattr(output, "items"):
        for name, value in output.items():
            if "past" not in name and "cache" not in name:
                yield from named_outputs(value, f"{prefix}.{name}".lstrip("."))
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from named_outputs(value, f"{prefix}.{index}".lstrip("."))


def input_device(model: nn.Module) -> torch.device:
    """Where batches go: to the first parameter that is loaded, or where the part that it is in says that it runs."""
    for module in model.modules():
        device = getattr(module.__dict__.get("forward"), "device", None)
        if not isinstance(device, torch.device):
            device = next((p.device for p in module.parameters(recurse=False) if not p.is_meta), None)
        if device is not None:
            return device
    return torch.device("cpu")


def named_device(name: str) -> torch.device:
    """The device of a name. Raises ConfigError for a name that torch does not know or a device that is not there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        first = "there is no such type" if first.startswith("Expected one of") else first
        raise ConfigError(f"The device {name!r} cannot be used: {first}. Possible here: {_devices()}.") from None
    if device.type == "meta":
        raise ConfigError(f"The device {name!r} cannot be used: it holds no values. Possible here: {_devices()}.")
    return device


def _devices() -> str:
    """The devices of this machine, in words."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if found is not None else 0
    more = "" if found is None else f", {found.type}" + "".join(f", {found.type}:{i}" for i in range(1, count))
    return f"cpu{more}"


def to_device(value: Any, device: torch.device) -> Any:
    """A value with the tensors in it on a device. Python does not wait for what goes from the host to a GPU."""
    if type(value) is dict:
        return {key: to_device(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_device(item, device) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if device.type == "cuda" and value.device.type == "cpu":
        return pinned(value).to(device, non_blocking=True)
    return value.to(device)


def pinned(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the host in memory from which a GPU copies by itself."""
    return x if x.is_pinned() else torch.empty_like(x, pin_memory=True).copy_(x)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A tensor of a GPU in pinned host memory, which has its values when all that the GPU was told before is done.

    Another copy from there to the same device comes after that. Python has to wait for the device before it reads.
    """
    return x.contiguous().to("cpu", non_blocking=True) if x.device.type == "cuda" else x.cpu()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within: the model is in evaluation mode, and fast in the type that it has."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with half_products(model):
            yield
    finally:
        for module, training in modes:
            module.training = training


def tokens_in(data: Iterable[Any] | None) -> int:
    """Tokens of text among the batches; 0 where there is none."""
    total = 0
    for batch in data or ():
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        if isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            total += ids.numel()
    return total


def longest_in(data: Iterable[Any] | None) -> int:
    """Tokens of the longest sample of text among the batches; 0 where there is none."""
    given = [batch.get("input_ids") if isinstance(batch, Mapping) else batch for batch in data or ()]
    ids = [each for each in given if isinstance(each, torch.Tensor) and not each.is_floating_point() and each.ndim]
    return max((each.shape[-1] for each in ids), default=0)


def text_config(config: Any) -> Any:
    """The part of a config of transformers that says what the model makes of text, or the config itself.

    Where one part reads a text and another writes (MusicGen), that of the part that writes.
    """
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # several parts
        return config.get_text_config(decoder=True)


def most_tokens(config: Any, wanted: int) -> int:
    """As many tokens as wanted, or as a model has positions; XLNet says -1, for no limit."""
    positions = getattr(config, "max_position_embeddings", None) or wanted
    return min(wanted, positions) if positions > 0 else wanted


def hidden_width(model: nn.Module) -> int:
    """Channels between the blocks, by the config of the model; 0 where it does not say."""
    return int(getattr(text_config(getattr(model, "config", None)), "hidden_size", 0) or 0)
