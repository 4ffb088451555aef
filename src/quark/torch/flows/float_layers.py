"""Layers that a server builds in float: they stay so in what is made for it, or are refused where they are named."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quark.base.log import logger
from quark.core.names.patterns import matches, matches_any
from quark.errors import NotSupportedError
from quark.goals.float_layers import FloatLayer, float_layers
from quark.goals.goal import RuntimeGoal
from quark.torch.checkpoint.carried import carried_beside
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig
from quark.torch.formats.fused_groups import architectures
from quark.torch.plan import chooser, quantizable_layers

LAYERS = (nn.Linear, nn.Embedding)


def left_in_float(model: Any, config: QConfig, goal: RuntimeGoal, folder: OpenedFolder | None = None) -> QConfig:
    """A config that leaves in float what a server builds so; says what that is.

    Args:
        model: With or without weights; it is not changed.
        config: What is asked for; it is not changed.
        goal: The server.
        folder: That the model is of; None: one that was built by hand.

    Raises:
        NotSupportedError: An entry for some layers is about such layers alone.
    """
    beside = carried_beside(model, folder) if config.layer_quant_config else {}
    rows = _built_in_float(model, config, goal.program, beside) if goal.float_layers else {}
    if not rows:
        return config
    _refuse_named(config, quantizable_layers(model).union(beside), rows, goal)
    # `transformer.wpe` of a GPT-2 has nothing before that name: it is excluded by its own.
    patterns = {f"*.{row.layer}" for name, row in rows.items() if matches(name, f"*.{row.layer}")}
    covered = {name for name in rows for pattern in patterns if matches(name, pattern)}
    logger.info(
        "%s builds some layers without a quantization, so they stay in float: %s (%d in all).",
        goal.program, ", ".join(dict.fromkeys(row.layer for row in rows.values())), len(rows),
    )  # fmt: skip
    return replace(
        config, exclude=[*config.exclude, *sorted(patterns), *(name for name in rows if name not in covered)]
    )


def _refuse_named(config: QConfig, layers: Collection[str], rows: Mapping[str, FloatLayer], goal: RuntimeGoal) -> None:
    """Raise NotSupportedError for an entry that is about layers which stay in float alone."""
    for pattern in (name for name in config.layer_quant_config if name not in config.kv_cache_quant_config):
        found = [name for name in layers if matches(name, pattern)]
        if found and all(name in rows for name in found):
            row = rows[found[0]]
            raise NotSupportedError(
                f"{goal.program} {row.version} builds {row.layer} without a quantization ({row.source.split()[0]}), so "
                f"it would not load {found[0]} as {pattern!r} asks for it. Possible: to leave it in float."
            )


def _built_in_float(model: Any, config: QConfig, program: str, beside: Collection[str]) -> dict[str, FloatLayer]:
    """Name of each layer that a config quantizes and a server builds in float -> its row.

    Of the layers `beside` the model, which lie in its folder, a config quantizes those that an entry of it names.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, LAYERS)]
    rows, choice = float_layers(program, architectures(model), [*layers, *beside]), chooser(config, model)
    wanted = [name for name in rows if choice.wanted(name)]
    return {n: rows[n] for n in wanted if n not in beside or matches_any(n, config.layer_quant_config)}
