"""The arguments of a model, as far as taking a batch apart needs to know them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn


@dataclass(frozen=True)
class ModelArguments:
    """The arguments of a model.

    Attributes:
        names: Of its positional arguments; None where it takes any number, or does not say.
        has_decoder: Whether it has an encoder and a decoder.
        placeholders: "image", "video" or "audio" -> the token that stands in its texts for what it makes of one.
        fixed: Name of an argument -> its axes that have one length, which an exported graph takes alone.
    """

    names: Sequence[str] | None = None
    has_decoder: bool = False
    placeholders: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> ModelArguments:
        """Those of a model, from its forward and its config."""
        config, parameters = getattr(model, "config", None), positional_parameters(model.forward)
        names = None if parameters is None else [parameter.name for parameter in parameters]
        fixed = _fixed(model) if isinstance(model, fx.GraphModule) else {}
        return cls(names, bool(getattr(config, "is_encoder_decoder", False)), placeholders_of(config), fixed)


def _fixed(graph: fx.GraphModule) -> dict[str, frozenset[int]]:
    """The axes of the inputs of an exported graph that are no symbols."""
    shapes = {
        str(n.target): getattr(n.meta.get("val"), "shape", ()) for n in graph.graph.nodes if n.op == "placeholder"
    }
    return {
        name: frozenset(axis for axis, n in enumerate(shape) if isinstance(n, int)) for name, shape in shapes.items()
    }


def placeholders_of(config: Any) -> dict[str, int]:
    """Those of a config of transformers."""
    kinds = ("image", "video", "audio")
    names = [(kind, f"{kind}_token_{form}") for kind in kinds for form in ("index", "id")]
    return {kind: token for kind, name in names if isinstance(token := getattr(config, name, None), int)}


def positional_parameters(forward: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The positional parameters of a forward; None where it takes any number, or does not say."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
