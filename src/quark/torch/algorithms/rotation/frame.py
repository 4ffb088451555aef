"""The parts of a model that a rotation works on one at a time: its frame (embeddings, final norm, head) and its blocks.

Found from one recorded forward of the frame, in which each block passes its input through, and one of each block; or
taken from `RotationConfig.scaling_layers`, whose names hold `layer_id` and `pre_layer_id` for the number of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from quark.core.names.patterns import matches
from quark.errors import ConfigError, QuarkError, StructureError, did_you_mean
from quark.torch.config.algo_configs import RotationConfig
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.batches import evaluating, forward_batch, input_device
from quark.torch.model.blocks import WHOLE, BlockOutput, Call, find_blocks, passing_through
from quark.torch.model.dataflow import Trace
from quark.torch.model.outside_reads import example
from quark.torch.model.record_forward import record
from quark.torch.model.residual_stream import Residual, StreamNorm, find_residual, hidden_values, measure_norm

TOKENS = 8
"""Tokens of the forward that proofs compare."""
FRAME = ""
"""The name of the frame among the parts of `scaling_layers`."""


@dataclass(frozen=True)
class Frame:
    """The modules around the blocks of a model.

    Attributes:
        blocks: Full names of the blocks.
        calls: For each block, its call on TOKENS tokens and on a single one; the hidden states are random.
        trace: The forward of the model with its blocks passing their input through.
        hidden: The value of that forward that passes through the blocks.
        results: What it returned, all floating-point tensors, before any rotation.
        given: The hidden state that the first block got.
        output: What a block returns.
    """

    blocks: tuple[str, ...]
    calls: Mapping[str, tuple[Call, Call]]
    trace: Trace
    hidden: int
    results: tuple[torch.Tensor, ...]
    given: torch.Tensor
    output: BlockOutput

    @property
    def width(self) -> int:
        """Features of the residual stream."""
        return int(self.given.shape[-1])


def find_frame(model: nn.Module, config: RotationConfig) -> Frame:
    """Record the frame of a model. Its first block is run once; the others may be on the meta device.

    Raises:
        StructureError: There is no list of blocks, or the model does not run on token ids.
    """
    names = find_blocks(model, blocks_path(model, config))
    if names == [WHOLE]:
        raise StructureError(
            "The model has no list of decoder blocks, which a rotation works through. "
            "Possible: RotationConfig(model_decoder_layers=...), the name of one."
        )
    single = _PassingRun(model, names, BlockOutput())
    single.run(1)
    many = _PassingRun(model, names, single.output)
    if single.output.by_batch:
        many = _PassingRun(model, names, BlockOutput())
        many.run(TOKENS)
        many.output.fix()  # in the recorded forward, no block may run
    trace = record(model, lambda: many.run(TOKENS))
    given = many.calls[names[0]].hidden
    calls = {name: (_with_random(many.calls[name]), _with_random(single.calls[name])) for name in names}
    hidden, _ = hidden_values(trace, names[0], given.shape)
    return Frame(tuple(names), calls, trace, hidden, many.result, given, many.output)


def rerun_frame(model: nn.Module, frame: Frame) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The hidden state that the first block gets and what the model returns, now, its blocks passing through."""
    passing = _PassingRun(model, list(frame.blocks), frame.output)
    passing.run(TOKENS)
    return passing.calls[frame.blocks[0]].hidden, passing.result


class _PassingRun:
    """Runs a model on token ids while its blocks pass their input through, and keeps their calls."""

    def __init__(self, model: nn.Module, names: list[str], output: BlockOutput) -> None:
        self.model, self.names, self.output = model, names, output
        self.calls: dict[str, Call] = {}
        self.result: tuple[torch.Tensor, ...] = ()

    def run(self, tokens: int) -> None:
        ids = torch.randint(0, self._vocabulary(), (1, tokens), generator=torch.Generator().manual_seed(0))
        device, given = input_device(self.model), example(self.model)
        batch: Any = ids
        if isinstance(given, Mapping) and not set(given) <= {"input_ids"}:
            # What else a model of transformers must get: features, images, ids of its decoder.
            batch = {name: ids if name in ("input_ids", "decoder_input_ids") else x for name, x in given.items()}
        quiet = quantizers_off(quantized_layers(self.model).values())
        passing = passing_through(self.model, self.names, self.calls.__setitem__, self.output)
        with torch.no_grad(), evaluating(self.model), quiet, passing:
            try:
                output = forward_batch(self.model, batch, device)
            except (TypeError, ValueError, RuntimeError) as error:
                if isinstance(error, QuarkError):
                    raise
                raise StructureError(f"The model does not run on token ids of shape (1, {tokens}): {error}") from error
        missing = [name for name in self.names if name not in self.calls]
        if missing:
            raise StructureError(f"The model does not run its block {missing[0]!r}.")
        leaves = tree_leaves(output)
        self.result = tuple(x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point())

    def _vocabulary(self) -> int:
        sizes = [m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)]
        if not sizes:
            raise StructureError("The model has no nn.Embedding: rotations are for models that read token ids.")
        get = getattr(self.model, "get_input_embeddings", None)
        embedding = None
        with suppress(NotImplementedError):  # of transformers, where two towers have an embedding each
            embedding = get() if callable(get) else None
        # Ids that every table holds, where it is not known which is that of the tokens.
        return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else min(sizes)


def _with_random(call: Call) -> Call:
    """The call on a random hidden state, the same in every run."""
    hidden = call.hidden
    random = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return call.with_hidden(random.to(hidden.device, hidden.dtype))


def blocks_path(model: nn.Module, config: RotationConfig) -> str | None:
    """The list of blocks that the config names; None where it has the default and the model has no such list."""
    path = config.model_decoder_layers
    named = path != RotationConfig.model_decoder_layers or path in dict(model.named_modules())
    return path if named else None


# Residual streams of the parts ----------------------------------------------------------------------------------------


def frame_residual(model: nn.Module, frame: Frame) -> Residual:
    """The stream in the frame: embeddings write it, the final norm and the head read it."""
    return find_residual(model, frame.trace, frame.hidden)


def block_residual(block: nn.Module, call: Call) -> Residual:
    """The stream in one block."""
    trace = record(block, lambda: call.run(block))
    return find_residual(block, trace, *hidden_values(trace, "", call.hidden.shape))


def given_residuals(model: nn.Module, config: RotationConfig, blocks: tuple[str, ...]) -> dict[str, Residual]:
    """The streams that `scaling_layers` describes, by part; empty if it is.

    Raises:
        ConfigError: A key or module name does not exist, or an item lacks one of its keys.
    """
    if not config.scaling_layers:
        return {}
    parts = {name: Residual() for name in (FRAME, *blocks)}
    resolver = _Resolver(model)
    for key, index, item in _items(config.scaling_layers, len(blocks)):
        for needed in ("prev_modules", "norm_module", "next_modules"):
            if needed not in item:
                raise ConfigError(f"scaling_layers[{key!r}]: {needed!r} is missing; R1 folds into those modules.")
        readers = resolver.names(item["next_modules"], index)
        for norm in resolver.names([item["norm_module"]], index) if readers else []:
            _add_norm(model, parts, norm, readers)
        for writer in resolver.names(item["prev_modules"], index):
            part, name = _part_of(parts, writer)
            parts[part] = replace(parts[part], writers=(*dict.fromkeys([*parts[part].writers, name]),))
    resolver.check()
    return parts


def given_targets(model: nn.Module, config: RotationConfig, blocks: tuple[str, ...]) -> list[str] | None:
    """The `target_modules` (else `next_modules`) of `scaling_layers`, for an online R1; None if it is empty."""
    if not config.scaling_layers:
        return None
    resolver = _Resolver(model)
    targets = []
    for _, index, item in _items(config.scaling_layers, len(blocks)):
        targets += resolver.names(item.get("target_modules", item.get("next_modules", [])), index)
    resolver.check()
    return list(dict.fromkeys(targets))


def _items(layers: Mapping[str, list[dict[str, Any]]], count: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Key, number of the block and item, in order."""
    keys = ("first_layer", "middle_layers", "last_layer")
    for key in layers:
        if key not in keys:
            raise ConfigError(f"scaling_layers: unknown key {key!r}. {did_you_mean(key, keys)}")
    for index in range(count):
        key = keys[0] if index == 0 else keys[1]
        yield from ((key, index, item) for item in layers.get(key, []))
    yield from ((keys[2], count - 1, item) for item in layers.get(keys[2], []))


class _Resolver:
    """Templates to names of modules. A model of mixed blocks may lack one in some of them."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [name for name, _ in model.named_modules()]
        self.matched: dict[str, bool] = {}

    def names(self, templates: list[str], index: int) -> list[str]:
        out = []
        for template in templates:
            pattern = template.replace("pre_layer_id", str(index - 1)).replace("layer_id", str(index))
            names = [name for name in self.modules if matches(name, pattern)]
            self.matched[template] = self.matched.get(template, False) or bool(names)
            out += names
        return out

    def check(self) -> None:
        for template, matched in self.matched.items():
            if not matched:
                raise ConfigError(
                    f"scaling_layers: {template!r} names no module. {did_you_mean(template, self.modules)}"
                )


def _part_of(parts: Mapping[str, Residual], name: str) -> tuple[str, str]:
    """The part that holds a module, and its name in it."""
    block = next((part for part in parts if part and name.startswith(f"{part}.")), FRAME)
    return (block, name[len(block) + 1 :]) if block else (FRAME, name)


def _add_norm(model: nn.Module, parts: dict[str, Residual], name: str, readers: list[str]) -> None:
    measured = measure_norm(model.get_submodule(name))
    if measured is None:
        raise ConfigError(
            f"scaling_layers: norm_module {name} ({type(model.get_submodule(name)).__name__}) is no norm."
        )
    part, inner = _part_of(parts, name)
    if any(_part_of(parts, reader)[0] != part for reader in readers):
        raise ConfigError(f"scaling_layers: {name} and {readers} are not in the same block.")
    norm = StreamNorm(inner, tuple(_part_of(parts, reader)[1] for reader in readers), *measured)
    parts[part] = replace(parts[part], norms=(*dict.fromkeys([*parts[part].norms, norm]),))
