"""Weights that are brought from files when their block's turn comes, and given back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from quark.errors import StructureError
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.checkpoint.sources.origins import Origin
from quark.torch.checkpoint.sources.source import Source


class OnDisk(Protocol):
    """A tensor of a model that lies in a file."""

    def read(self, like: torch.Tensor) -> torch.Tensor:
        """Its values, in the shape and dtype of `like`; they may be pages of the file."""
        ...

    def release(self) -> None:
        """Give back the memory of what `read` mapped."""
        ...


@dataclass(frozen=True)
class InFolder:
    """A float tensor of a folder."""

    origin: Origin
    checkpoint: Source

    def read(self, like: torch.Tensor) -> torch.Tensor:
        return self.origin.read(self.checkpoint, like.dtype, tuple(like.shape))

    def release(self) -> None:
        self.origin.release(self.checkpoint)


def in_folder(sources: Mapping[str, Origin], ties: Mapping[str, list[str]], checkpoint: Source) -> dict[str, InFolder]:
    """The float tensors of a model by all of their names.

    Args:
        sources: Name in the model -> where it lies in the folder.
        ties: Name in the model -> all names of the same parameter.
        checkpoint: The tensors of the folder.
    """
    return {alias: InFolder(source, checkpoint) for name, source in sources.items() for alias in ties[name]}


class WeightsOnDisk(BlockWeights):
    """Brings the weights of a module from files, and takes them away.

    Args:
        model: Without weights: those that are brought are on the meta device.
        sources: Full name of a parameter or buffer -> its file.
        device: Where blocks run; what is outside of them runs on the CPU.
    """

    whole = False

    def __init__(self, model: nn.Module, sources: Mapping[str, OnDisk], device: torch.device) -> None:
        self.model, self.sources, self.device = model, sources, device
        self.empty = dict(model.state_dict(keep_vars=True))

    def bring(self, name: str, recurse: bool = True, device: torch.device | None = None) -> None:
        """Put the weights of the module in place."""
        for full, tensor in self.own(name, recurse):
            if tensor.is_meta:
                x = self.sources[full].read(tensor)
                # A copy: what quantizing writes into must not be pages of the file.
                self.put(full, x.to(device or self.device, copy=True))
                self.sources[full].release()

    def show(self, name: str, table: nn.Embedding) -> None:
        """Put a table in place, over its file, as rows of it are looked up."""
        for full, tensor in self.own(name, False):
            if tensor.is_meta:
                self.put(full, self.sources[full].read(tensor))

    def take(self, name: str) -> None:
        """Leave the module as it was before it was brought."""
        for full, _ in self.own(name, True):
            self.put(full, self.empty[full])

    @contextmanager
    def around(self, names: Sequence[str]) -> Iterator[None]:
        """Within: the first block is there, and modules outside the blocks get their weights when they are called.

        Embeddings have theirs from the start: models make their inputs where the weight of one is.
        """
        inside = [m for name in names for m in self.model.get_submodule(name).modules()]
        outside = {name: m for name, m in self.model.named_modules() if all(m is not other for other in inside)}
        cpu = torch.device("cpu")

        def called(name: str) -> Callable[..., None]:
            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                _require_values(name, args, kwargs)
                if name in outside:
                    self.bring(name, recurse=False, device=cpu)

            return before

        handles = [
            self.model.get_submodule(name).register_forward_pre_hook(called(name), with_kwargs=True)
            for name in dict.fromkeys((*outside, *names))
        ]
        for name, module in outside.items():
            if isinstance(module, nn.Embedding):
                self.show(name, module)
        self.bring(names[0], device=cpu)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name in (*outside, names[0]):
                for full, _ in self.own(name, name == names[0]):
                    self.put(full, self.empty[full])
                    self.sources[full].release()

    def own(self, name: str, recurse: bool) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a module that come from files, by their full names."""
        module = self.model.get_submodule(name)
        prefix = f"{name}." if name else ""
        found = [
            *module.named_parameters(recurse=recurse, remove_duplicate=False),
            *module.named_buffers(recurse=recurse),
        ]
        return [(prefix + leaf, tensor) for leaf, tensor in found if prefix + leaf in self.sources]

    def put(self, full: str, tensor: torch.Tensor) -> None:
        """Put a tensor in its place."""
        parent, _, leaf = full.rpartition(".")
        module = self.model.get_submodule(parent)
        if leaf in module._parameters:
            given = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            module._parameters[leaf] = given
        else:
            module._buffers[leaf] = tensor


def _require_values(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise StructureError for an input without values: computed from it, a tensor holds whatever was in memory."""
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, dict(kwargs)))):
        raise StructureError(
            f"{name}: the model makes an input of it on the device of weights that are not read yet. Possible: "
            "quantize the model in memory (--no-stream, or quantize_model)."
        )
