"""Ranges and scales of mixture-of-experts layers: an expert sees only the tokens that are routed to it.

shared:  amax_k = max over the experts of a block of amax, for each projection k
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from quark.errors import CalibrationError
from quark.torch.fake_quant import FakeQuantize
from quark.torch.passes import UnfusedExperts

EXPERT = re.compile(r"(?P<block>.*expert[^.]*)\.(?P<index>\d+)\.(?P<rest>.+)", re.I)
"""Full name of a tensor of an expert: "model.layers.0.mlp.experts.3.down_proj.input"."""


def settle_experts(quantizers: Mapping[str, FakeQuantize], sync: bool) -> None:
    """What experts need after observing: one range for all of a block if `sync`, and tokens for each.

    Args:
        quantizers: Full name of the tensor -> its quantizer, which has observed.
        sync: Whether the experts of a block share the range of their inputs.

    Raises:
        CalibrationError: No calibration token reached some expert; names them.
    """
    if sync:
        share_expert_ranges(quantizers)
    require_tokens(quantizers)


def share_expert_ranges(quantizers: Mapping[str, FakeQuantize]) -> None:
    """Let the experts of a block have one range for the inputs of each projection: the one that covers all."""
    families: dict[tuple[str, str], list[FakeQuantize]] = {}
    for name, quantizer in quantizers.items():
        found = EXPERT.fullmatch(name)
        if found and found["rest"].endswith(".input"):
            families.setdefault((found["block"], found["rest"]), []).append(quantizer)
    for members in families.values():
        FakeQuantize.share_observed(members)


def require_tokens(quantizers: Mapping[str, FakeQuantize]) -> None:
    """Raise CalibrationError if no calibration token reached some expert; names them."""
    idle = [
        n for n, q in quantizers.items() if q.observer is not None and q.observer.count == 0 and EXPERT.fullmatch(n)
    ]
    if not idle:
        return
    experts = list(dict.fromkeys(f"{found['block']}.{found['index']}" for n in idle if (found := EXPERT.fullmatch(n))))
    raise CalibrationError(
        f"No calibration token was routed to {len(experts)} experts: {', '.join(experts[:5])}"
        f"{', ...' if len(experts) > 5 else ''}. Possible: more calibration data, a dynamic or weight-only scheme, or "
        "sync_moe_expert_input_amax=True in the QConfig, which gives all experts of a block one input range."
    )


def sibling_groups(model: nn.Module, groups: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The groups of siblings that share a global scale, with the gate and up projections of experts (w1, w3) added."""
    pairs = {m.names for m in model.modules() if isinstance(m, UnfusedExperts)} if groups else set()
    added = [[gate, up] for gate, up, _ in pairs if gate is not None and not any(gate in group for group in groups)]
    return [*groups, *sorted(added)]
