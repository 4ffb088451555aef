"""The rotation of one decoder block: found, proved on a float64 copy, and done.

Names are relative to the block. A block is all that must be in memory.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from quark.core.solvers.hadamard import Rotation
from quark.errors import CalibrationError, ConfigError, StructureError
from quark.torch.algorithms.rotation.fold import Turning, rotate_heads, rotate_online, rotate_readers, rotate_writers
from quark.torch.algorithms.rotation.frame import block_residual
from quark.torch.algorithms.rotation.value_heads import ValuePath, find_value_paths
from quark.torch.algorithms.scaling.float64_forward import Exact
from quark.torch.config.algo_configs import RotationConfig
from quark.torch.layers import QuantLayer
from quark.torch.layers.online_rotation import head_rotation_size, rotate_queries_and_keys
from quark.torch.model.batches import evaluating
from quark.torch.model.blocks import Call
from quark.torch.model.record_forward import is_linear, record
from quark.torch.model.residual_stream import Residual

TOLERANCE = 1e-9
"""Largest relative change of what a block adds to its input, in float64; a wrong fold changes about all of it."""
R1_SEED, R2_SEED = 1, 2
"""Of the random signs."""
_HEAD_SIZES = ("v_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
"""Attributes of attention modules that hold the features of a value head; the proof decides."""

_Stage = tuple[str, Callable[[nn.Module], None]]
_HeadRotation = tuple[ValuePath, list[torch.Tensor], Turning]


@dataclass(frozen=True)
class BlockPlan:
    """The changes of one block; names are relative to it.

    Attributes:
        stream: Q of R1, folded; None: R1 is online or off.
        residual: The stream in the block, for `stream`.
        heads: R2: the value path, its heads, and their rotation.
        online: Layers whose input is rotated in each forward.
        queries: Whether R3 is on, and with which `rotation_size`.
    """

    stream: Turning | None
    residual: Residual
    heads: tuple[_HeadRotation, ...]
    online: dict[str, Rotation]
    queries: tuple[bool, int | None]

    def stages(self) -> list[_Stage]:
        """The changes, in order."""
        out: list[_Stage] = []
        if self.stream is not None:
            out.append(("R1", self._fold_stream))
        if self.heads:
            out.append(("R2", self._fold_heads))
        if self.online:
            out.append(("The online rotation of inputs (R1, R4)", self._rotate_inputs))
        if self.queries[0]:
            out.append(("R3", self._rotate_queries))
        return out

    def apply(self, block: nn.Module) -> None:
        """Make all changes."""
        for _, change in self.stages():
            change(block)

    def _fold_stream(self, block: nn.Module) -> None:
        assert self.stream is not None
        rotate_readers(block, self.residual, self.stream)
        rotate_writers(block, self.residual, self.stream)

    def _fold_heads(self, block: nn.Module) -> None:
        for path, heads, rotation in self.heads:
            rotate_heads(block, path, heads, rotation)

    def _rotate_inputs(self, block: nn.Module) -> None:
        for name, rotation in self.online.items():
            rotate_online(block, name, rotation)

    def _rotate_queries(self, block: nn.Module) -> None:
        if not rotate_queries_and_keys(block, self.queries[1]):
            raise StructureError(
                "R3 needs queries and keys with a rotary embedding; the block has none. Possible: r3=False."
            )


def plan_block(
    block: nn.Module,
    calls: tuple[Call, Call],
    config: RotationConfig,
    stream: Rotation | None,
    given: Residual | None = None,
    targets: list[str] | None = None,
) -> BlockPlan:
    """Find what is to be changed in a block.

    Args:
        block: In any dtype, loaded.
        calls: From `Frame.calls`: many tokens, and one.
        config: What to rotate.
        stream: Q of R1 if it is folded.
        given: The stream in the block, where the config describes it.
        targets: The layers to rotate online, where the config lists them.

    Raises:
        StructureError: A part is not found. ConfigError: A size does not divide. CalibrationError: It is not loaded.
    """
    if any(parameter.is_meta for parameter in block.parameters()):
        raise CalibrationError("the block is on the meta device: load it before it is rotated.")
    with torch.no_grad(), evaluating(block):
        residual = Residual() if stream is None else given or block_residual(block, calls[0])
        if stream is not None and residual.centred and not stream.keep_mean:
            raise StructureError("R1: a norm here subtracts the mean, and the final norm of the model does not.")
        paths = _value_paths(block, calls[1], config) if config.r2 or config.r4 else []
        heads = _heads(block, paths, config) if config.r2 else ()
        online = _online(block, calls[0], paths, config, targets)
    return BlockPlan(stream, residual, heads, online, (config.r3, config.rotation_size))


def prove_block(block: nn.Module, many: Call, plan: BlockPlan) -> None:
    """Make the changes to a float64 copy of the block and compare what it computes.

    Raises:
        StructureError: It is not the same; names the rotation and the block.
    """
    exact, call = _double(block, many)
    errors: dict[str, torch.Tensor] = {}
    with torch.no_grad(), evaluating(exact):
        x, y = call.hidden, _exact(exact, call)
        try:
            for what, change in plan.stages():
                change(exact)
                if what == "R1":
                    assert plan.stream is not None
                    x, y = plan.stream.apply(x), plan.stream.apply(y)
                    call = call.with_hidden(x)
                errors[what] = (_exact(exact, call) - y).norm() / (y - x).norm().clamp(min=1e-300)
        finally:
            _require_same(errors)  # what fails after a wrong change fails because of it


def _require_same(errors: Mapping[str, torch.Tensor]) -> None:
    """Raise StructureError for the first change whose error is too large; all are read from a device at once."""
    for what, error in zip(errors, torch.stack([*errors.values()]).tolist() if errors else (), strict=True):
        if not error <= TOLERANCE:
            raise StructureError(
                f"{what} would change what the block computes, by {error:.1e} of it: its structure is not what was "
                "found. The model is as it was. Possible: leave this rotation off."
            )


def _exact(block: nn.Module, call: Call) -> torch.Tensor:
    """Return the output of a block, computed in float64 throughout."""
    return Exact(block, call.args, call.kwargs).run()[0][0]


def _double(block: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """A float64 copy of a block and of the arguments it is called with."""

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return copy.deepcopy(block).double(), Call(tree_map(wide, call.args), tree_map(wide, dict(call.kwargs)), call.key)


def _value_paths(block: nn.Module, single: Call, config: RotationConfig) -> list[ValuePath]:
    exact, call = _double(block, single)
    paths = find_value_paths(exact, lambda: _exact(exact, call))
    named = {name for name, _ in block.named_modules()}
    for field in ("v_proj", "o_proj"):
        name = getattr(config, field)
        if name != getattr(RotationConfig, field) and name not in named:
            raise ConfigError(f"RotationConfig.{field}={name!r} names no module of the block.")
    if {config.v_proj, config.o_proj} <= named:
        return [path for path in paths if (path.value, path.output) == (config.v_proj, config.o_proj)]
    return paths


def _heads(block: nn.Module, paths: list[ValuePath], config: RotationConfig) -> tuple[_HeadRotation, ...]:
    """R2 of each value path."""
    if not paths:
        raise StructureError(
            "R2: no layer was found whose outputs reach another one through attention alone. Possible: r2=False."
        )
    named = [getattr(module, attribute, None) for module in block.modules() for attribute in _HEAD_SIZES]
    sizes = [size for size in named if isinstance(size, int)]
    rotations = []
    for path in paths:
        fitting = ((size, heads) for size in sizes if (heads := path.heads(size)) is not None)
        size, heads = next(fitting, (0, None))
        if heads is None:
            raise StructureError(f"R2: the size of the heads of {path.value} is not known (head_dim of its module).")
        rotation = Rotation(head_rotation_size(size, config.rotation_size), R2_SEED if config.random_r2 else None)
        rotations.append((path, heads, rotation))
    return tuple(rotations)


def _by_source(block: nn.Module, call: Call, attention: Collection[str]) -> tuple[list[str], list[str]]:
    """The linear layers that read norms, and those that read linear layers, but for the outputs of attention."""
    trace = record(block, lambda: call.run(block))
    after_norm: list[str] = []
    after_layers: list[str] = []
    for name in trace.linears:
        if name not in trace.calls or name in attention:
            continue
        sources = trace.sources(trace.calls[name][0].inputs[0])
        linear = bool(sources) and all(s.module and is_linear(block.get_submodule(s.module)) for s in sources)
        (after_layers if linear else after_norm).append(name)
    return after_norm, after_layers


def _online(
    block: nn.Module, call: Call, paths: list[ValuePath], config: RotationConfig, targets: list[str] | None
) -> dict[str, Rotation]:
    """The layers whose input is rotated in each forward: those that read norms (R1), those that read layers (R4)."""
    online_r1 = config.r1 and bool(config.online_r1_rotation)
    if not (online_r1 or config.r4):
        return {}
    after_norm, after_layers = _by_source(block, call, {path.output for path in paths})
    names: list[str] = []
    # A list in the config stands for the layers that read norms; without R1 online, for those that read layers.
    if targets is not None:
        names += targets
    elif online_r1:
        names += after_norm
    if config.r4 and (online_r1 or targets is None):
        names += after_layers
    return {
        name: _input_rotation(name, layer, config, online_r1 and name in after_norm)
        for name, layer in _to_quantize(block, dict.fromkeys(names)).items()
    }


def _to_quantize(block: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The layers of these names that are quantized; all, in a block that is in float."""
    quantized = any(isinstance(module, QuantLayer) for module in block.modules())
    layers = {name: block.get_submodule(name) for name in names}
    return {name: layer for name, layer in layers.items() if isinstance(layer, QuantLayer) or not quantized}


def _input_rotation(name: str, layer: nn.Module, config: RotationConfig, r1: bool) -> Rotation:
    """The rotation of a layer's input. Signs are its own, or the same for all layers with `shared_parallel`."""
    features = int(layer.in_features)  # type: ignore[arg-type]
    size = config.rotation_size or features
    if features % size:
        raise ConfigError(f"rotation_size={size} does not divide the {features} inputs of {name}.")
    shared = config.online_config is not None and config.online_config.shared_parallel
    seed = R1_SEED if shared else zlib.crc32(name.encode())
    return Rotation(size, seed if r1 and config.random_r1 else None)
