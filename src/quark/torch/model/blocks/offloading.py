"""Parts of a model that its `device_map` keeps on the CPU or on disk, while the model is worked on.

    accelerate   weights are on the meta device; before each forward of a layer they are brought to its device
    within       weights are there, on the CPU; a part (a block, or a layer outside) visits its device while it runs,
                 or while somebody works on it, and what was changed there comes back
    afterwards   weights are on the meta device again, and accelerate brings what they are by then

On the CPU the tensors are accelerate's own. Those of files are mapped, so that nothing is read before its turn; what
becomes of them lies in files without a name beside them, and the files themselves are never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from quark.base.libraries.accelerate import bring_before_forward, names_brought, take_away
from quark.base.libraries.transformers import tied_weights
from quark.errors import NotSupportedError
from quark.torch.layers.fake_quant import FakeQuantize
from quark.torch.model.blocks.mapped_tensors import mapped_offload, mapped_safetensors
from quark.torch.model.blocks.offloaded_part import (
    CPU,
    Home,
    OffloadedPart,
    hooks_of,
    move,
    part_on,
    parts_of,
    settle,
    tensors_of,
)
from quark.torch.model.blocks.recording import outer_stacks

P = ParamSpec("P")
R = TypeVar("R")


class HostWeights(dict[str, torch.Tensor]):
    """The weights of one module by their names, as accelerate's hooks look them up.

    Attributes:
        folder: Where what becomes of them is kept; None: in memory.
    """

    folder: Path | None = None


class Offloaded:
    """The parts of a model that are elsewhere than where they run, while it is worked on."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def parts(self) -> list[OffloadedPart]:
        """All of them, as the model is now."""
        return parts_of(self.model)

    @property
    def on_disk(self) -> list[OffloadedPart]:
        """Those of which weights are in files."""
        return [part for part in self.parts if part.folder is not None]

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Within: parts run where their weights lie, which nobody moves."""
        for part in self.parts:
            part.stays = True
        try:
            yield
        finally:
            for part in self.parts:
                part.stays = False

    def bring(self, name: str) -> None:
        """Let what is in a module be on its device until `take`."""
        for part in parts_of(self.model.get_submodule(name)):
            part.bring()

    def take(self, name: str) -> None:
        """The module is finished: its weights go back."""
        for part in parts_of(self.model.get_submodule(name)):
            part.take()

    def _around(self, name: str) -> OffloadedPart | None:
        """The part that a layer is or is in."""
        path = name.split(".")
        above = (self.model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1))
        return next((part for part in map(part_on, above) if part is not None), None)

    @contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[None]:
        """Within: the parts that layers are in are on their devices, also while they run; what was changed is kept."""
        parts = {id(part): part for part in map(self._around, names) if part is not None}
        with ExitStack() as stack:
            for part in parts.values():
                stack.callback(part.take)
                part.bring()
            yield

    @contextmanager
    def onloading(self, name: str) -> Iterator[None]:
        """Within: a layer is on its device, alone of its part, and nothing runs; what was changed is kept."""
        part = self._around(name)
        module = self.model.get_submodule(name)
        if part is None or part.depth or not (part.deep or part.module is module):
            yield
            return
        homes: list[Home] = []
        try:
            move(tensors_of(module.modules()), part.device, homes, copies=part.folder is not None)
            yield
        finally:
            settle(tensors_of(module.modules()), homes, part.folder)


@contextmanager
def onloaded(model: nn.Module) -> Iterator[Offloaded]:
    """Within: the weights of the model are there, wherever its `device_map` keeps them.

    Raises:
        NotSupportedError: A map of weights that accelerate does not make.
    """
    offloaded = _onload(model)
    if offloaded:
        # Parts are whole blocks; outside of blocks the modules that hold tensors themselves.
        stacks = {id(model.get_submodule(name)) for name in outer_stacks(model)}
        _make_parts_of(model, offloaded, stacks, False)
    try:
        yield Offloaded(model)
    finally:
        for part in parts_of(model) if offloaded else ():
            _offload(part)


def with_weights(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose first argument is a model, or None, and which is called with the model's weights there."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        model = args[0] if args else kwargs.get("model")
        with onloaded(model) if isinstance(model, nn.Module) else nullcontext():
            return function(*args, **kwargs)

    return called


def refuse_offloaded(model: nn.Module, what: str) -> None:
    """Raise NotSupportedError, which says what cannot be done, for weights that accelerate keeps elsewhere."""
    for name, module in model.named_modules():
        if any(names_brought(module, hook) for hook in offloading_hooks(module)):
            raise NotSupportedError(
                f"{what}: {name or 'the model'} lies on the CPU or on disk by its device_map. Possible: "
                "accelerate.hooks.remove_hook_from_submodules(model), which loads it, or a model without a device_map."
            )


# Hooks ----------------------------------------------------------------------------------------------------------------


def has_device_map(model: nn.Module) -> bool:
    """Return True where accelerate's hooks say where the parts of a model run."""
    return any(hasattr(hook, "offload") for module in model.modules() for hook in hooks_of(module))


def offloading_hooks(module: nn.Module) -> list[Any]:
    """Those that bring weights before each forward."""
    return [hook for hook in hooks_of(module) if getattr(hook, "offload", False)]


def _onload(model: nn.Module) -> dict[int, tuple[Any, Path | None]]:
    """Give all modules their weights; id of a module that got some -> where it runs, and the folder of its files."""
    known: dict[Any, nn.Parameter] = {}
    found: dict[int, tuple[Any, Path | None]] = {}
    _refuse_split_ties(model)
    all_values = [
        (module, hook, {name: _host_value(hook.weights_map, name) for name in names_brought(module, hook)})
        for module in model.modules()
        for hook in offloading_hooks(module)
    ]
    for module, hook, values in all_values:
        folder = next((folder for _, folder in values.values() if folder is not None), None)
        for name, (value, _) in values.items():
            owner = _owner(module, name)
            _put(owner, name.rpartition(".")[2], value, known)
            found[id(owner)] = (hook.execution_device, folder)
        hook.weights_map, hook.offload = _AWAY if values else HostWeights(), False
    _tie(model, found)
    return found


def _tie(model: nn.Module, found: Mapping[int, object]) -> None:
    """Let parameters be one object that transformers says are one: on disk each has a file of its own."""
    modules = dict(model.named_modules())
    for name, of in tied_weights(model).items():
        (path, _, leaf), (its_path, _, its_leaf) = name.rpartition("."), of.rpartition(".")
        module, its = modules.get(path), modules.get(its_path)
        if module is None or its is None or id(module) not in found or id(its) not in found:
            continue
        ours, theirs = module._parameters.get(leaf), its._parameters.get(its_leaf)
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            continue
        if torch.equal(ours, theirs):
            module._parameters[leaf] = theirs


def _refuse_split_ties(model: nn.Module) -> None:
    """Raise NotSupportedError for one weight that lies in two places: what becomes of one would not be in the other."""
    modules = dict(model.named_modules())
    for name, of in tied_weights(model).items():
        ends = [(modules.get(end.rpartition(".")[0]), end.rpartition(".")[2]) for end in (name, of)]
        if len({bool(module and offloading_hooks(module)) for module, _ in ends}) == 1:
            continue
        first, second = (_value(module, leaf) for module, leaf in ends)
        if first is not None and second is not None and first.shape == second.shape and torch.equal(first, second):
            raise NotSupportedError(
                f"{name} and {of} share one weight, but the device_map keeps one of them on a device and the other on "
                "the CPU or on disk. Possible: a device_map that names one place for both."
            )


def _value(module: nn.Module | None, name: str) -> torch.Tensor | None:
    """The values of a tensor of a module on the CPU, wherever they lie; None where there are none."""
    if module is None:
        return None
    for hook in offloading_hooks(module):
        if name in names_brought(module, hook):
            return _host_value(hook.weights_map, name)[0]
    tensor = getattr(module, name, None)
    return tensor.detach().to(CPU) if isinstance(tensor, torch.Tensor) and not tensor.is_meta else None


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _stored(module: nn.Module, name: str) -> torch.Tensor:
    """A tensor of a module as it lies in its tables: the weight of a loaded layer looks float from outside."""
    tensor: torch.Tensor | None = module._parameters.get(name)
    tensor = module._buffers.get(name) if tensor is None else tensor
    found: torch.Tensor = getattr(module, name) if tensor is None else tensor
    return found


def _put(module: nn.Module, name: str, value: torch.Tensor, known: dict[Any, nn.Parameter]) -> None:
    """Let a tensor of a module be this one; parameters that are one in memory are one object."""
    before = _stored(module, name)
    value = value.detach().to(CPU, before.dtype)
    if name in module._buffers:
        module._buffers[name] = value
        return
    key = (value.data_ptr(), value.shape, value.stride(), value.dtype, before.requires_grad)
    if key not in known:
        known[key] = nn.Parameter(value, before.requires_grad)
    module._parameters[name] = known[key]


class _Away(HostWeights):
    """Stands in a hook for weights that its module has itself; it copies as what it is."""

    def __deepcopy__(self, memo: object) -> _Away:
        return self


_AWAY = _Away()


def _offload(part: OffloadedPart) -> None:
    """Hand the weights of a part to accelerate, and take the part's forward away."""
    _take_forward_away(part)
    modules = [*part.modules()]
    hooks = [(module, hook) for module in modules for hook in hooks_of(module)]
    done = {id(_owner(m, name)) for m, hook in hooks if _hook_is_away(hook) for name in names_brought(m, hook)}
    for module, hook in hooks:
        if _hook_is_away(hook):
            _hand_over(module, hook, part)
    for module in modules:
        if id(module) not in done and [*module.parameters(False)] and not isinstance(module, FakeQuantize):
            # Made meanwhile: an expert that was a part of another tensor, a branch of low rank.
            weights = HostWeights((name, x.detach()) for name, x in module.named_parameters(recurse=False))
            weights.folder = part.folder
            bring_before_forward(module, part.given, weights)
    for module in modules:
        _place_small(module, part.device)


def _take_forward_away(part: OffloadedPart) -> None:
    while part.depth:
        part.leave()
    part.run_on(part.given)
    if part.inner is None:
        part.module.__dict__.pop("forward", None)
    else:
        part.module.__dict__["forward"] = part.inner


def _place_small(module: nn.Module, device: torch.device) -> None:
    """Put what is small, and was not offloaded, where it is used."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None and not tensor.is_meta and tensor.device != device:
                moved = tensor.detach().to(device)
                table[name] = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _hook_is_away(hook: Any) -> bool:
    """Return True where a hook would bring weights, were they not there."""
    return getattr(hook, "weights_map", None) is _AWAY


def _hand_over(module: nn.Module, hook: Any, part: OffloadedPart) -> None:
    """Let a hook bring the weights that a module has now, and let it have none."""
    weights, before = HostWeights(), getattr(hook, "original_devices", {})
    weights.folder = part.folder
    for name in names_brought(module, hook):
        tensor = _stored(_owner(module, name), name.rpartition(".")[2])
        weights[name] = tensor.detach().to(CPU)
        take_away(module, name)
    hook.weights_map, hook.offload = weights, True
    hook.original_devices = {name: before.get(name, CPU) for name in weights}
    # By addresses in memory, which are those of other values now.
    hook.tied_params_map, hook.tied_params_names = None, set()


# Values ---------------------------------------------------------------------------------------------------------------


def _host_value(weights: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, Path | None]:
    """Return a tensor of a map of accelerate, on the CPU, and the folder for its successor; None: it is in memory."""
    if isinstance(weights, HostWeights):
        return weights[name], weights.folder
    while type(weights).__name__ == "PrefixedDataset":
        weights, name = weights.dataset, f"{weights.prefix}{name}"  # type: ignore[attr-defined]
    if not isinstance(weights, dict) and type(weights).__name__ != "OffloadedWeightsLoader":
        raise NotSupportedError(
            f"{name} comes from a {type(weights).__name__}. Possible: what dispatch_model, cpu_offload and "
            "disk_offload of accelerate make of a model."
        )
    in_memory = getattr(weights, "state_dict", weights)
    if name in in_memory:
        return in_memory[name], None
    loader: Any = weights
    entry, folder = loader.index[name], loader.save_folder
    if folder is None:
        raise NotSupportedError(
            f"The device_map keeps {name} on disk, and the model has no folder to which its quantized form could be "
            "written: the files of the model are never changed. Possible: load the model with offload_folder=..., or "
            "stream its folder."
        )
    if entry.get("safetensors_file") is not None:
        value = mapped_safetensors(Path(entry["safetensors_file"]), entry.get("weight_name", name))
        return (value.to(getattr(torch, entry["dtype"])) if "dtype" in entry else value), Path(folder)
    return mapped_offload(Path(folder) / f"{name}.dat", entry), Path(folder)


# Parts ----------------------------------------------------------------------------------------------------------------


def _make_parts_of(
    module: nn.Module, offloaded: Mapping[int, tuple[Any, Path | None]], stacks: set[int], inside: bool
) -> None:
    """Make parts of a module and those in it; `inside`: it lies in a list of blocks, which are `stacks`."""
    own, holders = offloaded.get(id(module)), [m for m in module.modules() if [*m.parameters(False)]]
    places = {str(offloaded[id(m)]) if id(m) in offloaded else "" for m in holders}
    whole = len(places) == 1 and "" not in places and not any(id(m) in stacks for m in module.modules())
    if whole and (inside or own is not None):
        device, folder = own or offloaded[id(holders[0])]
        _part(module, device, folder, True)
        return
    if own is not None:
        _part(module, *own, False)
    for child in module.children():
        _make_parts_of(child, offloaded, stacks, inside or id(module) in stacks)


def _part(module: nn.Module, device: Any, folder: Path | None, deep: bool) -> None:
    if part_on(module) is None:
        part = OffloadedPart(module, device, folder, deep)
        part.run_on(CPU)
        move([x for m in part.modules() for x in m._buffers.values() if x is not None], CPU, [])
