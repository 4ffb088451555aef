"""Rotations of inputs as the `transform_config` of compressed-tensors, which vLLM applies.

    {"config_groups": {"R4": {"type": "hadamard", "head_dim": 32, "apply": [
        {"targets": ["model.layers.0.mlp.down_proj", ...], "location": "input"}]}}}

`type` "hadamard" is Sylvester's matrix, `head_dim` the size of the blocks that it rotates (null: the whole input). The
matrix lies beside each layer, entries +-1: `<layer>.R4_input.weight`. Locations "weight_input" and "weight_output" say
what was folded into weights, and need nothing. "R4" is what llm-compressor calls the rotation before down projections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from quark.core.names.patterns import matches_any
from quark.core.solvers.hadamard import is_sylvester
from quark.errors import FormatError, NotSupportedError
from quark.torch.config.algo_configs import OnlineRotationConfig, RotationConfig
from quark.torch.layers.online_rotation import BUFFER

GROUP = "R4"
STORED = f".{GROUP}_input.weight"
"""Ending of the name of a stored matrix."""
FOLDED = ("weight_input", "weight_output")


def refuse_rotations(layers: Mapping[str, nn.Module], rotated: Mapping[str, int | None]) -> None:
    """Raise NotSupportedError, naming the layer, for a rotation that cannot be said."""
    sizes = set(rotated.values())
    for name, size in rotated.items():
        if size is None:
            raise NotSupportedError(
                f"{name}: compressed-tensors rotates inputs by Hadamard matrices of a power of two, without signs. "
                "Possible: rotation_size, a power of two that divides the inputs; the quark format."
            )
        if len(sizes) > 1 and size != layers[name].in_features:
            raise NotSupportedError(
                f"{name}: compressed-tensors has one block size for all rotated inputs; here {sorted(sizes, key=str)}."
            )


def write_transforms(rotated: Mapping[str, int | None], known_as: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The `transform_config` entry; nothing where no input is rotated.

    Args:
        rotated: Name of a layer -> the size of its matrix.
        known_as: Name of a layer -> all names by which readers know it.
    """
    if not rotated:
        return {}
    sizes = list(dict.fromkeys(rotated.values()))
    names = list(dict.fromkeys(form for name in rotated for form in known_as.get(name, (name,))))
    applied = {"targets": names, "location": "input", "inverse": False, "ignore": []}
    group = {"type": "hadamard", "head_dim": sizes[0] if len(sizes) == 1 else None, "apply": [applied]}
    return {"transform_config": {"config_groups": {GROUP: group}}}


def read_transforms(stored: Mapping[str, Any], layers: Mapping[str, nn.Module]) -> RotationConfig | None:
    """The rotation of inputs that a `quantization_config` asks for; None where it asks for none.

    Args:
        stored: The `quantization_config`.
        layers: The linear layers of the model by name.

    Raises:
        FormatError: It asks for a transform that this version does not apply.
    """
    names: list[str] = []
    size: int | None = None
    for key, group, applied in _transforms(stored):
        if key != GROUP or applied["location"] != "input" or group["type"] != "hadamard" or group.get("randomize"):
            raise FormatError(
                f"transform_config: {key} ({group['type']}, {applied['location']}) cannot be imported. Possible: "
                f"a group {GROUP!r} of type hadamard, not randomized, that transforms inputs."
            )
        size = group.get("head_dim")
        names += _targets(applied, layers)
    if not names:
        return None
    wrong = [name for name in names if not is_sylvester(size or layers[name].in_features)]  # type: ignore[arg-type]
    if wrong:
        raise FormatError(f"transform_config: {wrong[0]} is rotated by a matrix whose size is no power of two.")
    online = OnlineRotationConfig(shared_parallel=False, online_rotation_layers=names)
    return RotationConfig(r1=False, r4=True, rotation_size=size, online_config=online)


def _transforms(stored: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the transforms that a `quantization_config` asks for, after their group and its name; no folded ones."""
    groups = (stored.get("transform_config") or {}).get("config_groups") or {}
    for key, group in groups.items():
        yield from ((key, group, applied) for applied in group.get("apply") or [] if applied["location"] not in FOLDED)


def _targets(applied: Mapping[str, Any], layers: Mapping[str, nn.Module]) -> Iterable[str]:
    """Names of the layers that it is applied to, by name, pattern or class."""
    targets, ignored = applied.get("targets") or [], applied.get("ignore") or []
    for name, module in layers.items():
        kinds = (name, type(module).__name__)
        if any(matches_any(kind, targets) for kind in kinds) and not any(matches_any(kind, ignored) for kind in kinds):
            yield name


def received_rotation(stored: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """A stored matrix under the name that layers have for it; None for other tensors."""
    if not stored.endswith(STORED):
        return None
    return f"{stored.removesuffix(STORED)}.{BUFFER}", tensor.sign().to(torch.int8)
