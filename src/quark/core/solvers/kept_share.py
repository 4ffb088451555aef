"""How much of what a regression finds on few tokens holds on others.

    k = R / (R + N / (1 - s)),   N = s (V - E) / (1 - s),   R = E - N,   s = free / tokens,   k at most 1 - s^2

E is what it explains of V, the squares. What it leaves, V - E, is noise, of which as many free numbers explain the
share s by chance: N of E. The rest, R, holds on other tokens, where the noise in what was found costs 1 / (1 - s) of N
(tokens drawn of a normal distribution). With no more tokens than free numbers all is explained, and nothing is known.
"""

from __future__ import annotations

import numpy as np

from quark.core.array import Array, astype, copied_once, dtype_name, namespace
from quark.core.solvers.gptq import PROBES, moved_target


def freedom(feedback: Array, importance: Array, added: Array) -> Array:
    """tr(H (H + damping)^-1), how many numbers a regression on the inputs has free, estimated with PROBES vectors.

    Args:
        feedback, importance: F and d.
        added: The damping of each column, shape (columns,), in the order of F.

    Returns:
        One number, where the arrays are; no step waits for a device.
    """
    columns = feedback.shape[-1]
    probes = copied_once(
        ("signs", columns), lambda: np.random.default_rng(0).choice([-1.0, 1.0], (columns, PROBES)), feedback
    )
    solved = moved_target(astype(probes, dtype_name(feedback)), feedback, importance)
    lost = astype(probes, "float32") * solved * astype(added, "float32")[:, None]
    return columns - lost.sum() / PROBES


def kept_share(explained: Array, varied: Array, free: Array, tokens: int) -> Array:
    """How much of what a regression found is to be kept, 0 to 1.

    Args:
        explained: E, what it explains of the squares, summed over some outputs.
        varied: V, the squares.
        free: Of `freedom`.
        tokens: How many there were.
    """
    xp = namespace(explained)
    share = (free / tokens).clip(0.0, 1.0)
    others = (1.0 - share).clip(1e-6)
    noise = share / others * (varied - explained).clip(0.0)
    real = (explained - noise).clip(0.0)
    kept = xp.where(real > 0, real / (real + noise / others).clip(1e-30), 0.0)
    return xp.minimum(kept, 1.0 - share * share)
