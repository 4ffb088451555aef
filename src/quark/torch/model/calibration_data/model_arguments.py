"""What a model takes, as far as taking a batch apart needs to know it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelArguments:
    """What a model takes.

    Attributes:
        names: Of its positional arguments; None where it takes any number, or does not say.
        has_decoder: Whether it has an encoder and a decoder.
        placeholders: "image", "video" or "audio" -> the token that stands in its texts for what it makes of one.
    """

    names: Sequence[str] | None = None
    has_decoder: bool = False
    placeholders: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, forward: Callable[..., Any], config: Any) -> ModelArguments:
        """Those of a forward of a model, and of its config; None where it has none."""
        parameters = positional_parameters(forward)
        names = None if parameters is None else [parameter.name for parameter in parameters]
        return cls(names, bool(getattr(config, "is_encoder_decoder", False)), placeholders_of(config))


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
