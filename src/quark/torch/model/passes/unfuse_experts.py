"""Fused experts to one linear layer for each projection of each expert.

    fused      gate_up_proj (E, 2I, H), down_proj (E, H, I): transformers' mixture-of-experts blocks since version 5
    unfused    experts.0.gate_proj (I, H), experts.0.up_proj (I, H), experts.0.down_proj (H, I), experts.1.gate_proj ...
    or         experts.0.gate_up_proj (2I, H), experts.0.down_proj ..., where rows of gate and up alternate (GPT-OSS)

A block gets its tokens and a routing of them, or (Llama 4) as many rows for each expert, one expert after the other,
already scaled by the router, in a product with transposed weights: gate_up_proj (E, H, 2I), down_proj (E, I, H).

The weights are views of the fused ones. What a fused block computes is read from its shapes and the attributes that
transformers gives it, and proved: both forms must agree in float64 on random tokens. The leaf names are those of the
published checkpoints of the model (w1, w3, w2 for Mixtral), which transformers' conversion mapping knows.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from quark.base.libraries.transformers import conversions, rows_alternate
from quark.base.log import logger
from quark.errors import NotSupportedError
from quark.torch.layers import QuantLayer, layer_class
from quark.torch.layers.replace import set_submodule
from quark.torch.model.blocks.forwards import with_plain_forward
from quark.torch.model.names import expert_leaves
from quark.torch.model.passes.base import Wanted, linear_of

TOLERANCE = 1e-6
"""Largest difference of the two forms, of the largest value, in float64; a wrong layout differs by about 1."""

Names = tuple[str | None, str, str]
"""Names of the gate (None for experts without a layer of its own for it), up and down projections of an expert."""

_IN_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


class UnfusedExperts(nn.Module):
    """Experts as children "0", "1", ..., each with its linear layers.

    Every forward calls every layer, with no rows for an expert without tokens, in a fixed order: first gate and up of
    all experts, then down of all. So hooks see all experts that read the same input side by side.

    Args:
        fused: The block to stand for; its weights are shared, not copied.
        names: What its projections are called.

    Attributes:
        first: What the fused block calls its first weight: "gate_up_proj", or "up_proj" where there is no gate.
        sorted: Whether its input holds as many rows for each expert, sorted by expert, and no routing comes with it.
        ahead: Called before each expert's turn, if set: (whether it is for the down projection, index of the expert,
            function from any expert's index to its input of that turn). No input depends on the turns of others.
        extra: Expert -> the share of the tokens of others that it reads after its own, so that there is something to
            calibrate it by. What it makes of them is left out: the mixture returns what it always does.
        all_tokens: Whether each expert reads all tokens so, one expert after the other: of what it makes inside of so
            many, memory holds that of one.
    """

    ahead: Callable[[bool, int, Callable[[int], torch.Tensor]], None] | None = None
    extra: Mapping[int, float] = MappingProxyType({})
    all_tokens: bool = False

    def __init__(self, fused: nn.Module, names: Names) -> None:
        super().__init__()
        self.names = names
        self.first = _first(fused)
        self.post_expert_norm: Any = fused.post_expert_norm if getattr(fused, "has_post_expert_norm", False) else None
        # In a tuple: it is no child. It keeps the gate function with its attributes, and none of the weights.
        self.origin = (_shell(fused, {}),)
        for index in range(_leading(fused)):
            expert = nn.Module()
            for name, (weight, bias) in zip([n for n in names if n], _projections(fused, index, names), strict=True):
                grad = next(fused.parameters()).requires_grad
                expert.add_module(name, linear_of(weight, bias, grad))
            self.add_module(str(index), expert)
        self.count = _leading(fused)
        self.sorted = _sorted(fused)
        self.train(fused.training)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> Any:
        """Mix the chosen experts' outputs.

        Args:
            hidden_states: (tokens, H); of sorted experts (experts * tokens, H), and nothing else.
            top_k_index: (tokens, k), which experts; an index outside the experts stands for none.
            top_k_weights: (tokens, k).
        """
        if top_k_index is None or top_k_weights is None:
            return self._each_its_rows(hidden_states)
        places = self._places(top_k_index)
        mixed = torch.zeros_like(hidden_states)
        for y, (token, slot) in zip(self._own_outputs(hidden_states, places), places, strict=True):
            y = y if self.post_expert_norm is None else self.post_expert_norm(y)
            mixed.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(mixed.dtype))
        return mixed

    def _own_outputs(
        self, hidden_states: torch.Tensor, places: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """Yield the output of each expert for its own tokens, (tokens, H)."""
        down = self.names[2]
        if self.all_tokens:
            for index, (token, _) in enumerate(places):
                expert = self.get_submodule(str(index))
                yield expert.get_submodule(down)(self._inner(expert, hidden_states))[token]
            return
        rows = [self._with_extra(expert, token, len(hidden_states)) for expert, (token, _) in enumerate(places)]
        inner = [self._inner(expert, x) for expert, x in self._turns(False, lambda i: hidden_states[rows[i]])]
        for (expert, x), (token, _) in zip(self._turns(True, inner.__getitem__), places, strict=True):
            yield expert.get_submodule(down)(x)[: len(token)]

    def _with_extra(self, expert: int, own: torch.Tensor, count: int) -> torch.Tensor:
        """The tokens of an expert, and after them those of others, out of `count`, that it reads."""
        if expert not in self.extra:
            return own
        others = torch.ones(count, dtype=torch.bool, device=own.device).index_fill_(0, own, False)
        return torch.cat([own, share_of(others, self.extra[expert])])

    def tokens_of_experts(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor | None = None, *_: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """How many tokens each expert gets of what `forward` takes, (experts,), and how many there are.

        Of sorted rows, those count that are not 0: a router that leaves an expert out scales them by 0.
        """
        if top_k_index is None:
            rows = hidden_states.reshape(self.count, -1, hidden_states.shape[-1])
            return rows.any(-1).sum(-1), rows.shape[1]
        return torch.bincount(top_k_index.reshape(-1), minlength=self.count)[: self.count], len(hidden_states)

    def _each_its_rows(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The outputs of sorted experts, (experts * tokens, H)."""
        rows = hidden_states.reshape(self.count, -1, hidden_states.shape[-1])
        extra = dict.fromkeys(range(self.count), 1.0) if self.all_tokens else self.extra
        idle = {expert: share_of(~rows[expert].any(-1), share) for expert, share in extra.items()}
        mean = rows.sum(0) / rows.any(-1).sum(0).clamp(min=1).unsqueeze(-1) if extra else rows[0]

        def read(expert: int) -> torch.Tensor:
            """Its rows; those of others as the experts of their token get them, and one of 0 after them."""
            if expert not in idle:
                return rows[expert]
            filled = torch.cat([rows[expert], rows.new_zeros(1, rows.shape[-1])])
            filled[idle[expert]] = mean[idle[expert]].to(filled.dtype)
            return filled

        inner = [self._inner(expert, x) for expert, x in self._turns(False, read)]
        outputs = []
        for index, (expert, x) in enumerate(self._turns(True, inner.__getitem__)):
            y = expert.get_submodule(self.names[2])(x)
            outputs.append(
                y if index not in idle else y[:-1].index_copy(0, idle[index], y[-1:].repeat(len(idle[index]), 1))
            )
        return torch.cat(outputs)

    def _turns(self, down: bool, of: Callable[[int], torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
        """Each expert with its input."""
        for index in range(self.count):
            if self.ahead is not None:
                self.ahead(down, index, of)
            yield self.get_submodule(str(index)), of(index)

    def _places(self, top_k_index: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Token and slot of everything that is routed to each expert, in the order of the tokens."""
        flat = top_k_index.reshape(-1)
        # One sort and one wait for the device, not one for each expert.
        sizes = torch.bincount(flat, minlength=self.count)[: self.count].tolist()
        order = flat.argsort(stable=True)[: sum(sizes)]
        slots = top_k_index.shape[-1]
        return [(part // slots, part % slots) for part in torch.split(order, sizes)]

    def _inner(self, expert: nn.Module, x: torch.Tensor) -> Any:
        """The activations between the two phases, (rows, I)."""
        gate_name, up_name, _ = self.names
        fused: Any = self.origin[0]
        gate = None if gate_name is None else expert.get_submodule(gate_name)(x)
        up = expert.get_submodule(up_name)(x)
        if gate is None:
            return fused._apply_gate(up) if self.first == "gate_up_proj" else fused.act_fn(up)
        if not hasattr(fused, "_apply_gate"):
            return fused.act_fn(gate) * up
        return fused._apply_gate(torch.cat((gate, up), -1))

    def extra_repr(self) -> str:
        return f"{self.count} experts of {type(self.origin[0]).__name__}"

    def fused(self) -> nn.Module:
        """The block with all experts in one tensor again, of the weights that are here now."""
        origin: Any = self.origin[0]
        merged: dict[str, nn.Parameter] = {}
        for target, leaves in ((self.first, self.names[:2]), ("down_proj", self.names[2:])):
            layers = [[self.get_submodule(f"{i}.{leaf}") for leaf in leaves if leaf] for i in range(self.count)]
            for suffix, kind in (("", "weight"), ("_bias", "bias")):
                if getattr(layers[0][0], kind) is None:
                    continue
                parts = [[cast(torch.Tensor, getattr(layer, kind)).detach() for layer in expert] for expert in layers]
                rows = [torch.cat(part) for part in parts]
                if kind == "weight" and is_transposed(origin):
                    rows = [weight.t() for weight in rows]
                grad = cast(nn.Parameter, getattr(layers[0][0], kind)).requires_grad
                merged[target + suffix] = nn.Parameter(torch.stack(rows), grad)
        return _shell(origin, merged).train(self.training)


def share_of(mask: torch.Tensor, share: float) -> torch.Tensor:
    """Where a mask is true, a share of these places, evenly taken; one at least where there is one."""
    places = mask.nonzero()[:, 0]
    taken = min(len(places), math.ceil(share * len(places)))
    return places[torch.arange(taken, device=places.device) * len(places) // max(1, taken)]


def unfuse_experts(model: nn.Module, wanted: Wanted) -> dict[str, nn.Module]:
    """Replace the fused experts of which a layer is to be quantized.

    Experts that were taken apart before, and of which nothing is to be quantized, become one tensor again: that is how
    their checkpoints hold them, and how loaders expect them.

    Raises:
        NotSupportedError: A block is to be quantized whose form is not known; names it.
    """
    blocks = fused_blocks(model)
    chosen = {name: names for name, names in blocks.items() if any(map(wanted, layer_names(model, name, names)))}
    for name, leaf in other_experts(model).items():
        if wanted(name) and wanted(f"{name}.{leaf}"):
            module = model.get_submodule(name)
            shape = tuple(getattr(module, leaf).shape)
            raise _unknown(f"{name}.{leaf}", module, f"its shape {shape} is none that this version knows")
    unfused: dict[str, nn.Module] = {name: _unfused(name, model.get_submodule(name), chosen[name]) for name in chosen}
    for name, block in model.named_modules():
        layers = [f"{name}.{leaf}" for leaf, layer in block.named_modules() if layer_class(layer)]
        if isinstance(block, UnfusedExperts) and not any(map(wanted, layers)):
            unfused[name] = block.fused()
    originals = {name: model.get_submodule(name) for name in unfused}
    for name, block in unfused.items():
        set_submodule(model, name, block)
    return originals


def unfuse_known(model: nn.Module) -> None:
    """Replace all fused experts of a known form; the others stay, and are said."""
    for name, names in fused_blocks(model).items():
        try:
            block = _unfused(name, model.get_submodule(name), names)
        except NotSupportedError as error:
            logger.warning("%s", error)
        else:
            set_submodule(model, name, block)


def _unfused(name: str, fused: nn.Module, names: Names) -> UnfusedExperts:
    block = UnfusedExperts(fused, names)
    _prove(name, fused, block)
    return block


def fused_blocks(model: nn.Module) -> dict[str, Names]:
    """Name of each block of fused experts -> names of the gate, up and down projections of one expert."""
    blocks = {name: module for name, module in model.named_modules() if is_fused(module)}
    known = conversions(model) if blocks else []
    return {name: _names(known, name, module) for name, module in blocks.items()}


def layer_names(model: nn.Module, block: str, names: Names) -> list[str]:
    """The full names of the linear layers that a fused block would be unfused to."""
    experts = range(_leading(model.get_submodule(block)))
    return [f"{block}.{index}.{leaf}" for index in experts for leaf in names if leaf]


def is_fused(module: nn.Module) -> bool:
    """Return True where a module holds all experts of a block in the form that transformers gives them."""
    up = [name for name in ("gate_up_proj", "up_proj") if isinstance(getattr(module, name, None), nn.Parameter)]
    down = getattr(module, "down_proj", None)
    return len(up) == 1 and isinstance(down, nn.Parameter) and down.ndim == getattr(module, up[0]).ndim == 3


def _names(known: list[Any], block: str, module: nn.Module) -> Names:
    """Names of published checkpoints where they are known, else gate_proj, up_proj and down_proj.

    Gate and up whose rows alternate are one layer: that is how readers of quantized experts look for them.
    """
    (down,) = expert_leaves(known, f"{block}.down_proj") or ("down_proj",)
    if hasattr(module, "gate_up_proj"):
        if rows_alternate(module):
            return None, "gate_up_proj", down
        gate, up = expert_leaves(known, f"{block}.gate_up_proj") or ("gate_proj", "up_proj")
        return gate, up, down
    (up,) = expert_leaves(known, f"{block}.up_proj") or ("up_proj",)
    return None, up, down


def _leading(fused: nn.Module) -> int:
    down: torch.Tensor = fused.down_proj  # type: ignore[assignment]
    return len(down)


def _first(fused: nn.Module) -> str:
    """Return the name of the weight of a fused block that reads its input."""
    return "gate_up_proj" if hasattr(fused, "gate_up_proj") else "up_proj"


def _sorted(fused: nn.Module) -> bool:
    """Return True where a block gets sorted rows alone: its forward takes no routing."""
    return len(inspect.signature(inspect.unwrap(type(fused).forward)).parameters) == 2


def is_transposed(fused: nn.Module) -> bool:
    """Return True where the weights are (in, out), as a product of rows with them wants it."""
    return bool(getattr(fused, "is_transposed", _sorted(fused)))


def _projections(fused: nn.Module, index: int, names: Names) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight (out, in) and bias of gate (if it has a layer), up and down of one expert: views."""
    out = []
    for name in (_first(fused), "down_proj"):
        weight = getattr(fused, name).detach()[index]
        bias = getattr(fused, f"{name}_bias", None)
        bias = None if bias is None else bias.detach()[index]
        weight = weight.t() if is_transposed(fused) else weight
        half = len(weight) // 2
        rows = [slice(0, half), slice(half, None)] if names[0] and name != "down_proj" else [slice(None)]
        out += [(weight[r], None if bias is None else bias[r]) for r in rows]
    return out


def _shell(fused: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A shallow copy that holds other parameters."""
    shell = copy.copy(fused)
    shell.__dict__ = {**fused.__dict__, "_parameters": parameters}
    return with_plain_forward(shell)


def _prove(name: str, fused: nn.Module, unfused: UnfusedExperts) -> None:
    """Compare both forms of the first and the last expert on random tokens in float64."""
    forward = inspect.unwrap(type(fused).forward)
    try:
        inspect.signature(forward).bind(*range(2 if unfused.sorted else 4))
    except TypeError as error:  # known without weights
        raise _unknown(name, fused, f"its forward takes other inputs: {error}") from None
    if next(fused.parameters()).is_meta:
        return  # A checkpoint is being loaded: the proof was made before it was written.
    ends = [0, _leading(fused) - 1]
    probe: Any = _shell(
        fused, {k: nn.Parameter(p.detach()[ends].double()) for k, p in fused._parameters.items() if p is not None}
    )
    if hasattr(probe, "num_experts"):
        probe.num_experts = len(ends)
    device, hidden = probe.down_proj.device, _projections(fused, 0, unfused.names)[0][0].shape[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, hidden, generator=generator, dtype=torch.float64).to(device)
    index = torch.tensor([[0, 1], [1, 0]] * 4, device=device)
    weights = torch.rand(8, 2, generator=generator, dtype=torch.float64).to(device)
    try:
        with torch.no_grad():
            # Unwrapped: the plain loop over experts, not the kernel that a config names.
            given = (x,) if unfused.sorted else (x, index, weights)
            expected = forward(probe, *given)
            actual = UnfusedExperts(probe, unfused.names)(*given)
        difference = float((expected - actual).abs().max() / expected.abs().max().clamp(min=1e-300))
    except (TypeError, RuntimeError, AttributeError, IndexError, ValueError) as error:
        raise _unknown(name, fused, f"its forward on random tokens failed: {error}") from error
    if not difference <= TOLERANCE:
        raise _unknown(name, fused, f"separate experts differ from it by {difference:.1e} of the largest output")


def other_experts(model: nn.Module) -> dict[str, str]:
    """Modules that hold several experts in one parameter in a form that no pass knows, and that parameter's name."""
    others = {}
    for name, module in model.named_modules():
        if is_fused(module) or layer_class(module) or isinstance(module, QuantLayer):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            stacked = parameter.ndim == 3 and "expert" in f"{name}.{leaf}.{type(module).__name__}".lower()
            if stacked or (parameter.ndim == 2 and _IN_EXPERTS.search(name)):
                others[name] = leaf
    return others


def _unknown(name: str, module: nn.Module, why: str) -> NotSupportedError:
    return NotSupportedError(
        f"{name} ({type(module).__name__}) holds fused experts that cannot be taken apart: {why}. "
        "Possible: keep them in float, with '*experts*' in the exclude list."
    )
